"""A table as TSV, in the columns and the order of the screen."""

from __future__ import annotations

import time
from collections.abc import Iterable

from runner.lab import Lab, write_private
from runner.text import tsv_cell

from .widgets.table import Column, Row


def table_text(columns: Iterable[Column], rows: Iterable[Row]) -> str:
    """Tab-separated text with a header; cells cleaned, without tabs and new lines."""
    columns = list(columns)
    lines = ["\t".join(c.title or c.key for c in columns)]
    lines += ["\t".join(tsv_cell(c.cell(r)[0]).strip() for c in columns) for r in rows]
    return "\n".join(lines) + "\n"


def write_table(lab: Lab, name: str, columns: Iterable[Column], rows: Iterable[Row]) -> list[str]:
    """Write the table into the lab's folder; the answer is a note with its path."""
    word = "".join(c for c in name.split(" ")[0].lower() if c.isalnum()) or "table"
    path = lab.path / f"{word}-{time.strftime('%Y%m%d-%H%M%S')}.tsv"
    write_private(path, table_text(columns, rows).encode(), replace=True)
    return [str(path)]
