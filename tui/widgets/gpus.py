"""A panel per GPU: cards where there is room, one line each where there is not, 1 to 64 of them.

`choose_mode` is a pure function of count and room. A card is six rows: name, MFU with its history, use, power, and the run.
"""

from __future__ import annotations

from ..gpuwords import eta, figure, heat, history, label, memory_text, mfu_text, note, power_text, sample_of, stage_text, steady
from ..lines import Line, bar, crop, fit, safe, wrap_words
from ..words import GPU_GLYPHS, age, number, rate, short_gpu
from .table import Column, Row

TROUBLED = ("quarantined", "lost", "foreign", "down", "held")
CARD_HIGH = 6
CARD_WIDE = 34
ROW_WIDE = 80  # what a row needs to show everything that is acted on


def choose_mode(count: int, width: int, height: int) -> tuple[str, int, int]:
    """(mode, GPUs beside each other, rows taken) for `count` GPUs in `width` x `height` cells."""
    if count == 0:
        return ("rows", 1, 3)
    across = max(1, min(count, width // CARD_WIDE))
    while across > 1 and -(-count // (across - 1)) == -(-count // across):
        across -= 1  # as wide as they can be without another row of cards
    high = -(-count // across) * CARD_HIGH
    if high + 1 <= height and width >= CARD_WIDE:
        return ("cards", across, high + 1)
    return ("rows", *row_columns(count, width, height))


def row_columns(count: int, width: int, height: int) -> tuple[int, int]:
    """(columns, rows taken) for one line a GPU: a second column only when the first would not show all."""
    beside = max(1, min(width // ROW_WIDE, -(-count // max(1, height - 2))))
    return (beside, min(-(-count // beside) + 2, height))


def use(gpu: Row) -> str:
    """How busy the card says it is."""
    return number(sample_of(gpu).get("util_pct"), 0, "%")


COLUMNS = [
    Column("gpu", "GPU", 9, lambda g: (label(g), "strong"), order=label, short=lambda g: (label(g, 9), "strong"), grow=7),
    Column("name", "card", 12, lambda g: (short_gpu(g.get("name")), "muted"), drop=7, order=lambda g: str(g.get("name"))),
    Column(
        "run",
        "run",
        7,
        lambda g: (
            GPU_GLYPHS.get(str(g.get("state")), ("·", ""))[0] + safe(g.get("run") or "", 8),
            GPU_GLYPHS.get(str(g.get("state")), ("", ""))[1],
        ),
    ),
    Column("stage", "doing", 10, stage_text, drop=4),
    Column(
        "share",
        "done",
        5,
        lambda g: (number(100 * g["run_object"]["share"], 0, "%") if (g.get("run_object") or {}).get("share") is not None else "-", ""),
        "right",
    ),
    Column("eta", "left", 5, lambda g: (eta(g.get("run_object") or {}), ""), "right", drop=3),
    Column("mfu", "MFU", 6, lambda g: (mfu_text(g), "accent"), "right", order=lambda g: g.get("mfu_percent")),
    Column("spark", "", 8, lambda g: (steady(history(g), 8), "good"), drop=6),
    Column(
        "util",
        "util",
        4,
        lambda g: (number(sample_of(g).get("util_pct"), 0, "%"), ""),
        "right",
        order=lambda g: sample_of(g).get("util_pct"),
    ),
    Column("mem", "memory", 9, lambda g: (memory_text(g), ""), "right", drop=2),
    Column("power", "power", 9, lambda g: (power_text(g), ""), "right", drop=2),
    Column("temp", "heat", 5, heat, "right", drop=1, order=lambda g: sample_of(g).get("temp_c")),
    Column("figure", "figure", 11, lambda g: (figure(g["run_object"]), "") if g.get("run_object") else note(g), drop=5, flex=True),
    Column("tok", "tok/s", 6, lambda g: (rate(g.get("tok_s")), ""), "right", drop=8),
    Column("note", "", 9, lambda g: note(g) if g.get("run_object") else ("", ""), drop=9, flex=True),
]


def card(gpu: Row, width: int, selected: bool) -> list[Line]:
    """Six rows of one GPU in exactly `width` cells; the selected one has a heavier frame, for where there are no colours."""
    inner, run = width - 4, gpu.get("run_object") or {}
    edge = "accent" if selected else "track"
    glyph, style = GPU_GLYPHS.get(str(gpu.get("state")), ("·", ""))
    right = f" {safe(gpu['run'], 12)} " if gpu.get("run") else f" {stage_text(gpu)[0]} "
    name = crop(f" {label(gpu)} {short_gpu(gpu.get('name'))} ", max(4, inner - len(right) - 3))
    left, flat, right_end, side, foot = ("┏", "━", "┓", "┃", "┗{}┛") if selected else ("╭", "─", "╮", "│", "╰{}╯")
    top = Line((left + flat, edge), (glyph, style), (name, "strong"))
    top.add(flat * max(0, width - top.width - len(right) - 2), edge).add(right, "title" if gpu.get("run") else style)
    top.add(flat + right_end, edge)
    rows = _trouble(gpu, inner) or (_cpu_rows(gpu, run, inner) if gpu.get("index") is None else _gpu_rows(gpu, inner))
    rows = [*rows, _progress(gpu, run, inner)]
    out = [top.fitted(width)]
    out += [Line((side + " ", edge)).extend(r.fitted(inner).spans).add(" " + side, edge).measured(width) for r in rows]
    return [*out, Line((foot.format(flat * (width - 2)), edge))]


def _trouble(gpu: Row, inner: int) -> list[Line]:
    """Why a GPU without a run takes none, in the rows that figures have otherwise: who holds it must be readable here."""
    text, style = note(gpu)
    if gpu.get("run") or gpu.get("state") not in TROUBLED:
        return []
    rows = wrap_words(text, inner, 3)
    return [Line((row, style)) for row in [*rows, "", "", ""][:3]]


def _gpu_rows(gpu: Row, inner: int) -> list[Line]:
    """MFU with its history, use, memory. What moves every second stands together: a repaint covers all between its changes."""
    warm, style = heat(gpu)
    name = "use " if mfu_text(gpu) == "?" else "MFU "
    return [
        Line((name, "muted"), (steady(history(gpu), max(4, inner - 12)), "good"), (fit(mfu_text(gpu), 8, "right"), "accent")),
        Line(("use ", "muted"), (f"{number(sample_of(gpu).get('util_pct'), 0, '%'):>4}  {power_text(gpu):>8}  ", ""), (warm, style)),
        Line(("mem ", "muted"), (memory_text(gpu), ""), ("  ", ""), note(gpu)),
    ]


def _cpu_rows(gpu: Row, run: Row, inner: int) -> list[Line]:
    """A slot without a GPU: speed with its history, steps, what is wrong."""
    step, budget = number(run.get("step")), number(run.get("budget_s"), 0, " s")
    return [
        Line(("tok/s ", "muted"), (steady(history(gpu), max(4, inner - 14)), "good"), (fit(rate(gpu.get("tok_s")), 8, "right"), "accent")),
        Line(("step ", "muted"), (f"{step:<8}", ""), ("budget ", "muted"), (budget, ""))
        if run
        else Line(("no GPU: one run at a time", "muted")),
        Line(note(gpu)),
    ]


def _progress(gpu: Row, run: Row, inner: int) -> Line:
    """Stage, bar, share, time left and figure of the run; for an idle GPU, since when."""
    if not gpu.get("run"):
        since = age(gpu.get("since_s"))
        return Line((f"{stage_text(gpu)[0]} for {since}", GPU_GLYPHS.get(str(gpu.get("state")), ("", "muted"))[1]))
    share = run.get("share")
    shown = figure(run) if inner >= 34 else figure(run).split(" ")[-1]
    tail = f" {number(100 * share if share is not None else None, 0, '%'):>4} {eta(run):>5} {shown}"
    head = fit(stage_text(gpu)[0], 8)
    return Line((head, stage_text(gpu)[1])).extend(bar(share, max(3, inner - len(head) - len(tail)))).add(tail)
