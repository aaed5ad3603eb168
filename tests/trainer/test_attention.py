"""Every way to compute attention gives the same numbers and gradients, alone and in a compiled model, or says why it cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
from .conftest import TRAINER  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
HERE = [path.stem for path in TRAINER.glob("*.py")]
CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 0.02 if DEVICE.type == "cuda" else 1e-5
LENGTHS = (1, 96, 300)  # less than, about and more than a block of flex


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TRAINER))
    for name in HERE:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import attention

    yield attention
    for name in HERE:
        sys.modules.pop(name, None)
    torch._dynamo.reset()


def qkv(length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((2, length, 3, 32), generator=generator).to(DEVICE, DTYPE).requires_grad_() for _ in range(3)]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention written out, in float32."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / q.size(-1) ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, float("-inf")).softmax(-1), v.float())


def same(attention: ModuleType, name: str, length: int) -> None:
    ours, theirs = qkv(length), qkv(length)
    weight = torch.linspace(-1, 1, ours[0].numel(), device=DEVICE).view_as(ours[0])
    y, wanted = attention.attend(*ours, name), reference(*theirs)
    assert y.shape == ours[0].shape and y.dtype == DTYPE
    torch.testing.assert_close(y.float(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    (y * weight).sum().backward()
    (wanted * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.float(), b.grad.float(), atol=4 * TOLERANCE, rtol=4 * TOLERANCE)


@pytest.fixture
def flex_on_cpu(attention: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex has no CPU kernel with gradients, but its definition, uncompiled, computes anywhere."""
    if DEVICE.type == "cuda":
        return
    import attention_kernels
    import torch.nn.attention.flex_attention as upstream

    monkeypatch.setattr(upstream, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention_kernels, "compiled_flex", lambda: upstream.flex_attention)


def fake_package(module: str, monkeypatch: pytest.MonkeyPatch, attention: ModuleType, with_sums: bool) -> None:
    """An installed package whose kernel is PyTorch's, with or without the second output that some versions give."""

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> object:
        assert causal and not torch.compiler.is_compiling()
        y = attention.attend(q, k, v, "math")
        return (y, y.sum()) if with_sums else y

    found = ModuleType(module)
    found.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, module, found)


def test_every_name_is_known(attention: ModuleType) -> None:
    assert set(attention.NAMES) == {"default", *attention.SDPA_BACKENDS, "flex", *attention.PACKAGES}


@pytest.mark.parametrize("length", LENGTHS)
def test_whatever_works_here_equals_the_definition(attention: ModuleType, length: int) -> None:
    names = attention.usable(32, DEVICE)
    assert {"default", "flash", "math"} <= set(names)
    for name in names:
        same(attention, name, length)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, about itself
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_equals_the_definition(attention: ModuleType, length: int) -> None:
    same(attention, "flex", length)


@pytest.mark.parametrize(("name", "module"), [("fa4", "flash_attn.cute"), ("fa3", "flash_attn_interface"), ("fa2", "flash_attn")])
def test_a_package_is_called_where_it_is_installed(attention: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    import attention_kernels

    if name == "fa4":
        fake_package("flash_attn", monkeypatch, attention, with_sums=False)
    fake_package(module, monkeypatch, attention, with_sums=name != "fa2")
    attention_kernels.package.cache_clear()
    same(attention, name, 96)


def test_what_cannot_be_used_says_why(attention: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in attention.NEED_GPU:
        assert attention.why_not(name, 32, CPU) == "it needs a GPU"
    assert attention.usable(32, CPU) == ["default", "flash", "math"]
    import attention_kernels

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    attention_kernels.package.cache_clear()
    assert attention_kernels.package("flash_attn") == "flash_attn is not installed"

    def broken(_: str) -> ModuleType:
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore")

    monkeypatch.setattr(attention_kernels.importlib, "import_module", broken)
    attention_kernels.package.cache_clear()
    said = "flash_attn cannot be imported (flash_attn_2_cuda.so: undefined symbol: _ZN3c10)"
    assert attention_kernels.package("flash_attn") == said
    with pytest.raises(RuntimeError, match="undefined symbol"):
        attention.attend(*qkv(8), "fa2")
    attention_kernels.package.cache_clear()
    monkeypatch.setattr(attention, "attend", lambda *_: 1 / 0)
    assert attention.why_not("math", 32, CPU) == "it does not run on this CPU with heads of 32 (division by zero)"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, about itself
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize(("name", "pieces"), [("default", 1), ("flex", 1), ("fa2", 24)])
def test_a_compiled_model_takes_it(attention: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, pieces: int) -> None:
    import attention_kernels
    import train
    from torch._dynamo.testing import CompileCounterWithBackend

    fake_package("flash_attn", monkeypatch, attention, with_sums=False)
    attention_kernels.package.cache_clear()
    tokens = torch.randint(0, 64, (2, 130), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = []
    for taken, compiled in (("default", False), (name, True)):
        torch.manual_seed(0)
        with DEVICE:
            model = train.GPT(train.GPTConfig(130, 64, 4, 2, 64, True, 15.0), taken, DTYPE)
            model.init_weights()
            torch.nn.init.normal_(model.head.weight)
            for block in model.blocks:
                torch.nn.init.normal_(block.attention.out.weight, std=0.1)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        forward = torch.compile(model.token_nats, dynamic=False, backend=counter) if compiled else model.token_nats
        counts = []
        for _ in range(2):
            attention.prepare(taken, tokens.size(1), DEVICE)
            model.zero_grad()
            loss = forward(tokens, tokens).mean()
            loss.backward()
            counts.append(counter.frame_count)
        losses.append((loss.item(), model.blocks[0].attention.q.weight.grad.norm().item()))
        assert counts[0] == counts[1]  # a second step compiles nothing more
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if DEVICE.type == "cpu" else 0.02) and losses[0][1] > 0
    assert 1 <= counter.frame_count <= pieces
