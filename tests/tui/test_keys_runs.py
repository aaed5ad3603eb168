"""Every key that acts on runs, over a real lab: what it writes, what it asks first, and that nothing happens by accident."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from textual.widgets import Input

from runner.lab import Lab
from runner.records import Request
from tests.tui import rows
from tests.tui.driving import confirmed, filled, opened, screen_text, until
from tui.asking import answer
from tui.deeds import pairs
from tui.screens.run import RunPage
from tui.widgets.dialogs import Confirm, Form
from tui.widgets.gpuwall import GpuWall
from tui.widgets.table import Table


def last_event(lab: Lab) -> tuple[str, str, str | None, str | None]:
    event = lab.store.events(limit=1)[0]
    return event.who, event.verb, event.subject, event.why


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


def test_pairs_are_read_as_written() -> None:
    assert pairs("DEPTH=6 LR=0.03 NAME='a b' BATCH=2**17") == {"DEPTH": "6", "LR": "0.03", "NAME": "a b", "BATCH": "2**17"}


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
        assert not room.drafts
        script.write_text("#!/bin/sh\necho 'def (' >> \"$1\"\n")
        await pilot.press("E")
        await until(lambda: "line" in room._message[0])
        assert lab.store.count_runs() == count + 1


async def test_what_was_written_in_the_editor_is_not_lost(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to a slip in the syntax nor to Esc in the form that follows: E opens it again, until it is submitted."""
    script = tmp_path / "editor"
    script.write_text("#!/bin/sh\nsed -i 's/DEPTH = 8/DEPTH = 12/' \"$1\"; echo 'def (' >> \"$1\"\n")
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(script))
    async with opened(lab) as (room, pilot):
        monkeypatch.setattr(room, "suspend", contextlib.nullcontext)
        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        count = lab.store.count_runs()
        await pilot.press("E")
        await until(lambda: "E opens your text again" in room._message[0])
        script.write_text("#!/bin/sh\nsed -i '/^def ($/d' \"$1\"\n")
        await pilot.press("E")
        await until(lambda: isinstance(room.screen, Form))
        assert "DEPTH: 8 → 12" in screen_text(room)
        await pilot.press("escape")
        await until(lambda: "not submitted" in room._message[0])
        script.write_text("#!/bin/sh\ntrue\n")
        await pilot.press("E")
        await filled(room, pilot, "deeper is better")
        await until(lambda: lab.store.count_runs() == count + 1)
        assert lab.store.runs(order="seq DESC", limit=1)[0].constants["DEPTH"] == 12
        await until(lambda: not room.drafts)


async def test_the_copied_command_submits_the_run_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    async with opened(lab) as (room, pilot):
        monkeypatch.setattr(room, "copy_to_clipboard", copied.append)
        for run_id in ("r0008", "r0015"):
            room.open_run(run_id)
            await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
            await pilot.press("Y")
            await pilot.press("q")
    assert copied == ["overnight requeue r0008", "overnight run --base r0015 --allow-duplicate"]


async def test_constants_are_shown_for_a_row_that_does_not_have_them(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        room.screen.query_one("#board").focus()
        await pilot.press("C")
        await until(lambda: isinstance(room.screen, Form))
        assert "TOTAL_BATCH_SIZE=" in room.screen.notes[0]  # type: ignore[attr-defined]
        await filled(room, pilot, "DEPTH=10", "deeper")
        await until(lambda: lab.store.runs(order="seq DESC", limit=1)[0].constants["DEPTH"] == 10)
        assert lab.store.runs(order="seq DESC", limit=1)[0].parent == "r0005"


async def test_a_question_to_the_daemon_is_not_done_before_it_has_answered(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.press("V")
        await until(lambda: "asked the daemon: verify r0008" in screen_text(room))
        (asked,) = lab.store.requests("asked")
        error = {"code": "refused", "message": "r0008 cannot be verified: it was simulated.", "next": "Repeat it at other seeds."}
        lab.store.update_request(asked.id, state="failed", error=error)
        await pilot.press("escape", "ctrl+r")  # another page than the one it was asked on
        await until(lambda: "verify r0008: r0008 cannot be verified: it was simulated. Repeat it" in screen_text(room))
        assert "✓" not in screen_text(room).splitlines()[-1]

        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.press("V")
        await until(lambda: lab.store.requests("asked"))
        (asked,) = lab.store.requests("asked")
        result = {
            "run": "r0008",
            "by": "r0099",
            "outcome": "completed",
            "verdict": "verified",
            "verified_bpb": 0.9871234,
            "why": "equal [/x]",
        }
        lab.store.update_request(asked.id, state="done", result=result)
        await pilot.press("z", "ctrl+r")  # a frozen screen hears it, too
        await until(lambda: room.asking.open == {})
        assert room.message() == ("r0008 is verified, recomputed 0.987123: equal [/x]", "good")


@pytest.mark.parametrize(
    ("verb", "result", "said"),
    [
        (
            "hosts_check",
            {"hosts": [{"name": "beta", "error": None, "checks": [{"name": "torch", "ok": True}]}]},
            ("✓ beta is fit for runs", "good"),
        ),
        (
            "hosts_check",
            {"hosts": [{"name": "beta", "checks": [{"name": "torch", "ok": False, "text": "not there"}], "next": "Set it up."}]},
            ("✕ beta: torch: not there Set it up.", "warn"),
        ),
        ("host_setup", {"checks": []}, ("✓ set up beta", "good")),
        ("gpu_release", {"text": "GPU-1 is no longer quarantined."}, ("GPU-1 is no longer quarantined.", "good")),
        (
            "verify",
            {"run": "r1", "outcome": "crashed", "verdict": "claimed", "why": "oom"},
            ("r1 is not recomputed (crashed): oom", "warn"),
        ),
        ("verify", {"run": "r1", "outcome": "completed", "verdict": "refuted", "why": "other"}, ("r1 is refuted: other", "warn")),
    ],
)
def test_what_the_daemon_answered_in_a_sentence(verb: str, result: dict[str, object], said: tuple[str, str]) -> None:
    assert answer("set up beta", Request(1, verb, {}, "tui", "done", None, result, None, 0.0, 0.0)) == said
