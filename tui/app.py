"""The control room: a pure view of the lab, every override by keyboard. `run(lab)` opens it.

Reads come from `snapshot.Reader`, writes go through `hand.Hand`; both are daemon threads, so the first frame waits for neither and
quitting waits for nothing. Pages are in screens/, what they are made of in widgets/.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message
from textual.screen import Screen
from textual.scrollbar import ScrollBar

from runner import verbs
from runner.lab import Lab
from runner.text import plural

from .asking import WHO, Asked, Asking
from .commands import BindingCommands
from .gpuwords import STALE_S
from .hand import Deed, Hand
from .help import key_lines
from .lines import safe
from .memory import Memory
from .picture import Picture
from .plain import AsciiBars, ascii_only
from .screens.dashboard import Dashboard
from .screens.page import Page
from .snapshot import Snapshot, Source, aged
from .terminal import Terminal
from .themes import THEMES
from .widgets.dialogs import Confirm, Field, Form, KeysPage, inside
from .widgets.table import Table

MESSAGE_S = 8.0
TICK_S = 2.0


@dataclass
class Taken(Message):
    """A snapshot from the reader's thread; only the newest matters."""

    snapshot: Snapshot

    def can_replace(self, message: Message) -> bool:
        """Older ones are worth nothing."""
        return isinstance(message, Taken)


@dataclass
class Done(Message):
    """What became of a verb."""

    deed: Deed


class ControlRoom(App[None]):
    """The app: pages, snapshots, messages, and the keys that work everywhere."""

    TITLE = "Overnight"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[Any]] = {BindingCommands}
    CSS = """
    CommandPalette { background: transparent; }
    Confirm:ansi, Form:ansi, KeysPage:ansi { background: transparent; }
    CommandPalette SearchIcon { display: none; }
    ControlRoom.-ascii View { border-top: ascii $foreground 22%; }
    ControlRoom.-ascii View:focus { border-top: ascii $accent; }
    ControlRoom.-ascii Strips, ControlRoom.-ascii Box Lines, ControlRoom.-ascii Box Lines:focus, ControlRoom.-ascii #told { border: none; }
    ControlRoom.-ascii Box, ControlRoom.-ascii Toast { border: ascii $accent; }
    ControlRoom.-ascii CommandPalette #--input, ControlRoom.-ascii CommandPalette CommandList { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "all keys", key_display="?", show=False, tooltip="Every key that works here"),
        Binding("colon,ctrl+p", "command_palette", "commands", key_display=":", show=False, tooltip="Search every command"),
        Binding("p", "pause_queue", "pause queue", tooltip="Start nothing new (what runs goes on), or go on"),
        Binding("1", "page('dashboard')", "dashboard", show=False, tooltip="GPUs, queue, leaderboard"),
        Binding("2", "page('runs')", "runs", show=False, tooltip="Every run, newest first"),
        Binding("3", "page('waves')", "waves", show=False, tooltip="Every wave"),
        Binding("4", "page('hosts')", "hosts", show=False, tooltip="The machines"),
        Binding("5", "page('events')", "events", show=False, tooltip="Flags and the audit trail"),
        Binding("6", "page('lineage')", "lineage", show=False, tooltip="Kept runs as a tree, and val_bpb over time"),
        Binding("m", "approval", "approval mode", show=False, tooltip="Agents' submissions wait for you, or do not"),
        Binding("z", "freeze", "freeze", show=False, tooltip="Hold the screen still; the lab goes on"),
        Binding("T", "next_theme", "theme", show=False, tooltip="The next theme"),
        Binding("ctrl+r,ctrl+l", "refresh", "read now", show=False, tooltip="Read the lab now, and draw the whole screen anew"),
        Binding("q", "leave", "back or quit", show=False, tooltip="Back, and from the first page: quit. The daemon and the runs go on"),
        Binding("escape", "back", "back", show=False, tooltip="Back to the page before"),
        Binding("ctrl+z", "suspend_process", "suspend", show=False, tooltip="Back to the shell; `fg` returns"),
        Binding("ctrl+q", "quit", "quit", show=False, priority=True, tooltip="Quit at once. The daemon and the runs go on"),
    ]

    def __init__(
        self,
        source: Source,
        path: Path,
        *,
        readonly: bool = False,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.time,
        memory: Memory | None = None,
    ) -> None:
        no_color = "NO_COLOR" in os.environ
        super().__init__(ansi_color=True if no_color else None)
        self.source, self.path, self.readonly, self.ascii_only = source, path, readonly, ascii_only
        self.set_class(ascii_only, "-ascii")
        if ascii_only:
            ScrollBar.renderer = AsciiBars
        self.picture = Picture()
        self.clock = clock
        self.frozen = False
        self.snapshot = self._taken = Snapshot(lab=str(path))  # what is shown, and what was read last
        self.hand = Hand(path, self._report)
        self.asking = Asking(self)
        self.memory = memory or Memory(None)
        self.drafts: dict[str, str] = {}  # by run: a source that was edited and not submitted yet
        self._message: tuple[str, str, float] = ("", "", 0.0)
        for theme in THEMES:
            self.register_theme(theme)
        wanted = "ansi-dark" if no_color else str(self.memory.get("theme", "overnight"))
        self.theme = wanted if wanted in self.available_themes else "overnight"

    def get_driver_class(self) -> type[Driver]:
        """Where Textual would take its own driver for this terminal, ours."""
        found = super().get_driver_class()
        return Terminal if found is LinuxDriver else found

    def get_default_screen(self) -> Screen[Any]:
        """The first page."""
        return Dashboard()

    def on_ready(self) -> None:
        """The first frame is out: now begin to read."""
        gc.enable()
        self.source.start(self._deliver)
        self.set_interval(TICK_S, self._tick)

    def _tick(self) -> None:
        """Messages fade, and data that no longer comes grows visibly old, also when the reader hangs."""
        if not self.frozen and self.now() - self._taken.at > STALE_S:
            self._look()
        elif (page := self.front()) is not None:
            page.show_frame(self.snapshot)

    def _deliver(self, snapshot: Snapshot) -> None:
        """From the reader's thread."""
        self.post_message(Taken(snapshot))

    def _report(self, deed: Deed) -> None:
        """From the hand's thread."""
        self.post_message(Done(deed))

    def on_unmount(self) -> None:
        """Let the threads go; nobody waits for them."""
        self.source.stop()
        self.hand.stop()

    def _fatal_error(self) -> None:
        """A fault of the screen: its traceback goes to a file of the lab, a sentence to the person; daemon and runs know nothing of it."""
        text = "".join(traceback.format_exception(self._exception)) if self._exception else "no traceback\n"
        where = f"OVERNIGHT_DEBUG=1 shows more.\n{text}" if os.environ.get("OVERNIGHT_DEBUG") else written_down(self.path, text)
        self.panic(Text(f"The screen failed ({type(self._exception).__name__}); the daemon and the runs go on. {where}"))

    def now(self) -> float:
        """The clock of the screen."""
        return self.clock()

    # snapshots

    def on_taken(self, message: Taken) -> None:
        """A newer view of the lab."""
        self.asking.hear(message.snapshot)
        if self.frozen:
            return
        self._taken = message.snapshot
        self._look()

    def _look(self) -> None:
        """Show what was read last: as it was, or grown old where readings fail or hang."""
        old_s = self.now() - self._taken.at
        self.snapshot = aged(self._taken, old_s) if self._taken.seen and old_s > STALE_S else self._taken
        self.redraw()

    def redraw(self) -> None:
        """Show the snapshot on the page in front."""
        page = self.front()
        if page is not None:
            page.show(self.snapshot)

    def front(self) -> Page | None:
        """The page in front, also while a box is over it; None once the app is closing and panes may be gone."""
        if not self.is_running:
            return None
        return next((s for s in reversed(self.screen_stack) if isinstance(s, Page)), None)

    # messages and verbs

    def message(self) -> tuple[str, str] | None:
        """The newest message while it is fresh: (text, style)."""
        text, style, at = self._message
        return (text, style) if text and time.monotonic() - at < MESSAGE_S else None

    def say(self, text: str, style: str = "accent") -> None:
        """Show a sentence in the bottom line."""
        self._message = (text, style, time.monotonic())
        page = self.front()
        if page is not None:
            page.show_keys()

    def spelled(self, text: str) -> str:
        """Text that no pane draws, in the characters the terminal has."""
        return ascii_only(text) if self.ascii_only else text

    def complain(self, sentence: str) -> None:
        """Show a failure where it is not overlooked: a sentence with what to do next is longer than a line."""
        self.say(sentence, "bad")
        self.notify(self.spelled(safe(sentence, 600)), severity="error", markup=False, timeout=10)

    def do(self, label: str, verb: Callable[[Lab], Any], then: Callable[[Any], None] | None = None) -> None:
        """Carry out a verb and say what came of it."""
        if self.readonly:
            self.complain(f"{label}: this screen was opened read-only. Open it without --readonly to change anything.")
            return
        self.say(f"{label} …", "muted")
        self.unmark()  # the next key must not act on what was meant by this one
        self.hand.do(label, verb, then)

    def unmark(self) -> bool:
        """Take the marks of the page in front away; whether there were any."""
        page = self.front()
        return any([table.unmark() for table in page.query(Table)]) if page is not None else False

    def on_done(self, message: Done) -> None:
        """Tell, look again, and go on where the page asked to."""
        deed = message.deed
        if deed.ok and isinstance(deed.result, Asked):
            self.asking.follow(deed.result)
        elif deed.ok:
            self.say(f"✓ {deed.sentence}", "good")
        else:
            self.complain(deed.sentence)
        self.source.poke()
        if deed.ok and deed.then is not None:
            deed.then(deed.result)

    def copy(self, text: str) -> None:
        """Send text to the terminal's clipboard (OSC 52; tmux needs `set-clipboard on`)."""
        self.copy_to_clipboard(text)
        self.say(f"sent to the terminal's clipboard: {safe(text, 120)}")

    # pages

    def action_page(self, name: str) -> None:
        """Show one of the top pages; the dashboard lies under all."""
        from .screens import make_page  # pages are built when first asked for: the first frame waits for none but the dashboard

        under = self.screen_stack[1:]
        open_already = bool(under) and isinstance(under[0], Page) and under[0].NAME == name
        while len(self.screen_stack) > 1 + open_already:
            self.pop_screen()
        if name != Dashboard.NAME and not open_already:
            self.push_screen(make_page(name))

    def open_run(self, run_id: str) -> None:
        """Show a run's page."""
        from .screens.run import RunPage

        if isinstance(self.screen, RunPage) and self.screen.run_id == run_id:
            return
        self.push_screen(RunPage(run_id))

    def open_wave(self, wave_id: str) -> None:
        """Show a wave's page."""
        from .screens.wave import WavePage

        self.push_screen(WavePage(wave_id))

    def open_subject(self, row: Any) -> None:
        """Open what an event or flag is about, where it has a page."""
        subject = str((row or {}).get("subject") or "")
        if subject[:1] == "r" and subject[1:].isdigit():
            self.open_run(subject)
        elif subject[:1] == "w" and subject[1:].isdigit():
            self.open_wave(subject)
        elif (host := self._host_of(subject)) is not None:
            from .screens.hosts import HostsPage

            self.push_screen(HostsPage(host))
        else:
            self.say(f"{safe(subject, 40)} has no page of its own")

    def _host_of(self, subject: str) -> str | None:
        """The host that a subject is, or that holds it as a GPU."""
        if any(h.name == subject for h in self.snapshot.hosts):
            return subject
        return next((str(g.get("host")) for g in self.snapshot.gpus if g.get("uuid") == subject), None)

    async def action_back(self) -> None:
        """Take the marks away, else go back one page; at the first nothing happens."""
        if self.unmark():
            return
        if len(self.screen_stack) > 1:
            self.pop_screen()

    def action_leave(self) -> None:
        """Back one page, or quit from the first."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.exit()

    # keys that work everywhere

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that write are not offered on a screen that was opened for looking."""
        return not (self.readonly and action in ("pause_queue", "approval"))

    def action_keys(self) -> None:
        """The page of keys."""
        if isinstance(self.screen, Page):
            self.push_screen(KeysPage(f"Keys: {self.screen.NAME}", key_lines(self.screen, inside(self.size.width))))

    def action_command_palette(self) -> None:
        """Every command by name."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(CommandPalette(placeholder="a command, by any part of its name", id="--command-palette"))

    def action_refresh(self) -> None:
        """Read now; and draw all, for something else may have written to the terminal."""
        self.picture.forget()
        self.refresh()
        self.source.poke()

    def action_freeze(self) -> None:
        """Hold the screen still, or go on."""
        self.frozen = not self.frozen
        self.say("the screen is frozen: z goes on; the lab was never stopped" if self.frozen else "")
        self.redraw()
        if not self.frozen:
            self.source.poke()

    def action_pause_queue(self) -> None:
        """Pause or resume the queue."""
        state = self.snapshot.state
        if state is None:
            self.say("the lab is not read yet", "warn")
            return
        on = not state.paused
        self.do("pause the queue" if on else "resume the queue", lambda lab: verbs.pause_queue(lab, on, who=WHO))

    def action_approval(self) -> None:
        """Between auto and ask."""
        state = self.snapshot.state
        if state is not None:
            mode = "auto" if state.approval == "ask" else "ask"
            self.do(f"approval mode {mode}", lambda lab: verbs.set_approval(lab, mode, who=WHO))

    def action_next_theme(self) -> None:
        """The next of our themes and a few of Textual's."""
        names = [t.name for t in THEMES] + ["textual-dark", "textual-light", "solarized-light", "gruvbox", "nord", "ansi-dark"]
        names = [n for n in names if n in self.available_themes]
        self.theme = names[(names.index(self.theme) + 1) % len(names)] if self.theme in names else names[0]
        self.memory.put("theme", self.theme)
        self.say(f"theme {self.theme}")

    def toggle_host(self, name: str) -> None:
        """Pause or resume a host."""
        host = next((h for h in self.snapshot.hosts if h.name == name), None)
        on = not (host.paused if host else 0)
        self.do(f"{'pause' if on else 'resume'} host {name}", lambda lab: verbs.pause_host(lab, name, on, who=WHO))

    def drain_host(self, name: str) -> None:
        """Drain a host, or take it back."""
        host = next((h for h in self.snapshot.hosts if h.name == name), None)
        on = not (host.drain if host else 0)
        self.do(f"{'drain' if on else 'stop draining'} host {name}", lambda lab: verbs.drain_host(lab, name, on, who=WHO))

    def release_gpu(self, gpu: dict[str, Any]) -> None:
        """Ask the daemon to take a GPU back, after a question: what holds it may still be there."""
        uuid = str(gpu.get("uuid"))
        where = f"{safe(gpu.get('host'), 30)}:{gpu.get('index')}"
        self.push_screen(
            Confirm(
                f"Release {where}?",
                [f"It is quarantined: {safe(gpu.get('reason'), 200)}", "Runs are started on it again when its memory is free."],
            ),
            lambda yes: self.asking.ask(f"release {where}", "gpu_release", {f"release {where}": {"gpu": uuid}}) if yes else None,
        )

    def choose_class(self, class_key: str | None, budget_s: float | None) -> None:
        """Rank another class."""
        choose = getattr(self.source, "choose", None)
        if callable(choose):
            choose(class_key, budget_s)
        self.memory.put("class", class_key)
        self.say(f"leaderboard of {safe(class_key, 80)} at {budget_s:g} s" if budget_s else f"leaderboard of {safe(class_key, 80)}")

    def export(self, table: Table) -> None:
        """Ask where to, then write a table; the next time the same folder is offered."""
        from .export import checked_target, file_name, write_table

        folder = Path(str(self.memory.get("export_folder") or self.path))
        form = Form(
            f"Export {table.name_shown}",
            [Field("file", "File (tab-separated text)", str(folder / file_name(table.name_shown)))],
            notes=[f"{plural(len(table.rows), 'row')} as shown: this order, this filter, every column."],
            check=lambda got: checked_target(got["file"]),
        )

        def take(got: dict[str, str] | None) -> None:
            if got is not None:
                target = checked_target(got["file"])
                self.memory.put("export_folder", str(target.parent))
                columns, rows = list(table.columns), list(table.rows)
                self.do("export", lambda lab: write_table(target, columns, rows))

        self.push_screen(form, take)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Commands that have no key."""
        yield SystemCommand("Start the daemon", "Start the daemon of this lab", self._start_daemon)
        yield SystemCommand(
            "Accept hosts.toml",
            "Put an edited hosts.toml in force",
            lambda: self.do("accept hosts.toml", lambda lab: verbs.accept_policy(lab, who=WHO)),
        )
        yield SystemCommand(
            "Begin a new night",
            "Count max_wall_hours from now",
            lambda: self.do("begin a new night", lambda lab: verbs.new_night(lab, who=WHO)),
        )
        for agent in self._agents():
            yield SystemCommand(f"Pause {agent}", "Start none of this agent's runs", lambda a=agent: self._pause_agent(a, True))
            yield SystemCommand(f"Resume {agent}", "Start this agent's runs again", lambda a=agent: self._pause_agent(a, False))
        for name in sorted(self.available_themes):
            yield SystemCommand(f"Theme {name}", "Change the colours", lambda n=name: self._set_theme(n))

    def _agents(self) -> list[str]:
        rows = [*self.snapshot.queue, *self.snapshot.live.values()]
        paused = list(self.snapshot.state.paused_agents) if self.snapshot.state else []
        return sorted({safe(r.get("agent"), 60) for r in rows if str(r.get("agent")).startswith("mcp:")} | set(paused))

    def _pause_agent(self, name: str, on: bool) -> None:
        self.do(f"{'pause' if on else 'resume'} {name}", lambda lab: verbs.pause_agent(lab, name, on, who=WHO))

    def _set_theme(self, name: str) -> None:
        self.theme = name
        self.memory.put("theme", name)

    def _start_daemon(self) -> None:
        from runner.daemonctl import ensure_daemon

        self.do("start the daemon", lambda lab: ensure_daemon(lab) and None)


def written_down(lab: Path, text: str) -> str:
    """Keep a traceback beside the lab's other logs; says where."""
    path = lab / "tui-error.log"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8", errors="replace") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S\n") + text + "\n")
    except OSError:
        return "Set OVERNIGHT_DEBUG=1 to see the details."
    return f"The details are in {path}."


def run(lab_path: Path | str | None = None, readonly: bool = False, leave: bool = False, ascii_only: bool = False) -> int:
    """Open the control room on a lab; a terminal that cannot show one gets the table once.

    Returns the exit code; with `leave` the process ends with it as soon as the screen is closed.
    """
    from .opening import open_room

    return open_room(lab_path, readonly=readonly, leave=leave, ascii=ascii_only)


def run_once(lab_path: Path | str | None = None, readonly: bool = False, ascii_only: bool = False) -> int:
    """Print the lab as a plain table. Returns the exit code."""
    from .opening import open_room

    return open_room(lab_path, readonly=readonly, once=True, ascii=ascii_only)
