"""Every database that a test, the screen's reader or its hand opened is closed when the test ends: Python 3.13 warns otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.lab import Lab
from runner.store import Store
from tests.tui import scenes


@pytest.fixture(autouse=True)
def closed_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remember what is opened, and close it."""
    opened: list[Store] = []
    first = Store.__init__

    def remember(store: Store, *args: Any, **how: Any) -> None:
        first(store, *args, **how)
        opened.append(store)

    monkeypatch.setattr(Store, "__init__", remember)
    yield
    for store in opened:
        store.close()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The busy night."""
    return scenes.busy(tmp_path)
