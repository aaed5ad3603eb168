"""The working directory of a run: the trainer's files copied, its source replaced, the time budget written where the policy says it lives.

The same for every engine. The trainer folder itself is only read; editing it after a submission changes nothing of a queued run's source.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import BadValue, PolicyError, Refused, RequestError
from runner.sources import constants, override

if TYPE_CHECKING:
    from runner.policy import TrainerPolicy

LINK_ABOVE_BYTES = 1 << 20  # corpora and checkpoints are not copied per run
MAX_FILES = 5000  # a home directory named as trainer folder must not be copied
_SKIPPED_DIRS = frozenset({"__pycache__", "lab", "node_modules"})
_SKIPPED_SUFFIXES = (".pyc", ".pyo")


def materialise(trainer: TrainerPolicy, source_text: str, budget_s: float, dest: Path) -> None:
    """Fill `dest` (made when absent) so that the trainer's command can run there.

    Raises PolicyError where the budget or a shim is not where hosts.toml says, Refused for a folder of too many files.
    """
    dest.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = trainer.folder.resolve()
    for count, (path, relative) in enumerate(_files(folder)):
        if count >= MAX_FILES:
            raise Refused(
                f"The trainer folder {folder} holds more than {MAX_FILES} files.",
                next_step="Point [trainer] folder in hosts.toml at the folder of the training script alone.",
            )
        _place(path, dest / relative)
    for shim in trainer.shims:
        path = (folder / shim).resolve()
        if not path.is_file():
            raise PolicyError(
                f"hosts.toml: [trainer] shims names {shim!r}, which is no file in {folder}.", next_step="Mend or remove that entry."
            )
        _place(path, dest / path.name)  # beside the script: Python looks there before site-packages
    _write(dest / trainer.source, source_text)
    if trainer.budget:
        _write_budget(trainer.budget, budget_s, dest)


# The human's file holds secrets of hosts (`env`): it never travels with a trainer, whose code an agent writes.
HOSTS_FILE = "hosts.toml"


def _files(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Regular files worth copying, with their path below the folder; links that lead out of the folder are left behind."""
    for root, dirs, names in os.walk(folder):
        here = Path(root)
        dirs[:] = sorted(d for d in dirs if not _skipped_dir(here / d))
        for name in sorted(names):
            path = here / name
            if name.startswith(".") or name.endswith(_SKIPPED_SUFFIXES) or name == HOSTS_FILE:
                continue
            target = path.resolve() if path.is_symlink() else path
            if target is not path and not target.is_relative_to(folder):
                continue
            try:
                regular = stat.S_ISREG(target.stat().st_mode)
            except OSError:
                continue
            if regular:
                yield target, path.relative_to(folder)


def _skipped_dir(path: Path) -> bool:
    return (
        path.name.startswith(".")
        or path.name in _SKIPPED_DIRS
        or path.is_symlink()
        or (path / "pyvenv.cfg").exists()
        or (path / "lab.db").exists()
        or (path / ".git").exists()
    )


def _place(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.is_symlink() or to.exists():
        to.unlink()
    if path.stat().st_size > LINK_ABOVE_BYTES:
        to.symlink_to(path)
    else:
        shutil.copyfile(path, to)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.exists():
        path.unlink()  # never through a link into the trainer folder
    path.write_bytes(text.encode())


def _write_budget(where: str, budget_s: float, dest: Path) -> None:
    name, _, _ = where.partition(":")
    _write(dest / name, budgeted(where, budget_s, dest))


def budgeted(where: str, budget_s: float, folder: Path) -> str:
    """The text of the file that holds the time budget, with the budget (seconds) written in; `where` is FILE:NAME.

    Raised: PolicyError when hosts.toml names no such constant, BadValue when the budget does not fit its type.
    """
    name, _, constant = where.partition(":")
    path = folder / name
    place = f"hosts.toml: [trainer] budget = {where!r}"
    if not constant or not path.resolve().is_relative_to(folder.resolve()):
        raise PolicyError(
            f"{place} is not FILE:NAME of a file in the trainer folder.", next_step='For upstream it is "prepare.py:TIME_BUDGET".'
        )
    try:
        text = path.read_bytes().decode()
        old = constants(text)[constant]
    except (OSError, KeyError, UnicodeDecodeError, BadValue):
        raise PolicyError(
            f"{place}: there is no constant {constant} in {name} of the trainer folder.",
            next_step='Name the file and constant that hold the time budget in seconds, or "" for none.',
        ) from None
    if isinstance(old, bool) or not isinstance(old, (int, float)):
        raise PolicyError(
            f"{place}: {constant} is {old!r}, not a number of seconds.", next_step="Name the constant that holds the time budget."
        )
    if isinstance(old, int) and budget_s != int(budget_s):
        raise BadValue(
            f"{place}: {constant} is a whole number of seconds; {budget_s:g} is not.", next_step="Ask for a whole number of seconds."
        )
    try:
        return override(text, {constant: budget_s})
    except RequestError as e:  # bound twice, so an override would not reach it
        raise PolicyError(f"{place}: {e.message}", next_step=e.next_step) from None
