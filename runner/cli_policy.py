"""Commands about hosts.toml: `init` writes one for a trainer, `policy` shows what is in force and accepts an edit.

The policy in force is the copy in the lab; an edit that loosens a limit waits until a human accepts it here or in the control room.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from runner import verbs
from runner.cli_io import WHO, JsonFlag, emit, lab_of, print_json, say
from runner.init import init_folder
from runner.lab import Lab


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    app.command()(init)
    policy_app = typer.Typer(invoke_without_command=True, help="The limits in force, and accepting new ones.")
    policy_app.callback()(policy)
    policy_app.command()(accept)
    policy_app.command("new-night")(new_night)
    app.add_typer(policy_app, name="policy")


def init(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="PATH", help="A trainer folder, e.g. a checkout of karpathy/autoresearch.")] = Path(),
    json: JsonFlag = False,
) -> None:
    """Write hosts.toml for a trainer folder. Nothing else in it is touched."""
    made = init_folder(folder)
    if json:
        print_json(
            {
                "v": 1,
                "lab": str(made.hosts_file.parent / "lab"),
                "hosts_file": str(made.hosts_file),
                "written": made.written,
                "found": made.found,
                "next": made.next_steps,
            }
        )
        return
    say(f"{made.hosts_file} {'written' if made.written else 'is there already, and fits'}: {made.found}")
    for step in made.next_steps:
        say(f"  {step}")


def shown(lab: Lab) -> dict[str, Any]:
    """The policy in force without its secrets."""
    found = lab.policy()
    return {
        "trainer": dataclasses.asdict(found.trainer),
        "policy": dataclasses.asdict(found.limits),
        "hosts": [h.public() for h in found.hosts],
        "peaks": found.peaks,
        "hosts_file": str(lab.hosts_file),
        "pending": lab.store.meta("policy_pending"),
    }


def policy(context: typer.Context, json: JsonFlag = False) -> None:
    """The limits in force; `policy accept` takes over an edited hosts.toml."""
    if context.invoked_subcommand is not None:
        return
    lab = lab_of(context)
    lab.sync_policy()
    found = shown(lab)
    if json:
        emit(lab, found)
        return
    say(f"in force for {lab.path}, from {found['hosts_file']}")
    for section in ("trainer", "policy"):
        say(f"[{section}]")
        for key, value in found[section].items():
            say(f"  {key} = {'-' if value is None else value}")
    for host in found["hosts"]:
        say(f"[[host]] {host['name']} ({host['kind']}){' at ' + host['address'] if host['address'] else ''}")
    if found["pending"]:
        say(f"! {found['pending']}")


def accept(context: typer.Context, json: JsonFlag = False) -> None:
    """Accept hosts.toml as it is now."""
    lab = lab_of(context, create=True)
    verbs.accept_policy(lab, who=WHO)
    if json:
        emit(lab, shown(lab))
    else:
        say(f"{lab.hosts_file} is in force now.")


def new_night(context: typer.Context, json: JsonFlag = False) -> None:
    """Count max_wall_hours anew, from the next run on."""
    lab = lab_of(context)
    verbs.new_night(lab, who=WHO)
    if json:
        emit(lab, shown(lab))
    else:
        hours = lab.policy().limits.max_wall_hours
        say(
            "A new night begins."
            + (f" {hours:g} h of it are left (max_wall_hours)." if hours is not None else " max_wall_hours is not set.")
        )
