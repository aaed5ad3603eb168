"""The `demo` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    simulate: Annotated[bool, typer.Option("--simulate", help="Ten seconds on 16 simulated GPUs of two types; needs no PyTorch.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the control room.")] = False,
    folder: Annotated[Path | None, typer.Option("--folder", metavar="DIR", help="Where it lives (default: build/ here).")] = None,
) -> None:
    """The main job on this machine, end to end. A real MCP client, server, daemon and trainer."""
    from runner import demo as scene

    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    raise typer.Exit(scene.demo(simulate=simulate, plain=plain or not on_terminal, folder=folder))
