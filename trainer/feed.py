"""Feeds rows of tokens to training in a new order each epoch, without work on the host inside a step. Fixed.

Rows that fit a quarter of the GPU's memory lie there whole. Larger sets come in chunks: while training reads one, a thread gathers the next
into pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

RESIDENT_SHARE = 0.25  # of the GPU's memory that the rows may take
CHUNK_BYTES = 64 << 20  # of a streamed set: 16,000 rows of 2,048 tokens, a few hundred steps


def batches(
    rows: np.ndarray, batch_rows: int, device: torch.device, seed: int, skip: int = 0, chunk_bytes: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Endless (inputs, targets, epoch): int64 [batch_rows, seq_len] each, in an order that depends on `seed` alone.

    `skip` batches are left out at the start: those an interrupted run had already seen. `chunk_bytes` streams rows that would fit, too.
    """
    if chunk_bytes is None and fits(rows, device):
        stored = torch.from_numpy(np.array(rows).view(np.int16)).to(device)  # torch has few operations for uint16

        def chunks(order: np.ndarray) -> Iterator[torch.Tensor]:
            on_device = torch.from_numpy(order).to(device)
            for start in range(0, len(order), batch_rows):
                yield stored[on_device[start : start + batch_rows]]
    else:
        chunk_rows = max(1, (chunk_bytes or CHUNK_BYTES) // (rows.shape[1] * 2 * batch_rows)) * batch_rows

        def chunks(order: np.ndarray) -> Iterator[torch.Tensor]:
            return _streamed(rows, order, chunk_rows, batch_rows, device)

    order_seed, epoch, usable = np.random.default_rng(seed), 0, len(rows) - len(rows) % batch_rows
    while True:
        epoch += 1
        order = order_seed.permutation(len(rows))[:usable]
        left_out = min(skip, usable // batch_rows)
        skip -= left_out
        for part in chunks(order[left_out * batch_rows :]):
            batch = part.long() & 0xFFFF
            yield batch[:, :-1], batch[:, 1:], epoch


def fits(rows: np.ndarray, device: torch.device) -> bool:
    """Whether the rows may lie on the device whole; in a CPU's memory they do anyway."""
    return device.type != "cuda" or rows.nbytes <= RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory


def _streamed(rows: np.ndarray, order: np.ndarray, chunk_rows: int, batch_rows: int, device: torch.device) -> Iterator[torch.Tensor]:
    """The batches of `order`, with the next chunk gathered while this one is read."""

    def gather(start: int) -> torch.Tensor:
        chunk = torch.from_numpy(rows[order[start : start + chunk_rows]].view(np.int16))
        return chunk.pin_memory() if device.type == "cuda" else chunk

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(gather, 0)
        for start in range(0, len(order), chunk_rows):
            chunk = coming.result().to(device, non_blocking=True)
            if start + chunk_rows < len(order):
                coming = pool.submit(gather, start + chunk_rows)
            for at in range(0, len(chunk), batch_rows):
                yield chunk[at : at + batch_rows]
