"""Commands that open a face or another package's tool: the screen, demo, mcp, connect, report, plot, bench.

Every face is imported by name when its command runs, so that the daemon and the other commands never pay for a screen.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from runner import bench_trainer
from runner import connect as connecting
from runner import report as reporting
from runner.cli_io import JsonFlag, emit, lab_of, note, print_json, say
from runner.errors import BadValue, OvernightError
from runner.lab import find_lab


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    for command in (demo, mcp, connect, report, plot):
        app.command()(command)
    bench_app = typer.Typer(no_args_is_help=True, help="Measure.")
    bench_app.callback()(bench)
    bench_app.command("trainer")(compare_trainers)
    app.add_typer(bench_app, name="bench")


def face(module: str, extra: str) -> ModuleType:
    """A module of a face, by name. Raised: OvernightError when its packages are not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise OvernightError(f"{module} needs the package {missing}, which is not installed.", next_step=f"Install it: {extra}") from error


def open_screen(lab_path: Path | None, *, readonly: bool, once: bool, plain_characters: bool) -> None:
    """The control room; one plain picture of it where there is no terminal to draw on."""
    app = face("tui.app", "pip install textual==8.2.8")
    path = find_lab(lab_path)
    how = {"readonly": readonly, "ascii_only": plain_characters}
    raise typer.Exit(app.run_once(path, **how) if once else app.run(path, leave=True, **how))


def demo(
    simulate: Annotated[bool, typer.Option("--simulate", help="Ten seconds on 16 simulated GPUs of two types; needs no PyTorch.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the control room.")] = False,
    folder: Annotated[Path | None, typer.Option("--folder", metavar="DIR", help="Where it lives (default: build/ here).")] = None,
) -> None:
    """The main job on this machine, end to end. A real MCP client, server, daemon and trainer."""
    from runner import demo as scene

    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    raise typer.Exit(scene.demo(simulate=simulate, plain=plain or not on_terminal, folder=folder))


def mcp(
    context: typer.Context,
    http: Annotated[
        str | None, typer.Option("--http", metavar="HOST:PORT", help="Serve Streamable HTTP here instead of stdio; needs the lab's token.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Name for the audit trail (default: what the client calls itself).")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="Another Host name that HTTP clients may use.")
    ] = None,
) -> None:
    """Serve the lab to an agent over MCP. On stdio, or over HTTP with --http."""
    server = face("mcp_server.server", 'pip install "mcp>=2.3,<3"')
    raise typer.Exit(int(server.main(find_lab(context.find_root().obj), http=http, agent=agent, allow_hosts=allow_host or []) or 0))


def connect(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="claude|codex|cursor|vscode")],
    write: Annotated[bool, typer.Option("--write", help="Write it into the client's configuration instead of printing it.")] = False,
    json: JsonFlag = False,
) -> None:
    """How to connect a coding agent to this lab."""
    lab = find_lab(context.find_root().obj)
    made = connecting.connect(client, lab, write=write)
    if json:
        print_json({"v": 1, "lab": str(lab), "client": client, "written": write, "text": made})
    else:
        say(made)


def report(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The folder to write it to (default: report/ in the lab).")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """The night as Markdown with pictures."""
    lab = lab_of(context)
    path = reporting.write_report(lab, out or lab.path / "report")
    if json:
        emit(lab, {"report": str(path)})
    else:
        say(f"{path} written.")


def plot(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The SVG file to write (default: progress.svg in the lab).")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """The progress of the night as one SVG."""
    lab = lab_of(context)
    path = out or lab.path / "progress.svg"
    reporting.write_plot(lab, path)
    if json:
        emit(lab, {"plot": str(path)})
    else:
        say(f"{path} written.")


def bench() -> None:
    """Measure."""


def compare_trainers(
    against: Annotated[Path, typer.Option("--against", metavar="PATH", help="A checkout of karpathy/autoresearch or a fork.")],
    shards: Annotated[Path, typer.Option("--shards", metavar="DIR", help="Parquet shards of text; the last one is validation.")],
    budget: Annotated[list[float] | None, typer.Option("--budget", "-b", metavar="SECONDS", help="Repeat for more (default: 60).")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="How many alternating rounds.")] = 1,
    shim: Annotated[bool, typer.Option("--shim", help="Answer the other side's `kernels` package with PyTorch's attention.")] = False,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep data and runs here.")] = None,
    json: JsonFlag = False,
) -> None:
    """Two trainers on one GPU. The same data and budget, alternating, as a table."""
    for path in (against, shards):
        if not path.is_dir():
            raise BadValue(f"{path} is not a folder.", next_step="--against and --shards name folders.")
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = bench_trainer.bench(against, shards, budget or [60.0], rounds, folder, shim=shim, say=note)
    if json:
        print_json({"v": 1, "rows": [dataclasses.asdict(row) for row in rows]})
    else:
        say(bench_trainer.table(rows))
    if any(row.exit_code for row in rows):
        raise typer.Exit(1)
