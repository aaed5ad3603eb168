"""A training script read once: its constants, its hashes, and the same script with other constants, without reading it again.

A wave is one script with a dozen sets of constants, and reading a script takes 50 ms. Overriding literals by literals of the same kind
moves nothing else, so everything a variant is asked for follows from its root. What is no such override is read whole.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runner import sources
from runner.errors import BadValue

KEPT = 16  # scripts read; a lab's agents work on a handful at a time


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the constants of a script do not change."""

    text: str
    data: bytes
    bindings: tuple[sources.Binding, ...]
    elsewhere: dict[str, int]  # names bound where an override does not reach, with the line
    parts: tuple[str | tuple[int, ...], ...] | None  # canonical statements, and bindings side by side; None: only reading tells
    does_something: bool
    called_seed: int | None


class Script:
    """One script, or a variant of one; immutable."""

    __slots__ = ("_effective_sha", "_shape", "_values", "text")

    def __init__(self, shape: _Shape, values: Mapping[int, Any]) -> None:
        self._shape = shape
        self._values = dict(values)  # by place among the bindings: what differs from the root
        self._effective_sha: str | None = None
        self.text = shape.text if not values else sources.spliced(shape.data, [(shape.bindings[n], v) for n, v in values.items()])

    @property
    def root(self) -> str:
        """The text this script is a variant of: the same statements, other literals."""
        return self._shape.text

    @property
    def sha(self) -> str:
        """SHA-256 of the exact text."""
        return sources.sha(self.text)

    @property
    def does_something(self) -> bool:
        """Whether it holds any statement beside docstrings and `pass`."""
        return self._shape.does_something

    @property
    def constants(self) -> dict[str, Any]:
        """As `sources.constants`."""
        return {b.name: b.value for b in self._bindings() if b.name not in self._shape.elsewhere}

    @property
    def seed(self) -> int | None:
        """As `sources.seed_of`."""
        return next((v for name, v in self.constants.items() if sources.is_seed(name, v)), self._shape.called_seed)

    @property
    def effective_sha(self) -> str:
        """As `sources.effective_sha`: equal for scripts that do the same but for their seed."""
        if self._effective_sha is None:
            self._effective_sha = self._made_effective_sha()
        return self._effective_sha

    def _made_effective_sha(self) -> str:
        if self._shape.parts is None:
            return sources.effective_sha(self.text)
        bindings = self._bindings()
        said = [part if isinstance(part, str) else _constants_said([bindings[n] for n in part]) for part in self._shape.parts]
        body = f"({', '.join(said)}{',' if len(said) == 1 else ''})"
        return hashlib.sha256(f"('Module', ('body', {body}))".encode("utf-8", "surrogatepass")).hexdigest()

    def override(self, values: Mapping[str, Any]) -> Script:
        """As `sources.override`. Raised: UnknownName, BadValue."""
        fitted = sources.fitted(self._bindings(), self._shape.elsewhere, values)
        if self._shape.parts is None or not all(_plain(v) for v in fitted.values()):
            return _read(sources.override(self.text, values)) if fitted else self
        merged = {**self._values, **fitted}
        return Script(self._shape, {n: v for n, v in merged.items() if not sources.same(v, self._shape.bindings[n].value)})

    def reseeded(self, seed: int) -> Script:
        """As `sources.reseed`: at another seed, as a constant or in its `manual_seed(…)`; the same when it has neither."""
        names = [name for name, v in self.constants.items() if sources.is_seed(name, v)]
        return self.override(dict.fromkeys(names, seed)) if names else _read(sources.reseed(self.text, seed))

    def _bindings(self) -> list[sources.Binding]:
        found = list(self._shape.bindings)
        for n, value in self._values.items():
            found[n] = replace(found[n], value=value)
        return found


def read_script(text: str, name: str) -> Script:
    """The script of a text, kept for the next time. Raised: BadValue that names file and line."""
    try:
        return _kept(text)
    except BadValue:
        sources.check(text, name)  # says the same with the file's name
        raise


def _plain(value: Any) -> bool:
    """A literal that cannot be mistaken for more: nothing nested, and no text that a look for HEAD_DIM would find."""
    if isinstance(value, str):
        return "HEAD_DIM" not in value
    if isinstance(value, (list, tuple)):
        return all(not isinstance(v, (list, tuple, dict)) and _plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float))


def _constants_said(bindings: list[sources.Binding]) -> str:
    """Constants side by side as `sources.canonical` writes them, the seed left out."""
    said: dict[str, Any] = {}
    for b in bindings:
        hidden = sources.names_seed(b.name) and not isinstance(b.value, str)
        said[b.name] = "seed" if hidden else (type(b.value).__name__, repr(b.value))
    return repr(("constants", *sorted(said.items())))


def _read(text: str) -> Script:
    sources.check(text, "source")
    tree, data = sources.parse(text), text.encode()
    shape = _Shape(
        text=text,
        data=data,
        bindings=tuple(sources.bindings(tree, data)),
        elsewhere=sources.other_bindings(tree),
        parts=_parts(tree),
        does_something=sources.does_something(tree),
        called_seed=sources.called_seed(tree),
    )
    return Script(shape, {})


_kept = functools.lru_cache(maxsize=KEPT)(_read)


def _parts(tree: ast.Module) -> tuple[str | tuple[int, ...], ...] | None:
    """The statements of a script as `sources.canonical` writes them, seed left out, with places for the constants between them.

    None where a literal stands in more than its own place: a constant assigned twice in a row, a tree too deep to write down.
    """
    parts: list[str | tuple[int, ...]] = []
    group: dict[str, int] = {}
    place = -1
    try:
        for node in tree.body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if (name := sources.bound_name(node)) is not None:
                place += 1
                if name in group:
                    return None
                group[name] = place
                continue
            if group:
                parts.append(tuple(group.values()))
                group = {}
            parts.append(repr(sources.canon(node, with_seed=False)))
    except RecursionError:
        return None
    if group:
        parts.append(tuple(group.values()))
    return tuple(parts) if tree.body else None
