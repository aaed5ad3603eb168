"""The class of a run: what the agent cannot change and results depend on. Results are ranked inside one class at equal budget.

GPU model, driver and torch, data and evaluator make the class. What the agent can change (attention, compile mode, batch) is an attribute
and never part of it, so a better attention path can win. Across classes only rank and relative gain over one baseline are shown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import sources
from runner.errors import RequestError
from runner.records import Run

if TYPE_CHECKING:
    from runner.policy import TrainerPolicy

SEPARATOR = " · "
EVALUATOR_FUNCTION = "evaluate_bpb"  # upstream's name for what scores a model
_HASH_SHOWN = 10


def class_key(facts: Mapping[str, Any] | Run) -> str | None:
    """One line that is equal exactly for comparable runs; None while the GPU is unknown. A part that is not known is left out."""
    gpu = _fact(facts, "gpu_name")
    if not gpu:
        return None
    parts = [model(gpu)]
    for column, label in (("torch", "torch"), ("driver", "driver"), ("evaluator", "eval"), ("data_hash", "data")):
        value = _fact(facts, column)
        if value:
            parts.append(f"{label} {_short(value)}")
    return SEPARATOR.join(parts)


def _fact(facts: Mapping[str, Any] | Run, column: str) -> str | None:
    value = getattr(facts, column) if isinstance(facts, Run) else facts.get(column)
    return " ".join(str(value).split()).replace(SEPARATOR.strip(), "") if value is not None else None


def _short(value: str) -> str:
    """Long hashes are cut: ten hex digits tell labs' few evaluators and corpora apart."""
    return re.sub(rf"\b([0-9a-f]{{{_HASH_SHOWN}}})[0-9a-f]{{6,}}\b", r"\1", value)


def model(gpu_name: str) -> str:
    """The GPU's model without the maker's name: memory size and form factor stay, for results depend on them."""
    return re.sub(r"^(?:NVIDIA|AMD|Intel\(R\))\s+", "", " ".join(gpu_name.split()))


def gpu_of(key: str) -> str:
    """The GPU model a class is about."""
    return key.split(SEPARATOR)[0]


def differs_in(a: str, b: str) -> list[str]:
    """What tells two classes apart, in words: ["torch 2.11.0 / torch 2.13.0"]."""
    left, right = _parts(a), _parts(b)
    return [f"{left.get(k, '-')} / {right.get(k, '-')}" for k in dict.fromkeys((*left, *right)) if left.get(k) != right.get(k)]


def _parts(key: str) -> dict[str, str]:
    first, *rest = key.split(SEPARATOR)
    return {"gpu": first, **{p.split(" ")[0]: p for p in rest}}


def evaluator_id(trainer: TrainerPolicy) -> str | None:
    """Hash of what scores a run: the fixed files that define `evaluate_bpb`, and every local module they import. None where there is none.

    Comments, layout and the time budget are left out, so neither a longer budget nor a mended remark makes another class.
    """
    fixed = {p.stem: p for p in sorted(trainer.folder.glob("*.py")) if p.name not in trainer.editable and p.name != trainer.source}
    trees = {stem: tree for stem, path in fixed.items() if (tree := _tree(path)) is not None}
    wanted = [stem for stem, tree in trees.items() if _defines_evaluator(tree)] or list(trees)
    seen: set[str] = set()
    while wanted:
        stem = wanted.pop()
        if stem not in seen:
            seen.add(stem)
            wanted += [m for m in _imports(trees[stem]) if m in trees]
    if not seen:
        return None
    budget_file, _, budget_name = (trainer.budget or "").partition(":")
    texts = [f"{stem}:{sources.canonical(_without(fixed[stem], budget_file, budget_name))}" for stem in sorted(seen)]
    return sources.sha("\n".join(texts))[:_HASH_SHOWN]


def _defines_evaluator(tree: ast.Module) -> bool:
    return any(isinstance(n, ast.FunctionDef) and n.name == EVALUATOR_FUNCTION for n in tree.body)


def _tree(path: Path) -> ast.Module | None:
    try:
        return sources.parse(path.read_bytes().decode(), path.name)
    except (OSError, UnicodeDecodeError, RequestError):
        return None


def _imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def _without(path: Path, budget_file: str, budget_name: str) -> str:
    text = path.read_bytes().decode()
    if path.name == budget_file:
        try:
            return sources.override(text, {budget_name: 1})
        except RequestError:
            return text
    return text
