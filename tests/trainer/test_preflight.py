"""What preflight concludes from measurements, and that it can be run where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
from .conftest import TRAINER, Folder

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
NAMES = [path.stem for path in TRAINER.glob("*.py")]


@pytest.fixture
def preflight(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TRAINER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import preflight

    yield preflight
    for name in NAMES:
        sys.modules.pop(name, None)


def test_it_chooses_by_speed_and_refuses_with_numbers(preflight: ModuleType) -> None:
    rate, fit = preflight.Measured, preflight.Fit
    attention = {"default": rate(400e12, "FLOP/s"), "cudnn": rate(425e12, "FLOP/s"), "flash": rate(274e12, "FLOP/s"),
                 "efficient": rate(None, "FLOP/s", why="no kernel image is available"), "flex": rate(411e12, "FLOP/s"),
                 "fa3": rate(None, "FLOP/s", why="flash_attn_interface is not installed")}  # fmt: skip
    broken = fit(None, None, None, why="broken")
    modes = {"none": fit(100_000, 1, 1), "optimizer": fit(4_000, 1, 1), "model": broken, "both": fit(99_000, 30, 1)}
    batches = {16384: fit(80_000, 1, 1), 32768: fit(99_000, 1, 1), 65536: fit(100_000, 1, 1), 131072: fit(60_000, 1, 1)}
    choices, refused = preflight.choose(attention, modes, batches)
    assert choices == {"ATTENTION": "cudnn", "COMPILE": "both", "DEVICE_TOKENS": 32768}
    assert "compile mode optimizer runs, but at 4,000 of 100,000 tokens/s" in refused
    assert any("model does not run: broken" in text for text in refused) and any("efficient does not run" in text for text in refused)
    assert not any("not installed" in text for text in refused)


def test_a_small_gain_does_not_change_the_plain_choice(preflight: ModuleType) -> None:
    choices, _ = preflight.choose({"default": preflight.Measured(400.0, ""), "cudnn": preflight.Measured(408.0, "")}, {}, {})
    assert choices == {"ATTENTION": "default", "COMPILE": None, "DEVICE_TOKENS": None}


@pytest.mark.parametrize("name", ["flex", "fa2", "fa3", "fa4", "math"])
def test_whatever_is_measured_can_be_chosen(preflight: ModuleType, name: str) -> None:
    for gain, choice in ((1.04, name), (1.02, "default")):
        found = {"default": preflight.Measured(400e12, "FLOP/s"), name: preflight.Measured(gain * 400e12, "FLOP/s")}
        assert preflight.choose(found, {}, {})[0]["ATTENTION"] == choice


def test_what_is_fastest_alone_must_hold_in_the_model(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"fa2": None, "flex": 90_000, "cudnn": 101_000}
    monkeypatch.setattr(preflight, "try_training", lambda mode, name, *_: preflight.Fit(speeds[name], 1.0, 1.0, "out of registers"))
    rates = {"default": 400.0, "fa2": 700.0, "flex": 600.0, "cudnn": 500.0}
    found = {name: preflight.Measured(rate, "FLOP/s") for name, rate in rates.items()}
    assert preflight.attention_of_model(found, "both", 100_000, 0.1) == "cudnn"
    choices, refused = preflight.choose(found, {}, {})
    assert choices["ATTENTION"] == "cudnn"
    assert refused == [
        "attention by fa2 is not taken: it runs alone, but not in the model: out of registers",
        "attention by flex is not taken: it is faster alone, but the model makes 90,000 tokens/s with it, 100,000 without",
    ]
    speeds["cudnn"] = 99_000
    found["cudnn"].why = None
    assert preflight.attention_of_model(found, "both", 100_000, 0.1) == "default"


def test_attention_and_compile_mode_are_held_against_each_other(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {("both", "fa3"): 105_000, ("model", "fa3"): 120_000, ("both", "default"): 100_000}
    tried = []

    def training(mode: str, name: str, *_: object) -> object:
        tried.append((mode, name))
        return preflight.Fit(speeds[mode, name], 1.0, 1.0)

    monkeypatch.setattr(preflight, "try_training", training)
    found = {"default": preflight.Measured(400.0, "FLOP/s"), "fa3": preflight.Measured(700.0, "FLOP/s")}
    working, pairs = {"none": 50_000.0, "model": 95_000.0, "both": 100_000.0}, {}
    name = preflight.attention_of_model(found, "both", 100_000, 0.1, pairs)
    assert (name, preflight.mode_beside(name, "both", working, pairs, 0.1)) == ("fa3", "model")
    assert tried == [("both", "fa3"), ("model", "fa3")]  # what is far behind is not tried again
    assert {pair: fit.tokens_per_s for pair, fit in pairs.items()} == {("fa3", "both"): 105_000, ("fa3", "model"): 120_000}
    assert preflight.mode_beside("default", "both", working, {}, 0.1) == "both" and len(tried) == 2


def test_without_a_gpu_it_says_so(folder: Folder) -> None:
    done = folder.run("preflight.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["choices"] == {} and "no GPU" in found["note"] and found["gpu_name"] is None


def test_a_folder_that_takes_no_result_is_one_sentence(folder: Folder) -> None:
    (folder.path / "taken").write_text("a file")
    broken = folder.run("preflight.py", "--data", "taken")
    assert broken.returncode == 1 and broken.stderr == "error: cannot write taken: File exists; name a writable folder with --data\n"


def test_batches_are_tried_up_to_the_cliff(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {2**14: 80.0, 2**15: 99.0, 2**16: 100.0, 2**17: 60.0, 2**18: 50.0}
    tried: list[int] = []

    def training(mode: str, attention: str, tokens: int, seconds: float) -> object:
        tried.append(tokens)
        return preflight.Fit(speeds[tokens], 1.0, 1.0)

    monkeypatch.setattr(preflight, "try_training", training)
    assert list(preflight.device_batches("both", "default", 0.1)) == tried == [2**14, 2**15, 2**16, 2**17]
    speeds.update({2**16: 99.5, 2**17: 100.0, 2**18: 101.0})
    tried.clear()
    preflight.device_batches("both", "default", 0.1)
    assert tried == [2**14, 2**15, 2**16, 2**17]  # twice half a percent: flat
    monkeypatch.setattr(preflight, "try_training", lambda *_: preflight.Fit(None, None, None, why="out of memory"))
    assert list(preflight.device_batches("both", "default", 0.1)) == [2**14]


def test_a_result_that_is_kept_serves_again(preflight: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "preflight-x.json"
    assert preflight.kept(path, True) is None
    for text in ("{", "[]", "null", '{"choices": 1}'):
        path.write_text(text)
        assert preflight.kept(path, True) is None
    path.write_text(json.dumps({"choices": {}, "quick": True}))
    assert preflight.kept(path, True) and preflight.kept(path, False) is None
    path.write_text(json.dumps({"choices": {}, "quick": False}))
    assert preflight.kept(path, True) and preflight.kept(path, False)


def test_a_trial_that_fails_in_any_way_is_a_result(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class CompilationError(Exception):
        """As triton's: no RuntimeError."""

    def broken(*_: object, **__: object) -> None:
        raise CompilationError("\n  at 12:4: unsupported architecture\nmore")

    monkeypatch.setattr(preflight, "milliseconds", broken)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(1))
    monkeypatch.setattr(preflight, "why_not", lambda name, *_: "flash_attn is not installed" if name == "fa2" else None)
    monkeypatch.setattr(preflight, "prepare", lambda *_: None)
    backends = preflight.attention_backends(0.01)
    assert tuple(backends) == preflight.NAMES and backends["fa2"].why == "flash_attn is not installed"
    assert backends["default"].why == "at 12:4: unsupported architecture" and all(m.rate is None for m in backends.values())
    choices, refused = preflight.choose(backends, {}, {})
    assert choices["ATTENTION"] is None and any("cudnn does not run: at 12:4" in text for text in refused)
    assert not any("fa2" in text for text in refused)  # not having a package is no fault of the GPU
