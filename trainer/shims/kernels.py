"""Stands in for the `kernels` package, so that an unmodified karpathy/autoresearch runs where its Flash-Attention 3 kernel cannot.

Opt-in: put this file on a run's path (hosts.toml: [trainer] shims). It answers get_kernel(...) with attention from PyTorch under the same
signature: scaled_dot_product_attention where the window covers the whole row, flex_attention where it does not. It says so in the log,
since a result depends on it. OVERNIGHT_SHIM_ATTENTION=full takes the whole row everywhere: often faster than windows, but another model.
"""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F

EXACT = os.environ.get("OVERNIGHT_SHIM_ATTENTION", "exact") != "full"


@cache
def _window_mask(length: int, window: int, device: str):
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch, head, query, key):
        return (query >= key) & (query - key <= window)

    return create_block_mask(visible, None, None, length, length, device=device)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), **unsupported):
    """Causal attention of q [B, T, H, D] over k and v [B, T, H_kv, D], at most window_size[0] tokens back (-1: all)."""
    if wrong := [name for name, value in unsupported.items() if value not in (None, False, 0, 0.0)]:
        raise TypeError(f"the attention shim does not support {', '.join(sorted(wrong))}; it needs the real kernel")
    if not causal:
        raise TypeError("the attention shim supports causal attention only")
    left, length = window_size[0], q.size(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.size(1) != k.size(1)
    if not EXACT or left < 0 or left >= length - 1:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=grouped)
    else:
        from torch.nn.attention.flex_attention import flex_attention

        y = flex_attention(q, k, v, block_mask=_window_mask(length, left, str(q.device)), scale=softmax_scale, enable_gqa=grouped)
    return y.transpose(1, 2)


def get_kernel(name: str, *_: object, **__: object) -> SimpleNamespace:
    """The interface of the kernel package `name`, answered by PyTorch."""
    how = "scaled_dot_product_attention, " + ("windows by flex_attention" if EXACT else "windows ignored")
    print(f"attention shim: {name} answered by torch {torch.__version__}: {how}", flush=True)
    return SimpleNamespace(flash_attn_interface=SimpleNamespace(flash_attn_func=flash_attn_func))
