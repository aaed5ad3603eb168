"""How the control room opens: which lab, a daemon behind it, a terminal that can show it, or the table once where none can."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from runner import queries, states
from runner.errors import OvernightError
from runner.keeper import Keeper
from runner.lab import Lab, find_lab, make_lab, open_lab

from .gpuwords import eta, mfu_text, sample_of
from .lines import cells, crop, fit, safe
from .words import number, short_gpu


def open_room(lab_path: Path | str | None, *, readonly: bool = False, once: bool = False, leave: bool = False, ascii: bool = False) -> int:
    """Open the screen, or print the table once when this is no terminal (or TERM is dumb, or `once`).

    With `leave`, closing the screen ends the process at once: tearing the interpreter down takes as long as closing the screen did, and
    would meet the reader's thread wherever it hangs.
    """
    path = find_lab(lab_path)
    ascii = ascii or not draws_all(sys.stdout)
    if once or not full_screen(sys.stdin, sys.stdout):
        return print_once(path, readonly=readonly, ascii=ascii)
    gc.disable()  # collections while modules load cost a tenth of the time to the first frame; the app turns them on again
    from .app import ControlRoom
    from .memory import Memory
    from .snapshot import Reader

    try:
        if not readonly:
            make_lab(path)
    except OvernightError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    memory = Memory(path / "tui.json")
    before, keeper = (None, None) if readonly else (prepared(path), Keeper(path))
    reader = Reader(path, before=before, keeper=keeper, class_key=memory.get("class"))
    room = ControlRoom(reader, path, readonly=readonly, ascii_only=ascii, memory=memory)
    room.run()
    code = room.return_code or 0
    if leave:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def full_screen(stdin: TextIO, stdout: TextIO) -> bool:
    """Whether this terminal can show pages: Textual itself would start on a dumb one."""
    return stdin.isatty() and stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def draws_all(stdout: TextIO) -> bool:
    """Whether the terminal's encoding has the characters that the screen is drawn with; `--ascii` says so where its font has not."""
    return (getattr(stdout, "encoding", None) or "ascii").lower().replace("-", "").replace("_", "") in ("utf8", "utf16", "utf32")


def prepared(path: Path) -> Callable[[], None]:
    """What the reader does before its first reading: make the lab, start its daemon."""

    def prepare() -> None:
        from runner.daemonctl import ensure_daemon

        lab = open_lab(path, create=True)
        try:
            ensure_daemon(lab)
        finally:
            lab.close()

    return prepare


def print_once(path: Path, *, readonly: bool = False, ascii: bool = False) -> int:
    """The lab in plain rows on stdout, cut to a terminal's width: state, GPUs, queue, leaderboard. Returns the exit code."""
    try:
        if not readonly and not (path / "lab.db").exists():
            open_lab(path, create=True).close()
        lab = open_lab(path, readonly=True)
        try:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            lines = once_lines(lab, width)
        finally:
            lab.close()
    except OvernightError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if width is not None:
        lines = [crop(line, width) for line in lines]
    if ascii:
        from .plain import ascii_only

        lines = [ascii_only(line) for line in lines]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def tries(run: dict[str, Any]) -> str:
    """What a run changes and why, in words."""
    values = run["changes"] if "changes" in run else run["cell"] or run["overrides"]
    changed = " ".join(f"{name}={value}" for name, value in (values or {}).items())
    return "; ".join(part for part in (changed, run["hypothesis"]) if part) or "-"


# The columns of a GPU's row, as wide as the row is printed to a pipe, and how they are set where a terminal is narrower: those with the
# lowest number leave first, a run's words give way before them; a note that finds no room gets a row.
COLUMNS = (("place", 14, 9), ("name", 16, 7), ("state", 12, 8), ("run", 7, 9), ("words", 24, 6), ("share", -5, 5), ("eta", -6, 4),
           ("mfu", -11, 8), ("util", -5, 3), ("power", -5, 2), ("temp", -4, 1))  # fmt: skip
WORDS_LEAST = 12


def gpu_rows(found: list[dict[str, str]], width: int | None) -> list[str]:
    """GPUs in columns: at their full width without a limit, else as wide as what they hold, with what matters least left out."""
    sizes = {name: abs(size) for name, size, _ in COLUMNS}
    narrow = width is not None and width < 2 + sum(sizes.values()) + len(sizes) - 1
    if width is not None and narrow:
        sizes = {name: max([cells(row[name]) for row in found], default=0) for name in sizes}
        sizes = {name: size for name, size in sizes.items() if size}
        for name in sorted(sizes, key={n: rank for n, _, rank in COLUMNS}.__getitem__):
            over = 2 + sum(sizes.values()) + len(sizes) - 1 - width
            if over > 0 and "words" in sizes:
                sizes["words"] -= min(over, max(0, sizes["words"] - WORDS_LEAST))
                over = 2 + sum(sizes.values()) + len(sizes) - 1 - width
            if over > 0:
                del sizes[name]
    right = {name for name, size, _ in COLUMNS if size < 0}
    out = []
    for row in found:
        line = "  " + " ".join(fit(row[n], sizes[n], "right" if n in right else "left") for n in sizes)
        whole = f"{line} {row['note']}".rstrip()
        out += [line.rstrip(), f"      {row['note']}"] if row["note"] and width is not None and cells(whole) > width else [whole]
    return out


def unwatched(lab: Lab) -> list[dict[str, Any]]:
    """This machine's GPUs where no daemon has told any yet."""
    from runner import glance  # an engine and its loop: the screen opens without them

    return glance.gpus(lab)


def once_lines(lab: Lab, width: int | None = None) -> list[str]:
    """What `--once` prints; GPUs are set for a terminal of this width."""
    state = queries.lab_state(lab)
    live = {str(o["id"]): o for o in queries.run_objects(lab, queries.live_runs(lab))}
    out = [f"Overnight  {lab.path}  {time.strftime('%Y-%m-%d %H:%M:%S')}", safe(queries.state_line(state), 1000)]
    trouble = state.policy_pending or lab.hosts_trouble()
    out += [*([f"! {safe(trouble, 600)}"] if trouble else []), "", "GPUs"]
    gpus: list[dict[str, str]] = []
    for gpu in queries.gpu_objects(lab) or unwatched(lab):
        run = live.get(str(gpu["run"]), {})
        row = {**gpu, "run_object": run}
        sample = sample_of(row)
        gpus.append(
            {
                "place": f"{safe(gpu['host'], 20)}:{gpu['index'] if gpu['index'] is not None else 'cpu'}",
                "name": short_gpu(gpu["name"]),
                "state": safe(gpu["state"], 12),
                "run": safe(gpu["run"]) if gpu["run"] else "",
                "words": safe(states.run_words(run), 24) if run else "",
                "share": number(100 * run["share"], 0, "%") if run.get("share") is not None else "-",
                "eta": eta(run),
                "mfu": "MFU " + mfu_text(row),
                "util": number(sample.get("util_pct"), 0, "%"),
                "power": number(sample.get("power_w"), 0, "W"),
                "temp": number(sample.get("temp_c"), 0, "C"),
                "note": safe(gpu["note"], 200) if gpu["note"] else "",
            }
        )
    out += gpu_rows(gpus, width)
    waiting = queries.run_objects(lab, queries.queue(lab)[:20])
    out += ["", f"Queue ({state.queued}{f', {state.proposed} to approve' if state.proposed else ''})"]
    out += [f"  {fit(safe(r['id']), 7)} {fit(safe(r['gpu_type'] or 'any'), 10)} {safe(tries(r), 90)}" for r in waiting] or ["  empty"]
    board = queries.leaderboard(lab, limit=15)
    of = f" {safe(board['class'], 80)} {number(board['budget_s'])} s" if board["class"] else ""
    out += ["", f"Leaderboard{of}"]
    out += [
        f"  {r['rank']:>3} {fit(safe(r['id']), 7)} {number(r['val_bpb'], 6)} {fit(number(r['gain'], 4), 8, 'right')} "
        f"{fit(r['badge'] or '', 13)} {safe(tries(r), 90)}"
        for r in board["rows"]
    ] or ["  no result yet"]
    return out
