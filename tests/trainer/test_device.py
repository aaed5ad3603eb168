"""The device of a run: refused without bfloat16, named from the driver, given what preflight found, read in order."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
from .conftest import TRAINER  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TRAINER))
    import device

    yield device
    for name in [path.stem for path in TRAINER.glob("*.py")]:
        sys.modules.pop(name, None)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)


def test_a_gpu_without_bfloat16_is_refused_by_name(device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (7, 5), "Tesla T4")
    with pytest.raises(device.NoBfloat16, match=r"Tesla T4 has no bfloat16.*Ampere"):
        device.choose_device()
    fake_gpu(monkeypatch, (8, 6), "NVIDIA GeForce RTX 3090")
    assert device.choose_device() == torch.device("cuda", 0)


def test_the_driver_is_read_from_the_kernel(device: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(device, "DRIVER_FILE", version)
    assert device.driver_version() is None
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version:  gcc 13.3.0\n")
    assert device.driver_version() == "580.159.04"


def test_choices_of_preflight_become_defaults(device: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import attention
    import settings

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(device, "facts", lambda _: {"gpu_name": "NVIDIA H200", "driver": "580.159.04"})
    for module in (attention, settings):
        monkeypatch.setattr(module, "why_not", lambda name, head_dim, _: "it needs more" if name == "math" or head_dim > 256 else None)
    presets = {"DEPTH": 8, "HEAD_DIM": 128, "TOTAL_BATCH_SIZE": 2**17, "DEVICE_TOKENS": 2**17, "COMPILE": "both", "ATTENTION": "default",
               "LOSS": "torch"}  # fmt: skip
    constants = {"OPTIMIZER": "muon", "ASPECT_RATIO": 64, "DEPTH": None, "ATTENTION": None}
    plan = settings.make_plan(constants, presets, 2048, tmp_path, gpu)
    assert (plan.attention, plan.compile, plan.device_rows, plan.width, plan.defaults) == ("default", "both", 64, 512, "preset")
    path = device.preflight_file(tmp_path, gpu)
    path.write_text(json.dumps({"choices": {"ATTENTION": "cudnn", "COMPILE": None, "DEVICE_TOKENS": 2**15, "OTHER": 1}}))
    plan = settings.make_plan(constants, presets, 2048, tmp_path, gpu)
    assert (plan.attention, plan.compile, plan.device_rows, plan.defaults) == ("cudnn", "both", 16, "preflight")
    plan = settings.make_plan({**constants, "ATTENTION": "flash"}, presets, 2048, tmp_path, gpu)
    assert plan.attention == "flash"  # what an experiment says comes first
    path.write_text(json.dumps({"choices": {"ATTENTION": "flex"}}))
    assert settings.make_plan(constants, presets, 2048, tmp_path, gpu).attention == "flex"
    plan = settings.make_plan({**constants, "HEAD_DIM": 512}, presets, 2048, tmp_path, gpu)
    assert plan.attention == "default"  # measured with other heads than this model has
    with pytest.raises(settings.BadSetting, match="ATTENTION is 'math', but it needs more; these work here: default, cudnn"):
        settings.make_plan({**constants, "ATTENTION": "math"}, presets, 2048, tmp_path, gpu)
    old = '{"choices": {"ATTENTION": "flash-attention-3", "COMPILE": "both", "DEVICE_TOKENS": null}}'  # a name of an earlier table
    for damaged in ("[]", "{", old, '{"choices": 3}', '{"choices": {"ATTENTION": "flax", "COMPILE": 7, "DEVICE_TOKENS": "many"}}'):
        path.write_text(damaged)
        assert settings.make_plan(constants, presets, 2048, tmp_path, gpu).attention == "default"
    assert device.preflight_choices(tmp_path, torch.device("cpu")) == {}


def test_losses_come_back_in_order(device: ModuleType) -> None:
    reader = device.LossReader(torch.device("cpu"))
    for value in (3.0, 2.0, 1.0):
        reader.push(torch.tensor(value, requires_grad=True))
        assert reader.ready and reader.pop() == value and not reader.ready


def test_a_width_that_rounds_to_the_same_is_the_same_model(device: ModuleType, tmp_path: Path) -> None:
    import settings

    presets = {"DEPTH": 8, "HEAD_DIM": 128, "TOTAL_BATCH_SIZE": 2048, "DEVICE_TOKENS": 2048, "COMPILE": "none", "ATTENTION": "default",
               "LOSS": "torch", "OPTIMIZER": "muon"}  # fmt: skip
    cpu = torch.device("cpu")
    widths = [settings.make_plan({"ASPECT_RATIO": ratio}, presets, 256, tmp_path, cpu).width for ratio in (72, 80, 90, 96)]
    assert widths == [640, 640, 768, 768]
