"""What a wave's page shows: heat map, main effects with error bars, interactions, and what is not known; rows made by pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner import queries
from runner.lab import Lab
from runner.records import Json
from runner.research.classes import gpu_of
from runner.research.effects import Analysis, FactorSummary, key, told_once
from runner.research.waves import HeatMap, analyse_wave, heat_map
from runner.text import plural

from .lines import Line, Span, cells, crop, fit, safe, wrap_words
from .words import age, number, value_text

SHADES = " ░▒▓█"
CELL = 9
BADGES = {"clear": ("clear", "good"), "within noise": ("within noise", "warn"), "unknown": ("noise unknown", "muted")}


@dataclass(frozen=True, slots=True)
class WaveView:
    """A wave, its runs, and what they say."""

    wave: Json
    runs: tuple[Json, ...]
    analysis: Analysis
    heat: HeatMap | None
    duplicates: Mapping[str, tuple[str, ...]]


class WaveLoader:
    """Reads one wave; `pair` chooses the two factors of the heat map."""

    def __init__(self, wave_id: str) -> None:
        self.wave_id = wave_id
        self.pair = 0

    def __call__(self, lab: Lab) -> WaveView:
        """One view. Raised: UnknownName."""
        wave = queries.known_wave(lab, self.wave_id)
        runs = lab.store.runs("wave_id = ?", (wave.id,))
        pairs = factor_pairs(wave.factors)
        chosen = pairs[self.pair % len(pairs)] if pairs else None
        same: dict[str, dict[str, str]] = {}  # by effective source, the first run of each cell: repeats of a cell were asked for
        for run in runs:
            same.setdefault(run.effective_sha, {}).setdefault(key(run.cell), run.id)
        return WaveView(
            queries.wave_object(lab, wave), tuple(queries.run_objects(lab, runs)), analyse_wave(lab, wave.id),
            heat_map(lab, wave.id, *chosen) if chosen else None,
            {first: tuple(rest) for first, *rest in map(dict.values, same.values()) if rest},
        )  # fmt: skip


def factor_pairs(factors: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
    """Every pair of factors with more than one level, in order."""
    names = [n for n, values in factors.items() if len(values) > 1]
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]


def heading(view: WaveView, now: float, width: int) -> list[Line]:
    """What the wave is and how far it got."""
    wave = view.wave
    done = Line((f"{safe(wave['id'], 12)} ", "title"), (safe(wave.get("title") or wave.get("kind"), 80), "strong"))
    done.add(f"   {wave['ended']}/{wave['total']} ended, {wave['running']} live, {wave['queued']} waiting", "")
    done.add(f"   best {number(wave.get('best'), 6)}", "good").add(
        f"   by {safe(wave.get('agent'), 40)} {age(now - wave['created_at'])} ago", "muted"
    )
    out = [done.fitted(width)]
    if wave.get("hypothesis"):
        out.append(Line((crop(safe(wave["hypothesis"], 300), width), "muted")))
    return out


def shade(value: float, low: float, high: float) -> str:
    """The lower (the better), the darker."""
    if high <= low:
        return SHADES[2]
    return SHADES[4 - min(4, int((value - low) / (high - low) * 4.999))]


def heat_lines(view: WaveView, width: int) -> list[Line]:
    """The heat map of two factors; a cell without a result says whether it failed, is still to come, or was left out."""
    heat = view.heat
    if heat is None:
        return []
    real = [v for row in heat.values for v in row if v is not None]
    names = [fit(value_text(v), CELL, "right") for v in heat.columns]
    wide = min(24, max(len(value_text(v)) for v in heat.rows) + 1)
    room = max(1, (width - wide) // (CELL + 1))
    out = [
        Line((safe(heat.row_factor, 40), "accent"), (" down, ", "muted"), (safe(heat.column_factor, 40), "accent"), (" across", "muted"))
    ]
    out.append(Line((" " * wide, ""), (" ".join(names[:room]), "muted"), (" …" if len(names) > room else "", "muted")))
    for level, row in zip(heat.rows, heat.values, strict=True):
        line = Line((fit(value_text(level), wide), "muted"))
        for column, value in list(zip(heat.columns, row, strict=True))[:room]:
            line.extend(_empty(view, level, column) if value is None else _cell(value, real)).add(" ")
        out.append(line)
    if heat.left_out:
        words = f"on {gpu_of(heat.class_key)}; {plural(heat.left_out, 'result')} of other classes cannot be compared with these"
        out += [Line((row, "warn")) for row in wrap_words(words, width)]
    if real:
        others = [
            safe(f, 30) for f, values in view.wave["factors"].items() if f not in (heat.row_factor, heat.column_factor) and len(values) > 1
        ]
        out += [Line((row, "muted")) for row in wrap_words("█ is best" + (f"; means over {', '.join(others)}" if others else ""), width)]
    pairs = len(factor_pairs(view.wave["factors"]))
    if pairs > 1:
        out.append(Line((f"v: the next of {pairs} pairs", "muted")))
    return out


def _cell(value: float, real: list[float]) -> list[Span]:
    low, high = min(real), max(real)
    style = "good" if value == low else "muted" if value == high and high > low else ""
    return [(f"{shade(value, low, high)} ", "bar"), (fit(number(value, 4), CELL - 2, "right"), style)]


def _empty(view: WaveView, row: Any, column: Any) -> list[Span]:
    """A cell without a result: how its runs failed, that one is still to come, or a dot where there is none."""
    heat = view.heat
    assert heat is not None
    wanted = {heat.row_factor: value_text(row), heat.column_factor: value_text(column)}
    runs = [r for r in view.runs if all(value_text((r.get("cell") or {}).get(k)) == v for k, v in wanted.items())]
    if not runs:
        return [(fit("·", CELL, "right"), "track")]
    if any(r.get("phase") != "ended" for r in runs):
        return [(fit("to come", CELL, "right"), "muted")]
    failed = [str(r.get("outcome")) for r in runs if r.get("val_bpb") is None]
    if not failed:
        return [(fit("elsewhere" if any(r.get("class") != heat.class_key for r in runs) else "in doubt", CELL, "right"), "muted")]
    return [(fit(max(set(failed), key=failed.count).replace("_", " "), CELL, "right"), "bad")]


def effect_lines(analysis: Analysis, width: int) -> list[Line]:
    """Main effects by factor, each level with its bar around the mean, then interactions, prediction and notes."""
    out: list[Line] = []
    reach = max((abs(e.effect) + (e.se or 0) for e in analysis.effects if e.effect is not None), default=0.0)
    bar_wide = max(8, min(30, width - 40))
    found = [i for i in told_once(analysis.interactions) if i.effect is not None and i.clear]
    for factor in analysis.factors:
        text, style = BADGES.get(factor.badge, (factor.badge, "muted"))
        out.append(
            Line(
                (safe(factor.factor, 30), "accent"),
                (f"  {text}", style),
                (f"  {_better(factor)}", ""),
            )
        )
        others = sorted({f for i in found if factor.factor in i.factors for f in i.factors} - {factor.factor})
        if others:  # the level that is best on average may be the worst beside another level of these
            words = f"an average: which level is best depends on {', '.join(safe(o, 30) for o in others)}"
            out += [Line(("  " + row, "warn")) for row in wrap_words(words, width - 2)]
        out += [_effect(e.level, e.effect, e.se, e.n, reach, bar_wide) for e in analysis.effects if e.factor == factor.factor]
    if found:
        out.append(Line(("Interactions clear of the noise", "title")))
        out += [
            Line(
                (" × ".join(f"{safe(f, 30)}={value_text(v)}" for f, v in zip(i.factors, i.levels, strict=True)), ""),
                (f"  {i.effect:+.4f}{_error(i.se)}", "accent"),
            )
            for i in found[:6]
        ]
    out += _predictions(analysis, width)
    return out + [Line((row, "muted")) for n in analysis.notes for row in wrap_words(safe(n, 300), width)]


def _better(factor: FactorSummary) -> str:
    if factor.gain is None:
        return "these runs cannot tell its levels apart"
    return f"{value_text(factor.best)} is {number(factor.gain, 4)}{_error(factor.se)} better than {value_text(factor.worst)}"


def _error(se: float | None) -> str:
    return "" if se is None else f" ± {number(se, 4)}"


def _effect(level: Any, effect: float | None, se: float | None, n: int, reach: float, wide: int) -> Line:
    """One level: its deviation as a bar left or right of the wave's mean, with the error as a whisker."""
    line = Line((fit(value_text(level), 12, "right") + " ", ""))
    if not n:
        return line.add("no result", "muted")
    if effect is None or reach <= 0:
        return line.add(f"{'not told apart from the rest' if effect is None else 'no difference'}  n {n}", "muted")
    half = wide // 2
    drawn = [" "] * (2 * half + 1)
    at = half + round(effect / reach * half)
    for i in range(min(half, at), max(half, at) + 1):
        drawn[i] = "━"
    for i in range(
        max(0, half + round((effect - (se or 0)) / reach * half)), min(2 * half, half + round((effect + (se or 0)) / reach * half)) + 1
    ):
        drawn[i] = "─" if drawn[i] == " " else drawn[i]
    drawn[half] = "│"
    return line.add("".join(drawn), "good" if effect < 0 else "").add(f" {effect:+.4f}{_error(se)}  n {n}", "muted")


def _predictions(analysis: Analysis, width: int) -> list[Line]:
    """The best cell seen and the best one predicted, its constants in full: they are what one would run next."""
    out = []
    for name, found in (("best seen", analysis.observed_best), ("predicted best", analysis.predicted_best)):
        if found is not None:
            head = f"{number(found.value, 6)}{_error(found.se)}"
            mark = "" if found.ran else "  (not run)"
            cell = ", ".join(f"{safe(k, 30)}={value_text(v)}" for k, v in found.cell.items())
            line = Line((fit(name, 16), "title"), (head, "strong"), (mark, "warn"))
            if line.width + 2 + cells(cell) <= width:
                out.append(line.add("  " + cell))
            else:
                out += [line, *[Line(("  " + row, "")) for row in wrap_words(cell, width - 2)]]
    if analysis.sd is not None:
        out.append(
            Line(
                (
                    f"noise ±{number(analysis.sd, 5)} from {safe(analysis.sd_from, 20)}, {analysis.dof} dof; "
                    f"{plural(analysis.completed, 'result')} of {analysis.runs}",
                    "muted",
                )
            )
        )
    return out


def duplicate_lines(view: WaveView) -> list[Line]:
    """Runs whose sources do the same."""
    return [
        Line((f"{safe(first, 12)} and {', '.join(safe(i, 12) for i in others)} are the same source in effect", "muted"))
        for first, others in view.duplicates.items()
    ]
