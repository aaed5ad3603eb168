"""Soft-capped cross-entropy over a large vocabulary as one Triton kernel, with the gradient computed in the same pass. Fixed; CUDA only.

The kernel sits between two matrix products: logits = x @ W.T in bfloat16, one pass that turns each row of logits into its loss and into the
gradient of that loss, and the two products of the backward pass. On an H200 this took 13.8 ms for 262,144 tokens x 8,192 words forward and
backward against 17.3 ms compiled from PyTorch, and it leaves one compiled trunk that training and evaluation share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK_ROWS = 1 << 17  # bounds the logits to 2 GB at 8,192 words; the kernel is as fast from 2**14 rows on


@triton.jit
def _loss_rows(
    logits,
    targets,
    losses,
    cap,
    gradient_scale,
    vocab: tl.constexpr,
    block: tl.constexpr,
    shift: tl.constexpr,
    with_gradient: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < vocab
    raw = tl.load(logits + row * vocab + columns, mask=inside, other=0.0).to(tl.float32)
    tanh = 1 - 2 / (tl.exp(2 * raw / cap) + 1)
    capped = tl.where(inside, cap * tanh, float("-inf"))
    largest = tl.max(capped, axis=0) if shift else 0.0  # |capped| <= cap, so a small cap cannot overflow exp
    powers = tl.exp(capped - largest)
    total = tl.sum(powers, axis=0)
    target = tl.load(targets + row)
    chosen = tl.sum(tl.where(columns == target, capped, 0.0), axis=0)
    tl.store(losses + row, largest + tl.log(total) - chosen)
    if with_gradient:
        gradient = (powers / total - tl.where(columns == target, 1.0, 0.0)) * (1 - tanh * tanh) * gradient_scale
        tl.store(logits + row * vocab + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def _losses(logits: torch.Tensor, targets: torch.Tensor, cap: float, gradient_scale: float | None) -> torch.Tensor:
    """Loss per row, float32 [N]; with a gradient scale the logits are overwritten by their scaled gradient."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(vocab)
    _loss_rows[(rows,)](
        logits, targets, losses, cap, gradient_scale or 0.0, vocab, block, cap > 40, gradient_scale is not None, num_warps=8
    )
    return losses


class _MeanLoss(torch.autograd.Function):
    """Mean loss over rows; the gradients of x and W are computed in the forward pass and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, cap: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        dx, dw = torch.empty_like(x), None
        for start in range(0, len(x), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = x[part] @ weight.T
            total += _losses(logits, targets[part], cap, 1 / len(x)).sum()
            torch.mm(logits, weight, out=dx[part])
            dw_part = logits.T @ x[part]
            dw = dw_part if len(x) <= CHUNK_ROWS else dw_part.float() + (0 if dw is None else dw)
        ctx.save_for_backward(dx, dw)
        return total / len(x)

    @staticmethod
    def backward(ctx, upstream: torch.Tensor):
        dx, dw = ctx.saved_tensors
        return dx * upstream.to(dx.dtype), dw * upstream.to(dw.dtype), None, None


def mean_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, cap: float) -> torch.Tensor:
    """Mean soft-capped cross-entropy in nats of activations x [N, C] under head weight [V, C] against targets [N]."""
    return _MeanLoss.apply(x, weight, targets, cap)


@torch.no_grad()
def token_losses(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, cap: float) -> torch.Tensor:
    """The loss of every row in nats, float32 [N], without gradients."""
    parts = range(0, len(x), CHUNK_ROWS)
    return torch.cat([_losses(x[i : i + CHUNK_ROWS] @ weight.T, targets[i : i + CHUNK_ROWS], cap, None) for i in parts])
