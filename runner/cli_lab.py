"""Commands that steer the lab: daemon, hosts, queue, agents, approval.

Only the daemon talks to machines: `hosts check` and `hosts setup` are requests to it, answered while this command waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from runner import daemonctl, queries, verbs
from runner.cli_io import WHO, JsonFlag, emit, lab_of, say, say_unwatched, table, wait_for_answer
from runner.cli_runs import IdsOrWaves, Why, show_done
from runner.errors import RequestError, UnknownName
from runner.lab import Lab
from runner.text import ago, one_line, plural

HostName = Annotated[str, typer.Argument(metavar="HOST", help="A host of hosts.toml.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    for command in (approval, approve, decline):
        app.command()(command)
    groups: list[tuple[str, str, dict[str, Callable[..., None]]]] = [
        (
            "daemon",
            "The process that makes runs happen.",
            {"start": daemon_start, "stop": daemon_stop, "status": daemon_status, "run": daemon_run},
        ),
        ("queue", "Pause and resume the queue.", {"pause": queue_pause, "resume": queue_resume}),
        ("agents", "Pause and resume an agent's runs.", {"pause": agent_pause, "resume": agent_resume}),
    ]
    for name, help_text, commands in groups:
        group = typer.Typer(no_args_is_help=True, help=help_text)
        add_commands(group, commands)
        app.add_typer(group, name=name)
    hosts_app = typer.Typer(invoke_without_command=True, help="The machines: list, check, set up, drain.")
    hosts_app.callback()(hosts)
    add_commands(hosts_app, {"check": hosts_check, "setup": hosts_setup, "pause": host_pause, "resume": host_resume, "drain": host_drain})
    app.add_typer(hosts_app, name="hosts")


def add_commands(group: typer.Typer, commands: dict[str, Callable[..., None]]) -> None:
    """Add commands under their words."""
    for word, function in commands.items():
        group.command(word)(function)


def daemon_start(context: typer.Context, json: JsonFlag = False) -> None:
    """Start the daemon of this lab, if none runs."""
    lab = lab_of(context, create=True)
    daemonctl.ensure_daemon(lab)
    print_status(lab, json=json)


def daemon_stop(context: typer.Context, json: JsonFlag = False) -> None:
    """Stop the daemon; runs that have started go on, and the next start takes them up."""
    lab = lab_of(context)
    daemonctl.stop_daemon(lab)
    print_status(lab, json=json)


def daemon_status(context: typer.Context, json: JsonFlag = False) -> None:
    """Whether the daemon runs, and what waits for it; exit code 1 when it does not run."""
    lab = lab_of(context)
    if not print_status(lab, json=json):
        raise typer.Exit(1)


def print_status(lab: Lab, *, json: bool) -> bool:
    """Print the daemon's state; returns whether it runs, which only its lock can tell."""
    pid = daemonctl.daemon_pid(lab)
    row = daemonctl.daemon_status(lab)
    state = queries.lab_state(lab)
    now = time.time()
    found: dict[str, Any] = {
        "running": pid is not None,
        "pid": pid or None,
        "started_at": row.started_at if row else None,
        "beat_age_s": now - row.beat_at if row else None,
        "version": row.version if row else None,
        "queue_paused": state.paused,
        "approval": state.approval,
        "queued": state.queued,
        "running_runs": state.running,
        "idle_gpus": state.idle_gpus,
    }
    if json:
        emit(lab, found)
    elif pid is None:
        unwatched = f" and {state.running} run on unwatched" if state.running else ""
        say(f"No daemon runs for {lab.path}; {_wait(state.queued)}{unwatched}. `overnight daemon start` starts it.")
    elif row is None:
        say(f"The daemon (pid {pid or 'not said'}) holds {lab.path}/runner.lock and has written nothing to the lab yet.")
    else:
        say(f"The daemon runs (pid {row.pid}, up {ago(now - row.started_at)}, beat {ago(now - row.beat_at)} ago) for {lab.path}.")
        say(queries.lab_line(lab))
        if row.note:
            say(f"! {row.note}")
    return pid is not None


def daemon_run(context: typer.Context) -> None:
    """Be the daemon, in the foreground."""
    from runner import daemon  # asyncio and engines: only the process that is the daemon pays for them

    lab = lab_of(context, create=True)
    path = str(lab.path)
    lab.close()
    code = daemon.main(["--lab", path])
    raise typer.Exit(int(code or 0))


def queue_pause(context: typer.Context, why: Why = None) -> None:
    """Start no more runs until `queue resume`."""
    lab = lab_of(context)
    verbs.pause_queue(lab, True, who=WHO, why=why)
    say("The queue is paused; running runs go on.")


def queue_resume(context: typer.Context, why: Why = None) -> None:
    """Start runs again."""
    lab = lab_of(context)
    verbs.pause_queue(lab, False, who=WHO, why=why)
    say("The queue goes on.")


def agent_pause(context: typer.Context, name: Annotated[str, typer.Argument(metavar="AGENT")]) -> None:
    """Start none of this agent's runs; what it submits waits in the queue."""
    lab = lab_of(context)
    name = verbs.pause_agent(lab, name, True, who=WHO)
    say(f"Runs of {name} wait in the queue until `overnight agents resume {name}`; those that run go on.")
    known = [str(row[0]) for row in lab.store.tally("DISTINCT agent", "agent IS NOT NULL ORDER BY agent")]
    if name not in known:
        say(f"Nothing was submitted by {name} yet{'; so far: ' + ', '.join(known) if known else ''}.")


def agent_resume(context: typer.Context, name: Annotated[str, typer.Argument(metavar="AGENT")]) -> None:
    """Start this agent's runs again."""
    lab = lab_of(context)
    name = verbs.pause_agent(lab, name, False, who=WHO)
    say(f"Runs of {name} start again.")


def approval(
    context: typer.Context, mode: Annotated[str | None, typer.Argument(metavar="auto|ask")] = None, json: JsonFlag = False
) -> None:
    """Whether agents' submissions wait for you. `ask`: they do; `auto`: they are queued at once."""
    lab = lab_of(context)
    if mode is not None:
        verbs.set_approval(lab, mode, who=WHO)
    state = queries.lab_state(lab)
    if json:
        emit(lab, {"approval": state.approval, "proposed": state.proposed})
    else:
        say(f"approval: {state.approval}; {_wait(state.proposed)} for `overnight approve`.")


def _wait(count: int) -> str:
    return f"{plural(count, 'run')} {'waits' if count == 1 else 'wait'}"


def approve(context: typer.Context, ids: IdsOrWaves, why: Why = None, json: JsonFlag = False) -> None:
    """Let proposed runs go into the queue."""
    lab = lab_of(context)
    verbs.approve(lab, ids, who=WHO, why=why)
    show_done(lab, ids, [], json=json)


def decline(
    context: typer.Context,
    ids: IdsOrWaves,
    why: Annotated[str, typer.Option("--why", "-m", help="The reason; the agent reads it.")] = "",
    json: JsonFlag = False,
) -> None:
    """Refuse proposed runs. The agent reads the reason."""
    lab = lab_of(context)
    verbs.decline(lab, ids, who=WHO, why=why)
    show_done(lab, ids, [], json=json)


def print_hosts(lab: Lab, rows: list[dict[str, Any]], *, json: bool) -> None:
    """Hosts, then each check that was made."""
    if json:
        emit(lab, {"hosts": rows, "pending": lab.store.meta("policy_pending")})
        return
    table(
        ("host", "kind", "state", "for", "gpus"),
        [(r["name"], r["kind"], r["state"], ago(r["since_s"]), len(r["gpus"])) for r in rows],
        right="gpus",
    )
    for row in rows:
        if row["error"] and not row["checks"]:
            say(f"! {row['name']}: {one_line(row['error'], 500)}")
        if row["checks"]:
            say(f"\n{row['name']}")
            for check in row["checks"]:
                mark = "ok" if check["ok"] else "-" if check["ok"] is None else "NO"
                say(f"  {mark:<3} {check['name']:<22} {one_line(check.get('text') or str(check.get('value', '')), 300)}")
        if row["next"]:
            say(f"  → {row['next']}")
    if not any(row["checks"] for row in rows):  # a check is answered by a daemon that looks
        say_unwatched(lab)
    if pending := lab.store.meta("policy_pending"):
        say(f"! {pending}")


def hosts(context: typer.Context, json: JsonFlag = False) -> None:
    """The machines of hosts.toml."""
    if context.invoked_subcommand is None:
        lab = lab_of(context)
        print_hosts(lab, queries.host_objects(lab), json=json)


def known_host(lab: Lab, name: str) -> str:
    """The name, when the policy in force has it. Raised: UnknownName, or RequestError with what the edit of hosts.toml waits for."""
    names = [h.name for h in lab.policy().hosts]
    if name in names:
        return name
    unknown = UnknownName("host", one_line(name, 60), names, where="hosts.toml as it is in force")
    if waits := lab.sync_policy():
        raise RequestError(unknown.message, next_step=waits)
    if lab.policy().host(name) is None:  # taken over just now
        raise unknown
    return name


def hosts_check(
    context: typer.Context, names: Annotated[list[str] | None, typer.Argument(metavar="HOST...")] = None, json: JsonFlag = False
) -> None:
    """Check hosts: reachable, key, Python, torch, GPUs, disk, data; all at once. Exit code 1 when one is not fit."""
    lab = lab_of(context, create=True)
    lab.sync_policy()  # an edit of a second ago is told, too
    wanted = [known_host(lab, n) for n in names or []]
    result = wait_for_answer(lab, verbs.ask(lab, "hosts_check", {"hosts": wanted}, who=WHO))
    reports = {r["name"]: r for r in result.get("hosts", [])}
    rows = [r for r in queries.host_objects(lab, reports) if not wanted or r["name"] in wanted]
    print_hosts(lab, rows, json=json)
    if any(r["error"] or any(c["ok"] is False for c in r["checks"]) for r in rows):
        raise typer.Exit(1)


def hosts_setup(context: typer.Context, name: HostName, json: JsonFlag = False) -> None:
    """Make a host ready: trainer, Python environment, PyTorch for its driver, data. Resumable; stays inside its workdir."""
    lab = lab_of(context, create=True)
    result = wait_for_answer(lab, verbs.ask(lab, "host_setup", {"host": known_host(lab, name)}, who=WHO), deadline_s=3600)
    if json:
        emit(lab, {"host": name, **result})
    else:
        say(str(result.get("text") or f"{name} is ready; `overnight hosts check {name}` shows it."))


def host_pause(context: typer.Context, name: HostName) -> None:
    """Start no more runs on this host."""
    lab = lab_of(context)
    verbs.pause_host(lab, known_host(lab, name), True, who=WHO)
    say(f"{name} is paused; its running runs go on.")


def host_resume(context: typer.Context, name: HostName) -> None:
    """Use this host again, after a pause or a drain."""
    lab = lab_of(context)
    verbs.pause_host(lab, known_host(lab, name), False, who=WHO)
    verbs.drain_host(lab, name, False, who=WHO)
    say(f"{name} takes runs again.")


def host_drain(context: typer.Context, name: HostName) -> None:
    """Finish what runs on this host, and take nothing new: for a reboot, or to give it back."""
    lab = lab_of(context)
    verbs.drain_host(lab, known_host(lab, name), True, who=WHO)
    say(f"{name} takes nothing new; it is empty once its runs have ended.")
