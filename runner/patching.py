"""Unified diffs of source texts, both ways: written for people to read, applied exactly or not at all.

A hunk is found by its own lines, nearest to where its header says; wrong counts in a header (agents miscount) do not matter,
wrong lines do.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

from runner.errors import BadValue

_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(slots=True)
class _Hunk:
    number: int
    at: int  # 0-based line of the old text, as the header says
    counts: tuple[int, int]  # lines of the old and new side, as the header says
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    old_open: bool = False  # the old side ends without a newline
    new_open: bool = False
    last_mark: str = ""

    @property
    def full(self) -> bool:
        """Whether it holds as many lines as its header promised."""
        return len(self.old) >= self.counts[0] and len(self.new) >= self.counts[1]


def diff(a: str, b: str, a_name: str, b_name: str) -> str:
    """Unified diff from `a` to `b`; empty when they are equal."""
    lines = difflib.unified_diff(_lines(a), _lines(b), a_name, b_name)
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n" for line in lines)


def named_files(patch: str) -> list[str]:
    """The files the diff's first header names, without git's `a/` and `b/`; empty when it has none."""
    header = re.search(r"^--- ([^\t\n]+).*\n\+\+\+ ([^\t\n]+)", patch.replace("\r\n", "\n"), re.MULTILINE)
    return [re.sub(r"^[ab]/", "", name.strip()) for name in header.groups()] if header else []


def apply_diff(text: str, patch: str) -> str:
    """The text after a unified diff of one file; raises BadValue that names the hunk and the line that does not match."""
    hunks = _hunks(patch)
    if not hunks:
        raise BadValue("The diff has no hunk (a line that starts with '@@ -').", next_step="Send a unified diff, as `git diff` prints it.")
    crlf = "\r\n" in text
    lines = [line.rstrip("\r\n") for line in _lines(text)]
    ends_open = bool(text) and not text.endswith("\n")
    out: list[str] = []
    done = 0
    for hunk in hunks:
        at = _locate(lines, hunk, done)
        out += lines[done:at] + hunk.new
        done = at + len(hunk.old)
        if done == len(lines) and (hunk.old_open or hunk.new_open):
            ends_open = hunk.new_open
    out += lines[done:]
    newline = "\r\n" if crlf else "\n"
    return newline.join(out) + ("" if ends_open or not out else newline)


def _lines(text: str) -> list[str]:
    """Lines with their ends, split at line feeds only: a form feed inside a script is not a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _hunks(patch: str) -> list[_Hunk]:
    hunks: list[_Hunk] = []
    files = 0
    rows = patch.replace("\r\n", "\n").split("\n")
    if rows and rows[-1] == "":
        rows.pop()
    inside = False
    for i, row in enumerate(rows):
        taken = not inside or hunks[-1].full  # until then, "--- x" is a removed line "-- x"
        if taken and row.startswith("--- ") and i + 1 < len(rows) and rows[i + 1].startswith("+++ "):
            files, inside = files + 1, False
            continue
        header = _HEADER.match(row)
        if header:
            start, count = int(header[1]), header[2]
            counts = (int(count or 1), int(header[4] or 1))
            hunks.append(_Hunk(len(hunks) + 1, start if count == "0" else max(start - 1, 0), counts))
            inside = True
        elif row.startswith("@@"):
            raise BadValue(f"Line {i + 1} of the diff is not a hunk header: {row[:60]!r}.", next_step="A header reads '@@ -12,5 +12,6 @@'.")
        elif row.startswith(("diff --git ", "index ")) and inside:
            inside = False
        elif inside:
            _take(hunks[-1], row, i + 1)
    if files > 1:
        raise BadValue(
            f"The diff touches {files} files; a run changes the training script alone.", next_step="Send a diff of that one file."
        )
    return hunks


def _take(hunk: _Hunk, row: str, line: int) -> None:
    mark, rest = row[:1] or " ", row[1:]  # mail and editors strip the space of an empty context line
    if mark not in " +-\\":
        raise BadValue(
            f"Line {line} of the diff starts with {mark!r}; it must start with ' ', '+', '-' or '@@'.",
            next_step="Send a unified diff, as `git diff` prints it.",
        )
    if mark in " -":
        hunk.old.append(rest)
    if mark in " +":
        hunk.new.append(rest)
    if mark == "\\":  # "\\ No newline at end of file" speaks of the line before it
        hunk.old_open = hunk.old_open or hunk.last_mark in " -"
        hunk.new_open = hunk.new_open or hunk.last_mark in " +"
    hunk.last_mark = mark


def _locate(lines: list[str], hunk: _Hunk, done: int) -> int:
    """Where the hunk's old lines stand, nearest to its header, not before `done`."""
    last = len(lines) - len(hunk.old)
    if not hunk.old:
        return min(max(hunk.at, done), len(lines))
    places = [i for i in range(done, last + 1) if lines[i : i + len(hunk.old)] == hunk.old]
    if places:
        return min(places, key=lambda i: abs(i - hunk.at))
    at = min(max(hunk.at, 0), max(len(lines) - 1, 0))
    present = [*lines[at:], *[""] * len(hunk.old)]
    wanted, there = next(((w, h) for w, h in zip(hunk.old, present, strict=False) if w != h), (hunk.old[0], ""))
    raise BadValue(
        f"Hunk {hunk.number} of the diff does not match the script near line {at + 1}: "
        f"it expects {wanted[:80]!r} where {there[:80]!r} stands.",
        next_step="Make the diff against the source of the run named as base.",
    )
