"""Causal attention that is not PyTorch's own operator: flex_attention compiled from a mask, and installed FlashAttention packages. Fixed.

Imported by attention.py only when one of them is asked for, since this brings the compiler in. All take and give [B, T, H, D].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from device import first_line
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

masks: dict[tuple[int, str], BlockMask] = {}  # row length and type of device -> mask, for any number of rows and heads
_compiled: list[Callable[..., torch.Tensor]] = []


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Inside a compiled model flex is compiled with it; elsewhere alone, because uncompiled it would write the whole square of scores."""
    mask = masks.get((q.size(1), q.device.type))
    if mask is None:
        mask = block_mask(q.size(1), q.device)
    run = flex_attention if torch.compiler.is_compiling() else compiled_flex()
    return run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask).transpose(1, 2)


def compiled_flex() -> Callable[..., torch.Tensor]:
    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=False))
    return _compiled[0]


@torch.compiler.disable
def block_mask(length: int, device: torch.device) -> BlockMask:
    """The causal mask of rows of this length, made once."""
    if (length, device.type) not in masks:
        masks[length, device.type] = create_block_mask(_visible, None, None, length, length, device=str(device))
    return masks[length, device.type]


def _visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


@torch.compiler.disable  # not every package can be traced: a compiled model is cut here and calls the kernel as it is
def packaged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, module: str) -> torch.Tensor:
    """Attention by the package's kernel."""
    function = package(module)
    if isinstance(function, str):
        raise RuntimeError(function)
    out = function(q, k, v, causal=True)
    return out[0] if isinstance(out, tuple) else out  # some versions give the logarithms of the sums as well


@cache
def package(module: str) -> Callable[..., Any] | str:
    """The function of a FlashAttention package, or why there is none."""
    try:
        function: Callable[..., Any] = importlib.import_module(module).flash_attn_func
    except (ModuleNotFoundError, AttributeError):
        return f"{module} is not installed"
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        return f"{module} cannot be imported ({first_line(error)})"
    return function
