"""What can be told of a script before a slot is spent on it: constants that cannot be, batches that cannot divide, equal models.

Only what the text itself shows is used: the check, the assert and the rounding must be there. Nothing of the script is run.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from runner import sources
from runner.errors import RequestError
from runner.policy import TrainerPolicy
from runner.script import Script
from trainer import allowed

BATCH, ROWS, LENGTH = "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE", "MAX_SEQ_LEN"
# ((x + HEAD_DIM - 1) // HEAD_DIM) * HEAD_DIM, as upstream rounds; ceil(x / HEAD_DIM) * HEAD_DIM; -(-x // HEAD_DIM) * HEAD_DIM
_ROUNDING = re.compile(
    r"\+ HEAD_DIM - 1\) // HEAD_DIM\)? \* HEAD_DIM|ceil\([^()]*/ HEAD_DIM\) \* HEAD_DIM|-\(-[^()]*// HEAD_DIM\) \* HEAD_DIM"
)


def mistake(script: Script, trainer: TrainerPolicy) -> str | None:
    """Why a run of the script must end at its start, in a sentence with what would do; None where it need not."""
    return constant_mistake(script, trainer) or batch_mistake(script, trainer)


def constant_mistake(script: Script, trainer: TrainerPolicy) -> str | None:
    """What our own trainer would refuse of the script's constants, in its words; None for any other, which knows its own rules."""
    if not _ours(script, trainer):
        return None
    wrong = allowed.mistake(script.constants)
    return f"{wrong}." if wrong else None


def _ours(script: Script, trainer: TrainerPolicy) -> bool:
    """Whether the script asks our trainer to check its constants, by the very rules that stand in this program."""
    rules = Path(allowed.__file__)
    try:
        return _evidence(script.root).makes_plan and (trainer.folder / rules.name).read_bytes() == rules.read_bytes()
    except OSError:
        return False


def _makes_plan(node: ast.AST) -> bool:
    """`make_plan(globals(), …)`"""
    return _calls(node, "make_plan") and bool(node.args) and _calls(node.args[0], "globals")


def _calls(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


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
    """What the text of a script shows, whatever its constants: a check of them, an assert on its batches, the rounding of its width."""

    makes_plan: bool
    divides_batch: bool
    rounds_width: bool
    ratio_uses: int  # of ASPECT_RATIO by the script itself


@functools.lru_cache(maxsize=16)
def _evidence(text: str) -> _Evidence:
    tree = sources.parse(text)
    nodes = list(ast.walk(tree))
    uses = sum(isinstance(n, ast.Name) and n.id == "ASPECT_RATIO" and isinstance(n.ctx, ast.Load) for n in nodes)
    return _Evidence(
        makes_plan=any(_makes_plan(node) for node in nodes),
        divides_batch=any(isinstance(node, ast.Assert) and _divides_batch(node.test) for node in nodes),
        rounds_width=uses == 1 and _ROUNDING.search(ast.unparse(tree)) is not None,
        ratio_uses=uses,
    )


def one_model(script: Script, trainer: TrainerPolicy) -> Script:
    """The script with ASPECT_RATIO at the least value that rounds to the same width; unchanged where it does not show the rounding.

    Upstream's 90 and 96 are both width 768 at DEPTH 8 and HEAD_DIM 128: equal scripts after this are one experiment. What our own trainer
    leaves to the presets of a device must round to the same on all of them.
    """
    known = script.constants
    if _evidence(script.root).rounds_width:
        sizes = [known]
    elif _ours(script, trainer) and not _evidence(script.root).ratio_uses and isinstance(known.get("PRESETS"), dict):
        given = {name: value for name, value in known.items() if value is not None}
        sizes = [{**preset, **given} for preset in known["PRESETS"].values() if isinstance(preset, dict)]
    else:
        return script
    parts: list[tuple[Any, ...]] = [tuple(size.get(name) for name in ("DEPTH", "ASPECT_RATIO", "HEAD_DIM")) for size in sizes]
    if not parts or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for part in parts for n in part):
        return script
    return script.override({"ASPECT_RATIO": max(allowed.least_ratio(*part) for part in parts)})
