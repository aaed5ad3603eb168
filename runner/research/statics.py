"""What can be told of a script before a slot is spent on it: batches that cannot divide, and widths that round to one model.

Only what the text itself shows is used: the assert must be there, and so must the rounding. Nothing is run.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import sources
from runner.errors import RequestError
from runner.policy import TrainerPolicy
from runner.script import Script

BATCH, ROWS, LENGTH = "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE", "MAX_SEQ_LEN"
# ((x + HEAD_DIM - 1) // HEAD_DIM) * HEAD_DIM, as upstream rounds; ceil(x / HEAD_DIM) * HEAD_DIM; -(-x // HEAD_DIM) * HEAD_DIM
_ROUNDING = re.compile(
    r"\+ HEAD_DIM - 1\) // HEAD_DIM\)? \* HEAD_DIM|ceil\([^()]*/ HEAD_DIM\) \* HEAD_DIM|-\(-[^()]*// HEAD_DIM\) \* HEAD_DIM"
)


def batch_mistake(script: Script, trainer: TrainerPolicy) -> str | None:
    """Why the script's own assert on its batches must fail, in a sentence with what would fit; None where it need not."""
    if not _evidence(script.root).divides_batch:
        return None
    known = {**fixed_constants(trainer), **script.constants}
    total, rows, length = (known.get(name) for name in (BATCH, ROWS, LENGTH))
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (total, rows, length)):
        return None
    step = int(rows or 1) * int(length or 1)
    if int(total or 0) % step == 0:
        return None
    fits = next((n for n in range(int(rows or 1), 0, -1) if int(total or 0) % (n * int(length or 1)) == 0), None)
    hint = f" {ROWS} = {fits} would fit." if fits else f" {BATCH} must be a multiple of {length}."
    return f"{BATCH} = {total} is no multiple of {ROWS} × {LENGTH} = {rows} × {length} = {step}, which the script asserts.{hint}"


def _divides_batch(test: ast.expr) -> bool:
    """`TOTAL_BATCH_SIZE % … == 0`"""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.BinOp)
        and isinstance(test.left.op, ast.Mod)
        and isinstance(test.left.left, ast.Name)
        and test.left.left.id == BATCH
        and isinstance(test.ops[0], ast.Eq)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == 0
    )


def fixed_constants(trainer: TrainerPolicy) -> dict[str, Any]:
    """Constants of the trainer's fixed preparation: its sequence length, its evaluation tokens."""
    names = dict.fromkeys(("prepare.py", (trainer.budget or "").partition(":")[0]))
    for name in filter(None, names):
        path = Path(trainer.folder / name)
        try:
            return dict(_constants(path.read_bytes().decode()))
        except (OSError, UnicodeDecodeError, RequestError):
            continue
    return {}


@functools.lru_cache(maxsize=8)
def _constants(text: str) -> dict[str, Any]:
    return sources.constants(text)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What the text of a script shows, whatever its constants: the assert on its batches, and the rounding of its only width."""

    divides_batch: bool
    rounds_width: bool


@functools.lru_cache(maxsize=16)
def _evidence(text: str) -> _Evidence:
    tree = sources.parse(text)
    nodes = list(ast.walk(tree))
    uses = sum(isinstance(n, ast.Name) and n.id == "ASPECT_RATIO" and isinstance(n.ctx, ast.Load) for n in nodes)
    return _Evidence(
        divides_batch=any(isinstance(node, ast.Assert) and _divides_batch(node.test) for node in nodes),
        rounds_width=uses == 1 and _ROUNDING.search(ast.unparse(tree)) is not None,
    )


def one_model(script: Script) -> Script:
    """The script with ASPECT_RATIO at the least value that rounds to the same width; unchanged where it does not show the rounding.

    Upstream's 90 and 96 are both width 768 at DEPTH 8 and HEAD_DIM 128: equal scripts after this are one experiment.
    """
    constants = script.constants
    ratio, depth, head = (constants.get(name) for name in ("ASPECT_RATIO", "DEPTH", "HEAD_DIM"))
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (ratio, depth, head)):
        return script
    if not _evidence(script.root).rounds_width:
        return script
    ratio, depth, head = int(ratio or 1), int(depth or 1), int(head or 1)
    width = -(-depth * ratio // head) * head
    return script.override({"ASPECT_RATIO": (width - head) // depth + 1})
