"""The text of a training script: its constants read and rewritten, its hashes, and what changed between two of them.

Everything works on text through `ast` and never imports or runs it. Constants are module-level UPPER_CASE names bound to a literal;
an override is spliced over the literal by offset, so comments and layout stay as the author wrote them.
"""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import BadValue, UnknownName

__all__ = [
    "canonical",
    "changed_constants",
    "check",
    "constants",
    "effective_sha",
    "literal",
    "override",
    "reseed",
    "seed_of",
    "seed_only",
    "sha",
]

MAX_SOURCE_BYTES = 2 << 20
MAX_INT_BITS = 256  # `10**10**10` must not hang the reader
_NAME = re.compile(r"[A-Z][A-Z0-9_]*\Z")
_SEED_NAME = re.compile(r"(?:[A-Z0-9]+_)*SEED\Z")
_SEED_CALLS = frozenset({"manual_seed", "manual_seed_all", "seed", "seed_everything", "set_seed", "default_rng", "PRNGKey"})
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}


class _NotLiteral(Exception):
    """Raised when an expression is more than a literal and arithmetic on numbers."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One module-level assignment of a literal, with the literal's place in the UTF-8 text."""

    name: str
    value: Any
    start: int
    end: int
    line: int


def sha(text: str) -> str:
    """SHA-256 of the exact text; the name of a source."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse(text: str, name: str = "source") -> ast.Module:
    """The syntax tree; raises BadValue that names the line when the text is not Python."""
    if len(text) > MAX_SOURCE_BYTES:
        raise BadValue(
            f"{name} has {len(text):,} characters; a training script of more than {MAX_SOURCE_BYTES:,} is refused.",
            next_step="Submit the script itself, not data.",
        )
    try:
        text.encode("utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as e:
        shown = f": {e.text.strip()[:120]!r}" if e.text else ""
        raise BadValue(
            f"{name}, line {e.lineno}: {e.msg}{shown}.", next_step="Mend the syntax and submit again; nothing was queued."
        ) from None
    except (ValueError, RecursionError, MemoryError) as e:
        raise BadValue(f"{name} is not a Python script: {e}.", next_step="Submit UTF-8 text without NUL bytes.") from None


def check(text: str, name: str) -> None:
    """Raise BadValue naming the line when the text would not even compile."""
    tree = parse(text, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(tree, name, "exec")  # `return` outside a function and the like pass the parser
    except SyntaxError as e:
        raise BadValue(f"{name}, line {e.lineno}: {e.msg}.", next_step="Mend the syntax and submit again; nothing was queued.") from None
    except (ValueError, RecursionError, MemoryError) as e:
        raise BadValue(f"{name} cannot be compiled: {e}.", next_step="Mend the script and submit again.") from None


def does_something(tree: ast.Module) -> bool:
    """Whether a script holds any statement beside docstrings and `pass`."""
    idle = (ast.Pass, ast.Constant)
    return any(not isinstance(node.value if isinstance(node, ast.Expr) else node, idle) for node in tree.body)


def literal(node: ast.expr) -> Any:
    """Value of a literal expression, arithmetic on numbers included; raises _NotLiteral for anything else."""
    if isinstance(node, ast.Constant):
        if node.value is Ellipsis or isinstance(node.value, (bytes, complex)):
            raise _NotLiteral
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        items = [literal(e) for e in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    if isinstance(node, ast.Dict):
        return {_hashable(k): literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _number(literal(node.operand))
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _arithmetic(node.op, _number(literal(node.left)), _number(literal(node.right)))
    raise _NotLiteral


def _hashable(node: ast.expr | None) -> Any:
    if node is None:
        raise _NotLiteral
    key = literal(node)
    if not isinstance(key, (str, int, float, bool, type(None))):
        raise _NotLiteral
    return key


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _NotLiteral
    return value


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, (ast.Pow, ast.LShift)) and isinstance(right, int):
        if abs(right) > MAX_INT_BITS or (isinstance(left, int) and left.bit_length() * abs(right) > 4 * MAX_INT_BITS):
            raise _NotLiteral
    try:
        value = _BINARY[type(op)](left, right)
    except (ArithmeticError, ValueError, TypeError):
        raise _NotLiteral from None
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > MAX_INT_BITS):
        raise _NotLiteral
    return value


def _line_starts(data: bytes) -> list[int]:
    return [0, *(m.end() for m in re.finditer(rb"\r\n|\r|\n", data))]


def _assigned(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Name and value of `NAME = expr` or `NAME: T = expr`, for UPPER_CASE names."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        name, value = node.targets[0].id, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        name, value = node.target.id, node.value
    else:
        return None
    return (name, value) if _NAME.match(name) else None


def _literal_assignment(node: ast.stmt) -> tuple[str, ast.expr, Any] | None:
    found = _assigned(node)
    if found is None:
        return None
    try:
        return found[0], found[1], literal(found[1])
    except (_NotLiteral, RecursionError):
        return None


def bound_name(node: ast.stmt) -> str | None:
    """The constant a statement binds to a literal; None for any other statement."""
    found = _literal_assignment(node)
    return None if found is None else found[0]


def bindings(tree: ast.Module, data: bytes) -> Iterator[Binding]:
    """Module-level assignments of literals, in order."""
    starts = _line_starts(data)
    for node in tree.body:
        found = _literal_assignment(node)
        if found is not None:
            name, value_node, value = found
            start = starts[value_node.lineno - 1] + value_node.col_offset
            end = starts[(value_node.end_lineno or value_node.lineno) - 1] + (value_node.end_col_offset or 0)
            yield Binding(name, value, start, end, value_node.lineno)


def other_bindings(tree: ast.Module) -> dict[str, int]:
    """Names bound where an override does not reach (a branch, a loop, a function with `global`, an expression), with the line."""
    plain = {
        id(n.targets[0] if isinstance(n, ast.Assign) else n.target)
        for n in tree.body
        if _literal_assignment(n) is not None and isinstance(n, (ast.Assign, ast.AnnAssign))
    }
    seen: dict[str, int] = {}
    own: list[ast.AST] = list(tree.body)
    while own:  # module scope only: function bodies have names of their own
        node = own.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Global):
                    seen.update(dict.fromkeys(inner.names, inner.lineno))
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in plain:
            seen[node.id] = node.lineno
        own.extend(ast.iter_child_nodes(node))
    return seen


def constants(text: str) -> dict[str, Any]:
    """Module-level literals by name, in order; arithmetic is evaluated (`2**17`).

    A name that is also bound in a branch, a loop or from an expression is left out: no single value would be true.
    """
    tree = parse(text)
    again = other_bindings(tree)
    return {b.name: b.value for b in bindings(tree, text.encode()) if b.name not in again}


def override(text: str, values: Mapping[str, Any]) -> str:
    """The text with constants replaced, comments and layout kept.

    Raises UnknownName (with the nearest constants) or BadValue (wrong type, or a constant an override cannot reach).
    A value equal to the present one changes nothing, so the hash stays the same.
    """
    tree, data = parse(text), text.encode()
    found = list(bindings(tree, data))
    return spliced(data, [(found[n], value) for n, value in fitted(found, other_bindings(tree), values).items()])


def fitted(found: Sequence[Binding], elsewhere: Mapping[str, int], values: Mapping[str, Any]) -> dict[int, Any]:
    """Which bindings get which value, in the type of the present one; bindings that have it already are left out.

    `elsewhere`: names bound where an override does not reach, with the line. Raised: as `override`.
    """
    places: dict[str, list[int]] = {}
    for n, b in enumerate(found):
        places.setdefault(b.name, []).append(n)
    changed: dict[int, Any] = {}
    for name, asked in values.items():
        if name in elsewhere:
            raise BadValue(
                f"{name} is also assigned at line {elsewhere[name]}, where an override does not reach.",
                next_step="Edit the script itself and submit it as a source or a diff.",
            )
        if name not in places:
            raise UnknownName("constant", str(name), places, where="the script")
        for n in places[name]:
            value = _fit(name, found[n].value, asked)
            if not same(value, found[n].value):
                changed[n] = value
    return changed


def spliced(data: bytes, values: Iterable[tuple[Binding, Any]]) -> str:
    """The text with literals in the places of bindings, all else as it was."""
    for b, value in sorted(values, key=lambda pair: pair[0].start, reverse=True):
        data = data[: b.start] + repr(value).encode() + data[b.end :]
    return data.decode()


def same(a: Any, b: Any) -> bool:
    """Whether two literals are one, type and all: 1, 1.0 and True are three."""
    return type(a) is type(b) and repr(a) == repr(b)


def _fit(name: str, old: Any, new: Any) -> Any:
    """`new` in the type of `old`: an int stays an int, a tuple a tuple; a text such as "2**17" is evaluated where a number is wanted."""
    if isinstance(new, str) and not isinstance(old, str):
        new = _evaluated(name, old, new)
    if isinstance(old, bool) or old is None:
        fits = old is None or isinstance(new, bool)
    elif isinstance(old, int):
        if isinstance(new, float) and math.isfinite(new) and new == int(new):
            new = int(new)
        fits = isinstance(new, int) and not isinstance(new, bool)
    elif isinstance(old, float):
        fits = isinstance(new, (int, float)) and not isinstance(new, bool)
        new = float(new) if fits and abs(new) < 1e300 else new
    elif isinstance(old, (tuple, list)):
        return _fit_sequence(name, old, new)
    else:
        fits = isinstance(new, type(old))
    if not fits or not _finite(new):
        raise _wrong_type(name, old, new)
    return new


def _fit_sequence(name: str, old: tuple[Any, ...] | list[Any], new: Any) -> Any:
    if not isinstance(new, (tuple, list)) or (isinstance(old, tuple) and len(new) != len(old)):
        raise _wrong_type(name, old, new)
    # A position's type counts; beyond the old end, that of the last one does.
    items = [_fit(f"{name}[{i}]", old[min(i, len(old) - 1)] if old else None, v) for i, v in enumerate(new)]
    return tuple(items) if isinstance(old, tuple) else items


def _evaluated(name: str, old: Any, text: str) -> Any:
    try:
        value = literal(ast.parse(text.strip(), mode="eval").body)
        if old is not None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return value
    except (SyntaxError, ValueError, RecursionError, MemoryError, _NotLiteral):
        pass
    if old is None:
        return text  # None takes a text as it is ("none", "cudnn"), and a number written as one
    raise _wrong_type(name, old, text)


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_finite(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(v) for v in value)
    return value is None or isinstance(value, (str, int, bool))


def _wrong_type(name: str, old: Any, new: Any) -> BadValue:
    kinds = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text", dict: "a dictionary"}
    kind = kinds.get(type(old), "a literal")
    if isinstance(old, (tuple, list)):
        kind = f"a list of {len(old)} values" if isinstance(old, tuple) else "a list"
    return BadValue(f"{name} takes {kind} (now {old!r}); got {new!r:.80}.", next_step=f"Give {name} a value of the same type.")


def _is_seed_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in _SEED_CALLS


def canon(node: Any, with_seed: bool) -> Any:
    """A tree as nested tuples, equal for texts equal but for comments, docstrings, layout and the order of neighbouring constants."""
    if isinstance(node, ast.expr):
        try:
            value = literal(node)
            return (type(value).__name__, repr(value))
        except (_NotLiteral, RecursionError):
            pass
    if isinstance(node, ast.AST):
        if not with_seed and _is_seed_call(node) and isinstance(node, ast.Call):
            args = "seed" if all(isinstance(n, ast.Constant) for n in node.args) else canon(node.args, with_seed)
            return ("Call", canon(node.func, with_seed), args, canon(node.keywords, with_seed))
        fields = ((k, v) for k, v in ast.iter_fields(node) if k not in ("ctx", "type_comment", "kind", "type_ignores"))
        return (type(node).__name__, *((k, canon(v, with_seed)) for k, v in fields if v is not None and v != []))
    if isinstance(node, list):
        if node and isinstance(node[0], ast.stmt):
            return tuple(canon_body(node, with_seed))
        return tuple(canon(n, with_seed) for n in node)
    return repr(node)


def canon_body(body: list[ast.stmt], with_seed: bool) -> Iterator[Any]:
    group: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # docstrings and bare strings say nothing to the machine
        found = _literal_assignment(node)
        if found is not None and found[0] not in group:  # literals side by side do not depend on each other: order is layout
            name, _, value = found
            hidden = not with_seed and _SEED_NAME.match(name) and not isinstance(value, str)
            group[name] = "seed" if hidden else (type(value).__name__, repr(value))
            continue
        if group:
            yield ("constants", *sorted(group.items()))
            group = {}
        yield canon(node, with_seed)
    if group:
        yield ("constants", *sorted(group.items()))


def names_seed(name: str) -> bool:
    """Whether a constant of this name is the seed."""
    return _SEED_NAME.match(name) is not None


def is_seed(name: str, value: Any) -> bool:
    """Whether a constant is a seed that can be counted on."""
    return names_seed(name) and isinstance(value, int) and not isinstance(value, bool)


def canonical(text: str, *, with_seed: bool = True) -> str:
    """SHA-256 of what the script does: comments, docstrings, layout and the order of neighbouring constants left out."""
    try:
        shape = repr(canon(parse(text), with_seed))
    except (BadValue, RecursionError):
        return sha(text)  # not Python: only the very same text is the same
    return hashlib.sha256(shape.encode("utf-8", "surrogatepass")).hexdigest()


def effective_sha(text: str) -> str:
    """As `canonical`, the seed left out: runs with one effective_sha are repeats of each other."""
    return canonical(text, with_seed=False)


def seed_only(a: str, b: str) -> bool:
    """Whether the two scripts differ in the seed and in nothing else that matters."""
    return canonical(a) != canonical(b) and effective_sha(a) == effective_sha(b)


def seed_of(text: str) -> int | None:
    """The seed a script trains with: its SEED constant, else the literal of its first `manual_seed(…)`; None where there is none."""
    tree = parse(text)
    return next((value for name, value in constants(text).items() if is_seed(name, value)), called_seed(tree))


def called_seed(tree: ast.Module) -> int | None:
    """The literal of the first `manual_seed(…)` of a script; None where there is none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_seed_call(node) and node.args and isinstance(node.args[0], ast.Constant):
            value = node.args[0].value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def reseed(text: str, seed: int) -> str:
    """The script at another seed: its SEED constant, else the literals of its `manual_seed(…)` calls; unchanged where it has neither."""
    names = [n for n, v in constants(text).items() if is_seed(n, v)]
    if names:
        return override(text, dict.fromkeys(names, seed))
    data, starts = text.encode(), _line_starts(text.encode())
    places = []
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call) and _is_seed_call(node) and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            old = node.args[0]
            if isinstance(old.value, int) and not isinstance(old.value, bool):
                end = starts[(old.end_lineno or old.lineno) - 1] + (old.end_col_offset or 0)
                places.append((starts[old.lineno - 1] + old.col_offset, end))
    for start, end in sorted(places, reverse=True):
        data = data[:start] + repr(seed).encode() + data[end:]
    return data.decode()


def changed_constants(a: str, b: str) -> dict[str, tuple[Any, Any]]:
    """Constants whose value differs: name -> (in a, in b), None where a side has none."""
    before, after = constants(a), constants(b)
    names = [*before, *(n for n in after if n not in before)]
    return {n: (before.get(n), after.get(n)) for n in names if (n in before) != (n in after) or not same(before.get(n), after.get(n))}
