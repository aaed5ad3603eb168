"""The two tools that ask for GPU time: run_experiment and submit_wave. They return in well under a second; the daemon does the rest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from mcp_server.answers import Answer, Table
from mcp_server.calls import Call
from runner import news, queries, scheduler, verbs
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import GpuState, Phase, Submission, Submitted, WaveRequest
from runner.replays import REQUEST_ID_CHARS
from runner.text import one_line

VALUE_SCHEMA = {
    "anyOf": [
        {"type": "number"},
        {"type": "string"},
        {"type": "boolean"},
        {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "string"}]}},
    ]
}
Value = Annotated[bool | int | float | str | list[int | float | str], WithJsonSchema(VALUE_SCHEMA)]
Overrides = Annotated[
    dict[str, Value],
    Field(
        description='Constants of the script to change, e.g. {"MATRIX_LR": 0.05, "DEPTH": 10}. Names must exist in the script.',
        max_length=64,
    ),
]
Base = Annotated[
    str | None,
    Field(description="Run id whose source to start from. Default: the trainer's own script (the baseline).", min_length=1, max_length=20),
]
Path = Annotated[
    str | None,
    Field(description="An editable file in the trainer folder, read now; later edits of it change nothing.", min_length=1, max_length=400),
]
Source = Annotated[str | None, Field(description="The whole text of the training script.", max_length=1_000_000)]
Hypothesis = Annotated[str | None, Field(description="What you expect and why, in one sentence; shown beside the result.", max_length=1000)]
GpuType = Annotated[
    str | None, Field(description="Words of a GPU name from list_gpus, e.g. 'H200'. Default: any.", min_length=1, max_length=80)
]
Host = Annotated[str | None, Field(description="Only this host.", min_length=1, max_length=80)]
Budget = Annotated[
    float | None,
    Field(description="Training seconds per run. Default: the policy's. Results are ranked only against equal budgets.", gt=0, le=604_800),
]
Priority = Annotated[float, Field(description="Higher starts first.", ge=-100, le=100)]
RequestId = Annotated[
    str | None,
    Field(
        description="Your key for this request, without spaces: the same key again answers the same and does nothing new. Other agents' "
        "keys are their own.",
        min_length=1,
        max_length=REQUEST_ID_CHARS,
        pattern="^[!-~]+$",
    ),
]
FactorValues = Annotated[list[Value], Field(min_length=1, max_length=64)]


def run_experiment(
    call: Call,
    overrides: Overrides | None = None,
    base: Base = None,
    diff: Annotated[str | None, Field(description="Unified diff against base (or against the baseline).", max_length=400_000)] = None,
    path: Path = None,
    source: Source = None,
    hypothesis: Hypothesis = None,
    parent: Annotated[
        str | None, Field(description="Run id the result is compared with. Default: base.", min_length=1, max_length=20)
    ] = None,
    gpu_type: GpuType = None,
    host: Host = None,
    budget_s: Budget = None,
    seeds: Annotated[int, Field(description="Runs of the same source with different seeds.", ge=1, le=32)] = 1,
    priority: Priority = 0,
    purpose: Annotated[
        Literal["experiment", "baseline", "preflight"],
        Field(
            description="A baseline is never pruned and anchors the noise floor. A preflight trains nothing: it measures each GPU model "
            "not measured yet (attention, compile modes, device batch), takes minutes, and runs use what it found."
        ),
    ] = "experiment",
    allow_duplicate: Annotated[bool, Field(description="Run it although an equal experiment exists.")] = False,
    request_id: RequestId = None,
) -> Answer:
    """Queue one training run (or `seeds` repeats) and return its id at once. Use it for a single idea, a code change or a baseline; use
    submit_wave for two or more settings of constants, because a grid shows interactions and keeps all GPUs busy. Say what to run with
    one of: overrides (constants, cheapest), diff, path, source; base picks the run to start from. With nothing given the baseline
    script runs. A source equal to an earlier run in all that matters is refused with that run's id. Results: wait_for_results."""
    if purpose == "preflight":
        what = {"overrides": overrides, "base": base, "diff": diff, "path": path, "source": source, "parent": parent, "budget_s": budget_s}
        return preflight(call, [name for name, value in what.items() if value is not None], gpu_type, host, request_id)
    wish = Submission(
        source=source,
        path=path,
        diff=diff,
        base=base,
        overrides=dict(overrides or {}),
        budget_s=budget_s,
        hypothesis=hypothesis,
        parent=parent,
        purpose=purpose,
        gpu_type=gpu_type,
        host=host,
        priority=priority,
        seeds=seeds,
        allow_duplicate=allow_duplicate,
        request_id=request_id,
    )
    done = verbs.submit(call.lab, wish, who=call.who)
    return submitted(call, done)


def preflight(call: Call, unfit: list[str], gpu_type: str | None, host: str | None, request_id: str | None) -> Answer:
    """The receipt of a preflight; without a run to wait for, the notes say why."""
    if unfit:
        raise BadValue(f"A preflight takes no {', no '.join(unfit)}.", next_step="Give gpu_type, host and request_id, or none of them.")
    done = verbs.measure(call.lab, who=call.who, gpu_type=gpu_type, host=host, request_id=request_id)
    if done.run_ids:
        return submitted(call, done)
    return Answer(facts={"phase": "nothing queued", "outlook": "nothing to measure"}, notes=list(done.notes))


def submit_wave(
    call: Call,
    factors: Annotated[
        dict[str, FactorValues] | None,
        Field(
            description='A full grid: constant to values, e.g. {"DEPTH": [6, 8, 10], "MATRIX_LR": [0.03, 0.04]} is 6 runs.', max_length=8
        ),
    ] = None,
    cells: Annotated[
        list[dict[str, Value]] | None, Field(description="Or a plain list of overrides, one run each.", max_length=256)
    ] = None,
    base: Base = None,
    path: Path = None,
    source: Source = None,
    overrides: Overrides | None = None,
    repeats: Annotated[int, Field(description="Runs of each cell with different seeds.", ge=1, le=16)] = 1,
    title: Annotated[str | None, Field(description="A few words for the screen.", max_length=120)] = None,
    hypothesis: Hypothesis = None,
    gpu_type: GpuType = None,
    host: Host = None,
    budget_s: Budget = None,
    priority: Priority = 0,
    request_id: RequestId = None,
) -> Answer:
    """Queue many runs together: the full grid of factors, or a list of cells. Use it for most work: a factorial wave of 8 to 16 runs
    tells main effects and interactions in the time of one run on as many GPUs. overrides apply to every cell. Cells that are in effect
    the same as another or as an earlier run are left out and named. Then wait_for_results(wave=...), and analyze_wave for effects with
    error bars."""
    wish = WaveRequest(
        factors={k: list(v) for k, v in (factors or {}).items()},
        cells=[dict(c) for c in cells or []],
        base=base,
        source=source,
        path=path,
        overrides=dict(overrides or {}),
        repeats=repeats,
        budget_s=budget_s,
        title=title,
        hypothesis=hypothesis,
        gpu_type=gpu_type,
        host=host,
        priority=priority,
        request_id=request_id,
    )
    done = verbs.submit_wave(call.lab, wish, who=call.who)
    return submitted(call, done)


def submitted(call: Call, done: Submitted) -> Answer:
    """The receipt of a submission: ids, where they stand, what happens next, and which call to make then."""
    lab = call.lab
    notes = list(done.notes)
    if trouble := call.desk.wake_daemon(lab):
        notes.append(trouble)
    runs = [run for run in (lab.store.run(i) for i in done.run_ids) if run is not None]
    facts: dict[str, Any] = {"id": done.run_ids[0]} if len(done.run_ids) == 1 and done.wave_id is None else {}
    if done.wave_id is not None:
        facts["wave"] = done.wave_id
    facts["phase"] = ", ".join(dict.fromkeys(run.phase for run in runs))
    facts["budget_s"] = runs[0].budget_s if runs else None
    facts["outlook"] = outlook(lab, [run.id for run in runs])
    if done.replay:
        facts["replay"] = "this request_id was answered before; nothing new was started"
    answer = Answer(facts=facts, notes=notes)
    if "id" not in facts:
        # ids say which run is which cell; a list of cells needs no second call to be understood
        names = sorted({k for run in runs for k in (run.cell or {})})
        answer.tables["runs"] = Table(["id", *names], [[run.id, *((run.cell or {}).get(k) for k in names)] for run in runs])
    if done.wave_id is not None:
        answer.next_step = f"wait_for_results(wave='{done.wave_id}')"
    elif done.run_ids:
        answer.next_step = f"wait_for_results(ids={done.run_ids})" if len(done.run_ids) <= 4 else "wait_for_results()"
    return answer


def outlook(lab: Lab, run_ids: list[str]) -> str:
    """What will happen to these runs, in a few words: when the first can start and what stands in the way."""
    waiting = news.queued(lab)
    asked_for = set(run_ids)
    mine = [run for run in waiting if run.id in asked_for]
    if not mine:
        asked = [i for i in run_ids if (run := lab.store.run(i)) is not None and run.phase == Phase.PROPOSED]
        return "waits for a human to approve it" if asked else "already past the queue"
    if lab.store.setting("queue_paused", False):
        return "waits: a human has paused the queue"
    paused = lab.store.setting("paused_agents", [])
    first = mine[0]
    if first.agent in paused:
        return "waits: a human has paused your runs"
    known = queries.gpu_objects(lab)
    gpus = [gpu for gpu in known if suits(first, gpu)]
    if known and not gpus:
        return (
            f"waits: no GPU of this lab is a {one_line(first.gpu_type or 'GPU', 40)}{f' on {first.want_host}' if first.want_host else ''}"
        )
    if gpus and (run := lab.store.run(first.id)) is not None and (why := queries.why_waiting(lab, run)):
        return f"waits: {why}"
    idle = any(gpu["state"] == GpuState.FREE for gpu in gpus)
    placed = starting(waiting, known, paused) if idle else {}
    now = sum(run.id in placed for run in mine)
    if now == len(mine):
        return "starts at once: a GPU is idle"
    if now:
        return f"{now} of {len(mine)} start at once, the others as GPUs become free"
    rivals = [run for run in waiting[: waiting.index(first)] if run.agent not in paused]
    ahead = sum(run.id not in placed and (not gpus or any(suits(run, gpu) for gpu in gpus)) for run in rivals)
    free = [gpu["free_in_s"] for gpu in gpus if gpu["free_in_s"] is not None]
    free += [run.budget_s for run in rivals if placed.get(run.id) in {gpu["uuid"] for gpu in gpus}]
    if len(free) > ahead:
        return f"number {ahead + 1} in the queue; a GPU for it is free in about {sorted(free)[ahead]:.0f} s"
    return f"number {ahead + 1} in the queue"


def starting(waiting: list[news.Waiting], gpus: list[dict[str, Any]], paused: list[str]) -> dict[str, str]:
    """The waiting runs that get an idle GPU now, as the scheduler would give them out: run id to the GPU's UUID."""
    hold = {agent: "paused" for agent in paused}
    wishes = [scheduler.Wish(run.id, (n, 0), run.gpu_type, run.want_host, hold.get(run.agent)) for n, run in enumerate(waiting)]
    slots = [scheduler.SlotView(gpu["host"], gpu["uuid"], gpu["name"], usable=gpu["state"] == GpuState.FREE) for gpu in gpus]
    return {p.run_id: p.uuid for p in scheduler.place(wishes, slots, handed_ahead=0).placements}


def suits(run: news.Waiting, gpu: dict[str, Any]) -> bool:
    """Whether a run's wishes for a GPU type and host allow this GPU."""
    return run.want_host in (None, gpu["host"]) and (run.gpu_type is None or scheduler.matches_type(run.gpu_type, gpu["name"]))
