"""Prompts that start a piece of work, and completions for what has to be typed in them."""

from __future__ import annotations

import re
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, Completion, CompletionArgument, CompletionContext, PromptReference, ResourceTemplateReference
from pydantic import Field

from mcp_server.desk import Desk
from mcp_server.resources import program_text
from runner import news, sources
from runner.errors import BadValue, OvernightError, UnknownName
from runner.lab import Lab
from runner.submitting import MAX_WAVE_RUNS, checked_budget, known_run, trainer_text
from runner.text import one_line

PROMPT_ARGUMENTS = {
    "start_research": ["goal"],
    "plan_wave": ["goal", "runs", "base", "constants"],
    "review_night": [],
    "tune_training": ["budget"],
}
PROMPT_NAMES = tuple(PROMPT_ARGUMENTS)
BEST_KEPT = "the best kept run, else the baseline"
MOST = 100  # the protocol's limit for one completion answer

ELSEWHERE = (
    "The program below was written for one GPU and a terminal. In this lab, wherever it starts the script, use run_experiment or "
    "submit_wave; wherever it reads the log or the result, use wait_for_results, get_run and read_log; wherever it keeps or resets a "
    "commit or writes results.tsv, use decide. Do not start the training script yourself: the lab runs it on every GPU it has."
)
PLAN = """Plan the next wave for this lab. Goal: {goal}

1. Read leaderboard and list_runs(limit=50): what was tried, what won, what the noise floor is. Read analyze_wave of the last
   wave.
2. List idle GPUs by type (list_gpus). One wave should fill the GPUs of one type, and have at most {runs} runs.
3. Choose two or three factors that may interact{constants}, each with two to four values around the best known; state what you
   expect.
4. Submit it with submit_wave from base {base}, with the hypothesis and a request_id. Name the result that would change your mind.
"""

REVIEW = """Review this night of research for the human who wakes up now.

Use leaderboard (each class and budget), list_runs(outcome="crashed"), analyze_wave of each wave that mattered, and get_run of the
best three runs. Report: the best verified result and its gain over the baseline against the noise; what made the difference, in
order of effect; what did not help; what failed and why; GPU hours spent and GPUs that stood idle; three next experiments, with
reasons. Do not claim a gain that is within noise or only claimed.
"""


TUNE = """Tune total batch, learning rate and model size of this lab's script. Ordinary runs, at a budget of {budget} s; `overnight
tune` does the same.

0. run_experiment(purpose="preflight"), and wait for it: attention, compile mode and device batch are measured once, not searched.
1. Two or more repeats of the baseline at this budget: the noise. Gains within it count for nothing.
2. A wave of one change a run: TOTAL_BATCH_SIZE halved and doubled from the script's own (DEVICE_BATCH_SIZE must divide it), every
   learning rate times 0.5 and times 2, DEPTH and ASPECT_RATIO up and down. Read analyze_wave.
3. Move all of them to where the results so far say it is lowest. Around that point, waves that change all at once by half a step, each
   run with its mirror image; move again, until a wave brings nothing clear. Watch tokens per second: beyond a device batch, speed falls
   off a cliff.
4. Run the point and the baseline, two seeds each, at a budget four times as long: decide(action="promote", budget_s=...). Only now
   lengthen.
5. Report a table: budget, what was changed, val_bpb, gain with its error, MFU, tokens, steps.
"""


def add_prompts(server: MCPServer[Desk], desk: Desk) -> None:
    """Register prompts and completions."""

    @server.prompt(title="Start the research", description="The lab's research program, and the first steps.")
    async def start_research(goal: Annotated[str, Field(description="What to improve. Default: the program's own goal.")] = "") -> str:
        text = await desk.with_lab(program_text)
        if "wait_for_results" not in text:
            text = f"{ELSEWHERE}\n\n{text}"
        goal_line = f"The goal today: {goal}\n\n" if goal else ""
        begin = "Begin now: call list_gpus and leaderboard, then follow the program. Do not stop to ask; a human may interrupt."
        return f"{goal_line}{text}\n\n{begin}"

    @server.prompt(title="Plan a wave", description="Turn a goal into a factorial wave that fills the GPUs.")
    async def plan_wave(
        goal: Annotated[str, Field(description="What to learn.")] = "a lower val_bpb",
        runs: Annotated[str, Field(description="Runs at most.")] = "16",
        base: Annotated[str, Field(description="Run id to start from. Default: the best kept run.")] = "",
        constants: Annotated[str, Field(description="Constants to vary, with commas between them.")] = "",
    ) -> str:
        most = whole_number("runs", runs, MAX_WAVE_RUNS)
        named = [name.strip() for name in constants.split(",") if name.strip()]
        await desk.with_lab(lambda lab: check_plan(lab, base, named))
        among = f" (among them {', '.join(named)})" if named else ""
        return PLAN.format(goal=goal, runs=most, base=base or BEST_KEPT, constants=among)

    @server.prompt(title="Review the night", description="An honest report of what was found.")
    async def review_night() -> str:
        return REVIEW

    @server.prompt(title="Tune the training", description="Total batch and learning rate at a short budget, then a longer one.")
    async def tune_training(budget: Annotated[str, Field(description="Short budget in seconds. Default: the policy's.")] = "") -> str:
        seconds = await desk.with_lab(lambda lab: budget_of(lab, budget))
        return TUNE.format(budget=f"{seconds:g}")

    async def complete(
        ref: PromptReference | ResourceTemplateReference, argument: CompletionArgument, context: CompletionContext | None
    ) -> Completion | None:
        return await desk.with_lab(lambda lab: candidates(lab, argument.name, argument.value))

    server.completion()(complete)  # type: ignore[no-untyped-call]  # the SDK's decorator carries no types


def whole_number(name: str, text: str, most: int) -> int:
    """A prompt's argument as a number: prompts take text alone. Raised: MCPError."""
    if not re.fullmatch(r"[0-9]{1,6}", text.strip(), re.ASCII) or not 1 <= int(text) <= most:
        raise MCPError(INVALID_PARAMS, f"{name} must be a whole number from 1 to {most}; got {one_line(repr(text), 40)}.")
    return int(text)


def check_plan(lab: Lab, base: str, constants: list[str]) -> None:
    """Refuse a plan that starts from no run, or varies what the script does not have. Raised: MCPError with the nearest names."""
    try:
        if base:
            known_run(lab, base)
        known = constant_names(lab)
        for name in constants:
            if known and not base and name not in known:
                raise UnknownName("constant", one_line(name, 60), known, where="the script")
    except UnknownName as error:
        raise MCPError(INVALID_PARAMS, str(error)) from error


def budget_of(lab: Lab, text: str) -> float:
    """A prompt's budget in seconds, the policy's when none is given. Raised: MCPError."""
    try:
        return checked_budget(lab.policy().limits, float(text) if text.strip() else None)
    except ValueError:
        raise MCPError(INVALID_PARAMS, f"budget must be a number of seconds; got {one_line(repr(text), 40)}.") from None
    except BadValue as error:
        raise MCPError(INVALID_PARAMS, str(error)) from error


def candidates(lab: Lab, name: str, value: str) -> Completion | None:
    """Values of an argument that begin with what was typed: run ids newest first, wave ids, constants of the baseline script."""
    if name in ("run_id", "base"):
        known = news.run_ids(lab, value)
    elif name == "wave_id":
        known = news.wave_ids(lab, value)
    elif name == "constants":
        done, _, last = value.rpartition(",")
        head = f"{done}," if done else ""
        known = [f"{head}{c}" for c in constant_names(lab) if c.startswith(last.strip().upper())]
    else:
        return None
    return Completion(values=known[:MOST], total=len(known), has_more=len(known) > MOST)


def constant_names(lab: Lab) -> list[str]:
    """Constants of the trainer's own script; none when it cannot be read."""
    try:
        return list(sources.constants(trainer_text(lab.policy().trainer)))
    except OvernightError:
        return []
