"""Commands that only look: runs, show, log, leaderboard, gpus, events, waves.

Each prints what one query returns, as a plain table or as the object of FORMAT.md section 5.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from runner import queries, states, verbs
from runner.board import trust_word, whole_class
from runner.cli_io import WHO, JsonFlag, emit, lab_of, say, say_unwatched, table, wait_for_answer
from runner.errors import BadValue, UnknownName
from runner.lab import Lab
from runner.mfu import under_load
from runner.records import GpuState, Phase, Run
from runner.submitting import known_run
from runner.text import ago, bpb, clean, one_line, percent, signed, significant, thousands

Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=10000, metavar="N", help="At most so many rows.")]
FOLLOW_EVERY_S = 0.3
SAMPLE_STALE_S = 15.0  # a card is read every second


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    for command in (runs, show, log, leaderboard, waves, events):
        app.command()(command)
    gpu_app = typer.Typer(invoke_without_command=True, help="Every GPU and what it does.")
    gpu_app.callback()(gpus)
    gpu_app.command()(release)
    app.add_typer(gpu_app, name="gpus")


def run_line(run: Run) -> str:
    """One run in a few words, for progress."""
    done = percent(None if run.share is None else run.share * 100, 0)
    return f"{run.id} {states.run_state(run)} {done}, loss {significant(run.loss)}"


def what(hypothesis: str | None, values: dict[str, Any]) -> str:
    """What a run tries: the constants it changes, then why."""
    changed = " ".join(f"{k}={v}" for k, v in values.items())
    return "; ".join(part for part in (changed, hypothesis) if part) or "-"


def print_runs(rows: list[dict[str, Any]]) -> None:
    """The table of runs."""
    table(
        ("run", "state", "val_bpb", "loss", "share", "budget", "where", "verdict", "flags", "what"),
        [
            (
                r["id"],
                states.run_words(r),
                bpb(r["val_bpb"]),
                significant(r["loss"]),
                percent(None if r["share"] is None else 100 * r["share"], 0),
                ago(r["budget_s"]),
                r["gpu"] or r["host"],
                r["verdict"],
                len(r["flags"]) or "-",
                r["cause_text"] or what(r["hypothesis"], r["cell"] or r["overrides"]),
            )
            for r in rows
        ],
        right="val_bpb loss share",
    )


def runs(
    context: typer.Context,
    phase: Annotated[
        str | None, typer.Option("--phase", help="proposed, queued, starting, running, finishing, ended, unreachable.")
    ] = None,
    outcome: Annotated[str | None, typer.Option("--outcome", help="completed, crashed, diverged, timed_out, cancelled, lost, ...")] = None,
    wave: Annotated[str | None, typer.Option("--wave", metavar="ID", help="Only runs of this wave.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Only runs submitted by this agent.")] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="TEXT", help="Only runs whose hypothesis or id holds this.")] = None,
    limit: Limit = 50,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Go on where an earlier answer ended.")] = None,
    json: JsonFlag = False,
) -> None:
    """List runs, newest first."""
    lab = lab_of(context)
    page = queries.list_runs(lab, phase=phase, outcome=outcome, wave=wave, agent=agent, text=text, limit=limit, cursor=cursor)
    rows = queries.run_objects(lab, page.rows)
    if json:
        emit(lab, {"runs": rows, "total": page.total, "cursor": page.cursor})
        return
    if not rows:
        say(f"No runs in {lab.path}." if not page.total else "No such runs.")
        return
    print_runs(rows)
    queued = next((r for r in page.rows if r.phase == Phase.QUEUED), None)
    if queued is not None and (why := queries.why_waiting(lab, queued)):
        say(f"waiting: {why}")
    if page.cursor:
        say(f"{len(rows)} of {page.total}; more with --cursor {page.cursor}")
    if any(not r.ended for r in page.rows):
        say_unwatched(lab)


def show(context: typer.Context, run_id: Annotated[str, typer.Argument(metavar="ID")], json: JsonFlag = False) -> None:
    """Everything known about one run."""
    lab = lab_of(context)
    found = known_run(lab, run_id)
    row = queries.run_object(lab, found)
    told = lab.store.events(subject=found.id, limit=200)[::-1]
    points = [[p.step, p.share, p.loss] for p in queries.curve(lab, found.id, 200)]
    if json:
        trail = [
            {"id": e.id, "at": e.at, "who": e.who, "verb": e.verb, "subject": e.subject, "why": e.why, "detail": e.detail} for e in told
        ]
        emit(
            lab,
            {
                **row,
                "under_load": under_load(lab, found),
                "events": trail,
                "points": points,
                "source_path": str(lab.source_path(found.source_sha)),
                "last_lines": found.last_lines,
                "run_dir": str(lab.run_dir(found.id)),
            },
        )
        return
    say(f"{found.id}  {states.run_words(row)}  val_bpb {bpb(row['val_bpb'])}  {row['trust'] or ''}".rstrip())
    for key in (
        "hypothesis",
        "cause_text",
        "verdict",
        "verdict_why",
        "purpose",
        "parent",
        "base_run",
        "wave",
        "agent",
        "budget_s",
        "class",
        "host",
        "gpu",
        "step",
        "share",
        "loss",
        "tok_s",
        "peak_vram_mb",
        "training_s",
        "total_s",
        "wall_s",
        "num_steps",
        "params_m",
        "queue_position",
        "exit_code",
    ):
        if row.get(key) is not None:
            say(f"  {key:<14} {one_line(short(row[key]), 300)}")
    if row["mfu_percent"] is not None or row["mfu_reported"] is not None:
        say(f"  {'mfu':<14} {mfu_words(row, under_load(lab, found))}")
    if row["overrides"]:
        say(f"  {'overrides':<14} {one_line(' '.join(f'{k}={v}' for k, v in row['overrides'].items()), 300)}")
    for flag in row["flags"]:
        say(f"  ! {flag['severity']} {flag['kind']}: {one_line(flag['evidence'], 300)}")
    say(f"  {'source':<14} {lab.source_path(found.source_sha)}")
    say(f"  {'files':<14} {lab.run_dir(found.id)}")
    for event in told[-10:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.at))
        say(f"  {at} {event.who} {event.verb} {one_line(states.event_words(event) or '', 200)}".rstrip())
    if found.last_lines and row["outcome"] != "completed":
        say("last lines:")
        for line in clean(found.last_lines).splitlines()[-12:]:
            say(f"  | {line}")


def mfu_words(row: dict[str, Any], load: dict[str, Any] | None) -> str:
    """MFU with all that an honest reading of it needs: what the script said, the clock it ran at, and the power cap."""
    words = [f"{percent(row['mfu_percent'])} of the card's peak" if row["mfu_percent"] is not None else "? (the card's peak is not known)"]
    if row["mfu_reported"] is not None:
        words.append(f"reported {percent(row['mfu_reported'])}")
    if load is not None:
        if load["mfu_at_clock_percent"] is not None:
            words.append(f"{percent(load['mfu_at_clock_percent'])} at the {load['sm_mhz']:,.0f} MHz it had")
        if load["power_w"] is not None and load["power_limit_w"] is not None:
            words.append(f"{load['power_w']:.0f} of {load['power_limit_w']:.0f} W")
    return ", ".join(words)


def short(value: Any) -> str:
    """A value for a person: six significant digits of a float; JSON has them all."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def log(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="ID")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=1, max=100000, metavar="N", help="Only the last N lines.")] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, metavar="BYTES", help="Start at this byte.")] = None,
    json: JsonFlag = False,
) -> None:
    """The log of a run, made safe to print."""
    lab = lab_of(context)
    found = known_run(lab, run_id)
    if json and follow:
        raise BadValue(
            "--json prints one object and --follow has no end.", next_step="Ask again with --offset and the answer's next_offset."
        )
    part = queries.read_log(lab, found.id, offset=offset if offset is not None or tail is not None else 0, tail_lines=tail)
    if json:
        emit(lab, {"id": found.id, "offset": part.offset, "next_offset": part.next_offset, "text": clean(part.text)})
        return
    write(part.text)
    while True:
        ended = known_run(lab, run_id).ended  # before reading: what came until then is read once more below
        more = queries.read_log(lab, found.id, offset=part.next_offset)
        moved = more.next_offset != part.next_offset
        if moved:
            write(more.text)
            part = more
        elif ended or not follow:
            break
        else:
            time.sleep(FOLLOW_EVERY_S)
    if part.text and not clean(part.text).endswith("\n"):
        print()


def write(text: str) -> None:
    """Log text to the terminal at once."""
    sys.stdout.write(clean(text))
    sys.stdout.flush()


def leaderboard(
    context: typer.Context,
    class_key: Annotated[
        str | None, typer.Option("--class", metavar="PART", help="A class, or a part only it has, such as H200 (default: the busiest).")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", "-b", metavar="SECONDS", help="Results at this budget.")] = None,
    limit: Limit = 20,
    json: JsonFlag = False,
) -> None:
    """The best results. Ranked inside one class of GPU, software and data, at one budget."""
    lab = lab_of(context)
    board = queries.leaderboard(lab, class_key=whole_class(lab, class_key), budget_s=budget, limit=limit)
    if json:
        emit(lab, board)
    else:
        print_leaderboard(lab, board)


def print_leaderboard(lab: Lab, board: dict[str, Any]) -> None:
    """The leaderboard as a table."""
    if not board["rows"]:
        others = ", ".join(dict.fromkeys(f"{c['class']} at {ago(c['budget_s'])}" for c in board["classes"] if c["runs"]))
        say("No results yet." if not (others or board["unranked"]) else "Nothing is ranked here.")
        if others:
            say(f"There are results of {others}.")
        _say_unranked(board)
        return
    n = board["noise_n"]
    noise = "not measured yet" if board["noise_sd"] is None else f"±{board['noise_sd']:.6f} from {n} repeat{'' if n == 1 else 's'}"
    say(f"class {board['class']}, budget {ago(board['budget_s'])}, noise {noise}")
    table(
        ("#", "run", "val_bpb", "gain", "±", "badge", "verdict", "trust", "what"),
        [
            (
                r["rank"],
                r["id"],
                bpb(r["val_bpb"]),
                signed(r["gain"]),
                "-" if r["gain_se"] is None else f"{r['gain_se']:.6f}",
                r["badge"],
                r["verdict"],
                trust_word(r),
                what_of(r),
            )
            for r in board["rows"]
        ],
        right="# val_bpb gain ±",
    )
    if len(board["ladder"]) > 1:
        say("Best at each budget: " + ", ".join(f"{ago(s['budget_s'])} {bpb(s['val_bpb'])} ({s['id']})" for s in board["ladder"]))
    if apart := list(dict.fromkeys(str(c["class"]) for c in board["classes"] if c["runs"] and c["class"] != board["class"])):
        more = f" and {len(apart) - 4} more" if len(apart) > 4 else ""
        say(f"Not comparable with it: {'; '.join(apart[:4])}{more} (--class shows one).")
    _say_unranked(board)


def _say_unranked(board: dict[str, Any]) -> None:
    for row in board["unranked"][:10]:
        say(f"  not ranked: {row['id']} {one_line(row['reason'], 160)}")


def what_of(row: dict[str, Any]) -> str:
    """What the run of a leaderboard row tries; a wave's hypothesis is not repeated for each of its cells."""
    if row["promoted_from"]:
        return what(f"promoted from {row['promoted_from']}", row["changes"])
    return what(None if row["wave"] and row["changes"] else row["hypothesis"], row["changes"])


def waves(context: typer.Context, limit: Limit = 20, json: JsonFlag = False) -> None:
    """List waves, newest first."""
    lab = lab_of(context)
    found = [queries.wave_object(lab, w) for w in lab.store.waves(limit)]
    if json:
        emit(lab, {"waves": found})
        return
    if not found:
        say(f"No waves in {lab.path}.")
        return
    table(
        ("wave", "kind", "runs", "done", "best", "factors", "title"),
        [
            (
                w["id"],
                w["kind"],
                w["total"],
                w["ended"],
                bpb(w["best"]),
                " × ".join(f"{k}({len(v)})" for k, v in (w["factors"] or {}).items()) or "-",
                w["title"],
            )
            for w in found
        ],
        right="runs done",
    )


def gpus(context: typer.Context, json: JsonFlag = False) -> None:
    """Every GPU and what it does."""
    if context.invoked_subcommand is not None:
        return
    lab = lab_of(context)
    rows = queries.gpu_objects(lab)
    if json:
        emit(lab, {"gpus": rows})
        return
    if not rows:
        from runner import glance  # an engine and its loop: other commands need neither

        rows = glance.gpus(lab)
    if not rows:
        say("No GPUs known yet; the daemon finds them (`overnight daemon start`).")
        return
    table(
        ("gpu", "name", "state", "run", "mfu", "util", "memory", "power", "temp", "tok/s"),
        [gpu_row(r) for r in rows],
        right="mfu util memory power temp tok/s",
    )
    notes: dict[str, list[str]] = {}
    for r in rows:
        if r["note"]:  # whole and below the table: who holds a card must not be cut off by a narrow terminal
            notes.setdefault(str(r["note"]), []).append(place_of(r))
    for note, places in notes.items():
        say(f"! {', '.join(places)}: {one_line(note, 500)}")
    say_unwatched(lab)


def place_of(row: dict[str, Any]) -> str:
    """`host:index` of a GPU, or the name of a CPU slot."""
    return str(row["uuid"]) if row["index"] is None else f"{row['host']}:{row['index']}"


def gpu_row(row: dict[str, Any]) -> tuple[Any, ...]:
    """One line of the table of GPUs."""
    past = row["state"] in (GpuState.DOWN, GpuState.LOST) or (row["sample_age_s"] or 0.0) > SAMPLE_STALE_S  # figures of another time
    sample = {} if past else row["sample"] or {}

    def amount(key: str, unit: str) -> str:
        value = sample.get(key)
        return "-" if value is None else f"{value:.0f}{unit}"

    memory = (
        "-" if sample.get("mem_used_mib") is None else f"{thousands(sample['mem_used_mib'])}/{thousands(sample.get('mem_total_mib'))} MiB"
    )
    return (
        place_of(row),
        row["name"],
        row["state"],
        row["run"],
        percent(row["mfu_percent"])
        + (f" ({percent(row['mfu_at_clock_percent'])} at clock)" if row.get("mfu_at_clock_percent") is not None else ""),
        amount("util_pct", "%"),
        memory,
        "-" if sample.get("power_w") is None else f"{amount('power_w', '')}/{amount('power_limit_w', ' W')}",
        amount("temp_c", "°C"),
        thousands(row["tok_s"]),
    )


def release(
    context: typer.Context,
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="host:index, its UUID, or the first letters of that.")],
    json: JsonFlag = False,
) -> None:
    """Bring a quarantined GPU back once its memory is free again."""
    lab = lab_of(context)
    uuid = gpu_named(lab, gpu)
    result = wait_for_answer(lab, verbs.ask(lab, "gpu_release", {"uuid": uuid}, who=WHO))
    if json:
        emit(lab, {"gpus": [g for g in queries.gpu_objects(lab) if g["uuid"] == uuid], **result})
    else:
        say(str(result["text"]))


def gpu_named(lab: Lab, start: str) -> str:
    """The UUID of `host:index`, or that starts so. Raised: UnknownName, BadValue when several do."""
    gpus = lab.store.gpus()
    known = [g.uuid for g in gpus]
    found = (
        [g.uuid for g in gpus if f"{g.host}:{g.idx}" == start]
        or [u for u in known if u == start]
        or [u for u in known if u.lower().startswith(start.lower())]
    )
    if not found:
        raise UnknownName("GPU", one_line(start, 60), known)
    if len(found) > 1:
        raise BadValue(f"{len(found)} GPUs start with {start!r}.", next_step=f"Give more of it: {', '.join(found[:4])}")
    return found[0]


def events(
    context: typer.Context,
    limit: Limit = 50,
    subject: Annotated[str | None, typer.Option("--subject", metavar="ID", help="Only of this run, host, GPU or wave.")] = None,
    after: Annotated[int, typer.Option("--cursor", metavar="ID", min=0, help="Only events after this one.")] = 0,
    json: JsonFlag = False,
) -> None:
    """The audit trail. Who did what, when and why."""
    lab = lab_of(context)
    found = sorted(lab.store.events(after=after, subject=subject, limit=100_000 if after else limit), key=lambda e: e.id)[:limit]
    if json:
        rows = [
            {"id": e.id, "at": e.at, "who": e.who, "verb": e.verb, "subject": e.subject, "why": e.why, "detail": e.detail} for e in found
        ]
        emit(lab, {"events": rows, "cursor": found[-1].id if found else after})
        return
    if not found:
        say("Nothing has happened yet.")
        return
    table(
        ("at", "who", "verb", "subject", "why"),
        [(time.strftime("%m-%d %H:%M:%S", time.localtime(e.at)), e.who, e.verb, e.subject, states.event_words(e)) for e in found],
    )
