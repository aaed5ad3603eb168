"""What a script finds around it: imports that no host has are refused before a slot is spent, changed fixed files are said."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner import verbs
from runner.errors import BadValue, PolicyError
from runner.lab import Lab
from runner.onhost import inspecting
from runner.policy import load_policy
from runner.records import Submission, WaveRequest
from runner.research import surroundings
from tests.runner.labs import SCRIPT, make_lab

HOSTS = '[[host]]\nname = "here"\nkind = "local"\n[[host]]\nname = "tower"\nkind = "ssh"\naddress = "tower"\n'
WITH_EINOPS = SCRIPT.replace("SEED = 42", "import json\nimport einops.layers\nfrom prepare import TIME_BUDGET\n\nSEED = 42")


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    with closing(make_lab(tmp_path, hosts=HOSTS, script=WITH_EINOPS)) as opened:
        yield opened


def knows(lab: Lab, **hosts: list[str]) -> None:
    lab.store.set_setting(surroundings.MODULES, hosts)


def test_what_no_host_has_is_refused_before_a_slot_is_spent(lab: Lab) -> None:
    knows(lab, here=["torch"], tower=["torch", "numpy"])
    with pytest.raises(BadValue, match="imports einops, which the interpreter of here and tower does not have"):
        verbs.submit(lab, Submission(), who="cli")
    with pytest.raises(BadValue, match="einops"):
        verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 6]}), who="cli")
    assert lab.store.count_runs() == 0


def test_one_host_that_has_it_is_enough_and_the_other_is_named(lab: Lab) -> None:
    knows(lab, here=["torch"], tower=["torch", "einops"])
    assert any("einops is missing on here" in n for n in verbs.submit(lab, Submission(), who="cli").notes)
    assert not any("einops" in n for n in verbs.submit(lab, Submission(host="tower", allow_duplicate=True), who="cli").notes)
    with pytest.raises(BadValue, match="einops"):
        verbs.submit(lab, Submission(host="here", allow_duplicate=True), who="cli")


def test_a_host_that_was_never_checked_is_not_judged(lab: Lab) -> None:
    knows(lab, here=["torch"])
    assert len(verbs.submit(lab, Submission(), who="cli").run_ids) == 1
    lab.store.set_setting(surroundings.MODULES, {})
    assert not any("einops" in n for n in verbs.submit(lab, Submission(host="here", allow_duplicate=True), who="cli").notes)


def test_only_imports_that_must_work_count() -> None:
    text = (
        "import os, torch\nimport numpy as np\nfrom . import x\nfrom pkg.sub import y\n"
        "try:\n    import triton\nexcept ImportError:\n    triton = None\nif True:\n    import flash\ndef f():\n    import late\n"
    )
    assert surroundings.imports_of(text) == ("torch", "numpy", "pkg")


def test_modules_beside_the_script_and_shims_travel_with_it(tmp_path: Path) -> None:
    script = "import prepare\nimport kernels\nimport parts\nSEED = 1\nprint(SEED)\n"
    with closing(make_lab(tmp_path, hosts='[[host]]\nname = "here"\nkind = "local"\n', script=script)) as lab:
        (tmp_path / "trainer" / "parts").mkdir()
        (tmp_path / "trainer" / "kernels.py").write_text("")
        knows(lab, here=["torch"])
        assert len(verbs.submit(lab, Submission(), who="cli").run_ids) == 1


def test_a_changed_fixed_file_is_said_once(lab: Lab) -> None:
    folder = lab.policy().trainer.folder
    assert verbs.submit(lab, Submission(), who="cli").notes == []
    (folder / "prepare.py").write_text("TIME_BUDGET = 300\nEVAL = 2\n")
    again = [verbs.submit(lab, Submission(allow_duplicate=True), who="cli").notes for _ in range(2)]
    assert any("prepare.py changed since the last submission" in n for n in again[0])
    assert not any("prepare.py" in n for n in again[1])
    (folder / "train.py").write_text(WITH_EINOPS + "\nprint(1)\n")
    assert not any("train.py" in n for n in verbs.submit(lab, Submission(), who="cli").notes)


def test_a_host_tells_its_modules() -> None:
    found = inspecting.probe(sys.executable, 60.0)["modules"]
    assert "pytest" in found
    assert "json" not in found


@pytest.mark.parametrize(("line", "key"), [("lower_is_better = false", "lower_is_better"), ('metric = "loss"', "metric")])
def test_another_metric_is_refused_with_what_to_do(tmp_path: Path, line: str, key: str) -> None:
    (tmp_path / "hosts.toml").write_text(f"[trainer]\n{line}\n")
    with pytest.raises(PolicyError, match=rf"\[trainer\] {key} is") as refused:
        load_policy(tmp_path / "hosts.toml")
    assert "lowest first" in str(refused.value.next_step)
