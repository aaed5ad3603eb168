"""Every key of the control room, over a real lab: what it writes, what it asks first, and that nothing happens by accident."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.widgets import Input

from runner.lab import Lab
from tests.tui import rows, scenes
from tests.tui.driving import opened, screen_text, until
from tui.app import ControlRoom
from tui.deeds import RUN_BINDINGS, pairs
from tui.memory import Memory
from tui.screens import make_page
from tui.screens.page import Page
from tui.screens.run import RunPage
from tui.screens.wave import WavePage
from tui.widgets.dialogs import Confirm, FilterLine, Form, KeysPage
from tui.widgets.gpus import GpuWall
from tui.widgets.logpane import LogPane
from tui.widgets.table import Table


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return scenes.busy(tmp_path)


def last_event(lab: Lab) -> tuple[str, str, str | None, str | None]:
    event = lab.store.events(limit=1)[0]
    return event.who, event.verb, event.subject, event.why


async def confirmed(room: ControlRoom, pilot: Any) -> None:
    """Answer the open question with y, once its deaf time is over."""
    await until(lambda: isinstance(room.screen, Confirm))
    question = room.screen
    assert isinstance(question, Confirm)
    question._opened -= 1.0
    await pilot.press("y")
    await until(lambda: not isinstance(room.screen, Confirm))


async def filled(room: ControlRoom, pilot: Any, *texts: str) -> None:
    """Type into the open form and send it."""
    await until(lambda: isinstance(room.screen, Form))
    inputs = list(room.screen.query(Input))
    for box, text in zip(inputs, texts, strict=False):
        box.value = text
    inputs[-1].focus()
    await pilot.pause()
    await pilot.press("enter")


async def test_cancel_asks_first_and_enter_is_no(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("x")
        await until(lambda: isinstance(room.screen, Confirm))
        assert "r0015" in screen_text(room)
        room.screen._opened -= 1.0  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(lambda: not isinstance(room.screen, Confirm))
        assert lab.store.run("r0015").wanted == "run"  # type: ignore[union-attr]
        await pilot.press("x")
        await confirmed(room, pilot)
        await until(lambda: lab.store.run("r0015").wanted == "cancel")  # type: ignore[union-attr]
        assert last_event(lab) == ("tui", "cancel", "r0015", "by keyboard")


async def test_a_held_key_does_not_answer_a_question(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("x")
        await until(lambda: isinstance(room.screen, Confirm))
        room.screen._clock = lambda: room.screen._opened + 0.1  # type: ignore[attr-defined]
        await pilot.press("y", "y", "enter", "escape")
        assert isinstance(room.screen, Confirm)
        assert lab.store.run("r0015").wanted == "run"  # type: ignore[union-attr]


async def test_kill_is_a_forced_cancel(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("X")
        await confirmed(room, pilot)
        await until(lambda: lab.store.run("r0015").wanted_force == 1)  # type: ignore[union-attr]


async def test_marks_make_one_key_act_on_several(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("space", "space", "x")
        await until(lambda: isinstance(room.screen, Confirm))
        assert "2 runs" in screen_text(room)
        await confirmed(room, pilot)
        wall = room.screen.query_one(GpuWall)
        assert not wall.marks, "the next key must not act on what was meant by this one"
        await until(lambda: [lab.store.run(i).wanted for i in ("r0015", "r0016", "r0017")] == ["cancel", "cancel", "run"])  # type: ignore[union-attr]


async def test_escape_takes_marks_away_before_it_goes_back(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("2")
        await until(lambda: "runs" in room.snapshot.views)
        table = room.screen.query_one("#runs", Table)
        await until(lambda: table.rows)
        await pilot.press("space", "space")
        assert len(table.marks) == 2 and "2 marked" in screen_text(room)
        await pilot.press("escape")
        assert not table.marks and len(room.screen_stack) == 2
        await pilot.press("escape")
        assert len(room.screen_stack) == 1


async def test_queue_order(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        queue = room.screen.query_one("#queue", Table)
        queue.focus()
        await pilot.press("j", "j", "t")
        await until(lambda: [r["id"] for r in queue.rows][:2] == ["r0031", "r0029"])
        assert queue.cursor_key == "r0031" and queue.cursor == 0
        await pilot.press("minus")
        await until(lambda: [r["id"] for r in queue.rows][:2] == ["r0029", "r0031"])
        await pilot.press("plus")
        await until(lambda: [r["id"] for r in queue.rows][:2] == ["r0031", "r0029"])


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


async def test_proposals_are_approved_and_declined(lab: Lab) -> None:
    ids = [rows.add_run(lab, phase="proposed", approval="asked") for _ in range(2)]
    async with opened(lab) as (room, pilot):
        queue = room.screen.query_one("#queue", Table)
        queue.focus()
        await pilot.press("G", "A")
        await filled(room, pilot, "too costly")
        await until(lambda: lab.store.run(ids[1]).outcome == "declined")  # type: ignore[union-attr]
        assert last_event(lab)[3] == "too costly"
        await until(lambda: queue.rows[-1]["id"] == ids[0])
        await pilot.press("G", "a")
        await until(lambda: lab.store.run(ids[0]).phase == "queued")  # type: ignore[union-attr]


async def test_keep_needs_evidence_or_an_override_with_a_reason(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        room.open_run("r0012")  # within the noise of the baseline
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.press("K")
        await filled(room, pilot, "I like it", "")
        await until(lambda: "within noise" in (room._message[0]))
        assert lab.store.run("r0012").verdict is None  # type: ignore[union-attr]
        await pilot.press("K")
        await filled(room, pilot, "I like it", "yes")
        await until(lambda: lab.store.run("r0012").verdict == "keep")  # type: ignore[union-attr]
        await pilot.press("D")
        await filled(room, pilot, "changed my mind")
        await until(lambda: lab.store.run("r0012").verdict_why == "changed my mind")  # type: ignore[union-attr]


async def test_runs_made_from_runs(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        count = lab.store.count_runs()
        await pilot.press("R")
        await until(lambda: lab.store.count_runs() == count + 1)
        assert lab.store.runs(order="seq DESC", limit=1)[0].retry_of == "r0008"
        await pilot.press("N")
        await filled(room, pilot, "2")
        await until(lambda: lab.store.count_runs() == count + 3)
        assert {r.repeat_of for r in lab.store.runs(order="seq DESC", limit=2)} == {"r0008"}
        await pilot.press("P")
        await filled(room, pilot, "", "", "1")
        await until(lambda: "A promotion changes something" in screen_text(room))
        room.screen.query(Input).first().value = "typed here"
        await until(lambda: "typed here" in screen_text(room))
        await filled(room, pilot, "H200", "600", "1")
        await until(lambda: lab.store.count_runs() == count + 4)
        promoted = lab.store.runs(order="seq DESC", limit=1)[0]
        assert (promoted.promoted_from, promoted.gpu_type, promoted.budget_s) == ("r0008", "H200", 600.0)
        await pilot.press("C")
        await filled(room, pilot, "DEPTH=10 TOTAL_BATCH_SIZE=2**16", "deeper")
        await until(lambda: lab.store.count_runs() == count + 5)
        made = lab.store.runs(order="seq DESC", limit=1)[0]
        assert (
            made.constants["DEPTH"] == 10 and made.constants["TOTAL_BATCH_SIZE"] == 65536 and made.parent == "r0008" and made.agent == "tui"
        )
        await pilot.press("V")
        await until(lambda: [r.verb for r in lab.store.requests("asked")] == ["verify"])


async def test_an_unknown_constant_is_a_sentence_and_nothing_is_queued(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        count = lab.store.count_runs()
        await pilot.press("C")
        await filled(room, pilot, "DEPHT=10", "")
        await until(lambda: "DEPTH" in room._message[0])
        assert lab.store.count_runs() == count


async def test_pages_and_back(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        for key, name in (("2", "runs"), ("3", "waves"), ("4", "hosts"), ("5", "events"), ("6", "lineage")):
            await pilot.press(key)
            await until(lambda name=name: isinstance(room.screen, Page) and room.screen.NAME == name)
            assert len(room.screen_stack) == 2
        await pilot.press("escape")
        assert len(room.screen_stack) == 1
        await pilot.press("enter")
        await until(lambda: isinstance(room.screen, RunPage))
        await pilot.press("w")
        await until(lambda: isinstance(room.screen, WavePage))
        await pilot.press("q", "q")
        assert len(room.screen_stack) == 1
        await pilot.press("q")
        await until(lambda: not room.is_running)


async def test_the_filter_narrows_while_typing(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("2")
        await until(lambda: "runs" in room.snapshot.views)
        table = room.screen.query_one("#runs", Table)
        await until(lambda: len(table.rows) > 20)
        await pilot.press("slash", *"wave:w1")
        await until(lambda: len(table.rows) == 9)
        assert "wave:w1" in screen_text(room).splitlines()[-2], "what is typed is seen, above the keys"
        await pilot.press("enter")
        assert table.has_focus and "/wave:w1" in screen_text(room)
        await pilot.press("slash", *" vall<1")
        await until(lambda: "no number 'vall'" in screen_text(room) or "There is no" in room._message[0])
        await pilot.press("escape")
        await until(lambda: len(table.rows) > 20)
        assert not room.screen.query_one(FilterLine).has_class("-open")


async def test_sorting_follows_the_row_not_the_place(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("2")
        await until(lambda: "runs" in room.snapshot.views)
        table = room.screen.query_one("#runs", Table)
        await until(lambda: len(table.rows) > 20)
        await pilot.press("j", "j", "j")
        kept = table.cursor_key
        while table.sort_key != "val":
            await pilot.press("s")
        values = [r["val_bpb"] for r in table.rows if r["val_bpb"] is not None]
        assert values == sorted(values) and table.rows[-1]["val_bpb"] is None
        assert table.cursor_key == kept
        await pilot.press("S")
        values = [r["val_bpb"] for r in table.rows if r["val_bpb"] is not None]
        assert values == sorted(values, reverse=True) and table.rows[-1]["val_bpb"] is None


async def test_run_page_panes(lab: Lab) -> None:
    async with opened(lab, size=(140, 44)) as (room, pilot):
        room.open_run("r0005")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        page = room.screen
        assert isinstance(page, RunPage)
        await pilot.pause()
        shown = screen_text(room)
        assert "0.981202" in shown and "TOTAL_BATCH_SIZE" in shown and "verified" in shown and "reported 39.8 %" in shown
        assert "peak_vram_mb:     45060.2" in shown
        await pilot.press("d")
        await until(lambda: "-TOTAL_BATCH_SIZE" in screen_text(room) or "the sources are the same" in screen_text(room))
        await pilot.press("u")
        await until(lambda: "2.9 standard errors" in screen_text(room))
        await pilot.press("i")
        assert page.axis == "step"
        await pilot.press("o")
        assert page.metric == "tok_s"
        await pilot.press("o", "o", "o", "L")
        assert page.metric == "loss" and page.log_y
        await pilot.press("l", "slash", *"00950", "enter")
        log = page.query_one("#log", LogPane)
        assert any(s == "mark" for line in log.lines for _, s in line.spans)
        assert not log.following
        await pilot.press("G")
        assert log.following
        await pilot.press("O")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.run_id == "r0001")


async def test_an_unknown_run_says_so(lab: Lab) -> None:
    async with opened(lab) as (room, _):
        room.open_run("r9999")
        await until(lambda: "There is no run 'r9999'" in screen_text(room))


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


async def test_release_export_copy_and_themes(lab: Lab) -> None:
    lab.store.upsert_gpu("GPU-alpha-00", state="quarantined", reason="41 GiB held", run_id=None)
    async with opened(lab) as (room, pilot):
        await pilot.press("r")
        await confirmed(room, pilot)
        await until(lambda: [(r.verb, r.args) for r in lab.store.requests("asked")] == [("gpu_release", {"gpu": "GPU-alpha-00"})])
        room.screen.query_one("#board").focus()
        await pilot.press("e")
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


async def test_help_lists_every_key_with_words(lab: Lab) -> None:
    async with opened(lab, size=(120, 60)) as (room, pilot):
        await pilot.press("question_mark")
        await until(lambda: isinstance(room.screen, KeysPage))
        told = "\n".join(line.text for line in room.screen.lines)  # type: ignore[attr-defined]
        for binding in [b for b in [*RUN_BINDINGS, *ControlRoom.BINDINGS] if isinstance(b, Binding) and b.tooltip]:
            if binding.action.split("(")[0] in ("approve", "decline", "requeue", "decide", "verify", "priority", "keys"):
                continue  # do not apply to the live run under the cursor
            assert binding.tooltip in told, binding


async def test_the_palette_carries_out_what_it_lists(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("colon")
        await until(lambda: room.screen.query("CommandInput"))
        await pilot.press(*"pause queue")
        await until(lambda: len(room.screen.query_one("CommandList").options) > 0)  # type: ignore[attr-defined]
        await pilot.pause(0.3)
        await pilot.press("enter", "enter")
        await until(lambda: lab.store.setting("queue_paused") is True)


def test_no_key_is_bound_twice_and_every_key_has_words() -> None:
    pages: list[type[Page]] = [type(make_page(n)) for n in ("runs", "waves", "hosts", "events", "lineage")]
    from tui.screens.dashboard import Dashboard

    for page in [*pages, Dashboard, RunPage, WavePage]:
        seen: dict[str, str] = {}
        for widget in (page, ControlRoom):
            for binding in widget.BINDINGS:
                assert isinstance(binding, Binding)
                assert binding.description and binding.tooltip, f"{page.__name__}: {binding.key} has no words"
                for key in binding.key.split(","):
                    assert key not in seen, f"{page.__name__}: {key} is {seen[key]} and {binding.action}"
                    seen[key] = binding.action
        moves = {k for b in [*Table.BINDINGS, *GpuWall.BINDINGS] if isinstance(b, Binding) for k in b.key.split(",")}
        assert not moves & seen.keys() - {"h", "l"} or page is RunPage, f"{page.__name__}: {moves & seen.keys()} move the cursor"


def test_pairs_are_read_as_written() -> None:
    assert pairs("DEPTH=6 LR=0.03 NAME='a b' BATCH=2**17") == {"DEPTH": "6", "LR": "0.03", "NAME": "a b", "BATCH": "2**17"}


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_what_changes_in_the_lab_changes_on_the_screen(lab: Lab, size: tuple[int, int]) -> None:
    """Also after the focus moved, which makes every pane forget what it drew."""
    async with opened(lab, size=size) as (room, pilot):
        await pilot.press("tab", "tab", "shift+tab", "shift+tab")
        await pilot.pause()
        assert "14%" not in screen_text(room)
        lab.store.update_run("r0016", share=0.141, remaining_s=258.0)
        room.source.poke()
        await until(lambda: "14%" in screen_text(room))


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


async def test_the_mouse_selects_opens_and_sorts(lab: Lab) -> None:
    async with opened(lab, size=(160, 50)) as (room, pilot):
        await pilot.click("#gpus", offset=(45, 3))
        assert room.screen.query_one(GpuWall).cursor == 1
        await pilot.click("#board", offset=(6, 4))
        board = room.screen.query_one("#board", Table)
        assert board.cursor_key == board.rows[2]["id"]
        await pilot.click("#board", offset=(14, 1))
        assert board.sort_key == "val"
        await pilot.click("#board", offset=(6, 4), times=2)
        await until(lambda: isinstance(room.screen, RunPage))


async def test_edit_opens_the_editor_on_a_copy_and_submits_what_came_back(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "editor"
    script.write_text("#!/bin/sh\nsed -i 's/DEPTH = 8/DEPTH = 12/' \"$1\"\n")
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(script))
    async with opened(lab) as (room, pilot):
        monkeypatch.setattr(room, "suspend", contextlib.nullcontext)
        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        count = lab.store.count_runs()
        await pilot.press("E")
        await until(lambda: isinstance(room.screen, Form))
        assert "DEPTH: 8 → 12" in screen_text(room)
        await filled(room, pilot, "deeper is better")
        await until(lambda: lab.store.count_runs() == count + 1)
        made = lab.store.runs(order="seq DESC", limit=1)[0]
        assert made.constants["DEPTH"] == 12 and made.parent == "r0008" and made.hypothesis == "deeper is better"
        assert "DEPTH = 12" in lab.source_text(made.source_sha) and "DEPTH = 8" in lab.source_text(lab.store.run("r0008").source_sha)  # type: ignore[union-attr]
        script.write_text("#!/bin/sh\necho 'def (' >> \"$1\"\n")
        await pilot.press("E")
        await until(lambda: "line" in room._message[0])
        assert lab.store.count_runs() == count + 1


async def test_what_stands_for_nothing_is_said(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        for _ in range(14):
            await pilot.press("right")
        await pilot.press("enter")
        assert "no run" in room._message[0]
        await pilot.press("r")
        assert "only a quarantined GPU" in room._message[0]


async def test_a_large_screen_shows_the_curve_of_the_gpu_under_the_cursor(lab: Lab) -> None:
    async with opened(lab, size=(200, 60)) as (room, pilot):
        await pilot.press("right", "right")
        await until(lambda: "r0017 · loss by share of the budget" in screen_text(room))
        await pilot.press("right")
        await until(lambda: "r0018 · loss by share of the budget" in screen_text(room))
        assert [n for n in room.source._reader._views if n.startswith("watch:")] == ["watch:r0018"]  # type: ignore[attr-defined]
