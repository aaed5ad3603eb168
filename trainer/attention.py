"""The ways to compute causal attention: what ATTENTION can name, which of them work here, and what model and preflight both call.

Fixed: an experiment does not edit it. All take and give [B, T, H, D]. "default" is PyTorch's own pick; "cudnn", "flash", "efficient" and
"math" are its kernels by name; "flex" is compiled from a mask; "fa2", "fa3" and "fa4" are FlashAttention packages.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch
import torch.nn.functional as F
from allowed import CHOICES
from device import first_line
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PACKAGES = {"fa4": "flash_attn.cute", "fa3": "flash_attn_interface", "fa2": "flash_attn"}  # modules with a flash_attn_func
NAMES = CHOICES["ATTENTION"]
FLEX_LEAST_HEAD = 16
NEED_GPU = frozenset({"cudnn", "efficient", "flex", *PACKAGES})


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> torch.Tensor:
    """Causal attention over [B, T, H, D]. The kernel is chosen in here because global switches are ignored inside a compiled model."""
    if name == "flex":
        from attention_kernels import flex  # imports the compiler, a second and a half

        return flex(q, k, v)
    if name in PACKAGES:
        from attention_kernels import packaged

        return packaged(q, k, v, PACKAGES[name])
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if name == "default":
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        with sdpa_kernel(SDPA_BACKENDS[name]):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2)


def prepare(name: str, length: int, device: torch.device) -> None:
    """What `attend` needs before a model compiled around it meets rows of this length; without it the first pass is compiled in pieces."""
    if name == "flex":
        from attention_kernels import block_mask

        block_mask(length, device)


def why_not(name: str, head_dim: int, device: torch.device) -> str | None:
    """Why `name` cannot be used here, found by computing a few tokens with it; None if it can. Flex, slow to compile, is not tried."""
    if name in NEED_GPU and device.type != "cuda":
        return "it needs a GPU"
    if name == "flex":
        small = f"it needs heads of at least {FLEX_LEAST_HEAD}" if head_dim < FLEX_LEAST_HEAD else None
        return small if importlib.util.find_spec("triton") else "it needs triton"
    if name in PACKAGES:
        from attention_kernels import package

        if isinstance(found := package(PACKAGES[name]), str):
            return found
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.zeros((1, 64, 1, head_dim), dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns with each reason why a kernel does not fit
            attend(q, k, v, name).sum().backward()
    except Exception as error:  # noqa: BLE001 - a trial of what may not work here: whatever happens is its result
        return f"it does not run on this {'GPU' if device.type == 'cuda' else 'CPU'} with heads of {head_dim} ({first_line(error)})"
    return None


def usable(head_dim: int, device: torch.device) -> list[str]:
    """The names that work here."""
    return [name for name in NAMES if why_not(name, head_dim, device) is None]
