"""Every key that acts on the lab, its hosts, GPUs and waves, and the choices that are remembered."""

from __future__ import annotations

from pathlib import Path

from textual.binding import Binding
from textual.widgets import Input, Static

from runner import verbs
from runner.lab import Lab
from tests.keys_page import owners
from tests.tui import rows, scenes
from tests.tui.driving import confirmed, filled, opened, screen_text, until
from tui.deeds import RUN_ACTIONS, RUN_BINDINGS
from tui.memory import Memory
from tui.widgets.dialogs import Confirm, Form
from tui.widgets.table import Table
from tui.widgets.view import Lines


def last_event(lab: Lab) -> tuple[str, str, str | None, str | None]:
    event = lab.store.events(limit=1)[0]
    return event.who, event.verb, event.subject, event.why


async def test_pause_the_queue_and_the_approval_mode(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("p")
        await until(lambda: lab.store.setting("queue_paused") is True)
        await until(lambda: "PAUSED" in screen_text(room))
        await pilot.press("p")
        await until(lambda: lab.store.setting("queue_paused") is False)
        await pilot.press("m")
        await until(lambda: lab.store.setting("approval") == "ask")
        await pilot.press("H")
        await until(lambda: lab.store.hosts()[0].paused == 1)
        assert last_event(lab)[:3] == ("tui", "pause_host", "alpha")


async def test_release_export_copy_and_themes(lab: Lab) -> None:
    lab.store.upsert_gpu("GPU-alpha-00", state="quarantined", reason="41 GiB held", run_id=None)
    async with opened(lab) as (room, pilot):
        await pilot.press("r")
        await confirmed(room, pilot)
        await until(lambda: [(r.verb, r.args) for r in lab.store.requests("asked")] == [("gpu_release", {"gpu": "GPU-alpha-00"})])
        room.screen.query_one("#board").focus()
        await pilot.press("e")
        await until(lambda: isinstance(room.screen, Form))
        await pilot.press("enter")
        await until(lambda: list(lab.path.glob("leaderboard-*.tsv")))
        text = next(iter(lab.path.glob("leaderboard-*.tsv"))).read_text()
        assert text.splitlines()[1].split("\t")[1] == "r0005"
        await pilot.press("y")
        assert room.clipboard == "r0005"
        theme = room.theme
        await pilot.press("T")
        assert room.theme != theme
        await pilot.press("c")
        await until(lambda: (room.snapshot.board or {}).get("class") == rows.CLASS_H200)


async def test_hosts_page_verbs(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("4")
        await until(lambda: room.screen.query_one("#hosts", Table).rows)
        await pilot.press("j", "n")
        await until(lambda: lab.store.hosts()[1].drain == 1)
        await pilot.press("c")
        await until(lambda: [(r.verb, r.args) for r in lab.store.requests("asked")] == [("hosts_check", {"hosts": ["beta"]})])
        await pilot.press("I")
        await confirmed(room, pilot)
        await until(lambda: [r.verb for r in lab.store.requests("asked")] == ["hosts_check", "host_setup"])


async def test_hosts_page_says_what_keeps_runs_away_and_which_host_drains(lab: Lab) -> None:
    text = lab.hosts_file.read_text().replace('[[host]]\nname = "beta"\nkind = "ssh"\n', "")
    text = text.replace('name = "alpha"\n', 'name = "alpha"\nmin_free_disk_mib = 900000\n')
    lab.hosts_file.write_text(text)
    lab.accept(text)
    async with opened(lab, size=(160, 40)) as (room, pilot):
        await pilot.press("4")
        await until(lambda: room.screen.query_one("#hosts", Table).rows)
        shown = screen_text(room)
        assert "its disk is below the floor (812000 MiB free, floor 900000 MiB)" in shown
        assert "draining" in shown and "it is no longer in hosts.toml" in shown


async def test_hosts_page_shows_what_a_check_found(lab: Lab) -> None:
    report = {
        "name": "beta", "kind": "ssh", "state": "unfit", "error": "torch cannot be imported", "next": "Set it up: I.",
        "checks": [
            {"name": "reachable", "ok": True, "text": "Linux 6.1, 64 cores"},
            {"name": "torch", "ok": False, "text": "No module named torch"},
        ],
    }  # fmt: skip
    asked = lab.store.insert_request("hosts_check", {"hosts": []}, "cli")
    lab.store.update_request(asked, state="done", result={"hosts": [report]})
    broken = lab.store.insert_request("host_setup", {"host": "beta"}, "tui")
    lab.store.update_request(broken, state="failed", error={"code": "host", "message": "pip ended with 1", "next": ""})
    async with opened(lab) as (room, pilot):
        await pilot.press("4")
        await until(lambda: room.screen.query_one("#hosts", Table).rows)
        assert "No module named torch" not in screen_text(room)
        await pilot.press("j")
        await until(lambda: "✕ torch" in screen_text(room))
        shown = screen_text(room)
        assert "No module named torch" in shown and "✓ reachable" in shown and "Set it up: I." in shown and "pip ended with 1" in shown


async def test_cancel_a_wave_from_its_list(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("3")
        await until(lambda: len(room.screen.query_one("#waves", Table).rows) == 2)
        await pilot.press("x")
        await confirmed(room, pilot)
        await until(lambda: lab.store.count_runs("wave_id = 'w2' AND wanted = 'cancel'") == 23)


async def test_readonly_offers_no_writing_key(lab: Lab) -> None:
    async with opened(lab, readonly=True) as (room, pilot):
        assert "read-only" in screen_text(room)
        before = lab.store.events(limit=1)[0].id
        await pilot.press("x", "p", "m", "P", "t")
        assert "pause queue" not in screen_text(room)
        await pilot.press("H")
        await until(lambda: "read-only" in room._message[0])
        assert not isinstance(room.screen, (Confirm, Form))
        assert lab.store.events(limit=1)[0].id == before


async def test_columns_are_chosen_and_remembered(lab: Lab, tmp_path: Path) -> None:
    memory = Memory(tmp_path / "tui.json")
    async with opened(lab, memory=memory) as (room, pilot):
        room.screen.query_one("#board").focus()
        await pilot.press("vertical_line")
        await filled(room, pilot, "id val badge nonsense")
        await until(lambda: "gain" not in screen_text(room))
    async with opened(lab, memory=Memory(tmp_path / "tui.json")) as (room, pilot):
        board = room.screen.query_one("#board", Table)
        assert board.hidden == {"rank", "trust", "gain", "se", "verdict", "seeds", "params", "steps", "wave", "what"}
        board.hide(c.key for c in board.columns)
        assert not board.hidden, "a table without a column would be lost"


async def test_freeze_holds_the_screen(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("z")
        held = room.snapshot
        lab.store.set_setting("queue_paused", True)
        room.source.poke()
        await pilot.pause()
        assert room.snapshot is held and "FROZEN" in screen_text(room)
        await pilot.press("z")
        await until(lambda: room.snapshot.state is not None and room.snapshot.state.paused)


async def test_an_export_goes_where_one_says_and_overwrites_nothing(lab: Lab, tmp_path: Path) -> None:
    memory = Memory(tmp_path / "tui.json")
    there = tmp_path / "there.tsv"
    there.write_text("mine")
    async with opened(lab, memory=memory) as (room, pilot):
        room.screen.query_one("#board").focus()
        await pilot.press("e")
        refused = {"": "No file is named", str(there): "is there already", str(tmp_path): "is a folder", "/nowhere/x": "no folder"}
        for bad, says in refused.items():
            await filled(room, pilot, bad)
            await until(lambda says=says: says in str(room.screen.query_one("#wrong", Static).content))
        await filled(room, pilot, str(tmp_path / "night.tsv"))
        await until((tmp_path / "night.tsv").exists)
        assert there.read_text() == "mine"
        assert (tmp_path / "night.tsv").read_text().splitlines()[0].split("\t")[:3] == ["#", "run", "val_bpb"]
        await until(lambda: not isinstance(room.screen, Form))
        await pilot.press("e")
        await until(lambda: isinstance(room.screen, Form))
        assert room.screen.query_one("#field-file", Input).value.startswith(f"{tmp_path}/leaderboard-"), "the folder is offered again"


async def test_why_a_gpu_takes_no_run_is_told_in_full(tmp_path: Path) -> None:
    async with opened(scenes.host_down(tmp_path), size=(80, 24)) as (room, pilot):
        await pilot.press("4")
        await until(lambda: room.screen.query_one("#hosts", Table).rows)
        await pilot.pause()
        told = " ".join(" ".join(line.text for line in room.screen.query_one("#told", Lines).lines).split())
        assert told.startswith("alpha:3 quarantine: ") and "41 GiB still held by pid 8812 (python) of user mira" in told
        await pilot.press("r")
        await until(lambda: isinstance(room.screen, Confirm))


async def test_a_waves_id_is_copied(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("3")
        await until(lambda: room.screen.query_one("#waves", Table).rows)
        await pilot.press("y")
        assert room.clipboard == "w2" and "no run" not in screen_text(room)


def test_no_key_of_a_page_has_the_name_of_a_deed_for_runs() -> None:
    """Such a key would be refused where no run is under the cursor."""
    for name, owner in owners().items():
        own = [b for b in owner.BINDINGS if isinstance(b, Binding) and b not in RUN_BINDINGS]
        assert not RUN_ACTIONS & {b.action.split("(")[0] for b in own}, name


async def test_what_the_daemon_was_asked_is_about_hosts_and_not_about_a_list(lab: Lab) -> None:
    for hosts, subject in ((["beta"], "beta"), (["alpha", "beta"], "alpha, beta"), ([], "lab")):
        verbs.ask(lab, "hosts_check", {"hosts": hosts}, who="tui")
        assert lab.store.events(limit=1)[0].subject == subject
