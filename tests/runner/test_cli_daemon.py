"""Commands that need the daemon: real processes, real run directories; simulated GPUs, and one script on the local engine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from runner.daemonctl import daemon_status, stop_daemon
from runner.lab import Lab
from tests.runner.commands import overnight, program
from tests.runner.daemons import kill_daemon
from tests.runner.labs import make_lab

FAKE = '[[host]]\nname = "sim"\nkind = "fake"\nspeed = 400\ntypes = { H100 = 3, H200 = 1 }\n'
LOCAL = '[[host]]\nname = "here"\nkind = "local"\n'
UPSTREAM = (Path(__file__).parent / "upstream_bytes.py").read_text()

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest):
    hosts, script = getattr(request, "param", (FAKE, UPSTREAM))
    opened = make_lab(tmp_path, hosts=hosts, script=script)
    yield opened
    stop_daemon(opened)
    opened.close()


local = pytest.mark.parametrize("lab", [(LOCAL, UPSTREAM)], indirect=True, ids=["local"])


@local
def test_run_wait_json_prints_the_ended_run(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = overnight(capsys, "--lab", lab.path, "run", tmp_path / "trainer" / "train.py", "--set", "VAL_BPB=0.9775", "--wait", "--json")
    assert said.code == 0, said
    answer = said.object
    assert (answer["outcome"], answer["val_bpb"], answer["overrides"]) == ("completed", 0.9775, {"VAL_BPB": 0.9775})
    assert answer["class"] and isinstance(answer["flags"], list) and answer["trust"] in ("claimed", "unverifiable")
    log = overnight(capsys, "--lab", lab.path, "log", answer["id"]).out
    assert "val_bpb:" in log and "\r" not in log


@local
def test_a_crash_under_wait_is_exit_code_1_with_its_reason(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    said = overnight(capsys, "--lab", lab.path, "run", broken, "--wait", "--json")
    assert (said.code, said.object["outcome"], said.object["cause"]) == (1, "crashed", "import")
    shown = overnight(capsys, "--lab", lab.path, "show", said.object["id"]).out
    assert "no_such_module" in shown


def test_a_wave_is_waited_for_and_printed(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["wave", "--grid", "MATRIX_LR=0.03,0.05", "--set", "DEPTH=6", "--gpu", "H100"]
    said = overnight(capsys, "--lab", lab.path, *words, "--wait", "--json")
    assert said.code == 0, said
    answer = said.object
    assert answer["wave"]["total"] == answer["wave"]["ended"] == 2 and answer["wave"]["factors"] == {"MATRIX_LR": [0.03, 0.05]}
    assert [(r["cell"]["MATRIX_LR"], r["outcome"]) for r in answer["runs"]] == [(0.03, "completed"), (0.05, "completed")]
    assert {r["gpu"] for r in answer["runs"]} == {"NVIDIA H100 80GB HBM3"} and answer["runs"][0]["constants"]["DEPTH"] == 6


def test_seeds_make_a_wave_of_repeats(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    answer = overnight(capsys, "--lab", lab.path, "run", "--seeds", 3, "--wait", "--json").object
    assert len(answer["runs"]) == 3 and len({r["seed"] for r in answer["runs"]}) == 3 and answer["wave"]["kind"] == "repeats"


def test_the_same_key_never_starts_a_second_run(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    first = overnight(capsys, "--lab", lab.path, "run", "--request-id", "k1", "--json").object
    second = overnight(capsys, "--lab", lab.path, "run", "--request-id", "k1", "--json").object
    assert first["id"] == second["id"] and lab.store.count_runs() == 1


def test_requeue_repeat_and_promote_say_where_they_come_from(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = overnight(capsys, "--lab", lab.path, "run", "--gpu", "H100", "--wait", "--json").object["id"]
    assert overnight(capsys, "--lab", lab.path, "requeue", run_id, "--wait", "--json").object["retry_of"] == run_id
    repeat = overnight(capsys, "--lab", lab.path, "repeat", run_id, "--wait", "--json").object
    assert repeat["repeat_of"] == run_id and repeat["seed"] != 42
    promoted = overnight(capsys, "--lab", lab.path, "promote", run_id, "--gpu", "H200", "--wait", "--json").object
    assert (promoted["promoted_from"], promoted["gpu"]) == (run_id, "NVIDIA H200")


def test_the_daemon_starts_answers_and_stops(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    down = overnight(capsys, "--lab", lab.path, "daemon", "status", "--json")
    assert (down.code, down.object["running"], down.object["pid"]) == (1, False, None)
    up = overnight(capsys, "--lab", lab.path, "daemon", "start", "--json").object
    assert up["running"] and os.path.exists(f"/proc/{up['pid']}")
    again = overnight(capsys, "--lab", lab.path, "daemon", "start", "--json").object
    assert again["pid"] == up["pid"]
    status = overnight(capsys, "--lab", lab.path, "daemon", "status", "--json")
    keys = {"running", "pid", "started_at", "beat_age_s", "version", "queue_paused", "approval", "queued", "running_runs", "idle_gpus"}
    assert status.code == 0 and keys <= set(status.object)
    assert overnight(capsys, "--lab", lab.path, "daemon", "stop").code == 0 and daemon_status(lab) is None


def test_a_second_daemon_is_refused_in_a_sentence(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = overnight(capsys, "--lab", lab.path, "daemon", "start", "--json").object["pid"]
    said = program("--lab", lab.path, "daemon", "run", cwd=tmp_path)
    assert said.code != 0 and str(pid) in said.err and said.err.strip().count("\n") == 0 and "Traceback" not in said.err


def test_gpus_and_hosts_are_listed(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    overnight(capsys, "--lab", lab.path, "daemon", "start")
    until = time.monotonic() + 20
    rows: list[dict[str, object]] = []
    while len(rows) < 4 and time.monotonic() < until:
        rows = overnight(capsys, "--lab", lab.path, "gpus", "--json").object["gpus"]
    promised = set("uuid host index name state reason run standby since_s free_in_s holder sample sample_age_s mfu_percent tok_s".split())
    assert len(rows) == 4 and all(promised <= set(r) for r in rows)
    (host,) = overnight(capsys, "--lab", lab.path, "hosts", "--json").object["hosts"]
    assert (host["name"], host["kind"], host["state"], len(host["gpus"])) == ("sim", "fake", "up", 4)
    assert {"since_s", "error", "next", "checks"} <= set(host)
    table = overnight(capsys, "--lab", lab.path, "gpus").out
    assert "sim:0" in table and "sim:3" in table and "NVIDIA H200" in table


def test_tables_say_when_nobody_watches(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    overnight(capsys, "--lab", lab.path, "daemon", "start")
    overnight(capsys, "--lab", lab.path, "queue", "pause")
    overnight(capsys, "--lab", lab.path, "run", "--json")
    until = time.monotonic() + 20
    while not overnight(capsys, "--lab", lab.path, "gpus", "--json").object["gpus"]:
        assert time.monotonic() < until
    words = [["gpus"], ["hosts"], ["runs"]]
    assert not any("nobody watches" in overnight(capsys, "--lab", lab.path, *w).out for w in words)
    kill_daemon(lab)
    assert all("nobody watches: it is as it was" in overnight(capsys, "--lab", lab.path, *w).out for w in words)
    lab.store._write("UPDATE gpus SET telemetry = json_set(telemetry, '$.at', 1.0)", ())
    assert all(" W " not in line for line in overnight(capsys, "--lab", lab.path, "gpus").out.splitlines())  # figures of another time


def test_a_host_added_to_hosts_toml_leads_to_policy_accept(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    overnight(capsys, "--lab", lab.path, "daemon", "start")
    lab.hosts_file.write_text(lab.hosts_file.read_text() + FAKE.replace('"sim"', '"more"'))
    for command in ("check", "setup", "pause"):
        said = overnight(capsys, "--lab", lab.path, "hosts", command, "more")
        assert said.code == 2 and "[[host]] more is new" in said.err and "overnight policy accept" in said.err
    assert "overnight policy accept" in overnight(capsys, "--lab", lab.path, "hosts", "check").out
    assert "more is new" in overnight(capsys, "--lab", lab.path, "hosts", "--json").object["pending"]
    overnight(capsys, "--lab", lab.path, "policy", "accept")
    assert overnight(capsys, "--lab", lab.path, "hosts", "--json").object["pending"] is None
    assert "policy accept" not in overnight(capsys, "--lab", lab.path, "hosts").out


def test_a_paused_queue_starts_nothing_until_it_is_resumed(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    overnight(capsys, "--lab", lab.path, "queue", "pause", "--why", "lunch")
    run_id = overnight(capsys, "--lab", lab.path, "run", "--json").object["id"]
    status = overnight(capsys, "--lab", lab.path, "daemon", "status", "--json").object
    assert status["queue_paused"] and status["queued"] == 1
    cancelled = overnight(capsys, "--lab", lab.path, "cancel", run_id, "--json").object["runs"][0]
    assert cancelled["id"] == run_id
    assert overnight(capsys, "--lab", lab.path, "queue", "resume").code == 0
    events = overnight(capsys, "--lab", lab.path, "events", "--json").object["events"]
    assert [e["why"] for e in events if e["verb"] == "pause_queue"] == ["lunch"]


def test_plain_progress_and_json_never_mix(lab: Lab, tmp_path: Path) -> None:
    said = program("--lab", lab.path, "run", "--wait", "--json", cwd=tmp_path)
    assert said.code == 0 and json.loads(said.out)["outcome"] == "completed" and said.out.count("\n") == 1
