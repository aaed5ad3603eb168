"""The machines: state, GPUs and disk, what the last check found, and the verbs for them: pause, drain, check, set up, release a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from runner.lab import Lab
from runner.records import Host, Json, Request

from ..gpuwords import label, stage_text
from ..lines import Line, fit, safe, wrap_words
from ..snapshot import Snapshot
from ..tables import HOSTS
from ..widgets.dialogs import Confirm
from ..widgets.gpus import COLUMNS
from ..widgets.table import Table
from ..widgets.view import Lines
from ..words import age
from .page import PAGE_KEYS, Page


def load_requests(lab: Lab) -> list[Request]:
    """Requests about hosts: what is asked, under way, and answered last."""
    return [
        *lab.store.requests("asked"),
        *lab.store.requests("working"),
        *lab.store.requests("failed")[-5:],
        *lab.store.requests("done")[-20:],
    ]


class HostsPage(Page):
    """All hosts."""

    NAME = "hosts"
    BINDINGS: ClassVar[list[BindingType]] = [
        *PAGE_KEYS,
        Binding("H", "pause_host", "pause", tooltip="Start nothing new on the host, or go on"),
        Binding("n", "drain_host", "drain", tooltip="Let it finish what it runs and take nothing more, or take it back"),
        Binding("c", "check", "check", tooltip="Ask the daemon to check the host now"),
        Binding("I", "setup", "set up", show=False, tooltip="Ask the daemon to install what runs need on the host"),
        Binding("r", "release", "release", show=False, tooltip="Release the quarantined GPU under the cursor of the lower table"),
        Binding("e", "export", "export", show=False, tooltip="Write the table in focus to a TSV file"),
    ]
    DEFAULT_CSS = """
    HostsPage #hosts { height: 2fr; min-height: 5; }
    HostsPage #told { height: 2fr; }
    HostsPage #gpus { height: 3fr; }
    """

    def __init__(self, host: str | None = None) -> None:
        super().__init__()
        self._first = host  # where the cursor begins

    def body(self) -> Iterable[Widget]:
        """Hosts, what is known of the one under the cursor, its GPUs."""
        yield Table(HOSTS, key="name", id="hosts", title="Hosts", empty="no host is known yet: hosts.toml names them")
        yield Lines(id="told", title="Check")
        yield Table(COLUMNS, key="uuid", id="gpus", title="GPUs", empty="no GPU here")

    def on_mount(self) -> None:
        """Begin to read the requests."""
        self.room.source.watch("requests", load_requests)
        self.query_one("#hosts").focus()

    def on_unmount(self) -> None:
        """Read no longer."""
        self.room.source.unwatch("requests")

    def show_body(self, snapshot: Snapshot) -> None:
        """The three panes."""
        table = self.query_one("#hosts", Table)
        if self._first is not None:
            table.cursor_key, self._first = self._first, None
        table.show([host_row(h, snapshot, self.room.now()) for h in snapshot.hosts])
        self._tell(snapshot)

    def _tell(self, snapshot: Snapshot) -> None:
        row = self.query_one("#hosts", Table).row()
        if row is None:
            return
        requests = snapshot.views.get("requests")
        self.query_one("#told", Lines).caption(f"What is known of {safe(row['name'], 40)}")
        told, gpus = self.query_one("#told", Lines), [g for g in snapshot.gpus if g.get("host") == row["name"]]
        troubles = trouble_lines(gpus, max(20, told.scrollable_content_region.width))
        told.show(troubles + host_lines(row, requests if isinstance(requests, list) else [], self.room.now()))
        self.query_one("#gpus", Table).show(
            [
                {**g, "run_object": snapshot.live.get(str(g.get("run"))), "history": snapshot.history.get(str(g.get("uuid")), ())}
                for g in gpus
            ]
        )

    def on_table_moved(self, event: Table.Moved) -> None:
        """Tell about the host under the cursor."""
        if event.table.id == "hosts":
            self._tell(self.room.snapshot)

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """A GPU's row opens its run."""
        row = event.table.row() or {}
        if event.table.id == "gpus" and row.get("run"):
            self.room.open_run(str(row["run"]))

    def _host(self) -> str | None:
        return self.query_one("#hosts", Table).cursor_key

    def action_pause_host(self) -> None:
        """Pause or resume."""
        if host := self._host():
            self.room.toggle_host(host)

    def action_drain_host(self) -> None:
        """Drain or take back."""
        if host := self._host():
            self.room.drain_host(host)

    def action_check(self) -> None:
        """Ask for a check."""
        if host := self._host():
            self.room.asking.ask(f"check {host}", "hosts_check", {f"check {host}": {"hosts": [host]}})

    def action_setup(self) -> None:
        """Ask, then have it set up."""
        host = self._host()
        if host is None:
            return
        lines = [f"The daemon installs Python packages into Overnight's own folder on {safe(host, 40)}. Nothing else there is touched."]
        self.room.push_screen(
            Confirm(f"Set up {safe(host, 40)}?", lines),
            lambda yes: self.room.asking.ask(f"set up {host}", "host_setup", {f"set up {host}": {"host": host}}) if yes else None,
        )

    def action_release(self) -> None:
        """Release a quarantined GPU of this host: the one under the cursor, or the first."""
        table = self.query_one("#gpus", Table)
        held = [r for r in table.rows if r.get("state") == "quarantined"]
        row = table.row()
        if row is not None and row.get("state") == "quarantined":
            held.insert(0, row)
        if held:
            self.room.release_gpu(dict(held[0]))
        else:
            self.room.say("no GPU of this host is quarantined")

    def action_export(self) -> None:
        """Write the table in focus."""
        table = self.filtered()
        if table is not None:
            self.room.export(table)


def host_row(host: Host, snapshot: Snapshot, now: float) -> Json:
    """One host with its GPUs counted."""
    gpus = [g for g in snapshot.gpus if g.get("host") == host.name]
    told = snapshot.told.get(host.name, {})
    return {
        "name": host.name, "kind": host.kind, "state": told.get("state") or host.state, "since_s": now - host.since,
        "error": told.get("error") or host.error, "info": host.info,
        "paused": host.paused, "drain": host.drain, "gpus": len(gpus), "busy": sum(1 for g in gpus if g.get("run")),
        "disk_free_mib": host.disk_free_mib, "checked_s": now - host.checked_at if host.checked_at else None,
    }  # fmt: skip


def trouble_lines(gpus: list[Json], width: int) -> list[Line]:
    """Why a GPU takes no run, in full: rows and cards have no room for it."""
    out: list[Line] = []
    for gpu in gpus:
        if gpu.get("state") in ("quarantined", "foreign", "lost"):
            word, style = stage_text({**gpu, "run": None})  # the GPU's own state, whatever runs on it
            words = f"{label(gpu)} {word}: {safe(gpu.get('note') or gpu.get('reason'), 400)}"
            out += [Line((row, style)) for row in wrap_words(words, width)]
    return out


def newest_report(name: str, requests: list[Request]) -> tuple[Request, Json] | None:
    """The last check that looked at a host: the request and what it found there."""
    for request in sorted(requests, key=lambda q: -q.id):
        if request.verb == "hosts_check" and request.state == "done":
            found = next((r for r in (request.result or {}).get("hosts", []) if r.get("name") == name), None)
            if found is not None:
                return request, found
    return None


def host_lines(row: Mapping[str, Any], requests: list[Request], now: float) -> list[Line]:
    """What the daemon knows of a host: its error, what is asked of it, its last check, its facts."""
    name, out = str(row.get("name")), list[Line]()
    if row.get("error"):
        out.append(Line(("✕ ", "bad"), (safe(row["error"], 400), "bad")))
    asked = [q for q in requests if q.args.get("host") == name or q.args.get("hosts") in ([], [name])]
    for request in [q for q in asked if q.state != "done" or q.verb != "hosts_check"][-3:]:
        said = (request.error or {}).get("message") if request.error else request.progress
        style = "bad" if request.state == "failed" else "good" if request.state == "done" else "accent"
        head = f"{safe(request.verb, 20).replace('_', ' ')}: {safe(request.state, 10)}, {age(now - request.updated_at)} ago  "
        out.append(Line((head, style), (safe(said or "", 300), "")))
    report = newest_report(name, requests)
    if report is not None:
        out.append(
            Line((f"Checked {age(now - report[0].updated_at)} ago", "title"), (f"  {safe(report[1].get('next') or '', 300)}", "warn"))
        )
        for check in report[1].get("checks") or []:
            ok = check.get("ok")
            glyph, style = ("✓", "good") if ok else ("?", "muted") if ok is None else ("✕", "bad")
            text = safe(check.get("text") or check.get("value"), 300)
            out.append(Line((f"{glyph} ", style), (fit(safe(check.get("name"), 30), 20), ""), (text, "" if ok else style)))
    for key, value in (row.get("info") or {}).items():
        if isinstance(value, (str, int, float)) and value != "":  # plain facts; an environment may hold what is nobody's business
            out.append(Line((fit(safe(key, 24), 22), "muted"), (safe(value, 300), "")))
    return out or [Line(("nothing is known yet: c asks the daemon to check it", "muted"))]
