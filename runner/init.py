"""`overnight init PATH`: recognise a trainer folder and write hosts.toml into it, and nothing else.

Understood: our own trainer, and any checkout of karpathy/autoresearch or a fork, unmodified. What is not found is left out of the file,
in the open.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import sources
from runner.errors import BadValue, OvernightError, Refused
from runner.lab import HOSTS_FILE
from runner.policy import load_policy

BUDGET_NAMES = ("TIME_BUDGET", "TIME_BUDGET_S", "TIME_BUDGET_SECONDS", "BUDGET_SECONDS")


@dataclass(frozen=True, slots=True)
class Made:
    """What init found and did."""

    hosts_file: Path
    written: bool
    found: str
    next_steps: list[str]


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a folder says about itself; `budget` is FILE:NAME, `budget_s` its present value."""

    folder: Path
    script: str
    budget: str | None
    budget_s: float | None
    prepare: bool
    program: bool
    python: Path | None


def recognise(folder: Path) -> Trainer:
    """Read a trainer folder. Raised: BadValue when there is no training script in it."""
    if not folder.is_dir():
        raise BadValue(
            f"{folder} is not a folder.", next_step="Name the folder that holds train.py, e.g. a checkout of karpathy/autoresearch."
        )
    if not (folder / "train.py").is_file():
        inner = [c.name for c in sorted(folder.iterdir()) if c.is_dir() and (c / "train.py").is_file()][:3]
        hint = (
            f"Did you mean {folder / inner[0]}?"
            if inner
            else "Name the folder that holds it, or write hosts.toml by hand (runner/FORMAT.md, section 6)."
        )
        raise BadValue(f"{folder} has no train.py.", next_step=hint)
    budget, budget_s = None, None
    for name in ("prepare.py", "train.py"):
        value = constant(folder / name, BUDGET_NAMES)
        if value is not None:
            budget, budget_s = f"{name}:{value[0]}", value[1]
            break
    python = folder / ".venv" / "bin" / "python"
    return Trainer(
        folder,
        "train.py",
        budget,
        budget_s,
        (folder / "prepare.py").is_file(),
        (folder / "program.md").is_file(),
        python if python.exists() else None,
    )


def constant(path: Path, names: tuple[str, ...]) -> tuple[str, float] | None:
    """The first of the names that the script assigns a number at module level, with that number."""
    try:
        found: dict[str, Any] = sources.constants(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, OvernightError):
        return None
    for name in names:
        value = found.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return name, float(value)
    return None


def hosts_text(trainer: Trainer) -> str:
    """The hosts.toml of a trainer."""
    seconds = trainer.budget_s or 300.0
    lines = [
        "# Written by `overnight init`. Format: runner/FORMAT.md section 6 of Overnight. Yours to edit: agents cannot,",
        "# and an edit that loosens a limit waits for `overnight policy accept`.",
        "",
        "[trainer]",
        'folder = "."',
        f'command = ["{{python}}", {json.dumps(trainer.script)}]',
        f"editable = [{json.dumps(trainer.script)}]",
        f"source = {json.dumps(trainer.script)}",
    ]
    if trainer.budget:
        lines.append(f"budget = {json.dumps(trainer.budget)}")
    else:
        lines.append('budget = ""   # no time budget constant was found: a run ends when the script does; else "FILE:NAME"')
    if trainer.prepare:
        lines.append('data_command = ["{python}", "prepare.py"]')
    lines += [
        "",
        "[policy]",
        f"budget_s = {seconds:g}"
        + ("" if trainer.budget else "          # a run is stopped after twice this and 300 s: wall_factor, wall_extra_s"),
        f"max_budget_s = {max(3600.0, 4 * seconds):g}",
        'approval = "auto"        # "ask": submissions of agents wait for you',
        "retry_lost = 1",
        "",
        "[[host]]",
        'name = "here"',
        'kind = "local"',
    ]
    if trainer.python:
        lines.append(f"python = {json.dumps(str(trainer.python))}")
    return "\n".join(lines) + "\n"


def init_folder(path: Path) -> Made:
    """Write hosts.toml into a trainer folder. Raised: BadValue, Refused when another hosts.toml is there."""
    folder = path.expanduser().resolve()
    trainer = recognise(folder)
    target = folder / HOSTS_FILE
    text = hosts_text(trainer)
    written = False
    if target.exists() or target.is_symlink():
        if not target.is_file() or target.read_text(encoding="utf-8", errors="replace") != text:
            load_policy(target)
            raise Refused(f"{target} is there already; nothing was changed.", next_step="Edit it, or move it away and ask again.")
    else:
        load_policy(target, text=text)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
        written = True
    return Made(target, written, described(trainer), next_steps(trainer))


def described(trainer: Trainer) -> str:
    """What was recognised, in a sentence."""
    budget = f"time budget {trainer.budget} = {trainer.budget_s:g} s" if trainer.budget else "no time budget constant"
    return f"{trainer.script}, {budget}, {'program.md is used as it is' if trainer.program else 'no program.md'}."


def next_steps(trainer: Trainer) -> list[str]:
    """What to do next, in order."""
    steps = [f"cd {trainer.folder}"]
    if trainer.python is None and (trainer.folder / "pyproject.toml").is_file():
        steps.append('uv sync                     # its own environment, then name it: python = ".venv/bin/python" under [[host]]')
    if trainer.prepare:
        steps.append("overnight hosts setup here  # prepares the data once")
    return [
        *steps,
        "overnight run --baseline    # the first run",
        "overnight                   # the control room",
        "overnight connect claude    # an agent",
    ]
