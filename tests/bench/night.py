"""A simulated night: strategies on a response surface, through the real store, scheduler and research code, with time compressed.

    python -m tests.bench.night [--surface FILE] [--seeds 20] [--only greedy,waves,balanced,promotion,staged] [--json OUT]

FILE is any Python module with `score(constants, gpu, budget_s, seed)` and `DEFAULTS`; the product's own is the default. Printed for each
strategy: hours and GPU-hours until what it would hand over is within 0.002 of the surface's best value (noise-free) on the target type.
Hours are simulated: start, compile and evaluation of a run and a minute of the agent's thinking between two asks are counted.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from runner import scheduler, verbs
from runner.engines import surface as builtin
from runner.lab import Lab, open_lab
from runner.records import Outcome, Phase, Purpose, Submission
from runner.research import pruning, trust
from runner.research.balanced import Balanced, Rung, ladder
from runner.research.classes import class_key
from runner.research.knobs import knobs_of, mended_batch
from runner.research.strategy import Strategy, Told, Trial
from tests.bench.rivals import Greedy, Waves

TOLERANCE = 0.002
BUDGET_S = 300.0
START_S, EVAL_S, THINK_S = 14.0, 11.0, 60.0
CAP_HOURS = 40.0
SEQ_LEN = 2048
CRASHES = 0.08  # of a surface that has none of its own


@dataclass(frozen=True, slots=True)
class Reached:
    """When a strategy came within the tolerance; `hours` is the cap where it did not."""

    hours: float
    gpu_hours: float
    runs: int
    reached: bool


class Surface:
    """A surface, its noise-free twin, and its best value."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.noisy, self.quiet = self._load("noisy"), self._load("quiet")
        for name in ("NOISE_SD", "FLAKY"):
            if hasattr(self.quiet, name):
                setattr(self.quiet, name, 0.0)
        self.crashes = 0.0 if hasattr(self.noisy, "FLAKY") else CRASHES
        self.start = {k: v for k, v in self.noisy.DEFAULTS.items() if k != "SEED"}
        self.repeats = 1 if self._value(self.start, "H100", BUDGET_S, 1) == self._value(self.start, "H100", BUDGET_S, 2) else 48
        self.known: dict[str, float] = {}

    def _load(self, tag: str) -> ModuleType:
        path = self.path or builtin.__file__
        spec = importlib.util.spec_from_file_location(f"night_surface_{tag}", path)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{path} is no Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    def _value(self, constants: dict[str, Any], gpu: str, budget_s: float, seed: int) -> float:
        found = self.quiet.score(constants, gpu, budget_s, seed)
        return found.val_bpb if found.outcome == "completed" else math.inf

    def true(self, constants: dict[str, Any], gpu: str) -> float:
        """The noise-free value; the mean of many runs where the surface's noise has no switch."""
        known = [v for s in range(self.repeats) if math.isfinite(v := self._value(constants, gpu, BUDGET_S, s))]
        return statistics.mean(known) if known else math.inf

    def best(self, gpu: str) -> float:
        """The lowest noise-free value found by descents from several starts, down to steps of a thirtieth."""
        if gpu not in self.known:
            rng = random.Random(0)
            self.known[gpu] = min(self._descend(self._start(rng, n), gpu) for n in range(4))
        return self.known[gpu]

    def _start(self, rng: random.Random, n: int) -> dict[str, Any]:
        if n == 0:
            return dict(self.start)
        return {k: knob.moved(self.start[k], rng.choice((-1, 0, 0, 1))) for k, knob in knobs_of(self.start).items()} | {
            k: v for k, v in self.start.items() if k not in knobs_of(self.start)
        }

    def _descend(self, constants: dict[str, Any], gpu: str) -> float:
        value = self.true(constants, gpu)
        knobs = knobs_of(self.start)
        better = True
        while better:
            better = False
            for (name, knob), step in itertools.product(knobs.items(), (2, -2, 1, -1, 0.5, -0.5, 0.25, -0.25, 0.1, -0.1, 0.03, -0.03)):
                tried = {**constants, name: knob.moved(constants[name], step)}
                found = self.true(tried, gpu)
                if found < value - 1e-7:
                    constants, value, better = tried, found, True
        return value

    def source(self) -> str:
        """A training script whose constants are the surface's."""
        return "".join(f"{k} = {v!r}\n" for k, v in {**self.start, "SEED": 42}.items())


class Night:
    """One lab, its simulated GPUs and a clock; plays waves of trials and counts hours."""

    def __init__(self, surface: Surface, lab: Lab, gpus: Sequence[str], seed: int, mode: str) -> None:
        self.surface, self.lab, self.mode = surface, lab, mode
        self.gpus = {f"GPU-{i:02d}": name for i, name in enumerate(gpus)}
        self.rng = random.Random(7919 * seed + 1)
        self.now, self.gpu_s, self.runs = 0.0, 0.0, 0
        self.busy: dict[str, str] = {}
        self.events: list[tuple[float, int, str, str, float]] = []
        self.order = itertools.count()
        self.courses: dict[str, Any] = {}
        self.finished: dict[tuple[str, float], list[pruning.Curve]] = {}
        self.pruned: dict[tuple[str, float], int] = {}
        self.hopeless: dict[str, float] = {}

    def play(self, trials: Sequence[Trial], screen: str | None, target: str | None) -> list[Told]:
        """Submit a wave, let it run to its end, and give its results."""
        ids = [self._submit(t, target if t.confirm else screen) for t in trials]
        self._place()
        while self.events:
            at, _, kind, run_id, share = heapq.heappop(self.events)
            if run_id not in self.courses:
                continue
            self.now = max(self.now, at)
            if kind == "look":
                self._look(run_id, share)
            else:
                self._end(run_id)
        return [self._told(t, i) for t, i in zip(trials, ids, strict=True)]

    def _submit(self, trial: Trial, gpu_type: str | None) -> str:
        changed = {k: v for k, v in trial.constants.items() if v != self.surface.start[k]}
        purpose = Purpose.PROMOTION if trial.confirm else Purpose.EXPERIMENT if trial.role == "step" else Purpose.REPEAT
        wish = Submission(
            overrides={**changed, "SEED": self.rng.randrange(10**6)},
            budget_s=trial.budget_s or BUDGET_S,
            purpose=purpose,
            gpu_type=gpu_type,
            allow_duplicate=True,
        )
        self.runs += 1
        return verbs.submit(self.lab, wish, who="mcp:night").run_ids[0]

    def _place(self) -> None:
        queue = [r for r in self.lab.store.active_runs() if r.phase == Phase.QUEUED]
        wishes = [scheduler.Wish(r.id, (-r.priority, r.seq), r.gpu_type) for r in queue]
        slots = [scheduler.SlotView("sim", u, name, usable=u not in self.busy, run_id=self.busy.get(u)) for u, name in self.gpus.items()]
        rows = {r.id: r for r in queue}
        for placed in scheduler.place(wishes, slots, handed_ahead=0).placements:
            self._start(rows[placed.run_id], placed.uuid)

    def _start(self, run: Any, uuid: str) -> None:
        gpu = self.gpus[uuid]
        constants = {k: v for k, v in run.constants.items() if k in self.surface.noisy.DEFAULTS}
        result = self.surface.noisy.score(constants, gpu, run.budget_s, self.rng.randrange(10**6))
        outcome, trained = result.outcome, result.training_s
        if outcome == "completed" and self.rng.random() < self.surface.crashes:
            outcome, trained = "crashed", run.budget_s * self.rng.uniform(0.02, 0.9)
        self.busy[uuid] = run.id
        self.lab.store.update_run(run.id, phase=Phase.RUNNING, gpu_uuid=uuid, gpu_name=gpu, host="sim", engine="fake", started_at=self.now)
        ends = self.now + START_S + trained + (EVAL_S if outcome == "completed" else 0.0)
        self.courses[run.id] = (run, uuid, gpu, outcome, result, self.now, None)
        if self.mode != "off" and run.purpose in pruning.PRUNABLE:
            for share in pruning.GRID:
                if share * run.budget_s < trained:
                    heapq.heappush(self.events, (self.now + START_S + share * run.budget_s, next(self.order), "look", run.id, share))
        heapq.heappush(self.events, (ends, next(self.order), "end", run.id, 1.0))

    def _losses(self, result: Any, share: float = 1.0) -> tuple[float | None, ...]:
        values = [result.curve(s) if s <= share + 1e-9 else math.nan for s in pruning.GRID]
        return tuple(v if math.isfinite(v) else None for v in values)

    def _look(self, run_id: str, share: float) -> None:
        run, uuid, gpu, _, result, began, _ = self.courses[run_id]
        scope = (gpu, run.budget_s)
        known = self.finished.get(scope, [])
        found = pruning.judge(self.mode, share, self._losses(result, share), known, self.pruned.get(scope, 0))
        if found is not None:
            self.pruned[scope] = self.pruned.get(scope, 0) + 1
            self.courses[run_id] = (run, uuid, gpu, str(Outcome.PRUNED), result, began, found)
            self._end(run_id)

    def _end(self, run_id: str) -> None:
        run, uuid, gpu, outcome, result, began, hopeless = self.courses.pop(run_id)
        wall = self.now - began
        self.gpu_s += wall
        del self.busy[uuid]
        value = result.val_bpb if outcome == "completed" else None
        facts = {"gpu_name": gpu, "torch": "sim", "evaluator": "sim"}
        row = {
            "phase": Phase.ENDED,
            "outcome": outcome,
            "val_bpb": value,
            "class_key": class_key(facts),
            "wall_s": wall,
            "training_s": None,
            "ended_at": self.now,
            "torch": "sim",
            "cause_text": hopeless.evidence if hopeless else None,
        }
        with self.lab.store.transaction():
            self.lab.store.update_run(run_id, **row)
            ended = self.lab.store.run(run_id)
            if ended is not None and value is not None:
                self.lab.store.update_run(run_id, **trust.settled(self.lab, ended))
        if value is not None:
            curve = pruning.Curve(run_id, self._losses(result), value, run.budget_s)
            self.finished.setdefault((gpu, run.budget_s), []).append(curve)
        if hopeless is not None:
            self.hopeless[run_id] = hopeless.predicted
        self._place()

    def _told(self, trial: Trial, run_id: str) -> Told:
        run = self.lab.store.run(run_id)
        if run is None or run.outcome is None:
            raise RuntimeError(f"{run_id} did not end")
        if run.outcome == Outcome.PRUNED:
            return Told(trial, self.hopeless[run_id], "pruned", predicted=True)
        return Told(trial, run.val_bpb, str(run.outcome))


def mend(constants: dict[str, Any]) -> dict[str, Any]:
    """What an agent knows of upstream's script: the device batch must divide the total batch, at 2048 tokens a row."""
    return mended_batch(constants, SEQ_LEN)


@dataclass(frozen=True, slots=True)
class Entry:
    """A strategy with the GPUs it has, the type its result is for, and its pruning mode."""

    name: str
    words: str
    gpus: tuple[str, ...]
    target: str
    screen: str | None
    mode: str
    make: Callable[[Surface, int], Strategy]


def staged(surface: Surface, seed: int) -> Strategy:
    """One wave of single changes at a third of the budget on the screening type, then small balanced waves on the target type."""
    return Balanced(dict(surface.start), ladder(BUDGET_S), mend=mend, seed=seed)


def balanced(surface: Surface, seed: int) -> Strategy:
    """The same search at the full budget on one type: what program.md and `tune` use."""
    return Balanced(dict(surface.start), (Rung(BUDGET_S),), mend=mend, seed=seed)


def greedy(surface: Surface, seed: int) -> Strategy:
    """One change at a time."""
    return Greedy(surface.start, seed=seed, mend=mend)


def waves(surface: Surface, seed: int) -> Strategy:
    """Plain waves: one-factor changes around a base, whose gains are combined."""
    return Waves(dict(surface.start), 16, mend=mend)


MIXED = ("H100",) * 13 + ("H200",) * 3
ENTRIES = (
    Entry("greedy", "greedy, one at a time, on 1 GPU", ("H200",), "H200", None, "off", greedy),
    Entry("waves", "plain waves on 16", ("H200",) * 16, "H200", None, "off", waves),
    Entry("balanced", "balanced waves on 16", ("H200",) * 16, "H200", None, "off", balanced),
    Entry("promotion", "balanced, with promotion, on 13 + 3", MIXED, "H200", "H100", "off", staged),
    Entry("staged", "balanced, with pruning and promotion, 13 + 3", MIXED, "H200", "H100", "cautious", staged),
)


def night(surface: Surface, entry: Entry, seed: int, cap_hours: float = CAP_HOURS) -> Reached:
    """Play one night to the tolerance or the cap."""
    goal = surface.best(entry.target) + TOLERANCE
    with tempfile.TemporaryDirectory() as folder:
        lab = _lab(Path(folder), surface)
        try:
            strategy, play = entry.make(surface, seed), Night(surface, lab, entry.gpus, seed, entry.mode)
            while play.now < cap_hours * 3600:
                if surface.true(strategy.incumbent, entry.target) <= goal:
                    return Reached(play.now / 3600, play.gpu_s / 3600, play.runs, True)
                trials = strategy.ask()
                if not trials:
                    break
                strategy.tell(play.play(trials, entry.screen, entry.target))
                play.now += THINK_S
        finally:
            lab.close()
    return Reached(cap_hours, play.gpu_s / 3600, play.runs, False)


def _lab(folder: Path, surface: Surface) -> Lab:
    (folder / "train.py").write_text(surface.source())
    (folder / "hosts.toml").write_text('[policy]\nmax_queue = 10000\n[[host]]\nname = "sim"\nkind = "fake"\n')
    return open_lab(folder / "lab", create=True)


def table(surface: Surface, results: dict[str, list[Reached]]) -> str:
    """The table of a surface: medians, means with the cap counted, and the two ratios that are asked for."""
    lines = [
        f"surface {surface.path or 'built in'}: default {surface.true(surface.start, 'H200'):.6f}, best {surface.best('H200'):.6f} on H200",
        f"{'strategy':44} {'hours p50':>9} {'mean':>7} {'GPU-h p50':>9} {'mean':>7} {'runs p50':>8} {'reached':>9}",
    ]
    for entry in ENTRIES:
        found = results.get(entry.name)
        if found:
            hours, gpu, runs = [r.hours for r in found], [r.gpu_hours for r in found], [r.runs for r in found]
            reached = f"{sum(r.reached for r in found)}/{len(found)}"
            lines.append(
                f"{entry.words:44} {statistics.median(hours):9.2f} {statistics.mean(hours):7.2f} {statistics.median(gpu):9.1f} "
                f"{statistics.mean(gpu):7.1f} {statistics.median(runs):8.0f} {reached:>9}"
            )
    for name, words in (("waves", "plain waves are"), ("balanced", "balanced waves are")):
        if {"greedy", name} <= results.keys():
            said = f"{words} on 16 sooner than greedy on one by"
            lines.append(_ratio(said, results["greedy"], results[name], "hours", "times (target 20)"))
    for name, words in (("promotion", "promotion needs"), ("staged", "pruning and promotion need")):
        for rival, other in (("waves", "plain"), ("balanced", "balanced")):
            if {name, rival} <= results.keys():
                said = f"{words}, of the GPU-hours of {other} waves on 16,"
                lines.append(_ratio(said, results[name], results[rival], "gpu_hours", "(target 0.60)"))
    return "\n".join(lines)


def _ratio(words: str, a: list[Reached], b: list[Reached], key: str, unit: str) -> str:
    x, y = [getattr(r, key) for r in a], [getattr(r, key) for r in b]
    return (
        f"{words} {statistics.median(x) / max(statistics.median(y), 1e-9):.2f} (medians), "
        f"{statistics.mean(x) / max(statistics.mean(y), 1e-9):.2f} (means) {unit}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the bench and print its table."""
    parser = argparse.ArgumentParser(description="A simulated night: strategies on a response surface.")
    parser.add_argument("--surface", help="a Python file with score() and DEFAULTS (default: the product's own)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="greedy,waves,balanced,promotion,staged")
    parser.add_argument("--cap", type=float, default=CAP_HOURS, help="simulated hours after which a night is given up")
    parser.add_argument("--json", help="write every night's figures there")
    args = parser.parse_args(argv)
    if args.surface and not Path(args.surface).is_file():
        print(f"There is no file {args.surface}.", file=sys.stderr)
        return 2
    surface, began = Surface(args.surface), time.monotonic()
    results: dict[str, list[Reached]] = {}
    for entry in ENTRIES:
        if entry.name in args.only.split(","):
            results[entry.name] = [night(surface, entry, seed, args.cap) for seed in range(args.seeds)]
            print(f"{entry.name}: {args.seeds} nights, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(surface, results))
    if args.json:
        rows = {n: [[r.hours, r.gpu_hours, r.runs, r.reached] for r in found] for n, found in results.items()}
        Path(args.json).write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
