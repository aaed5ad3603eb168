"""What a run's page shows: read from the lab in the reader's thread, then turned into rows by pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner import compare, patching, queries, states
from runner.errors import LabError, UnknownName
from runner.lab import Lab
from runner.mfu import under_load
from runner.records import Event, Json, Point, Run, Sample
from runner.text import clean

from .chart import Series, draw
from .lines import Line, fit, safe, wrap_words
from .telemetry import reached, telemetry_lines
from .words import TRUST, age, clock, number, rate, run_state, short_gpu, value_text

LOG_BYTES = 200_000
LOG_LINES = 1500
CURVE = 500
MARGIN = 9  # cells left of the curves: axis labels, and the names under them
METRICS = {"loss": "loss (nats)", "tok_s": "tokens/s", "dt_ms": "ms a step", "mfu": "MFU %"}
AXES = {"share": "share of the budget", "step": "step", "t": "time (s)"}


@dataclass(frozen=True, slots=True)
class Rival:
    """Another run's curve."""

    run_id: str
    points: tuple[Point, ...]
    budget_s: float


@dataclass(frozen=True, slots=True)
class RunView:
    """All there is to show of one run; rivals are other runs' curves by role."""

    run: Json
    last_lines: str | None = None
    points: tuple[Point, ...] = ()
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    first_step_at: float | None = None
    last_output_at: float | None = None
    log: str = ""
    events: tuple[Event, ...] = ()
    samples: tuple[Sample, ...] = ()
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    compared: str | None = None
    parent_bpb: float | None = None
    diff: str | None = None


class RunLoader:
    """Reads one run; curves and sources of ended runs are read once."""

    def __init__(self, run_id: str, *, log: bool = True) -> None:
        self.run_id, self.want_log = run_id, log
        self.best_id: str | None = None
        self.want_diff = False
        self.diff_with: str | None = None
        self._curves: dict[str, tuple[Point, ...]] = {}
        self._diffs: dict[tuple[str, str], str] = {}

    def __call__(self, lab: Lab) -> RunView:
        """One view. Raised: UnknownName when the run is not there."""
        run = lab.store.run(self.run_id)
        if run is None:
            raise UnknownName("run", self.run_id, [r.id for r in lab.store.runs(order="seq DESC", limit=50)])
        against = self.diff_with or run.parent or run.base_run or run.repeat_of or run.retry_of
        other = lab.store.run(against) if against and against != run.id else None
        rivals: dict[str, Rival] = {}
        for role, rival in (
            ("other" if self.diff_with else "parent", other),
            ("best", lab.store.run(self.best_id) if self.best_id else None),
        ):
            if rival and rival.id != run.id and rival.id not in [r.run_id for r in rivals.values()]:
                rivals[role] = Rival(rival.id, self._curve(lab, rival), rival.budget_s)
        return RunView(
            run={**queries.run_object(lab, run), "under_load": under_load(lab, run)},
            last_lines=run.last_lines,
            points=self._curve(lab, run),
            rivals=rivals,
            first_step_at=run.first_step_at,
            last_output_at=run.last_output_at,
            log=queries.read_log(lab, run.id, limit=LOG_BYTES, tail_lines=LOG_LINES).text if self.want_log else "",
            events=_trail(lab, run),
            samples=_samples(lab, run),
            changed=_changed(other, run),
            compared=other.id if other else None,
            parent_bpb=other.val_bpb if other else None,
            diff=self._diff(lab, other, run) if self.want_diff else None,
        )

    def _curve(self, lab: Lab, run: Run) -> tuple[Point, ...]:
        if run.id not in self._curves:
            points = tuple(queries.curve(lab, run.id, CURVE))
            if not run.ended:
                return points
            self._curves[run.id] = points
        return self._curves[run.id]

    def _diff(self, lab: Lab, other: Run | None, run: Run) -> str:
        if other is None and self.diff_with:
            return f"There is no run {safe(self.diff_with, 40)!r} to compare with. B names another; an empty name is the parent again."
        if other is None:
            text, against = compare.diff_of(lab, run)
            return text or f"the source is {against}"
        key = (other.source_sha, run.source_sha)
        if key not in self._diffs:
            try:
                a, b = lab.source_text(other.source_sha), lab.source_text(run.source_sha)
            except LabError as error:
                return str(error)
            self._diffs[key] = patching.diff(a, b, other.id, run.id) or "the sources are the same"
        return self._diffs[key]


def _trail(lab: Lab, run: Run) -> tuple[Event, ...]:
    """Who did what to the run, newest first; what was done to its wave was done to it."""
    found = lab.store.events(subject=run.id, limit=200) + (lab.store.events(subject=run.wave_id, limit=50) if run.wave_id else [])
    return tuple(sorted(found, key=lambda e: -e.id))


def _samples(lab: Lab, run: Run) -> tuple[Sample, ...]:
    if run.started_at is None:
        return ()
    span = (run.ended_at or run.last_output_at or run.started_at) - run.started_at
    every = max(1, int(span / 600))
    return tuple(lab.store.samples("run_id = ? AND at % ? = 0", (run.id, every), limit=2000))


def _changed(other: Run | None, run: Run) -> dict[str, tuple[Any, Any]]:
    if other is None:
        return {k: (None, v) for k, v in run.overrides.items()}
    names = dict.fromkeys([*run.constants, *other.constants])
    return {n: (other.constants.get(n), run.constants.get(n)) for n in names if other.constants.get(n) != run.constants.get(n)}


# rows


def curve_lines(view: RunView, width: int, height: int, *, metric: str = "loss", axis: str = "share", log: bool = False) -> list[Line]:
    """The run's curve over its parent's and the best one's, the GPU under it on the same axis."""
    steps = [p.step for points in (view.points, *(r.points for r in view.rivals.values())) for p in points]
    span = {"share": (0.0, 1.0), "t": (0.0, view.run.get("budget_s") or 1.0), "step": (0.0, float(max(steps, default=1)))}[axis]
    if not view.points:
        return [*state_lines(view, width), Line()]
    telemetry = []
    if height >= 16 and view.first_step_at is not None:
        anchors = reached(view.run, view.points, view.first_step_at, view.last_output_at)
        telemetry = telemetry_lines(view.run, view.samples, anchors, width, MARGIN, axis, span)
    series = [
        Series(
            r.run_id if role == "other" else f"{role} {r.run_id}",
            _xy(r.points, metric, axis, r.budget_s),
            role if role == "best" else "parent",
        )
        for role, r in reversed(list(view.rivals.items()))
    ]
    series.append(Series(str(view.run["id"]), _xy(view.points, metric, axis, view.run.get("budget_s") or 1.0), "own"))
    chart = draw(series, width, height - len(telemetry), log=log, x_name=AXES[axis], clip=metric == "loss", x_span=span, margin=MARGIN)
    return chart + telemetry


def state_lines(view: RunView, width: int) -> list[Line]:
    """Why there is no curve: where a run stands that has not trained yet, or how it ended without."""
    run, phase = view.run, view.run.get("phase")
    if phase == "ended":
        text = f"It ended without a step: {safe(run.get('cause_text') or run.get('cause') or run.get('outcome'), 400)}"
    elif phase == "proposed":
        text = "It waits for approval: a approves, A declines with a reason."
    elif phase == "queued":
        place = run.get("queue_position")
        text = f"It waits at place {place} of the queue: t moves it to the top." if place else "It waits in the queue."
    elif phase == "unreachable":
        text = f"Its host is out of reach for {age(run.get('unreachable_s'))}; nothing is known of it since then."
    else:
        doing = safe(run.get("stage") or phase, 20)
        text = f"It has not made a step yet ({doing}), {age(run.get('age_s'))} after it was submitted."
    return [Line((row, "bad" if phase == "ended" else "muted")) for row in wrap_words(text, max(20, width - 1))]


def _xy(points: tuple[Point, ...], metric: str, axis: str, budget_s: float) -> list[tuple[float, float | None]]:
    """Points of a metric over share, training time (share of the budget in seconds) or step."""
    if axis == "step":
        return [(float(p.step), getattr(p, metric)) for p in points]
    scale = budget_s if axis == "t" else 1.0
    return [(p.share * scale, getattr(p, metric)) for p in points if p.share is not None]


def fact_lines(view: RunView, width: int) -> list[Line]:
    """State and result, what it is about, what speaks against it, then figures and constants: what matters most stands highest."""
    run = view.run
    out = [Line(run_state(run))]
    out += _paragraph("", run.get("cause_text") or run.get("cause"), width, "bad" if run.get("outcome") != "completed" else "muted")
    out += _result(view)
    out += _paragraph("why", run.get("hypothesis"), width)
    if run.get("verdict"):
        out += _paragraph("verdict", f"{run['verdict']}: {run.get('verdict_why') or 'no reason given'}", width)
    if run.get("flags"):
        out += [Line(), Line(("Flags", "title"))]
        for flag in run["flags"]:
            out += _paragraph(safe(flag.get("kind"), 30), flag.get("evidence"), width, "bad" if flag.get("severity") == "bad" else "warn")
        out.append(Line())
    for name, text in _facts(run):
        out += _paragraph(name, text, width)
    attributes = (run.get("attributes") or {}).items()
    out += _paragraph("with", ", ".join(f"{safe(k, 30)} {safe(v, 40)}" for k, v in attributes if v is not None), width)
    out += _constants(view, width)
    if view.last_lines and run.get("outcome") not in (None, "completed"):
        out += [Line(), Line(("Last lines", "title"))]
        out += [Line((row, "muted")) for t in clean(view.last_lines).splitlines()[-8:] for row in wrap_words(safe(t, 400), width)]
    return out


def _result(view: RunView) -> list[Line]:
    run = view.run
    if run.get("val_bpb") is None and run.get("loss") is None:
        return []
    if run.get("val_bpb") is None:
        return [Line((fit("loss", 9), "muted"), (number(run.get("loss"), 4), "strong"), (f"   step {number(run.get('step'))}", "muted"))]
    line = Line((fit("val_bpb", 9), "muted"), (number(run["val_bpb"], 6), "strong"))
    glyph, style = TRUST.get(str(run.get("trust")), ("", "muted"))
    line.add(f" {glyph} {safe(run.get('trust') or '', 20)}", style)
    against = Line((" " * 9, ""))
    if view.parent_bpb is not None:
        gain = view.parent_bpb - run["val_bpb"]
        against.add(f"{'0' if abs(gain) < 5e-7 else f'{gain:+.6f}'} against {view.compared}", "good" if gain > 0 else "muted")
    if run.get("verified_bpb") is not None:
        line.add(f"   recomputed {number(run['verified_bpb'], 6)}", style)
    return [line, against] if view.parent_bpb is not None else [line]


def _facts(run: Json) -> list[tuple[str, str]]:
    """Name and value of each figure that is known."""
    mfu = number(run.get("mfu_percent"), 1, " %")
    if run.get("mfu_reported") is not None:
        mfu = f"reported {number(run['mfu_reported'], 1, ' %')} → {mfu}"
    load = run.get("under_load") or {}
    if load.get("mfu_at_clock_percent") is not None:
        mfu += f", {number(load['mfu_at_clock_percent'], 1, ' %')} at {number(load['sm_mhz'], 0, ' MHz')}"
    if load.get("power_w") is not None and load.get("power_limit_w") is not None:
        mfu += f", {number(load['power_w'], 0)}/{number(load['power_limit_w'], 0, ' W')}"
    where = " ".join(x for x in (safe(run["host"], 30) if run.get("host") else "", short_gpu(run["gpu"]) if run.get("gpu") else "") if x)
    done = "" if run.get("share") is None else f", {number(100 * run['share'])} % done, {clock(run.get('remaining_s'))} left"
    budget = f"{number(run.get('budget_s'))} s{done}"
    trained = clock(run.get("training_s"))
    if run.get("training_s") is None and run.get("share"):  # stopped before its summary: by the last step it printed
        trained = f"{number(100 * run['share'])} % of it"
    times = f"trained {trained}, in all {clock(run.get('wall_s'))}"
    parts = [
        f"{number(run.get('params_m'), 1)} M params" if run.get("params_m") is not None else "",
        f"depth {run['depth']}" if run.get("depth") is not None else "",
        f"{number(run.get('tokens_m'), 1)} M tokens" if run.get("tokens_m") is not None else "",
        f"{number(run.get('num_steps'))} steps" if run.get("num_steps") is not None else "",
    ]
    origin = [
        f"{k.replace('_', ' ')} {safe(run[k], 20)}" for k in ("parent", "wave", "retry_of", "repeat_of", "promoted_from") if run.get(k)
    ]
    rows = [
        ("where", where),
        ("budget", budget if run.get("phase") != "ended" else f"{number(run.get('budget_s'))} s · {times}"),
        ("MFU", mfu),
        ("speed", f"{rate(run.get('tok_s'))} tokens/s" if run.get("tok_s") is not None else ""),
        ("memory", number(run.get("peak_vram_mb"), 0, " MB peak")),
        ("size", ", ".join(p for p in parts if p)),
        ("seed", number(run.get("seed"))),
        ("by", safe(run.get("agent"), 60)),
        ("from", ", ".join(origin)),
        ("class", safe(run["class"], 120) if run.get("class") else ""),
    ]
    return [(name, text) for name, text in rows if text and text != "-"]


def _constants(view: RunView, width: int) -> list[Line]:
    if not view.changed:
        return (
            [Line(), Line(("Constants", "title"), (f"  the same as {view.compared}" if view.compared else "", "muted"))]
            if view.compared
            else []
        )
    out = [Line(), Line(("Constants", "title"), (f"  against {view.compared}" if view.compared else "  as overridden", "muted"))]
    name_wide = min(30, max(len(safe(n, 30)) for n in view.changed))
    for name, (old, new) in view.changed.items():
        out.append(
            Line(
                (fit(safe(name, 30), name_wide) + " ", ""),
                (value_text(old) if old is not None else "", "muted"),
                (" → " if old is not None else "", "muted"),
                (value_text(new), "accent"),
            )
        )
    return out


def _paragraph(name: str, text: Any, width: int, style: str = "") -> list[Line]:
    """A named text, wrapped."""
    if not text:
        return []
    rows = wrap_words(safe(text, 2000), max(16, width - 10))
    head = fit(name, 9) if len(name) < 9 else name + " "
    return [Line((head if i == 0 else " " * 9, "muted"), (t, style)) for i, t in enumerate(rows)]


def diff_lines(diff: str | None) -> list[Line]:
    """A unified diff, coloured by its first character."""
    if diff is None:
        return [Line(("reading the sources …", "muted"))]
    styles = {"+": "good", "-": "bad", "@": "accent"}
    return [
        Line((clean(t).expandtabs(4) or " ", "muted" if t.startswith(("+++", "---")) else styles.get(t[:1], ""))) for t in diff.splitlines()
    ]


def audit_lines(events: tuple[Event, ...], now: float) -> list[Line]:
    """Who did what to the run, newest first."""
    if not events:
        return [Line(("nobody did anything to this run", "muted"))]
    return [
        Line(
            (fit(age(now - e.at), 6, "right") + "  ", "muted"),
            (fit(safe(e.who, 20), 14), ""),
            (fit(safe(e.verb, 20), 12), "accent"),
            (safe(states.event_words(e) or "", 300), ""),
        )
        for e in events
    ]
