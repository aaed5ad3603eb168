"""The reading commands: tables a person reads, and the JSON objects of FORMAT.md section 5."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runner import verbs
from runner.lab import Lab
from runner.records import Point, Submission, WaveRequest
from tests.runner.commands import overnight, program
from tests.runner.labs import finish, make_lab

HOSTILE = "[/bold][red] \x1b[2J\x1b]0;owned\x07 \u202etxt.exe \x00 \x9b31m\nsecond line"


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def keys_of(section: str) -> set[str]:
    """The keys FORMAT.md promises of a run object."""
    text = (Path(__file__).parents[2] / "runner" / "FORMAT.md").read_text(encoding="utf-8")
    start = text.index(section)
    return {word for part in text[start : text.index("\n\n", start)].split("`")[1::2] for word in part.split()}


def submit(lab: Lab, **fields: object) -> str:
    return verbs.submit(lab, Submission(**fields), who="cli").run_ids[0]  # type: ignore[arg-type]


def test_runs_prints_the_run_objects_of_the_format_page(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = submit(lab)
    answer = overnight(capsys, "--lab", lab.path, "runs", "--json").object
    assert (answer["v"], answer["lab"], answer["total"], answer["cursor"]) == (1, str(lab.path), 1, None)
    (row,) = answer["runs"]
    promised = keys_of("**Run object**")
    assert {"id", "outcome", "queue_position"} <= promised and promised <= set(row) and row["id"] == run_id


def test_lab_may_stand_anywhere(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--lab", lab.path, "runs", "--json"], ["runs", "--lab", lab.path, "--json"], ["runs", "--json", f"--lab={lab.path}"]):
        assert overnight(capsys, *words).object["lab"] == str(lab.path)


def test_the_lab_of_the_environment_and_of_the_nearest_hosts_file(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert overnight(capsys, "runs", "--json").object["lab"] == str(lab.path)
    monkeypatch.setenv("OVERNIGHT_LAB", str(tmp_path / "other"))
    assert overnight(capsys, "runs").code == 1


def test_show_tells_everything_and_the_trail(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = submit(lab, overrides={"DEPTH": 4}, hypothesis="shallower")
    points = [Point(step=n, t=float(n), share=n / 300, loss=9 - n / 100, tok_s=1.0, dt_ms=1.0, mfu=None) for n in range(300)]
    lab.store.add_points(run_id, points)
    finish(lab, run_id, 1.25)
    answer = overnight(capsys, "--lab", lab.path, "show", run_id, "--json").object
    assert answer["outcome"] == "completed" and answer["val_bpb"] == 1.25 and answer["overrides"] == {"DEPTH": 4}
    assert len(answer["points"]) == 200 and answer["points"][0][0] == 0 and answer["points"][-1][0] == 299
    assert [e["verb"] for e in answer["events"]] == ["submit", "ended"] and "DEPTH = 4" in Path(answer["source_path"]).read_text()
    plain = overnight(capsys, "--lab", lab.path, "show", run_id).out
    assert "1.250000" in plain and "shallower" in plain and "DEPTH=4" in plain


def test_leaderboard_ranks_inside_one_class(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    base, better = submit(lab), submit(lab, overrides={"DEPTH": 4})
    finish(lab, base, 1.3)
    finish(lab, better, 1.2)
    board = overnight(capsys, "--lab", lab.path, "leaderboard", "--json").object
    assert {"class", "budget_s", "classes", "noise_sd", "noise_n", "rows", "unranked", "ladder"} <= set(board)
    assert [r["id"] for r in board["rows"]] == [better, base]
    lines = overnight(capsys, "--lab", lab.path, "leaderboard").out.splitlines()
    assert [line.split()[1] for line in lines if line.strip()[:1].isdigit()] == [better, base]


def test_log_pages_by_offset_and_tails(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = submit(lab)
    finish(lab, run_id, 1.0)
    lab.run_dir(run_id).mkdir(parents=True)
    (lab.run_dir(run_id) / "out.log").write_bytes(b"one\ntwo\rstep 1\rstep 2\nthree\n" + HOSTILE.encode())
    first = overnight(capsys, "--lab", lab.path, "log", run_id, "--json").object
    assert first["offset"] == 0 and first["text"].startswith("one\ntwo\nstep 1\nstep 2\nthree\n") and "\x1b" not in first["text"]
    assert overnight(capsys, "--lab", lab.path, "log", run_id, "--offset", first["next_offset"], "--json").object["text"] == ""
    assert overnight(capsys, "--lab", lab.path, "log", run_id, "--tail", 1).out == "second line\n"
    whole = overnight(capsys, "--lab", lab.path, "log", run_id)
    assert whole.code == 0 and whole.out.endswith("second line\n")
    assert overnight(capsys, "--lab", lab.path, "log", run_id, "-f").out == whole.out
    assert overnight(capsys, "--lab", lab.path, "log", run_id, "-f", "--json").code == 2


def test_a_long_log_is_printed_whole(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = submit(lab)
    finish(lab, run_id, 1.0)
    lab.run_dir(run_id).mkdir(parents=True)
    (lab.run_dir(run_id) / "out.log").write_text("".join(f"line {n}\n" for n in range(40_000)))
    shown = overnight(capsys, "--lab", lab.path, "log", run_id).out.splitlines()
    assert len(shown) == 40_000 and shown[-1] == "line 39999"


@pytest.mark.parametrize("words", [["runs"], ["show", "ID"], ["leaderboard"], ["events"], ["log", "ID"], ["waves"]], ids=" ".join)
def test_text_from_outside_never_reaches_the_terminal_as_it_is(lab: Lab, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    run_id = submit(lab, hypothesis=HOSTILE)
    made = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 5]}, title=HOSTILE, hypothesis=HOSTILE), who="cli")
    finish(lab, run_id, 1.0, cause_text=HOSTILE, last_lines=HOSTILE, gpu_name=HOSTILE, host=HOSTILE)
    finish(lab, made.run_ids[0], None, cause_text=HOSTILE, last_lines=HOSTILE)
    lab.store.raise_flag(run_id, "odd", "warn", HOSTILE)
    verbs.decide(lab, run_id, "discard", who="cli", why=HOSTILE)
    lab.run_dir(run_id).mkdir(parents=True)
    (lab.run_dir(run_id) / "out.log").write_bytes(HOSTILE.encode())
    words = [run_id if w == "ID" else w for w in words]
    for said in (overnight(capsys, "--lab", lab.path, *words), overnight(capsys, "--lab", lab.path, *words, "--json")):
        assert said.code == 0
        assert not any((c < " " and c != "\n") or "\x7f" <= c <= "\x9f" or c == "\u202e" for c in said.out), repr(said.out)
    assert "[/bold]" in overnight(capsys, "--lab", lab.path, *words).out


def test_numbers_that_are_not_there_are_dashes_and_nulls(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    submit(lab)
    (row,) = overnight(capsys, "--lab", lab.path, "runs", "--json").object["runs"]
    assert row["val_bpb"] is None and row["loss"] is None and row["mfu_percent"] is None
    line = overnight(capsys, "--lab", lab.path, "runs").out.splitlines()[1]
    assert line.split()[2:5] == ["-", "-", "-"]


def test_runs_are_paged_by_cursor(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    ids = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [1, 2, 3, 4, 5]}), who="cli").run_ids
    seen, cursor = [], None
    while True:
        more = ["--cursor", cursor] if cursor else []
        page = overnight(capsys, "--lab", lab.path, "runs", "--limit", 2, "--json", *more).object
        seen += [r["id"] for r in page["runs"]]
        cursor = page["cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]


def test_events_follow_a_cursor_in_order(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = submit(lab)
    first = overnight(capsys, "--lab", lab.path, "events", "--json").object
    verbs.cancel(lab, [run_id], who="cli", why="enough")
    verbs.pause_queue(lab, True, who="tui")
    more = overnight(capsys, "--lab", lab.path, "events", "--cursor", first["cursor"], "--json").object["events"]
    assert [(e["who"], e["verb"]) for e in more] == [("cli", "cancel"), ("tui", "pause_queue")] and more[0]["why"] == "enough"


def test_cancel_answers_with_runs_and_notes(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    done, waiting = submit(lab), submit(lab, overrides={"DEPTH": 3})
    finish(lab, done, 1.0)
    answer = overnight(capsys, "--lab", lab.path, "cancel", done, waiting, "--json").object
    assert [r["id"] for r in answer["runs"]] == [done, waiting] and any(done in n for n in answer["notes"])
    made = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 5]}), who="cli")
    assert [r["id"] for r in overnight(capsys, "--lab", lab.path, "cancel", made.wave_id, "--json").object["runs"]] == made.run_ids


def test_decide_keeps_and_discards_with_a_reason(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = submit(lab)
    finish(lab, run_id, 1.0)
    answer = overnight(capsys, "--lab", lab.path, "decide", run_id, "discard", "--why", "worse", "--json").object
    assert (answer["runs"][0]["verdict"], answer["runs"][0]["verdict_why"]) == ("discard", "worse")
    assert overnight(capsys, "--lab", lab.path, "decide", run_id, "perhaps").code == 2


def test_the_queue_is_ordered_by_hand(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    ids = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [1, 2, 3]}), who="cli").run_ids
    answer = overnight(capsys, "--lab", lab.path, "priority", ids[2], "--move", "top", "--json").object
    assert answer["runs"][0]["queue_position"] == 1
    assert overnight(capsys, "--lab", lab.path, "priority", ids[0], "--move", "sideways").code == 2


def test_approval_mode_and_its_answers(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert overnight(capsys, "--lab", lab.path, "approval", "ask", "--json").object["approval"] == "ask"
    ids = [verbs.submit(lab, Submission(overrides={"DEPTH": n}), who="mcp:agent").run_ids[0] for n in (2, 3)]
    yes = overnight(capsys, "--lab", lab.path, "approve", ids[0], "--json").object["runs"][0]
    no = overnight(capsys, "--lab", lab.path, "decline", ids[1], "--why", "too small", "--json").object["runs"][0]
    assert (yes["phase"], no["outcome"], no["cause_text"]) == ("queued", "declined", "too small")


def test_policy_shows_no_secret_and_takes_over_an_edit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = '[[host]]\nname = "here"\nenv = { HF_TOKEN = "hf_secret" }\n'
    lab = make_lab(tmp_path, hosts=hosts)
    lab.close()
    shown = overnight(capsys, "--lab", lab.path, "policy", "--json")
    assert shown.object["hosts"][0]["env"] == ["HF_TOKEN"] and "hf_secret" not in shown.out
    assert "hf_secret" not in overnight(capsys, "--lab", lab.path, "policy").out
    text = (tmp_path / "hosts.toml").read_text().replace("budget_s = 20", "budget_s = 20\nmax_budget_s = 200000")
    (tmp_path / "hosts.toml").write_text(text)
    assert "max_budget_s" in overnight(capsys, "--lab", lab.path, "policy", "--json").object["pending"]
    after = overnight(capsys, "--lab", lab.path, "policy", "accept", "--json").object
    assert after["policy"]["max_budget_s"] == 200000 and after["pending"] is None


def test_help_and_version_need_no_lab_and_no_face(tmp_path: Path) -> None:
    said = program("--help", cwd=tmp_path)
    assert said.code == 0 and all(word in said.out for word in ("run", "leaderboard", "daemon", "demo", "connect"))
    assert program("--version", cwd=tmp_path).out.startswith("overnight ")
    assert list(tmp_path.iterdir()) == []


def test_reading_commands_import_no_face(lab: Lab, tmp_path: Path) -> None:
    code = (
        "import sys, json; from runner import cli; cli.main(['--lab', sys.argv[1], 'runs']); "
        "print(json.dumps([m for m in ('textual', 'torch', 'mcp', 'asyncssh') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, str(lab.path)], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_every_command_of_the_format_page_exists(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "runner" / "FORMAT.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text[text.index("| command | object |") :].splitlines() if line.startswith("| `")]
    promised = {part.split()[0] for row in rows for part in row.split("`")[1::2]}
    known = set(program("--help", cwd=tmp_path).out.split("Commands:")[1].split())
    assert {"run", "waves", "tune"} <= promised and promised <= known
