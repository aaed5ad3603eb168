"""From a request to rows: which text a run executes, whether policy allows it, whether it exists already.

Called by verbs inside one transaction; nothing here asks a host or starts anything. A source is checked and stored before its row is
written.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import patching, tallies
from runner.errors import BadValue, Duplicate, Refused, UnknownName
from runner.lab import Lab
from runner.materialise import budgeted
from runner.policy import Limits, TrainerPolicy
from runner.records import Json, Outcome, Phase, Purpose, Run, Submission, WaveRequest
from runner.research import statics
from runner.scheduler import matches_type
from runner.script import Script, read_script
from runner.text import one_line, plural
from runner.textfile import read_text

MAX_SOURCE_BYTES = 2 << 20
MAX_WAVE_RUNS = 512
MAX_SEEDS = 64
SEED_NAME = "SEED"
# What a run with the same effective source must have come to for a new one to be its duplicate: anything that told something
# about the source.
TELLING = (Outcome.COMPLETED, Outcome.DIVERGED, Outcome.NO_RESULT, Outcome.PRUNED)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked source, ready to become one row or several."""

    script: Script
    sha: str
    effective_sha: str
    constants: Json
    overrides: Json
    base_run: str | None
    name: str
    seed: int | None = None

    @property
    def text(self) -> str:
        """The exact text that runs."""
        return self.script.text


def trainer_text(trainer: TrainerPolicy, name: str | None = None) -> str:
    """The text of an editable file of the trainer folder (default: its source).

    Raised: Refused for a file outside the editable set, BadValue for one that cannot be read.
    """
    wanted = name or trainer.source
    path = (trainer.folder / wanted).resolve()
    allowed = {(trainer.folder / n).resolve(): n for n in {trainer.source, *trainer.editable}}
    if path not in allowed:
        names = ", ".join(sorted(set(allowed.values())))
        raise Refused(f"{wanted} is not a file that may be edited in {trainer.folder}.", next_step=f"Editable: {names}.")
    try:
        return read_text(path, "The training script")
    except FileNotFoundError:
        raise BadValue(
            f"The training script {path} does not exist.", next_step="Point [trainer] folder in hosts.toml at your trainer."
        ) from None


def known_run(lab: Lab, run_id: str) -> Run:
    """The run of that id. Raised: UnknownName with the nearest ids."""
    run = lab.store.run(run_id)
    if run is None:
        recent = [str(row[0]) for row in lab.store.tally("id", "1 ORDER BY seq DESC LIMIT 500")]
        padded = f"r{int(run_id[1:]):04d}" if run_id[:1] in "rR" and run_id[1:].isdigit() else ""
        if padded in recent:
            raise UnknownName("run", run_id, [padded])
        raise UnknownName("run", run_id, recent)
    return run


@dataclass(frozen=True, slots=True)
class Origin:
    """The script a request starts from, before its overrides."""

    script: Script
    base_run: str | None
    name: str


def prepare(lab: Lab, sub: Submission) -> Prepared:
    """Resolve what to run and apply the overrides; every error is raised before anything is written."""
    return varied(lab, origin(lab, sub), sub.overrides)


def origin(lab: Lab, sub: Submission) -> Origin:
    """Resolve which script a request names. Raised: BadValue, UnknownName, Refused."""
    given = [n for n in ("source", "path") if getattr(sub, n) is not None]
    if len(given) > 1 or (given and (sub.diff is not None or sub.base is not None)):
        raise BadValue(
            "Say what to run in one way: source, path, or base with an optional diff and overrides.", next_step="Leave the others out."
        )
    if sub.path == "":
        raise BadValue("The path is empty.", next_step="Name an editable file of the trainer folder, or leave the path out.")
    trainer = lab.policy().trainer
    base = known_run(lab, sub.base) if sub.base is not None else None
    if sub.source is not None:
        text = sub.source
    elif base is not None:
        text = lab.source_text(base.source_sha)
    else:
        text = trainer_text(trainer, sub.path)
    name = sub.path or trainer.source
    if sub.diff is not None:
        for other in patching.named_files(sub.diff):
            if other == "/dev/null" or (Path(other).suffix and Path(other).name != Path(name).name):
                raise Refused(f"The diff is of {other}, and a run changes {name} alone.", next_step=f"Send a diff of {name}.")
        text = patching.apply_diff(text, sub.diff)
    if len(text.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
        raise BadValue(f"The source is larger than {MAX_SOURCE_BYTES >> 20} MiB.", next_step="Keep data out of the training script.")
    if "\x00" in text:
        raise BadValue("The source holds a NUL byte.", next_step="Send the script's text.")
    script = read_script(text, name)
    if not script.does_something:
        raise BadValue(f"{name} holds no statement.", next_step="Send a whole training script.")
    return Origin(script, base.id if base else None, name)


def varied(lab: Lab, origin: Origin, overrides: Json) -> Prepared:
    """A script with its constants overridden. Raised: UnknownName, BadValue."""
    _check_not_budget(lab.policy().trainer, origin, overrides)
    script = origin.script.override(overrides)
    mistake = statics.mistake(script, lab.policy().trainer)
    if mistake:
        raise BadValue(f"{origin.name}: {mistake}", next_step="Nothing was queued.")
    return Prepared(
        script=script,
        sha=script.sha,
        effective_sha=statics.one_model(script, lab.policy().trainer).effective_sha,
        constants=script.constants,
        overrides=overrides,
        base_run=origin.base_run,
        name=origin.name,
        seed=script.seed,
    )


def _check_not_budget(trainer: TrainerPolicy, origin: Origin, overrides: Json) -> None:
    """Refuse an override of the constant that every run gets its budget through: it would be overwritten, and tell nothing."""
    name, _, constant = (trainer.budget or "").partition(":")
    if name == trainer.source and constant in overrides and constant in origin.script.constants:
        raise BadValue(
            f"{constant} is the time budget: each run gets its own written there, so an override of it changes nothing.",
            next_step="Ask for budget_s (--budget) instead.",
        )


def with_seed(prepared: Prepared, seed: int) -> Prepared:
    """The same source at another seed, as a constant or in its `manual_seed(…)`; the very same when it has neither (a plain repeat)."""
    script = prepared.script.reseeded(seed)
    named = {SEED_NAME: seed} if SEED_NAME in prepared.constants else {}
    return dataclasses.replace(
        prepared,
        script=script,
        sha=script.sha,
        constants={**prepared.constants, **named},
        overrides={**prepared.overrides, **named},
        seed=script.seed,
    )


def checked_budget(limits: Limits, budget_s: float | None) -> float:
    """The time budget in seconds (default: the policy's). Raised: BadValue outside the policy's range."""
    if budget_s is None:
        return limits.budget_s
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not math.isfinite(budget_s):
        raise BadValue(
            f"The budget is {budget_s!r}; it must be a number of seconds.",
            next_step=f"Allowed: {limits.min_budget_s:g} to {limits.max_budget_s:g}.",
        )
    if not limits.min_budget_s <= budget_s <= limits.max_budget_s:
        raise BadValue(
            f"A budget of {budget_s:g} s is outside what the policy allows.",
            next_step=f"Allowed: {limits.min_budget_s:g} to {limits.max_budget_s:g} s ([policy] min_budget_s, max_budget_s in hosts.toml).",
        )
    return float(budget_s)


def check_trainer(lab: Lab, prepared: Prepared, budget_s: float) -> None:
    """Refuse what every run would fail on: a budget that cannot be written where hosts.toml says it lives."""
    trainer = lab.policy().trainer
    if trainer.budget is None:
        return
    name, _, constant = trainer.budget.partition(":")
    if name != trainer.source:
        budgeted(trainer.budget, budget_s, trainer.folder)
    elif constant not in prepared.constants:
        raise BadValue(f"The script has no constant {constant}, where hosts.toml says the time budget lives.", next_step="Keep it.")


def check_place(lab: Lab, gpu_type: str | None, host: str | None) -> list[str]:
    """Check a wish for a GPU type or host; notes say when nothing seen so far meets it. Raised: UnknownName for an unknown host."""
    if host is not None and lab.policy().host(host) is None:
        raise UnknownName("host", host, [h.name for h in lab.policy().hosts], where="hosts.toml")
    if gpu_type is None:
        return []
    names = {g.name for g in lab.store.gpus()}
    if names and not any(matches_type(gpu_type, n) for n in names):
        wanted, seen = one_line(repr(gpu_type), 60), ", ".join(sorted(names))
        return [f"No GPU seen so far has {wanted} in its name (seen: {seen}); the run waits until one appears."]
    return []


def check_places(lab: Lab, gpu_type: str | None, host: str | None) -> list[str]:
    """As `check_place`, for the runs of a wave: a note, too, where several types of GPU may take them, which are not compared."""
    notes = check_place(lab, gpu_type, host)
    here = [g.name for g in lab.store.gpus() if host in (None, g.host)]
    names = sorted({name for name in here if gpu_type is None or matches_type(gpu_type, name)})
    if len(names) < 2:
        return notes
    told = f"They may go to {len(names)} types ({', '.join(names)}), and what ran on different types is not compared."
    return [*notes, f"{told} A GPU type (gpu_type, --gpu) keeps them on one."]


def check_limits(lab: Lab, agent: str, new_runs: int, budget_s: float) -> None:
    """Refuse what would pass a limit of the policy, in words that say which and how much is left."""
    limits, store = lab.policy().limits, lab.store
    over, mine = tallies.ended(lab), 0 if limits.max_runs_per_agent is None else store.count_runs("agent = ?", (agent,))
    waiting, promised_s, live = store.tally("sum(phase IN ('queued', 'proposed')), total(budget_s), count(*)", "phase != 'ended'")[0]
    total, used_s = over.count + live, over.wall_s + promised_s
    where = "in hosts.toml, [policy]"
    for key, used, limit in (
        ("max_runs", total, limits.max_runs),
        ("max_runs_per_agent", mine, limits.max_runs_per_agent),
        ("max_queue", waiting or 0, limits.max_queue),
    ):
        if limit is not None and used + new_runs > limit:
            raise Refused(
                f"{new_runs} more would pass {key} = {limit}: {used} used, {max(limit - used, 0)} left.",
                next_step=f"Submit fewer, or ask the human to raise {key} {where}.",
            )
    hours = used_s / 3600
    if limits.max_gpu_hours is not None and hours + new_runs * budget_s / 3600 > limits.max_gpu_hours:
        raise Refused(
            f"{plural(new_runs, 'run')} of {budget_s:g} s would pass max_gpu_hours = {limits.max_gpu_hours:g}: "
            f"{hours:.2f} used or promised.",
            next_step=f"Submit less, or ask the human to raise max_gpu_hours {where}.",
        )
    started = store.setting("night_started_at")
    if limits.max_wall_hours is not None and started is not None and (time.time() - started) / 3600 > limits.max_wall_hours:
        raise Refused(
            f"The night is over: max_wall_hours = {limits.max_wall_hours:g} have passed since its first run.",
            next_step=f"A human can start another with `overnight policy new-night`, or raise max_wall_hours {where}.",
        )


def find_duplicate(lab: Lab, prepared: Prepared, budget_s: float, gpu_type: str | None) -> Run | None:
    """An earlier run that would tell the same: equal effective source and budget, waiting, live, or ended with something to tell."""
    marks = ", ".join("?" * len(TELLING))
    found = lab.store.runs(
        f"effective_sha = ? AND budget_s = ? AND purpose != 'verify' AND wanted = 'run' AND (outcome IS NULL OR outcome IN ({marks}))",
        (prepared.effective_sha, budget_s, *map(str, TELLING)),
        order="seq",
    )
    return next((run for run in found if gpu_type is None or _on_type(run, gpu_type)), None)


def _on_type(run: Run, gpu_type: str) -> bool:
    """Whether a run ran on such a GPU, or waits for one by that very name."""
    return matches_type(gpu_type, run.gpu_name) if run.gpu_name else run.gpu_type == gpu_type


def refuse_duplicate(lab: Lab, prepared: Prepared, budget_s: float, gpu_type: str | None) -> None:
    """Raised: Duplicate, naming the earlier run, when this experiment would spend a slot on what is known."""
    twin = find_duplicate(lab, prepared, budget_s, gpu_type)
    if twin is None:
        return
    told = f"val_bpb {twin.val_bpb:.6f}" if twin.val_bpb is not None else (twin.outcome or twin.phase)
    what = "differs only by its seed from" if prepared.sha != twin.source_sha and prepared.seed != twin.seed else "is in effect the same as"
    raise Duplicate(
        f"This source {what} {twin.id} ({told}).",
        twin.id,
        next_step=f"To measure noise, ask for a repeat of {twin.id}; else change something that matters.",
    )


def refuse_promoted(lab: Lab, run: Run, budget_s: float, gpu_type: str | None) -> None:
    """Raised: Duplicate, naming the earlier run, when a run was promoted to this GPU type and budget before and that told something."""
    marks = ", ".join("?" * len(TELLING))
    there = lab.store.runs(
        f"promoted_from = ? AND budget_s = ? AND wanted = 'run' AND (outcome IS NULL OR outcome IN ({marks}))",
        (run.id, budget_s, *map(str, TELLING)),
        order="seq",
    )
    wanted = gpu_type or run.gpu_type
    twin = next((p for p in there if _same_type(wanted, p)), None)
    if twin is not None:
        told = f"val_bpb {twin.val_bpb:.6f}" if twin.val_bpb is not None else (twin.outcome or twin.phase)
        raise Duplicate(f"{run.id} was promoted there already: {twin.id} ({told}).", twin.id, next_step=f"Ask for a repeat of {twin.id}.")


def _same_type(wanted: str | None, run: Run) -> bool:
    """Whether a run went, or will go, to the GPU type that another asks for; words may be fewer or in another order."""
    if wanted is None or run.gpu_type is None:
        return wanted == run.gpu_type
    known = (run.gpu_name, run.gpu_type)
    return any(name is not None and matches_type(wanted, name) for name in known) or matches_type(run.gpu_type, wanted)


def wave_cells(request: WaveRequest) -> list[Json]:
    """The overrides of each cell: the full grid in the order of its factors, or the listed cells."""
    if bool(request.factors) == bool(request.cells) and (request.factors or request.repeats < 2):
        raise BadValue(
            "A wave is a grid of factors, a list of cells, or repeats of one source.",
            next_step="Give factors, or cells, or repeats of 2 and more.",
        )
    for name, values in request.factors.items():
        if name in request.overrides:
            raise BadValue(
                f"{name} is both a factor and an override of all cells.", next_step="Leave it out of the overrides, or out of the factors."
            )
        if not isinstance(values, (list, tuple)) or not values:
            raise BadValue(f"Factor {name} has no values.", next_step=f'Give a list, for example {{"{name}": [1, 2]}}.')
        if len({repr(v) for v in values}) != len(values):
            raise BadValue(f"Factor {name} names a value twice.", next_step="Use repeats to run a cell several times.")
    if not 1 <= request.repeats <= MAX_SEEDS:
        raise BadValue(f"repeats is {request.repeats}.", next_step=f"Allowed: 1 to {MAX_SEEDS}.")
    if request.factors:
        count = math.prod(len(v) for v in request.factors.values())
        if count * request.repeats > MAX_WAVE_RUNS:
            raise BadValue(
                f"The wave has {count * request.repeats} runs; at most {MAX_WAVE_RUNS} fit in one.",
                next_step="Leave out a factor or some values.",
            )
        return [dict(zip(request.factors, values, strict=True)) for values in itertools.product(*request.factors.values())]
    cells = [dict(cell) for cell in request.cells] or [{}]
    if len(cells) * request.repeats > MAX_WAVE_RUNS:
        raise BadValue(f"The wave has {len(cells) * request.repeats} runs; at most {MAX_WAVE_RUNS} fit in one.", next_step="Split it.")
    return cells


def insert(lab: Lab, prepared: Prepared, *, agent: str, purpose: str, budget_s: float, approval: str, **columns: Any) -> str:
    """Store the source and write the row, wanted columns only; returns the run id. The caller has the source synced."""
    path = Path(prepared.name)
    sha = lab.keep_source(prepared.text, synced=False)
    lab.store.add_source(sha, len(prepared.text.encode()), path.name, prepared.effective_sha)
    asked = approval == "asked"
    return lab.store.insert_run(
        created_at=time.time(),
        purpose=str(purpose),
        source_sha=sha,
        effective_sha=prepared.effective_sha,
        overrides=prepared.overrides,
        constants=prepared.constants,
        base_run=prepared.base_run,
        budget_s=budget_s,
        agent=agent,
        seed=prepared.seed,
        approval=approval,
        phase=Phase.PROPOSED if asked else Phase.QUEUED,
        **columns,
    )


def trainer_effective_sha(lab: Lab) -> str | None:
    """The effective hash of the trainer's own script, remembered for each text; None when it cannot be read."""
    try:
        trainer = lab.policy().trainer
        return statics.one_model(read_script(trainer_text(trainer), trainer.source), trainer).effective_sha
    except (BadValue, Refused):
        return None


def purpose_of(lab: Lab, prepared: Prepared, budget_s: float, asked: str, own_sha: str | None) -> str:
    """`baseline` for the trainer's own script (`own_sha`: its effective hash) when this budget has none yet, else what was asked."""
    if asked != Purpose.EXPERIMENT or prepared.base_run is not None or own_sha != prepared.effective_sha:
        return asked
    has_one = lab.store.count_runs(
        "purpose = 'baseline' AND budget_s = ? AND (outcome IS NULL OR outcome = 'completed') AND wanted = 'run'", (budget_s,)
    )
    return asked if has_one else str(Purpose.BASELINE)
