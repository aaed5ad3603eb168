"""What is told before a slot is spent: batches that cannot divide, and six widths that are four models."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner import verbs
from runner.errors import BadValue, Duplicate
from runner.lab import Lab
from runner.policy import TrainerPolicy
from runner.records import Submission, WaveRequest
from runner.research import statics
from runner.script import read_script
from runner.sources import constants
from tests.runner.labs import make_lab
from trainer import allowed

UPSTREAM = """ASPECT_RATIO = 64       # model_dim = depth * ASPECT_RATIO
HEAD_DIM = 128
TOTAL_BATCH_SIZE = 2**19
DEPTH = 8
DEVICE_BATCH_SIZE = 128


def build_model_config(depth):
    base_dim = depth * ASPECT_RATIO
    model_dim = ((base_dim + HEAD_DIM - 1) // HEAD_DIM) * HEAD_DIM
    return model_dim


tokens_per_fwdbwd = DEVICE_BATCH_SIZE * MAX_SEQ_LEN
assert TOTAL_BATCH_SIZE % tokens_per_fwdbwd == 0
print(build_model_config(DEPTH))
"""


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    opened = make_lab(tmp_path, script=UPSTREAM)
    (opened.policy().trainer.folder / "prepare.py").write_text("MAX_SEQ_LEN = 2048\nTIME_BUDGET = 300\n")
    yield opened
    opened.close()


def one_model(text: str) -> str:
    return statics.one_model(read_script(text, "train.py"), TrainerPolicy(folder=Path("nowhere"))).text


def batch_mistake(text: str, trainer: TrainerPolicy) -> str | None:
    return statics.batch_mistake(read_script(text, "train.py"), trainer)


def width(text: str) -> int:
    scope: dict[str, Any] = {"MAX_SEQ_LEN": 2048}
    exec(text, scope)
    return int(scope["build_model_config"](scope["DEPTH"]))


@pytest.mark.parametrize("depth", [3, 6, 8, 12])
def test_the_least_ratio_gives_the_same_width(depth: int) -> None:
    for ratio in range(16, 130):
        text = UPSTREAM.replace("ASPECT_RATIO = 64", f"ASPECT_RATIO = {ratio}").replace("DEPTH = 8", f"DEPTH = {depth}")
        least = one_model(text)
        assert width(least) == width(text)
        one_less = constants(least)["ASPECT_RATIO"] - 1
        if one_less:
            assert width(text.replace(f"ASPECT_RATIO = {ratio}", f"ASPECT_RATIO = {one_less}")) < width(text)


def test_six_widths_are_four_models(lab: Lab) -> None:
    sent = verbs.submit_wave(lab, WaveRequest(factors={"ASPECT_RATIO": [48, 64, 72, 80, 90, 96]}), who="cli")
    assert len(sent.run_ids) == 4
    assert sum("in effect the same" in note for note in sent.notes) == 2
    with pytest.raises(Duplicate, match="in effect the same"):
        verbs.submit(lab, Submission(overrides={"ASPECT_RATIO": 94}), who="cli")


@pytest.mark.parametrize(
    "text",
    [
        UPSTREAM.replace("((base_dim + HEAD_DIM - 1) // HEAD_DIM) * HEAD_DIM", "base_dim"),  # no rounding to see
        UPSTREAM + "print(ASPECT_RATIO)\n",  # it matters elsewhere too
        UPSTREAM.replace("DEPTH = 8", "DEPTH = None"),
    ],
)
def test_without_evidence_nothing_is_equal(text: str) -> None:
    assert one_model(text) == text


def test_a_batch_that_cannot_divide_is_refused_with_what_would_fit(lab: Lab) -> None:
    with pytest.raises(BadValue, match="DEVICE_BATCH_SIZE = 64 would fit") as caught:
        verbs.submit(lab, Submission(overrides={"TOTAL_BATCH_SIZE": 2**17}), who="cli")
    assert "Nothing was queued" in str(caught.value)
    assert lab.store.count_runs() == 0
    assert verbs.submit(lab, Submission(overrides={"TOTAL_BATCH_SIZE": 2**17, "DEVICE_BATCH_SIZE": 64}), who="cli").run_ids
    with pytest.raises(BadValue, match="multiple of 2048"):
        verbs.submit(lab, Submission(overrides={"TOTAL_BATCH_SIZE": 1000}), who="cli")


def test_a_script_without_the_assert_is_left_to_run(lab: Lab) -> None:
    trainer = lab.policy().trainer
    assert batch_mistake(UPSTREAM.replace("2**19", "1000"), trainer)
    assert batch_mistake(UPSTREAM.replace("2**19", "1000").replace("assert ", "print(").replace("== 0\n", "== 0)\n"), trainer) is None
    (trainer.folder / "prepare.py").unlink()
    assert batch_mistake(UPSTREAM.replace("2**19", "1000"), trainer) is None


OURS = Path(allowed.__file__).parent


@pytest.fixture
def our_lab(tmp_path: Path) -> Any:
    """A lab whose trainer is our own."""
    opened = make_lab(tmp_path, script=(OURS / "train.py").read_text())
    shutil.copy(OURS / "allowed.py", opened.policy().trainer.folder)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"DEPTH": "abc"}, "DEPTH is 'abc'; it must be a whole number above 0"),
        ({"DEPTH": 2.5}, "DEPTH is 2.5; it must be a whole number above 0"),
        ({"DEPTH": -1}, "DEPTH is -1; it must be a whole number above 0"),
        ({"TOTAL_BATCH_SIZE": 10**80}, "TOTAL_BATCH_SIZE is too large; it must be below"),
        ({"ATTENTION": "sdpa"}, "ATTENTION is 'sdpa'; it must be one of: default, cudnn, flash, efficient, math, flex"),
        ({"COMPILE": True}, "COMPILE is True; it must be one of: none"),
        ({"OPTIMIZER": "sgd"}, "OPTIMIZER is 'sgd'; it must be one of: muon, adamw"),
        ({"HEAD_DIM": 15}, "HEAD_DIM 15 is odd"),
        ({"SEED": -1}, "SEED is -1; it must be a whole number from 0"),
        ({"ADAM_BETAS": (1.0, 0.95)}, "ADAM_BETAS is (1.0, 0.95); it must be two numbers from 0 up to and without 1"),
        ({"CHECKPOINT_EVERY_S": 0}, "CHECKPOINT_EVERY_S is 0; it must be a number above 0"),
        ({"EMBEDDING_LR": -1e300}, "EMBEDDING_LR is -1e+300; it must be a number"),
        ({"SOFTCAP": 0.0}, "SOFTCAP is 0.0; it must be a number above 0"),
        ({"TOTAL_BATCH_SIZE": 1000, "SEQ_LEN": 256}, "TOTAL_BATCH_SIZE 1000 is not a multiple of the row length 256; the nearest"),
        ({"TOTAL_BATCH_SIZE": 2048, "SEQ_LEN": 256, "DEVICE_BATCH_SIZE": 3}, "TOTAL_BATCH_SIZE 2048 is 8 rows of 256, which DEVICE"),
    ],
)
def test_what_our_trainer_would_refuse_is_not_queued(our_lab: Lab, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(BadValue, match=re.escape(f"train.py: {says}")) as caught:
        verbs.submit(our_lab, Submission(overrides=overrides), who="cli")
    assert ". Nothing was queued" in str(caught.value) and our_lab.store.count_runs() == 0


def test_what_a_device_decides_is_left_to_the_run(our_lab: Lab) -> None:
    for overrides in ({}, {"ATTENTION": "flex"}, {"TOTAL_BATCH_SIZE": 1000}, {"DEVICE_BATCH_SIZE": 7}, {"SEQ_LEN": 96, "DEPTH": 3}):
        assert verbs.submit(our_lab, Submission(overrides=overrides), who="cli").run_ids


def test_our_six_widths_are_four_models_on_every_device(our_lab: Lab) -> None:
    sent = verbs.submit_wave(our_lab, WaveRequest(factors={"ASPECT_RATIO": [48, 64, 72, 80, 90, 96]}), who="cli")
    assert len(sent.run_ids) == 4 and sum("in effect the same" in note for note in sent.notes) == 2
    # at 3 layers heads of 32 (a CPU's preset) tell 65 from 64, heads of 128 do not
    sent = verbs.submit_wave(our_lab, WaveRequest(factors={"ASPECT_RATIO": [63, 64, 65], "DEPTH": [3]}), who="cli")
    assert len(sent.run_ids) == 2


def test_a_ratio_that_matters_elsewhere_is_not_rounded(our_lab: Lab) -> None:
    text = (OURS / "train.py").read_text()
    trainer = our_lab.policy().trainer
    rounded = statics.one_model(read_script(text, "train.py"), trainer)
    assert rounded.constants["ASPECT_RATIO"] == 49
    for other in (f"{text}print(ASPECT_RATIO)\n", f"{text}PRESETS.clear()\n".replace("PRESETS = {", "PRESETS = dict() or {", 1)):
        assert statics.one_model(read_script(other, "train.py"), trainer).text == other


def test_another_trainers_rules_are_its_own(our_lab: Lab) -> None:
    trainer = our_lab.policy().trainer
    script = read_script((OURS / "train.py").read_text(), "train.py").override({"DEPTH": "abc"})
    assert statics.mistake(script, trainer)
    own = read_script(script.text.replace("make_plan(globals(), ", "make_plan({}, "), "train.py")  # it does not ask for a check
    assert statics.mistake(own, trainer) is None
    with (trainer.folder / "allowed.py").open("a") as rules:
        rules.write('CHOICES["OPTIMIZER"] += ("sgd",)\n')
    assert statics.mistake(script, trainer) is None
    (trainer.folder / "allowed.py").unlink()
    assert statics.mistake(script, trainer) is None


def test_upstreams_repeats_differ_in_their_seed_and_a_seed_is_no_experiment(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, script="import torch\n\ntorch.manual_seed(42)\nDEPTH = 8\n")
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    again = [lab.store.run(i) for i in verbs.repeat(lab, base, 2, who="cli").run_ids]
    assert [r.seed for r in again if r] == [43, 44]
    assert len({r.source_sha for r in again if r}) == 2
    assert {r.effective_sha for r in again if r} == {lab.store.run(base).effective_sha}  # type: ignore[union-attr]
    with pytest.raises(Duplicate, match="differs only by its seed"):
        verbs.submit(lab, Submission(source="import torch\n\ntorch.manual_seed(137)\nDEPTH = 8\n"), who="cli")
    lab.close()
