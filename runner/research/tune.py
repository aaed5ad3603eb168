"""The tuning loop of report 1 without a language model: a baseline, batch, learning rate and size at a short budget, then a longer budget.

Made of ordinary runs, submitted through the verbs. What was asked is written down, and results are read from the rows, so it can be stopped
at any moment and goes on where it was. The optimiser is asked and told: optuna where that extra is installed and wanted, else our waves.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from runner import sources, submitting, verbs
from runner.errors import BadValue, Refused
from runner.lab import Lab
from runner.mfu import mfu_percent
from runner.records import Outcome, Purpose, Run, Submission
from runner.research import axes, noise, statics, waves
from runner.research.axes import BATCH, RATE, Axes, Point
from runner.research.balanced import Balanced, Pace, Rung
from runner.research.ground import Ground
from runner.research.knobs import knobs_of
from runner.research.strategy import Told, Trial

STATE = "tuning"
REPEATS = 2
FLAGS = {"budget_s": "--budget", "long_budgets_s": "--longer", "waves": "--waves", "size": "--size", "gpu_type": "--gpu",
         "optimizer": "--optimizer", "knobs": "--knob"}  # fmt: skip
Asked = tuple[Point, str, str]  # changes of the script, role, run id


@dataclass(frozen=True, slots=True)
class Plan:
    """What to tune with: short and long budgets in seconds, waves, runs in a later wave, bounds of the batch, axes (none: the usual)."""

    budget_s: float
    long_budgets_s: tuple[float, ...]
    waves: int = 3
    size: int = 8
    smallest_batch: int = 2**15
    largest_batch: int = 2**19
    gpu_type: str | None = None
    optimizer: str = "waves"  # waves, optuna
    knobs: tuple[str, ...] = ()


class Asker(Protocol):
    """An optimiser over the axes; `incumbent` is where it would go now."""

    incumbent: Point

    def ask(self) -> list[Trial]:
        """The next points."""

    def tell(self, results: Sequence[Told]) -> None:
        """What became of them."""


class OptunaAsker:
    """optuna's TPE over the same axes; seeded, so that a resumed tune asks what it asked before."""

    def __init__(self, start: Point, plan: Plan, within: Axes) -> None:
        try:
            self.optuna: Any = importlib.import_module("optuna")
        except ImportError:
            raise Refused("optuna is not installed.", next_step="Install the `tune` extra, or leave --optimizer out.") from None
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        sampler = self.optuna.samplers.TPESampler(seed=0, n_startup_trials=plan.size, constant_liar=True)
        self.study = self.optuna.create_study(sampler=sampler)
        self.size, self.axes, self.start, self.incumbent = plan.size, within, dict(start), dict(start)
        self.open: list[tuple[Any, Point]] = []
        self.seen: dict[str, tuple[Point, list[float]]] = {}

    def ask(self) -> list[Trial]:
        """A wave of TPE's proposals, beside repeats of the start."""
        self.open = [(trial, self._point(trial)) for trial in (self.study.ask() for _ in range(self.size - REPEATS))]
        repeats = [Trial(dict(self.start), "base") for _ in range(REPEATS)]
        return repeats + [Trial(point, "step", "*") for _, point in self.open]

    def _point(self, trial: Any) -> Point:
        point = dict(self.start)
        for name, knob in knobs_of(self.start).items():
            if name == BATCH:
                low, high = (int(math.log2(b)) for b in (self.axes.smallest_batch, self.axes.largest_batch))
                point[name] = 2 ** trial.suggest_int(name, low, high)
            else:
                point[name] = knob.of(knob.to(self.start[name]) + trial.suggest_float(name, -1.5, 1.5))
        return point

    def tell(self, results: Sequence[Told]) -> None:
        """Values to the study; what crashed is told as failed. The incumbent is the best mean so far."""
        states = self.optuna.trial.TrialState
        for (trial, _), told in zip(self.open, [r for r in results if r.trial.role == "step"], strict=False):
            self.study.tell(trial, told.value, state=states.FAIL if told.value is None else None)
        for told in results:
            if told.value is not None:
                self.seen.setdefault(repr(told.trial.constants), (told.trial.constants, []))[1].append(told.value)
        if self.seen:
            self.incumbent = dict(min(self.seen.values(), key=lambda s: statistics.mean(s[1]))[0])


class Tune:
    """One tuning of a lab: `advance` submits what comes next once everything before it has ended."""

    def __init__(self, lab: Lab, plan: Plan, *, who: str = "cli", restart: bool = False) -> None:
        if plan.optimizer not in ("waves", "optuna"):
            raise BadValue(f"There is no optimizer {plan.optimizer!r}.", next_step="Allowed: waves, optuna.")
        short = [b for b in plan.long_budgets_s if b <= plan.budget_s]
        if short or len(set(plan.long_budgets_s)) < len(plan.long_budgets_s):
            raise BadValue(
                f"The longer budgets are {', '.join(f'{b:g} s' for b in plan.long_budgets_s)}, the short one {plan.budget_s:g} s.",
                next_step="Give each longer budget once, and longer than the short one.",
            )
        self.lab, self.who = lab, who
        found = lab.store.setting(STATE)
        kept = None if restart else found
        self.anew = restart
        self.left = [i for batch in found["asked"] for _, _, i in batch] if found and restart else []  # the old tune's runs
        self.serial: int = found["serial"] + (1 if restart else 0) if found else 1
        self.plan = Plan(**{**kept["plan"], **{k: tuple(kept["plan"][k]) for k in ("long_budgets_s", "knobs")}}) if kept else plan
        self.batches: list[list[Asked]] = [[(c, role, i) for c, role, i in batch] for batch in kept["asked"]] if kept else []
        self.ground = Ground(lab, self.plan.gpu_type, kept.get("ground") if kept else None)
        self.constants = sources.constants(submitting.trainer_text(lab.policy().trainer))
        seq_len = statics.fixed_constants(lab.policy().trainer).get(statics.LENGTH)
        names = axes.axes_of(self.constants, self.plan.knobs)
        bounds = self.plan.smallest_batch, self.plan.largest_batch
        self.axes = Axes(self.constants, names, seq_len if isinstance(seq_len, int) else None, *bounds)

    # state

    def _save(self) -> None:
        self.lab.store.set_setting(
            STATE, {"plan": asdict(self.plan), "asked": self.batches, "serial": self.serial, "ground": self.ground.kept}
        )

    def runs(self) -> list[Run]:
        """Every run of this tune, in the order of submission."""
        return [r for batch in self.batches for _, _, i in batch if (r := self.lab.store.run(i)) is not None]

    def pending(self) -> list[Run]:
        """Runs that have not ended, those that measure GPUs included."""
        return [r for r in [*self.ground.runs(), *self.runs()] if not r.ended]

    def unlike(self, asked: Plan) -> list[str]:
        """What the tune that goes on does otherwise than is asked for now, in words."""
        own, wish = asdict(self.plan), asdict(asked)
        return [f"{FLAGS[n]} {_said(own[n])} (asked for now: {_said(wish[n])})" for n in FLAGS if own[n] != wish[n]]

    def over(self) -> bool:
        """Whether every step was taken and has ended."""
        return len(self.batches) > self.plan.waves + len(self.plan.long_budgets_s) and not self.pending()

    def clear_away(self) -> list[str]:
        """After a restart: the old tune's runs that never started are cancelled; in words, what became of those that had not ended."""
        runs = [r for i in self.left if (r := self.lab.store.run(i)) is not None and not r.ended]
        waiting, live = ([r.id for r in runs if r.waiting is wait] for wait in (True, False))
        self.left = []
        if self.anew:
            self._save()  # the old one is forgotten, whatever comes now
        if waiting:
            verbs.cancel(self.lab, waiting, who=self.who, why="the tune was begun anew")
        told = [f"Cancelled what the old tune had waiting: {', '.join(waiting)}."] if waiting else []
        go_on = f"The old tune's {', '.join(live)} {'go' if len(live) > 1 else 'goes'} on to the end; `overnight cancel` stops them."
        return [*told, go_on] if live else told

    # steps

    def advance(self) -> bool:
        """Submit the next step when nothing is pending; False when the tune is done. Raised: Refused when it cannot go on."""
        if self.pending():
            return True
        if not self.batches:
            if self.ground.kept is None:
                if not self.ground.ready():
                    return True
                self.ground.measure(self.who, f"tune-{self.serial}-preflight")
                self._save()
                if self.pending():
                    return True
            return self._submit([({}, "base")] * REPEATS, self.plan.budget_s)
        asker, told = self._asker(), 1
        while told < len(self.batches) and told <= self.plan.waves:
            asker.ask()
            asker.tell(self._told(self.batches[told]) + (self._told(self.batches[0]) if told == 1 else []))
            told += 1
        if told <= self.plan.waves:
            return self._submit([(self.axes.changes(t.constants), t.role) for t in asker.ask()], self.plan.budget_s)
        longs = len(self.batches) - 1 - self.plan.waves
        if longs >= len(self.plan.long_budgets_s):
            return False
        best = self.best()
        if best is None:
            raise Refused("No run of the tune has a result.", next_step="Look at their logs: `overnight runs`.")
        # What the model expects to be lowest, and what measured lowest: luck draws the second, a wrong model the first.
        candidates: list[Point] = [p for p in (self.axes.changes(asker.incumbent), self._changes(best)) if p]
        points = [{}, *(p for n, p in enumerate(candidates) if p not in candidates[:n])]
        return self._submit([(p, "step" if p else "base") for p in points for _ in range(REPEATS)], self.plan.long_budgets_s[longs])

    def _asker(self) -> Asker:
        first = next((r for r in self.runs() if r.outcome == Outcome.COMPLETED), None)
        start = self.axes.begin(first)
        if self.plan.optimizer == "optuna":
            return OptunaAsker(start, self.plan, self.axes)
        rung, floor = (
            Rung(pairs=max(self.plan.size // 2, 2)),
            waves.noise_floor(self.lab, first.class_key, self.plan.budget_s) if first else None,
        )
        return Balanced(dict(start), (rung,), mend=self.axes.within, pace=Pace(repeats=REPEATS), floor=floor)

    def _submit(self, points: Sequence[tuple[Point, str]], budget_s: float) -> bool:
        """All or nothing as far as limits go; a step that was cut off half-way is the same step when it is taken again."""
        submitting.check_limits(self.lab, self.who, len(points), budget_s)
        self.batches.append([(c, role, self._run(c, role, budget_s, n)) for n, (c, role) in enumerate(points)])
        self._save()
        return True

    def _run(self, changes: Point, role: str, budget_s: float, nth: int) -> str:
        overrides, step = self.axes.overrides(changes), len(self.batches)
        seed = self.constants.get(submitting.SEED_NAME)
        if isinstance(seed, int) and (role != "step" or step > self.plan.waves):
            overrides[submitting.SEED_NAME] = seed + step * 100 + nth
        again = 0 < step <= self.plan.waves
        purpose = Purpose.TUNE if role == "step" else Purpose.REPEAT if again else Purpose.BASELINE
        wish = Submission(
            overrides=overrides,
            budget_s=budget_s,
            hypothesis=f"tune: {axes.said(changes)}",
            purpose=purpose,
            gpu_type=self.plan.gpu_type,
            allow_duplicate=True,
            request_id=f"tune-{self.serial}-{step}-{nth}",
        )
        return verbs.submit(self.lab, wish, who=self.who).run_ids[0]

    def _told(self, batch: Sequence[Asked]) -> list[Told]:
        """What became of a step, by what was asked then: a claim refuted since does not turn one point's result into another's."""
        told = []
        for changes, role, run_id in batch:
            run, trial = self.lab.store.run(run_id), Trial({**self.axes.own, **changes}, role)
            told.append(Told(trial, waves.score(run) if run else None, str(run.outcome) if run else "lost"))
        return told

    # results

    def _points(self, budget_s: float) -> list[tuple[Point, list[Run]]]:
        found: dict[str, tuple[Point, list[Run]]] = {}
        for batch in self.batches:
            for changes, _, run_id in batch:
                run = self.lab.store.run(run_id)
                if run is not None and run.budget_s == budget_s and waves.score(run) is not None:
                    found.setdefault(repr(sorted(changes.items())), (changes, []))[1].append(run)
        return list(found.values())

    def best(self) -> Run | None:
        """A run of the best point at the short budget, by the mean of its runs."""
        points = self._points(self.plan.budget_s)
        return min(points, key=lambda p: _mean(p[1]))[1][0] if points else None

    def _changes(self, run: Run) -> Point:
        return next(dict(changes) for batch in self.batches for changes, _, i in batch if i == run.id)

    def table(self) -> list[dict[str, Any]]:
        """Report 1's table: the points of each budget from the worst to the best, and what each gained over the script as it is."""
        rows: list[dict[str, Any]] = []
        for budget in (self.plan.budget_s, *self.plan.long_budgets_s):
            points = self._points(budget)
            floor = noise.pooled([_scores(runs) for _, runs in points])
            base = next((runs for changes, runs in points if not changes), None)
            for changes, runs in sorted(points, key=lambda p: _mean(p[1]), reverse=True):
                gained = noise.gain(_scores(runs), _scores(base), floor) if base and runs is not base else None
                rows.append(self._row(budget, changes, runs, gained))
        return rows

    def _row(self, budget_s: float, changes: Point, runs: Sequence[Run], gained: noise.Gain | None) -> dict[str, Any]:
        return {
            "budget_s": budget_s,
            "changes": changes,
            "batch": changes.get(BATCH),
            "rate": changes.get(RATE, 1.0),
            "val_bpb": _mean(runs),
            "runs": len(runs),
            "id": runs[0].id,
            "gain": gained.value if gained else None,
            "gain_se": gained.se if gained else None,
            "badge": gained.badge if gained else "baseline" if not changes else noise.UNKNOWN,
            "mfu_percent": mfu_percent(runs[0], self.lab.policy()),
            "tokens_m": _tokens_m(runs[0]),
            "num_steps": runs[0].num_steps,
        }


def _said(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " and ".join(_said(v) for v in value) or "the usual"
    return "any" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _tokens_m(run: Run) -> float | None:
    """Millions of tokens trained on: steps times batch where both are known, since a summary rounds to 0.1 M."""
    batch = (run.attributes or {}).get("total_batch")
    return run.num_steps * batch / 1e6 if run.num_steps and isinstance(batch, int) else run.tokens_m


def _scores(runs: Sequence[Run]) -> list[float]:
    return [value for r in runs if (value := waves.score(r)) is not None]


def _mean(runs: Sequence[Run]) -> float:
    return statistics.mean(_scores(runs))
