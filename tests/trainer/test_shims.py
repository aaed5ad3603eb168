"""The stand-in for upstream's attention kernel: the same numbers as the definition, and a refusal of what it cannot do."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
from .conftest import TRAINER  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.fixture
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_shim", TRAINER / "shims" / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def definition(q, k, v, window: int):
    """Softmax over the visible keys, written out: [B, T, H, D]."""
    length = q.size(1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.size(-1) ** 0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    visible = (distance >= 0) & ((distance <= window) if window >= 0 else True)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [-1, 256, 64, 7])
def test_it_computes_what_the_kernel_computes(kernels: ModuleType, window: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 128, 2, 16) for _ in range(3))
    attention = kernels.get_kernel("varunneal/flash-attention-3").flash_attn_interface
    assert "attention shim: varunneal/flash-attention-3" in capsys.readouterr().out
    got = attention.flash_attn_func(q, k, v, causal=True, window_size=(window, 0))
    assert got.shape == q.shape
    torch.testing.assert_close(got, definition(q, k, v, window), atol=1e-5, rtol=1e-4)


def test_whole_rows_on_request(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "EXACT", False)
    q, k, v = (torch.randn(1, 32, 1, 8) for _ in range(3))
    attention = kernels.get_kernel("any").flash_attn_interface
    assert "windows ignored" in capsys.readouterr().out
    got = attention.flash_attn_func(q, k, v, causal=True, window_size=(4, 0))
    torch.testing.assert_close(got, definition(q, k, v, -1), atol=1e-5, rtol=1e-4)


def test_what_it_cannot_do_is_refused(kernels: ModuleType) -> None:
    x = torch.randn(1, 8, 1, 8)
    with pytest.raises(TypeError, match="causal"):
        kernels.flash_attn_func(x, x, x)
    with pytest.raises(TypeError, match="softcap"):
        kernels.flash_attn_func(x, x, x, causal=True, softcap=15.0)
