"""The night in a folder: report.md with its leaderboard, what worked when, where the GPU time went, and what one GPU would have taken.

`overnight report` writes it with two pictures beside it, `overnight plot` writes the progress picture alone. Every figure is computed
from the runs' rows; what cannot be computed is left out or said to be unknown. Prose from outside is escaped.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner import board, report_kept, report_types, sources
from runner.board import trust_word
from runner.errors import BadValue, LabError
from runner.lab import Lab
from runner.plot import Bar, Dot, progress_svg, slots_svg
from runner.records import GpuState, Json, Outcome, Phase, Run, Trust, Verdict
from runner.research.classes import gpu_of
from runner.text import ago, bpb, markdown_cell, one_line, percent, plural, signed

TOP = 15
PHASES = 12  # rows of the table of phases
AGENT_S = 60.0  # thinking between two runs of a sequential agent: about 30 s to edit and 30 s to read, as in the report on 16 GPUs


@dataclass(frozen=True, slots=True)
class Night:
    """All that the report is made of.

    `start` is the first start of a run, `end` the last end, by the wall clock; durations are seconds of the runs' own clock, of which a
    simulated night has `1 / pace` in a second. `lanes` are the GPUs by UUID: every one that could have worked, also those that never did.
    """

    lab: str
    runs: list[Run]
    board: Json
    start: float
    end: float
    lanes: dict[str, str]
    pace: float
    busy_s: float
    types: str = ""
    kept: str = ""

    @property
    def slots(self) -> int:
        """GPUs that could have worked."""
        return len(self.lanes)

    @property
    def long_s(self) -> float:
        """From the first start to the last end."""
        return (self.end - self.start) / self.pace

    @property
    def slot_s(self) -> float:
        """Seconds that the GPUs could have worked."""
        return self.slots * self.long_s

    @property
    def training_s(self) -> float:
        """Seconds of training that gave a result."""
        return sum(self.trained_s(r) for r in self.runs)

    def hours(self, at: float | None) -> float:
        """Hours from the start to a moment, the end when there is none."""
        return ((self.end if at is None else at) - self.start) / self.pace / 3600

    def lasted_s(self, run: Run) -> float:
        """How long a run had its GPU."""
        return max(0.0, (run.ended_at or self.end) - (run.started_at or self.end)) / self.pace

    def trained_s(self, run: Run) -> float:
        """How much of that was counted training of a run with a result."""
        return min(run.training_s or 0.0, self.lasted_s(run)) if run.outcome == Outcome.COMPLETED else 0.0


def gather(lab: Lab) -> Night:
    """Read the night. Raised: LabError when no run has started yet."""
    runs = [r for r in lab.store.runs() if r.started_at is not None]
    if not runs:
        raise LabError("No run has started in this lab yet, so there is nothing to report.", next_step="Submit one: `overnight run`.")
    now = time.time()
    start = min(r.started_at or now for r in runs)
    end = max(start + 1.0, max(now if r.ended_at is None else r.ended_at for r in runs))
    pace = pace_of(runs)
    busy = busy_s(runs, end) / pace
    best, types = board.leaderboard(lab, limit=TOP), report_types.section(lab)
    return Night(str(lab.path), runs, best, start, end, lanes_of(lab, runs), pace, busy, types, report_kept.section(lab))


def pace_of(runs: Iterable[Run]) -> float:
    """Seconds of the wall clock in a second of the runs' own: 1, less where the GPUs are simulated on a faster clock."""
    both = [(r.ended_at - r.started_at, r.wall_s) for r in runs if r.started_at is not None and r.ended_at is not None and r.wall_s]
    real, own = sum(b[0] for b in both), sum(b[1] for b in both)
    return real / own if own > 0 and 0 < real < 0.8 * own else 1.0


def lane_of(run: Run) -> str:
    """What a run had to itself: its GPU, or its host's one slot."""
    return run.gpu_uuid or f"{run.host}"


def lanes_of(lab: Lab, runs: Iterable[Run]) -> dict[str, str]:
    """Name by UUID of every GPU that a run had, or that could have had one: those that others use and those of removed hosts could not."""
    here = {h.name for h in lab.store.hosts() if h.state != "removed"}
    known = {g.uuid: g for g in lab.store.gpus()}
    used = {lane_of(r): r.host or "?" for r in runs}
    free = {g.uuid: g.host for g in known.values() if g.host in here and g.state != GpuState.FOREIGN}
    names: dict[str, str] = {}
    for uuid, host in {**free, **used}.items():
        gpu = known.get(uuid)
        index = gpu.idx if gpu is not None else len(names)
        names[uuid] = host if index is None else f"{host}:{index:02d}"
    return names


def busy_s(runs: Iterable[Run], end: float) -> float:
    """Wall-clock seconds in which a GPU had a run, over all GPUs; where two are recorded at once, it was busy once."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        spans[lane_of(run)].append((run.started_at or end, run.ended_at or end))
    total = 0.0
    for lane in spans.values():
        until = float("-inf")
        for begin, finish in sorted(lane):
            total += max(0.0, finish - max(begin, until))
            until = max(until, finish)
    return total


def ranked(night: Night) -> list[Run]:
    """The runs of the reported class and budget that count, in the order in which they ended."""
    from runner.research.waves import score  # numpy comes with it, and every command of the CLI imports this module

    scope = (night.board["class"], night.board["budget_s"])
    found = [r for r in night.runs if (r.class_key, r.budget_s) == scope and score(r) is not None and r.purpose != "verify"]
    return sorted(found, key=lambda r: r.ended_at or 0.0)


def value(run: Run) -> float:
    """What a ranked run counts for: the recomputed value where there is one."""
    found = run.verified_bpb if run.trust == Trust.VERIFIED and run.verified_bpb is not None else run.val_bpb
    assert found is not None
    return found


def write_report(lab: Lab, folder: Path) -> Path:
    """Write report.md, progress.svg and slots.svg; the path of the report. Raised: LabError when the folder cannot be written."""
    night = gather(lab)
    try:
        own_folder(lab, folder.parent)
        folder.mkdir(exist_ok=True)
        (folder / "progress.svg").write_text(progress(night), encoding="utf-8")
        (folder / "slots.svg").write_text(slots_svg(bars(night), "What each GPU did", lanes=night.lanes.values()), encoding="utf-8")
        (folder / "report.md").write_text(markdown(night), encoding="utf-8")
    except OSError as error:
        raise LabError(
            f"The report cannot be written to {folder}: {error.strerror or error}.", next_step="Name another folder with --out."
        ) from error
    return folder / "report.md"


def own_folder(lab: Lab, folder: Path) -> None:
    """Make a folder inside the lab; elsewhere it must be there: a misspelt path is not a wish for new folders. Raised: BadValue."""
    if folder.absolute().is_relative_to(lab.path.absolute()):
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.exists():
        raise BadValue(f"There is no folder {folder}.", next_step="Make it first, or name another with --out.")


def write_plot(lab: Lab, path: Path) -> None:
    """Write the progress picture. Raised: LabError when it cannot be written."""
    night = gather(lab)
    try:
        own_folder(lab, path.parent)
        path.write_text(progress(night), encoding="utf-8")
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error.strerror or error}.", next_step="Name another file with --out.") from error


def progress(night: Night) -> str:
    """The progress picture of the class and budget with most results."""
    dots = [Dot(night.hours(r.ended_at), value(r), r.verdict == Verdict.KEEP, f"{r.id} {r.hypothesis or ''}") for r in ranked(night)]
    found = night.board
    where = f", {gpu_of(found['class'])}" if found["class"] else ""
    return progress_svg(dots, f"val_bpb{where}, {found['budget_s']:g} s" if found["budget_s"] else "val_bpb")


def bars(night: Night) -> list[Bar]:
    """Every run on its GPU."""
    return [
        Bar(night.lanes[lane_of(r)], night.hours(r.started_at), night.hours(r.ended_at), str(r.outcome or r.phase), r.id)
        for r in night.runs
    ]


def markdown(night: Night) -> str:
    """The report's text."""
    parts = [
        _head(night),
        "![progress](progress.svg)",
        _leaderboard(night.board),
        night.kept,
        night.types,
        _phases(night),
        _time(night),
        "![GPUs over time](slots.svg)",
        _alone(night),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _head(night: Night) -> str:
    ended = [r for r in night.runs if r.phase == Phase.ENDED]
    counts: dict[str, int] = defaultdict(int)
    for run in ended:
        counts[str(run.outcome)] += 1
    best = ranked(night)
    lines = [
        "# The night",
        "",
        f"Lab `{one_line(night.lab, 200)}`, {_when(night.start)} to {_when(night.end)} "
        f"({ago(night.end - night.start)}), {plural(night.slots, 'slot')}."
        + ("" if night.pace == 1 else f" The GPUs are simulated: durations below are of their clock, {1 / night.pace:.0f} times as fast."),
        "",
        f"**{plural(len(night.runs), 'run')}** started, {plural(len(ended), 'run')} ended"
        + (": " + ", ".join(f"{n} {o}" for o, n in sorted(counts.items(), key=lambda c: -c[1])) if counts else "")
        + ".",
    ]
    if best:
        first, top = night.board["rows"][0], min(best, key=value)
        verified = sum(r.trust == "verified" for r in best)
        scope = f"{markdown_cell(night.board['class'])}, {night.board['budget_s']:g} s"
        line = f"Ranked: {scope}. Best: **{bpb(first['val_bpb'])}** ({first['id']})"
        if first["gain"] is not None:
            error = f", ± {first['gain_se']:.6f}" if first["gain_se"] else ""
            line += f", {signed(first['gain'])} against the baseline ({first['badge']}{error})"
        line += f". The best single run is {top.id} with {bpb(value(top))}. {verified} of {len(best)} results were recomputed and agree."
        lines += ["", line]
        sd = night.board["noise_sd"]
        lines.append("" if sd is None else f"Noise between repeats: {sd:.6f} ({night.board['noise_n']} degrees of freedom).")
    return "\n".join(lines)


def _leaderboard(found: Json) -> str:
    if not found["rows"]:
        return "No run has a result yet."
    rows = [
        [
            str(r["rank"]),
            r["id"],
            bpb(r["val_bpb"]),
            signed(r["gain"]),
            f"{r['gain_se']:.6f}" if r["gain_se"] else "-",
            r["badge"],
            r["verdict"] or "",
            trust_word(r),
            str(r["seed_n"]),
            what(r),
        ]
        for r in found["rows"]
    ]
    text = "## Leaderboard\n\n" + _table(["#", "run", "val_bpb", "gain", "±", "noise", "verdict", "trust", "n", "what"], rows)
    if found["unranked"]:
        text += "\n\nNot ranked: " + "; ".join(f"{u['id']} ({markdown_cell(u['reason'])})" for u in found["unranked"][:10]) + "."
    if len(found["ladder"]) > 1:
        text += (
            "\n\nBest at each budget: " + ", ".join(f"{s['budget_s']:g} s {bpb(s['val_bpb'])} ({s['id']})" for s in found["ladder"]) + "."
        )
    return text


def what(row: Json) -> str:
    """What a run changed, then what it was for."""
    changed = ", ".join(f"{k}={v}" for k, v in (row.get("changes") or {}).items())
    return " · ".join(t for t in (changed, row["hypothesis"]) if t)


def phases(night: Night) -> list[tuple[list[str], list[Run]]]:
    """The night in stretches: runs in the order of submission that change the same constants; short stretches join the one before."""
    out: list[tuple[list[str], list[Run]]] = []
    for run in sorted(night.runs, key=lambda r: r.seq):
        names = _varied(run)
        if out and (out[-1][0] == names or run.purpose in ("repeat", "promotion") or not names):
            out[-1][1].append(run)
        else:
            out.append((names, [run]))
    while len(out) > PHASES:
        at = min(range(1, len(out)), key=lambda i: len(out[i][1]))
        names, runs = out.pop(at)
        out[at - 1] = (sorted({*out[at - 1][0], *names}), out[at - 1][1] + runs)
    return out


def _varied(run: Run) -> list[str]:
    """The constants a run changed, but for its seed."""
    return sorted(name for name in run.cell or run.overrides or {} if not sources.names_seed(name))


def _phases(night: Night) -> str:
    scope = {r.id for r in ranked(night)}
    rows: list[list[str]] = []
    before: float | None = None
    for names, runs in phases(night):
        # A baseline or a repeat in between is no success of what was varied then.
        good = [r for r in runs if r.id in scope and (bool(own := _varied(r)) == bool(names)) and set(own) <= set(names)]
        best = min(good, key=value) if good else None
        step = before - value(best) if best is not None and before is not None else None
        kept = sum(r.verdict == Verdict.KEEP for r in runs)
        rows.append(
            [
                f"{runs[0].id}–{runs[-1].id}",
                str(len(runs)),
                ", ".join(names) or "the script itself",
                bpb(value(best)) if best else "-",
                _step(step),
                best.id if best else "-",
                str(kept),
            ]
        )
        if best is not None:
            before = value(best) if before is None else min(before, value(best))
    return "## What worked, and when\n\n" + _table(
        ["runs", "n", "what was varied", "best", "better than all before by", "run", "kept"], rows
    )


def _step(step: float | None) -> str:
    if step is None:
        return "-"
    return f"{step:.6f}" if step > 0 else "no gain"


def _time(night: Night) -> str:
    """Shares of the slot seconds, and what was spent for nothing."""
    spent: dict[str, float] = defaultdict(float)
    for run in night.runs:
        lasted = night.lasted_s(run)
        if run.outcome == Outcome.COMPLETED:
            spent["training that counts"] += night.trained_s(run)
            spent["around the training (start, compile, evaluation)"] += lasted - night.trained_s(run)
        elif run.phase != Phase.ENDED:
            spent["still running"] += lasted
        else:
            spent[f"{run.outcome} runs"] += lasted
    spent["idle slots"] = night.slot_s - night.busy_s
    unit, size = ("hours", 3600.0) if night.slot_s >= 3600 else ("minutes", 60.0)
    rows = [
        [name, f"{seconds / size:.2f}", percent(100 * seconds / night.slot_s)]
        for name, seconds in sorted(spent.items(), key=lambda s: -s[1])
    ]
    busy, training = percent(100 * night.busy_s / night.slot_s), percent(100 * night.training_s / night.slot_s)
    head = (
        f"Busy share **{busy}**, training share **{training}** of {night.slot_s / size:.2f} slot {unit} "
        f"({plural(night.slots, 'slot')} for {ago(night.long_s)})."
    )
    return f"## Where the GPU time went\n\n{head}\n\n" + _table(["what", f"slot {unit}", "share"], rows)


def alone_s(night: Night) -> tuple[float, float] | None:
    """(seconds of the night, seconds on one GPU) until the best result: the same runs one after another, an agent's minute each."""
    first = night.board["rows"][0]["id"] if night.board["rows"] else None  # by the mean of its repeats, not the luckiest run
    best = next((r for r in night.runs if r.id == first), None)
    if best is None:
        return None
    there = best.ended_at or night.end
    until = [r for r in night.runs if r.ended_at is not None and r.ended_at <= there and r.purpose != "verify"]
    return (there - night.start) / night.pace, sum(night.lasted_s(r) + AGENT_S for r in until)


def _alone(night: Night) -> str:
    found = alone_s(night)
    if found is None:
        return ""
    real, single = found
    return (
        "## On one GPU\n\n"
        f"The best result was there after {ago(real)}. The same runs one after another on one such GPU, with {AGENT_S:.0f} s of an "
        f"agent's time between two, would have taken {ago(single)}: **{single / max(real, 1.0):.1f} times as long**. This assumes that a "
        "sequential search would have tried the same runs in the same order."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(markdown_cell(one_line(c, 160)) for c in row) + " |" for row in rows])


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
