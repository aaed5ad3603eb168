"""Feeding: every row once an epoch, in an order of the seed's, the same whether the rows are resident or streamed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
np = pytest.importorskip("numpy")
from .conftest import TRAINER  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
CPU = torch.device("cpu")


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TRAINER))
    import feed

    yield feed
    sys.modules.pop("feed", None)


def rows(count: int) -> np.ndarray:
    """Row i holds the tokens 40000 + i …: above 32767, where int16 is negative."""
    return (40000 + np.arange(count)[:, None] + 100 * np.arange(5)).astype(np.uint16)


def take(batches: Iterator, count: int) -> list[tuple[list, int]]:
    taken = [(inputs[:, 0].tolist(), epoch) for inputs, _, epoch in itertools.islice(batches, count)]
    batches.close()
    return taken


def test_each_row_comes_once_an_epoch_in_a_new_order(feed: ModuleType) -> None:
    seen = take(feed.batches(rows(22), 4, CPU, seed=1), 10)
    first, second = ([i for ids, epoch in seen if epoch == number for i in ids] for number in (1, 2))
    assert len(first) == len(second) == 20 and len(set(first)) == len(set(second)) == 20  # two rows fill no batch
    assert set(first) <= set(range(40000, 40022)) and first != second
    assert seen == take(feed.batches(rows(22), 4, CPU, seed=1), 10) != take(feed.batches(rows(22), 4, CPU, seed=2), 10)


def test_targets_are_the_next_tokens(feed: ModuleType) -> None:
    inputs, targets, _ = next(feed.batches(rows(4), 2, CPU, seed=0))
    assert inputs.dtype == torch.int64 and (targets - inputs == 100).all() and inputs.min() >= 40000


@pytest.mark.parametrize("chunk_rows", [1, 3, 8, 1000])
def test_streamed_rows_come_in_the_same_order(feed: ModuleType, chunk_rows: int) -> None:
    resident = take(feed.batches(rows(50), 4, CPU, seed=3), 30)
    assert take(feed.batches(rows(50), 4, CPU, seed=3, chunk_bytes=chunk_rows * 10), 30) == resident


def test_skipped_batches_are_those_already_seen(feed: ModuleType) -> None:
    whole = take(feed.batches(rows(22), 4, CPU, seed=1), 20)
    for skip in (1, 5, 7, 11):
        assert take(feed.batches(rows(22), 4, CPU, seed=1, skip=skip), 20 - skip) == whole[skip:]
        assert take(feed.batches(rows(22), 4, CPU, seed=1, skip=skip, chunk_bytes=80), 20 - skip) == whole[skip:]
