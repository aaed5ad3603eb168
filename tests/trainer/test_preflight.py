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
NAMES = ("preflight", "train", "device", "prepare", "corpora", "report", "state", "peaks", "settings", "feed", "ending")


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
                 "efficient": rate(None, "FLOP/s", why="no kernel image is available"), "flex": rate(900e12, "FLOP/s"),
                 "flash-attention-3": rate(None, "FLOP/s", why="not installed")}  # fmt: skip
    broken = fit(None, None, None, why="broken")
    modes = {"none": fit(100_000, 1, 1), "optimizer": fit(4_000, 1, 1), "model": broken, "both": fit(99_000, 30, 1)}
    batches = {16384: fit(80_000, 1, 1), 32768: fit(99_000, 1, 1), 65536: fit(100_000, 1, 1), 131072: fit(60_000, 1, 1)}
    choices, refused = preflight.choose(attention, modes, batches)
    assert choices == {"ATTENTION": "cudnn", "COMPILE": "both", "DEVICE_TOKENS": 32768}     # flex is not something train.py can take
    assert "compile mode optimizer runs, but at 4,000 of 100,000 tokens/s" in refused
    assert any("model does not run: broken" in text for text in refused) and any("efficient does not run" in text for text in refused)
    assert not any("not installed" in text for text in refused)


def test_a_small_gain_does_not_change_the_plain_choice(preflight: ModuleType) -> None:
    choices, _ = preflight.choose({"default": preflight.Measured(400.0, ""), "cudnn": preflight.Measured(408.0, "")}, {}, {})
    assert choices == {"ATTENTION": "default", "COMPILE": None, "DEVICE_TOKENS": None}


def test_without_a_gpu_it_says_so(folder: Folder) -> None:
    done = folder.run("preflight.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["choices"] == {} and "no GPU" in found["note"] and found["gpu_name"] is None


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
    backends = preflight.attention_backends(0.01)
    assert set(backends) >= {"default", "cudnn", "flash", "efficient", "flex", "flash-attention-3"}
    assert backends["default"].why == "at 12:4: unsupported architecture" and all(m.rate is None for m in backends.values())
    choices, refused = preflight.choose(backends, {}, {})
    assert choices["ATTENTION"] is None and any("cudnn does not run: at 12:4" in text for text in refused)
