"""The tuning loop of report 1 without a language model: a baseline, total batch and learning rate at a short budget, then a longer budget.

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
from runner.research import noise, waves
from runner.research.knobs import mended_batch
from runner.research.strategy import Settings, Told, Trial, Waves

STATE = "tune"
BATCH, RATE = "TOTAL_BATCH_SIZE", "LR_MULTIPLIER"
REPEATS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to tune with: short budget and long ones in seconds, waves, runs in a wave, and the batch sizes allowed."""

    budget_s: float
    long_budgets_s: tuple[float, ...]
    waves: int = 3
    size: int = 8
    smallest_batch: int = 2**15
    largest_batch: int = 2**19
    gpu_type: str | None = None
    optimizer: str = "waves"  # waves, optuna


class Asker(Protocol):
    """An optimiser over total batch and learning-rate multiplier."""

    def ask(self) -> list[Trial]:
        """The next points."""

    def tell(self, results: Sequence[Told]) -> None:
        """What became of them."""


class OptunaAsker:
    """optuna's TPE over the same two axes; deterministic, so that a resumed tune asks what it asked before."""

    def __init__(self, start: dict[str, Any], plan: Plan, limits: tuple[int, int]) -> None:
        try:
            self.optuna: Any = importlib.import_module("optuna")
        except ImportError:
            raise Refused("optuna is not installed.", next_step="Install the `tune` extra, or leave --optimizer out.") from None
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        self.study = self.optuna.create_study(
            sampler=self.optuna.samplers.TPESampler(seed=0, n_startup_trials=plan.size, constant_liar=True)
        )
        self.plan, self.limits, self.start, self.open = plan, limits, start, list[Any]()

    def ask(self) -> list[Trial]:
        """A wave of TPE's proposals; the first holds the start itself, repeated."""
        low, high = (int(math.log2(b)) for b in self.limits)
        self.open = [self.study.ask() for _ in range(self.plan.size - REPEATS)]
        return [Trial(dict(self.start), "base") for _ in range(REPEATS)] + [
            Trial({BATCH: 2 ** t.suggest_int("batch", low, high), RATE: round(2 ** t.suggest_float("rate", -1.5, 1.5), 3)}, "step", BATCH)
            for t in self.open
        ]

    def tell(self, results: Sequence[Told]) -> None:
        """Values to the study; what crashed is told as failed."""
        for trial, told in zip(self.open, [r for r in results if r.trial.role == "step"], strict=False):
            failed = told.value is None
            self.study.tell(trial, None if failed else told.value, state=self.optuna.trial.TrialState.FAIL if failed else None)


class Tune:
    """One tuning of a lab: `advance` submits what comes next once everything before it has ended."""

    def __init__(self, lab: Lab, plan: Plan, *, who: str = "cli", restart: bool = False) -> None:
        if plan.optimizer not in ("waves", "optuna"):
            raise BadValue(f"There is no optimizer {plan.optimizer!r}.", next_step="Allowed: waves, optuna.")
        self.lab, self.who = lab, who
        found = lab.store.setting(STATE)
        kept = None if restart else found
        self.serial: int = found["serial"] + (1 if restart else 0) if found else 1
        self.plan = Plan(**{**kept["plan"], "long_budgets_s": tuple(kept["plan"]["long_budgets_s"])}) if kept else plan
        self.batches: list[list[tuple[dict[str, Any], str, str]]] = [[tuple(t) for t in b] for b in kept["asked"]] if kept else []
        self.limits = self.plan.smallest_batch, self.plan.largest_batch
        self.text = submitting.trainer_text(lab.policy().trainer)
        self.constants = sources.constants(self.text)
        if BATCH not in self.constants:
            raise Refused(f"The script has no constant {BATCH}.", next_step="Tune works on scripts that keep their batch in that constant.")

    # state

    def _save(self) -> None:
        self.lab.store.set_setting(STATE, {"plan": asdict(self.plan), "asked": self.batches, "serial": self.serial})

    def runs(self) -> list[Run]:
        """Every run of this tune, in the order of submission."""
        return [r for batch in self.batches for _, _, i in batch if (r := self.lab.store.run(i)) is not None]

    def pending(self) -> list[Run]:
        """Runs that have not ended."""
        return [r for r in self.runs() if not r.ended]

    # steps

    def advance(self) -> bool:
        """Submit the next step when nothing is pending; False when the tune is done. Raised: Refused when it cannot go on."""
        if self.pending():
            return True
        if not self.batches:
            return self._submit([Trial({BATCH: None, RATE: 1.0}, "base") for _ in range(REPEATS)], self.plan.budget_s)
        start = self._start()
        asker, told = self._asker(start), 1
        while told < len(self.batches) and told <= self.plan.waves:
            asker.tell(self._told(self.batches[told], asker.ask()))
            told += 1
        if told <= self.plan.waves:
            return self._submit(asker.ask(), self.plan.budget_s)
        longs = len(self.batches) - 1 - self.plan.waves
        if longs < len(self.plan.long_budgets_s):
            best = self.best()
            if best is None:
                raise Refused("No run of the tune has a result.", next_step="Look at their logs: `overnight runs`.")
            points = [Trial({BATCH: None, RATE: 1.0}, "base"), Trial(self._point(best), "step", BATCH)]
            return self._submit(points, self.plan.long_budgets_s[longs])
        return False

    def _asker(self, start: dict[str, Any]) -> Asker:
        if self.plan.optimizer == "optuna":
            return OptunaAsker(start, self.plan, self.limits)
        settings = Settings(repeats=REPEATS, old_repeats=1, caution=0.0)
        return Waves(dict(start), self.plan.size, settings=settings, mend=self._within)

    def _within(self, point: dict[str, Any]) -> dict[str, Any]:
        return {**point, BATCH: min(max(int(point[BATCH]), self.limits[0]), self.limits[1])}

    def _start(self) -> dict[str, Any]:
        """Where the search starts: the script's own batch, as the baseline ran it."""
        own = self.constants[BATCH]
        if own is None:
            first = next((r for r in self.runs() if r.outcome == Outcome.COMPLETED), None)
            if first is None:
                raise Refused("The baseline has no result, so there is nothing to tune from.", next_step="Look at its log first.")
            own = (first.attributes or {}).get("total_batch")
            if not own and first.tokens_m and first.num_steps:
                own = 2 ** round(math.log2(first.tokens_m * 1e6 / first.num_steps))
        if not isinstance(own, int) or own < 1:
            raise Refused(f"The baseline does not say its {BATCH}.", next_step="Set it in the script.")
        if own < self.plan.smallest_batch:  # a CPU's batches are far below a GPU's
            self.limits = max(own // 8, 1), own * 2
        return self._within({BATCH: own, RATE: 1.0})

    def _submit(self, trials: Sequence[Trial], budget_s: float) -> bool:
        # One short transaction a run: request ids make a step that was cut off half-way the same step when it is taken again.
        self.batches.append([(t.constants, t.role, self._run(t, budget_s, n)) for n, t in enumerate(trials)])
        self._save()
        return True

    def _run(self, trial: Trial, budget_s: float, nth: int) -> str:
        overrides = self.overrides(trial.constants)
        seed = self.constants.get(submitting.SEED_NAME)
        if isinstance(seed, int) and trial.role in ("base", "old"):
            overrides[submitting.SEED_NAME] = seed + len(self.batches) * 100 + nth
        label = (
            "tune: baseline"
            if trial.constants[BATCH] is None
            else f"tune: batch {trial.constants[BATCH]}, rate x {trial.constants[RATE]:g}"
        )
        purpose = Purpose.TUNE if trial.role == "step" else Purpose.REPEAT if trial.constants[BATCH] else Purpose.BASELINE
        wish = Submission(
            overrides=overrides, budget_s=budget_s, hypothesis=label, purpose=purpose, gpu_type=self.plan.gpu_type, allow_duplicate=True
        )
        return verbs.submit(self.lab, wish, who=self.who).run_ids[0]

    def overrides(self, point: dict[str, Any]) -> dict[str, Any]:
        """Constants of the script for a point: the batches that fit together, and every learning rate times the multiplier."""
        found: dict[str, Any] = {}
        if point[BATCH] is not None:
            rows, seq_len = self.constants.get("DEVICE_BATCH_SIZE"), self._seq_len()
            mended = mended_batch({BATCH: point[BATCH], "DEVICE_BATCH_SIZE": rows}, seq_len)
            found[BATCH] = point[BATCH]
            if mended["DEVICE_BATCH_SIZE"] != rows:
                found["DEVICE_BATCH_SIZE"] = mended["DEVICE_BATCH_SIZE"]
        if point[RATE] != 1.0:
            found |= {k: v * point[RATE] for k, v in self.constants.items() if k.endswith("_LR") and isinstance(v, float)}
        return found

    def _seq_len(self) -> int | None:
        trainer = self.lab.policy().trainer
        for name in ("prepare.py", (trainer.budget or "").partition(":")[0]):
            try:
                length = sources.constants((trainer.folder / name).read_bytes().decode()).get("MAX_SEQ_LEN")
            except (OSError, UnicodeDecodeError, BadValue):
                continue
            if isinstance(length, int):
                return length
        return None

    def _told(self, batch: Sequence[tuple[dict[str, Any], str, str]], asked: Sequence[Trial]) -> list[Told]:
        told = []
        for trial, (_, _, run_id) in zip(asked, batch, strict=False):
            run = self.lab.store.run(run_id)
            told.append(Told(trial, waves.score(run) if run else None, str(run.outcome) if run else "lost"))
        return told

    # results

    def _points(self, budget_s: float) -> dict[tuple[Any, float], list[Run]]:
        found: dict[tuple[Any, float], list[Run]] = {}
        for batch in self.batches:
            for point, _, run_id in batch:
                run = self.lab.store.run(run_id)
                if run is not None and run.budget_s == budget_s and waves.score(run) is not None:
                    found.setdefault((point[BATCH], point[RATE]), []).append(run)
        return found

    def best(self) -> Run | None:
        """A run of the best point at the short budget, by the mean of its runs."""
        points = self._points(self.plan.budget_s)
        means = {p: statistics.mean(float(waves.score(r) or 0) for r in runs) for p, runs in points.items()}
        return points[min(means, key=lambda p: means[p])][0] if means else None

    def _point(self, run: Run) -> dict[str, Any]:
        return next(dict(point) for batch in self.batches for point, _, i in batch if i == run.id)

    def table(self) -> list[dict[str, Any]]:
        """Report 1's table: each step that improved on the one before, then the longer budgets."""
        rows: list[dict[str, Any]] = []
        policy = self.lab.policy()
        for budget in (self.plan.budget_s, *self.plan.long_budgets_s):
            points = self._points(budget)
            floor = noise.pooled([[float(waves.score(r) or 0) for r in runs] for runs in points.values()])
            base = points.get((None, 1.0))
            for (batch, rate), runs in sorted(
                points.items(), key=lambda p: statistics.mean(float(waves.score(r) or 0) for r in p[1]), reverse=True
            ):
                values = [float(waves.score(r) or 0) for r in runs]
                gained = noise.gain(values, [float(waves.score(r) or 0) for r in base], floor) if base and runs is not base else None
                rows.append(
                    {
                        "budget_s": budget,
                        "batch": batch,
                        "rate": rate,
                        "val_bpb": statistics.mean(values),
                        "runs": len(runs),
                        "id": runs[0].id,
                        "gain": gained.value if gained else None,
                        "gain_se": gained.se if gained else None,
                        "badge": gained.badge if gained else "baseline",
                        "mfu_percent": mfu_percent(runs[0], policy),
                        "tokens_m": runs[0].tokens_m,
                        "num_steps": runs[0].num_steps,
                    }
                )
        return rows
