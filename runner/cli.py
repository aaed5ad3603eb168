"""The `overnight` command: its groups, its global options, and the one place where an error becomes a sentence and an exit code.

Exit codes are FORMAT.md section 5: 0 done, 1 the thing asked for failed, 2 the request was wrong, 130 interrupted. Faces (TUI, MCP)
are opened by name, so that importing this never imports them. `OVERNIGHT_DEBUG=1` shows the traceback of an error nobody expected.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from runner import cli_faces, cli_lab, cli_policy, cli_research, cli_runs, cli_search, cli_watch
from runner.cli_io import debug, print_error, version, wants_json
from runner.errors import OvernightError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A terminal control room for autonomous training research. Without a command: the control room itself.",
)
for group in (cli_runs, cli_watch, cli_research, cli_search, cli_lab, cli_policy, cli_faces):
    group.register(app)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        print(f"overnight {version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    lab: Annotated[
        Path | None,
        typer.Option("--lab", metavar="DIR", help="The lab folder (else OVERNIGHT_LAB, else lab/ beside the nearest hosts.toml)."),
    ] = None,
    readonly: Annotated[bool, typer.Option("--readonly", help="Open the control room for looking only.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one plain picture of the lab and leave.")] = False,
    plain_characters: Annotated[
        bool, typer.Option("--ascii", envvar="OVERNIGHT_ASCII", help="Draw without box, block and braille characters.")
    ] = False,
    show: Annotated[bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)] = False,
) -> None:
    """Open the control room when no command is given."""
    context.obj = lab
    if context.invoked_subcommand is None:
        cli_faces.open_screen(lab, readonly=readonly, once=once, plain_characters=plain_characters)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and never raises."""
    args = lab_first(list(sys.argv[1:] if argv is None else argv))
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = app(args=args, prog_name="overnight", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        give_up_stdout()  # the reader (head, a closed pager) has seen enough
        return 0
    except (KeyboardInterrupt, typer.Abort):
        print("Interrupted.", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - the top of the program: whatever happened becomes a sentence
        return report(error, as_json=wants_json(args))


def open_missing_streams() -> None:
    """Give a command whose standard streams were closed (`>&-`) nowhere to read and write: a file it opens must not become its stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # for as long as the process lives


def report(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong in one sentence, on stderr or as the `error` object of --json; returns the exit code."""
    if isinstance(error, OvernightError):
        print_error(error.as_json(), as_json=as_json)
        return error.exit_code
    if type(error).__name__ == "NoArgsIsHelpError" and not as_json:
        print(error)
        return 2
    if isinstance(error, TyperException):
        print_error(
            {
                "code": "usage",
                "message": usage_sentence(error),
                "next": "`overnight --help` lists the commands, `overnight COMMAND --help` their options.",
            },
            as_json=as_json,
        )
        return error.exit_code
    if debug():
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.ENOSPC and error.filename is None:
            give_up_stdout()
        where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, (str, bytes)) else ""
        print_error(
            {"code": "os", "message": f"{error.strerror}{where}.", "next": "Check the path, its permissions and the free disk space."},
            as_json=as_json,
        )
        return 1
    print_error(
        {
            "code": "unexpected",
            "message": f"Something went wrong inside Overnight ({type(error).__name__}); nothing was lost.",
            "next": written_down(error),
        },
        as_json=as_json,
    )
    return 1


def give_up_stdout() -> None:
    """Send what is still buffered for a stdout that takes no more to nowhere, so that Python's own flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage_sentence(error: TyperException) -> str:
    """The parser's message as a sentence."""
    text = error.format_message().strip()
    return text if text.endswith((".", "?", ")")) else f"{text}."


def written_down(error: Exception) -> str:
    """Keep the traceback of an unexpected error in a file of this user; says where it is."""
    path = Path(tempfile.gettempdir()) / f"overnight-error-{os.geteuid()}.log"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S\n") + "".join(traceback.format_exception(error)) + "\n")
    except OSError:
        return "OVERNIGHT_DEBUG=1 shows the details."
    return f"The details are in {path}; OVERNIGHT_DEBUG=1 shows them."


def lab_first(args: list[str]) -> list[str]:
    """The arguments with `--lab DIR` moved to the front, so that it may stand anywhere before `--`."""
    front: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        if word == "--":
            rest += args[position:]
            break
        if word == "--lab" and position + 1 < len(args):
            front += [word, args[position + 1]]
            position += 1
        elif word.startswith("--lab="):
            front.append(word)
        else:
            rest.append(word)
        position += 1
    return front + rest


if __name__ == "__main__":
    sys.exit(main())
