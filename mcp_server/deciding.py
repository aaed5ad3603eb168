"""The tools that act on runs: decide (keep, discard, promote, repeat) and cancel. Each leaves an audit event with the caller's name and
reason."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mcp_server.answers import Answer, Table
from mcp_server.calls import Call
from mcp_server.reads import RunId
from mcp_server.submitting import GpuType, RequestId, submitted
from runner import news, queries, replays, verbs
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Phase, Run
from runner.research.lineage import left
from runner.submitting import known_run

Why = Annotated[str | None, Field(description="The reason, in a sentence; it is shown to the human.", max_length=1000)]


def decide(
    call: Call,
    id: RunId,
    action: Annotated[
        Literal["keep", "discard", "promote", "repeat"],
        Field(description="keep, discard: the verdict. promote, repeat: new runs of its source."),
    ],
    why: Why = None,
    gpu_type: GpuType = None,
    budget_s: Annotated[float | None, Field(description="For promote: a longer training budget in seconds.", gt=0, le=604_800)] = None,
    seeds: Annotated[int, Field(description="For promote and repeat: how many runs, each with another seed.", ge=1, le=32)] = 1,
    override: Annotated[bool, Field(description="Keep although the gain is within noise or unverified; say why.")] = False,
    request_id: RequestId = None,
) -> Answer:
    """Decide about a finished run. keep: build on it (needs a gain beyond noise, or override with a reason); discard: leave it behind;
    both need `why`. repeat: run the same source again with other seeds, to learn the noise. promote: run it on another GPU type
    (gpu_type) or with a longer budget (budget_s), the two axes on which a winner is confirmed."""
    lab = call.lab
    run = known_run(lab, id)
    if action in ("keep", "discard"):
        if not (why or "").strip():
            raise BadValue(f"decide(action='{action}') needs why.", next_step="Say in one sentence what the evidence is.")
        if gpu_type is not None or budget_s is not None or seeds != 1:
            raise BadValue(
                f"gpu_type, budget_s and seeds do not belong to action='{action}'.",
                next_step="Use action='promote' or 'repeat' for new runs.",
            )
        replay = replays.answered(lab, call.who, request_id)
        if request_id is not None or (run.verdict, run.verdict_by, run.verdict_why) != (action, call.who, why):
            run = verbs.decide(lab, id, action, who=call.who, why=why, override=override, request_id=request_id)
        facts = {"id": run.id, "verdict": run.verdict, "why": run.verdict_why, "val_bpb": run.val_bpb}
        return Answer(facts=facts, notes=[*([verbs.ANSWERED] if replay else []), *left(lab, run)])
    if action == "repeat":
        if gpu_type is not None or budget_s is not None:
            raise BadValue(
                "A repeat runs in the same class at the same budget; gpu_type and budget_s belong to action='promote'.",
                next_step="Use action='promote'.",
            )
        return submitted(call, verbs.repeat(lab, id, seeds, who=call.who, why=why, request_id=request_id))
    if gpu_type is None and budget_s is None:
        raise BadValue(
            "promote needs gpu_type or budget_s.", next_step="list_gpus names the types; or give a budget_s longer than the run's."
        )
    return submitted(
        call, verbs.promote(lab, id, who=call.who, gpu_type=gpu_type, budget_s=budget_s, seeds=seeds, why=why, request_id=request_id)
    )


def cancel(
    call: Call,
    ids: Annotated[list[str] | None, Field(description="Run ids.", max_length=256)] = None,
    wave: Annotated[str | None, Field(description="Or every unfinished run of this wave.", max_length=20)] = None,
    why: Why = None,
    force: Annotated[bool, Field(description="Kill at once, without the grace to end cleanly.")] = False,
    request_id: RequestId = None,
) -> Answer:
    """Stop runs that are queued or going; a finished run is left as it is. Use it when a result can no longer matter, so that its GPU
    serves the next idea. What a stopped run had measured stays readable. Repeating the call is harmless."""
    lab = call.lab
    if bool(ids) == bool(wave):
        raise BadValue("cancel needs ids or wave, one of them.", next_step="list_runs(phase='running') shows what is going.")
    if wave is not None:
        queries.known_wave(lab, wave)
        targets = news.wave_runs(lab, wave)
    else:
        targets = [known_run(lab, i) for i in dict.fromkeys(ids or [])]
    named = [wave] if wave is not None else [run.id for run in targets]
    notes = verbs.cancel(lab, named, who=call.who, why=why, force=force, request_id=request_id)
    stopped = [run for run in targets if not run.ended]
    if verbs.ANSWERED in notes:
        stopped = []
    if wave is not None:  # what of a wave had ended is no news, unless it is all of it
        notes = [note for note in notes if note == verbs.ANSWERED] or ([] if stopped else ["Every run of this wave has ended already."])
        targets = stopped
    return Answer(
        facts={"asked": len(stopped), "outlook": stopping(lab, stopped, force) if stopped else None},
        tables={"runs": Table(["id", "phase", "outcome"], [[run.id, run.phase, run.outcome] for run in targets])},
        notes=notes,
        next_step="wait_for_results tells each run's end, with its reason." if stopped else "",
    )


def stopping(lab: Lab, runs: list[Run], force: bool) -> str:
    """What happens to runs that were asked to end, in words; it is the daemon that acts, within a second."""
    waiting, away = sum(run.waiting for run in runs), sum(run.phase == Phase.UNREACHABLE for run in runs)
    live = len(runs) - waiting - away
    how = "killed now" if force else f"told to end now, and killed after {lab.policy().limits.grace_s:g} s"
    said = [
        f"{waiting} not started: taken from the queue at once" if waiting else "",
        f"{live} on a GPU: {how}; its GPU is idle once its processes and their memory are gone" if live else "",
        f"{away} on a host out of reach: when it is back" if away else "",
    ]
    return "; ".join(part for part in said if part)
