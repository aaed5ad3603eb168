"""`overnight demo`: the main job on this machine, shown from end to end.

A scripted agent (a real MCP client in a process of its own) talks to the real server over stdio; the real daemon runs what it submits;
this process only watches: with the control room in a terminal, with plain lines without one. `--simulate` does the same on 16 simulated
GPUs of two types, without torch. Everything lies in one folder; an interrupted demo goes on where it was, a finished one starts afresh.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runner import daemonctl, queries
from runner.cli_io import note, say
from runner.cli_watch import print_leaderboard, run_line
from runner.demo_plan import Plan, real_plan, simulated_plan
from runner.errors import OvernightError
from runner.lab import Lab, open_lab
from runner.records import Outcome, Run
from runner.text import ago, bpb, one_line

MARK = "overnight-demo"
SHARED_LOCKS = Path(tempfile.gettempdir()) / "overnight-locks"
PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a demo happens."""

    folder: Path
    plan: Plan

    @property
    def lab_path(self) -> Path:
        """The demo's lab."""
        return self.folder / "lab"

    @property
    def plan_file(self) -> Path:
        """What the agent will do, with the keys of its requests."""
        return self.folder / "plan.json"


def demo(*, simulate: bool, plain: bool, folder: Path | None = None) -> int:
    """Run the demo; returns the exit code: 0 when every run completed, or 1."""
    plan = simulated_plan() if simulate else real_plan(trainer_folder(), gpu=has_gpu())
    stage = Stage(folder.absolute() if folder else demo_folder(plan.name), plan)
    resumed = prepare(stage)
    say(f"Overnight demo: {plan.story}")
    say(f"  lab     {stage.lab_path}{' (going on where it was)' if resumed else ''}")
    say(f"  trainer {stage.folder / 'trainer' if simulate else plan.trainer}")
    say(f"  takes   about {plan.takes}\n")
    if not plain:
        say("  q       leaves the control room; the results and how to connect an agent are printed then\n")
    keep_locks_here(stage)
    lab = open_lab(stage.lab_path, create=True)
    try:
        daemonctl.ensure_daemon(lab)
        try:
            finished, refused = show(stage, lab, plain=plain)
        except KeyboardInterrupt:
            say_how_to_return(stage)
            raise
        if not finished:
            say_how_to_return(stage)
            return 0
        daemonctl.stop_daemon(lab)
        runs = lab.store.runs("purpose NOT IN ('verify', 'preflight')")  # the daemon may still check the best one
        say("")
        print_boards(lab)
        if not simulate and (busy := busy_words(os.getloadavg()[1], os.cpu_count() or 1)):
            say(busy)
        say_how_to_connect()
        return 1 if refused or any(run.outcome not in plan.good_ends for run in runs) else 0
    finally:
        lab.close()


def trainer_folder() -> Path:
    """The shipped trainer. Raised: OvernightError when torch is missing."""
    found = importlib.util.find_spec("trainer")
    folder = Path(next(iter(found.submodule_search_locations or []), "")) if found else None
    if folder is None or not (folder / "train.py").is_file():
        raise OvernightError("The shipped trainer is not installed.", next_step="Run the demo from a checkout: make demo.")
    if importlib.util.find_spec("torch") is None:
        raise OvernightError(
            "The trainer needs PyTorch, which is not installed.",
            next_step="`make demo` installs it; `overnight demo --simulate` needs none.",
        )
    return folder


def has_gpu() -> bool:
    """Whether an NVIDIA driver is loaded here."""
    return Path("/dev/nvidiactl").exists()


def demo_folder(name: str) -> Path:
    """`build/NAME` of the checkout, or `overnight-NAME` here when installed without one."""
    checkout = Path(__file__).resolve().parents[1]
    return checkout / "build" / name if (checkout / "Makefile").is_file() else Path.cwd() / f"overnight-{name}"


def prepare(stage: Stage) -> bool:
    """Lay out the demo's folder; returns whether an unfinished demo goes on."""
    empty = stage.folder.is_dir() and not any(stage.folder.iterdir())
    if stage.folder.exists() and not empty:
        if not (stage.folder / MARK).is_file():
            raise OvernightError(
                f"{stage.folder} is not a demo's folder, and not empty.", next_step="Move it away, or give --folder another name."
            )
        if unfinished(stage):
            return True
        clear(stage)
    stage.folder.mkdir(parents=True, exist_ok=True)
    (stage.folder / MARK).write_text("This folder belongs to `overnight demo` and is made anew by it.\n", encoding="utf-8")
    for name, text in stage.plan.files.items():
        path = stage.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    stage.plan_file.write_text(json.dumps(stage.plan.agent, indent=1), encoding="utf-8")
    return False


def unfinished(stage: Stage) -> bool:
    """Whether the last demo in this folder was left before its agent had all results."""
    return stage.plan_file.is_file() and not (stage.folder / "done").exists() and (stage.lab_path / "lab.db").is_file()


def clear(stage: Stage) -> None:
    """Remove the folder of a finished demo; its daemon is stopped first."""
    if (stage.lab_path / "lab.db").is_file():
        try:
            lab = open_lab(stage.lab_path)
        except OvernightError as error:
            note(f"The last demo's lab cannot be opened and is removed: {error.message}")
        else:
            daemonctl.stop_daemon(lab)
            lab.close()
    shutil.rmtree(stage.folder)


def keep_locks_here(stage: Stage) -> None:
    """On a machine without GPUs and without another lab, keep the GPU locks in the demo's folder, so that nothing is left outside of it."""
    if "OVERNIGHT_LOCK_DIR" not in os.environ and not SHARED_LOCKS.exists() and not has_gpu():
        locks = stage.folder / "locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        os.environ["OVERNIGHT_LOCK_DIR"] = str(locks)


def show(stage: Stage, lab: Lab, *, plain: bool) -> tuple[bool, bool]:
    """Let the agent work and show it; returns whether it finished, and whether it was refused something."""
    log = stage.folder / "agent.log"
    command = [sys.executable, "-I", "-m", "mcp_server.client", "--lab", str(stage.lab_path), "--plan", str(stage.plan_file)]
    with log.open("ab") as errors:
        agent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors if not plain else subprocess.PIPE, stderr=errors, text=True
        )
    try:
        if plain:
            follow(lab, agent)
        else:
            importlib.import_module("tui.app").run(stage.lab_path)
        code = agent.poll()
    finally:
        end(agent)
    if code is None:
        return False, False
    if code:
        note(f"The agent stopped early; its words are in {log}.")
    (stage.folder / "done").touch()
    return True, code != 0


def end(agent: subprocess.Popen[str]) -> None:
    """End the agent if it is still there; what it submitted stays."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(5)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def lines_of(stream: IO[str], into: queue.Queue[str | None]) -> None:
    """Read a stream to its end in a thread."""
    for line in stream:
        into.put(line.rstrip("\n"))
    into.put(None)


def follow(lab: Lab, agent: subprocess.Popen[str]) -> None:
    """Plain lines until the agent has ended: what it says, how runs go, what they came to."""
    started = time.monotonic()
    said: queue.Queue[str | None] = queue.Queue()
    assert agent.stdout is not None
    threading.Thread(target=lines_of, args=(agent.stdout, said), daemon=True).start()
    seen: dict[str, str] = {}
    spoken = started
    open_ended = True
    while open_ended:
        try:
            line = said.get(timeout=0.2)
            open_ended = line is not None
            if line is not None and "wait_for_results" not in line:
                stamp(started, line)
        except queue.Empty:
            pass
        runs = lab.store.runs()
        spoken = report(runs, seen, started, spoken)
    agent.wait()


def report(runs: list[Run], seen: dict[str, str], started: float, spoken: float) -> float:
    """Say what changed since the last look; returns when something was last said about a running run."""
    for run in runs:
        if run.ended and seen.get(run.id) != "ended":
            seen[run.id] = "ended"
            result = f"val_bpb {bpb(run.val_bpb)}" if run.outcome == Outcome.COMPLETED else run.cause_text or ""
            stamp(started, f"{run.id} {run.outcome} {result}  {name_of(run)}")
    if time.monotonic() - spoken < PROGRESS_EVERY_S:
        return spoken
    live = [run for run in runs if run.live]
    if live:
        more = f", and {len(live) - 3} more" if len(live) > 3 else ""
        stamp(started, "; ".join(run_line(run) for run in live[:3]) + more)
    return time.monotonic()


def name_of(run: Run) -> str:
    """What a run tries, in a few words."""
    return one_line(" ".join(f"{k}={v}" for k, v in (run.cell or run.overrides).items()) or run.hypothesis or run.purpose, 80)


def stamp(started: float, text: str) -> None:
    """A line with the time since the demo began."""
    say(f"{ago(time.monotonic() - started):>12}  {text}")
    sys.stdout.flush()


def overnight() -> str:
    """How to call this command from anywhere."""
    beside = Path(sys.executable).parent / "overnight"
    return str(beside) if beside.exists() else "overnight"


def say_how_to_return(stage: Stage) -> None:
    """What goes on when somebody leaves early, and how to come back to it or end it."""
    command = f"{overnight()} --lab {stage.lab_path}"
    say("\nWhat was submitted goes on without you. The same command again finishes the demo.")
    say(f"  look again       {command}")
    say(f"  end its daemon   {command} daemon stop")


def busy_words(load: float, cores: int) -> str | None:
    """What to make of the order when other programs took part of the machine: a training alone keeps the load near the number of cores."""
    if has_gpu() or load <= 1.4 * cores:
        return None
    return (
        f"This machine was busy with other work (load {load:.1f} on {cores} cores): 20 s were not the same for every run, and neighbours "
        "may have changed places. docs/benchmarks.md has the order on a quiet machine.\n"
    )


def print_boards(lab: Lab) -> None:
    """The leaderboard of each class, the one with most runs first."""
    first = queries.leaderboard(lab)
    print_leaderboard(lab, first)
    for scope in first["classes"]:
        if scope["class"] != first["class"]:
            say("")
            print_leaderboard(lab, queries.leaderboard(lab, class_key=scope["class"], budget_s=scope["budget_s"]))
    say("")


def say_how_to_connect() -> None:
    """The last lines: from here to one's own night."""
    command = overnight()
    say("Connect your agent (run it where your hosts.toml is, or add --lab DIR):")
    say(f"  Claude Code   {command} connect claude")
    say(f"  Codex         {command} connect codex")
    say(f"Your own trainer, e.g. a checkout of karpathy/autoresearch:  {command} init PATH")
