"""A table as TSV, in the order of the screen, into a file of one's choice."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from runner.errors import BadValue
from runner.lab import write_private
from runner.text import tsv_cell

from .widgets.table import Column, Row


def table_text(columns: Iterable[Column], rows: Iterable[Row]) -> str:
    """Tab-separated text with a header; cells cleaned, without tabs and new lines."""
    columns = list(columns)
    lines = ["\t".join(c.title or c.key for c in columns)]
    lines += ["\t".join(tsv_cell(c.cell(r)[0]).strip() for c in columns) for r in rows]
    return "\n".join(lines) + "\n"


def file_name(name: str) -> str:
    """What a table's file is called unless somebody says otherwise."""
    word = "".join(c for c in name.split(" ")[0].lower() if c.isalnum()) or "table"
    return f"{word}-{time.strftime('%Y%m%d-%H%M%S')}.tsv"


def checked_target(text: str) -> Path:
    """The file to write, absolute. Raised: BadValue when it cannot be one; nothing that is there is overwritten."""
    if not text:
        raise BadValue("No file is named.", next_step="For example ~/night.tsv.")
    try:
        path = Path(text).expanduser().absolute()
        there, is_folder, has_place = path.exists(), path.is_dir(), path.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadValue(f"{text!r} is no file name: {error}.") from error
    if is_folder:
        raise BadValue(f"{path} is a folder.", next_step="Name a file in it.")
    if there:
        raise BadValue(f"{path} is there already.", next_step="Name another file.")
    if not has_place:
        raise BadValue(f"There is no folder {path.parent}.", next_step="Make it first, or name another.")
    return path


def write_table(path: Path, columns: Iterable[Column], rows: Iterable[Row]) -> list[str]:
    """Write the table; the answer is a note with its path. Raised: LabError when it cannot be written."""
    write_private(path, table_text(columns, rows).encode())
    return [str(path)]
