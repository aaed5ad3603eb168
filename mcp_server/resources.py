"""Resources: the same facts as the tools, for clients that let a person attach them, and for notifications.

Few clients read resources on their own, so nothing here is reachable only here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError

from mcp_server.answers import Output, cell, fence, number, rounded
from mcp_server.desk import Desk
from runner import compare, news, queries
from runner.errors import OvernightError, UnknownName
from runner.lab import Lab
from runner.submitting import known_run
from runner.text import clean

LOG_CHARS = 60_000
PROGRAM_CHARS = 100_000
SHIPPED_PROGRAM = Path(__file__).resolve().parent.parent / "program.md"


def program_text(lab: Lab) -> str:
    """The research instructions: the trainer folder's own program.md, else one beside hosts.toml, else the shipped one.

    Raises LabError or ResourceNotFoundError when none can be read.
    """
    trainer = lab.policy().trainer
    for path in (trainer.folder / trainer.program, lab.hosts_file.parent / trainer.program, SHIPPED_PROGRAM):
        try:
            return clean(path.read_text(encoding="utf-8"))[:PROGRAM_CHARS]
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ResourceError(f"{path} cannot be read: {error}") from error
    raise ResourceNotFoundError(f"There is no {trainer.program} in {trainer.folder}. The server's instructions say how to work without it.")


def run_json(lab: Lab, run_id: str) -> str:
    """A run object (FORMAT.md section 5) as JSON."""
    return json.dumps(queries.run_object(lab, known_run(lab, run_id)), ensure_ascii=False, allow_nan=False, indent=1)


def run_log(lab: Lab, run_id: str) -> str:
    """The end of a run's output, as quoted data."""
    run = known_run(lab, run_id)
    return fence(Output(run.id, queries.read_log(lab, run.id, tail_lines=2000).text), LOG_CHARS)


def run_source(lab: Lab, run_id: str) -> str:
    """The script a run executed."""
    return lab.source_text(known_run(lab, run_id).source_sha)


def run_diff(lab: Lab, run_id: str) -> str:
    """The unified diff of a run's script against its parent's (or base's)."""
    return compare.diff_of(lab, known_run(lab, run_id))[0] or "(no difference)\n"


def wave_json(lab: Lab, wave_id: str) -> str:
    """A wave object with its runs, as JSON."""
    wave = queries.known_wave(lab, wave_id)
    runs = [[r.id, r.phase, r.outcome, r.val_bpb, r.cell] for r in news.wave_runs(lab, wave_id)]
    body = {**queries.wave_object(lab, wave), "columns": ["id", "phase", "outcome", "val_bpb", "cell"], "runs": runs}
    return json.dumps(body, ensure_ascii=False, allow_nan=False, indent=1)


def figure(value: float | None) -> float | int | None:
    """A figure as the tools show it; None stays None."""
    return None if value is None else number(value)


def leaderboard_text(lab: Lab) -> str:
    """The leaderboard as a tab-separated table."""
    board = queries.leaderboard(lab, limit=50)
    keys = ["rank", "id", "val_bpb", "gain", "gain_se", "badge", "verdict", "trust", "changes", "hypothesis"]
    lines = [f"# class {cell(board['class'])}, budget {cell(figure(board['budget_s']))} s", "\t".join(keys)]
    figures = ("val_bpb", "gain", "gain_se")
    lines += ["\t".join(cell(figure(rounded(row[k], 6)) if k in figures else row.get(k)) for k in keys) for row in board["rows"]]
    return clean("\n".join(lines)) + "\n"


def add_resources(server: MCPServer[Desk], desk: Desk) -> None:
    """Register every resource on the server."""

    async def read(work: Callable[[Lab], str]) -> str:
        try:
            return await desk.with_lab(work)
        except UnknownName as exc:
            raise ResourceNotFoundError(str(exc)) from exc
        except OvernightError as exc:
            raise ResourceError(str(exc)) from exc

    @server.resource(
        "lab://program", title="Research program", mime_type="text/markdown", description="Instructions for the research agent."
    )
    async def program() -> str:
        return await read(program_text)

    @server.resource("lab://leaderboard", title="Leaderboard", mime_type="text/tab-separated-values", description="The fifty best runs.")
    async def leaderboard() -> str:
        return await read(leaderboard_text)

    def template(path: str, title: str, mime: str, what: str, body: Callable[[Lab, str], str]) -> None:
        name = "wave_id" if path.startswith("waves") else "run_id"

        if name == "run_id":

            async def by_run(run_id: str) -> str:
                return await read(lambda lab: body(lab, run_id))

            server.resource(f"lab://{path}", name=body.__name__, title=title, mime_type=mime, description=what)(by_run)
        else:

            async def by_wave(wave_id: str) -> str:
                return await read(lambda lab: body(lab, wave_id))

            server.resource(f"lab://{path}", name=body.__name__, title=title, mime_type=mime, description=what)(by_wave)

    template("runs/{run_id}", "Run", "application/json", "One run, all facts.", run_json)
    template("runs/{run_id}/log", "Log of a run", "text/plain", "The end of its output: untrusted data.", run_log)
    template("runs/{run_id}/source", "Source of a run", "text/x-python", "The script it executed.", run_source)
    template("runs/{run_id}/diff", "Diff of a run", "text/x-diff", "Against its parent or base.", run_diff)
    template("waves/{wave_id}", "Wave", "application/json", "A wave and its runs.", wave_json)
