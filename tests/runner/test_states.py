"""What is shown of runs, GPUs and hosts that are not as they were: out of contact, held, locked, draining; the same in every face."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from runner import queries, states, verbs
from runner.lab import Lab
from runner.records import Gpu, Submission
from tests.runner.commands import overnight
from tests.runner.daemons import ended, fake_lab, serving, until
from tests.runner.labs import make_lab
from tui.opening import once_lines
from tui.words import run_state

pytestmark = pytest.mark.timeout(240)
TWO = 'types = {H100 = 2}\nspeed = 1\n[[host]]\nname = "sim2"\nkind = "fake"\ntypes = {H100 = 1}\nspeed = 1\n'


def submit(lab: Lab, host: str = "sim") -> str:
    return verbs.submit(lab, Submission(budget_s=300, host=host, allow_duplicate=True), who="cli").run_ids[0]


def fault(lab: Lab, host: str, name: str, text: str = "") -> Path:
    """A file of a simulated host's faults."""
    path = lab.path / "fake" / host / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shown(lab: Lab) -> dict[str, dict[str, Any]]:
    return {g["uuid"]: g for g in queries.gpu_objects(lab)}


def phase(lab: Lab, run_id: str) -> str:
    run = lab.store.run(run_id)
    assert run is not None
    return run.phase


def edit(lab: Lab, was: str, now: str) -> None:
    """A human's edit of hosts.toml, accepted."""
    text = lab.hosts_file.read_text().replace(was, now)
    lab.hosts_file.write_text(text)
    lab.accept(text)


async def test_a_host_out_of_contact_is_told_apart_from_a_lost_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = fake_lab(tmp_path, host=TWO)
    async with serving(lab):
        run_id = submit(lab)
        await until(lambda: phase(lab, run_id) == "running" and (lab.store.run(run_id) or 0).stage == "training")  # type: ignore[union-attr]
        down = fault(lab, "sim", "down")
        await until(lambda: phase(lab, run_id) == "unreachable" and lab.store.hosts()[0].state == "down")
        run = queries.run_object(lab, lab.store.run(run_id))  # type: ignore[arg-type]
        assert run["state"] == run["phase"] == "unreachable" and run["stage"] is None and run["unreachable_s"] >= 0
        for words in (["runs"], ["runs", "--phase", "unreachable"], ["show", run_id]):
            out = overnight(capsys, "--lab", lab.path, *words).out
            assert "unreachable " in out and " s" in out and "training" not in out
        once = "\n".join(once_lines(lab))
        assert "unreachable" in once and "train" not in once.split("Leaderboard")[0] and "host down since" in once
        assert run_state(run)[0].startswith("~ no link")
        gpus = shown(lab)
        here = [g for g in gpus.values() if g["host"] == "sim"]
        assert [g["state"] for g in here] == ["down", "down"] and all(g["reason"].startswith("host down since ") for g in here)
        assert {g["run"] for g in here} == {run_id, None}
        state = queries.lab_state(lab)
        assert (state.total_gpus, state.idle_gpus, state.hosts_down) == (3, 1, ["sim"])
        assert "down" in overnight(capsys, "--lab", lab.path, "gpus").out
        assert not [f for f in lab.store.flags() if f.kind == "gpu_lost"]
        down.unlink()
        await until(lambda: phase(lab, run_id) == "running" and {g["state"] for g in shown(lab).values()} == {"busy", "free"})
        verbs.cancel(lab, [run_id], who="cli")
        await ended(lab, run_id)
    lab.close()


async def test_a_lost_cards_flag_goes_when_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.devices.MISSING_S", 0.5)
    lab = fake_lab(tmp_path, host="types = {H100 = 2}\nspeed = 1\n")
    async with serving(lab):
        run_id = submit(lab)
        await until(lambda: phase(lab, run_id) == "running")
        uuid = str(lab.store.run(run_id).gpu_uuid)  # type: ignore[union-attr]
        lost = fault(lab, "sim", "lost", uuid)
        await until(lambda: [f for f in lab.store.flags(run_id) if f.kind == "gpu_lost"])
        assert shown(lab)[uuid]["state"] == "lost"
        lost.unlink()
        await until(lambda: not lab.store.flags(run_id) and shown(lab)[uuid]["state"] == "busy")
        verbs.cancel(lab, [run_id], who="cli")
        await ended(lab, run_id)
    lab.close()


async def test_a_removed_host_starts_nothing_and_is_shown_until_it_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = fake_lab(tmp_path, "handed_ahead = 1", host=TWO.replace("H100 = 2", "H100 = 1"))
    async with serving(lab) as daemon:
        monkey = daemon.roster.far
        daemon.roster.far = lambda host: True  # type: ignore[method-assign]  # as over ssh: the next run is handed ahead early
        here, other = submit(lab), submit(lab, "sim2")
        await until(lambda: phase(lab, here) == phase(lab, other) == "running")
        waits = verbs.submit(lab, Submission(budget_s=300, host="sim", allow_duplicate=True), who="cli").run_ids[0]
        await until(lambda: (r := lab.store.run(waits)) and r.stage == "standby")
        edit(lab, '[[host]]\nname = "sim"\nkind = "fake"\ntypes = {H100 = 1}\nspeed = 1\n', "")
        await until(lambda: phase(lab, waits) == "queued")
        hosts = {h["name"]: h for h in queries.host_objects(lab)}
        assert hosts["sim"]["state"] == "draining" and "no longer in hosts.toml" in hosts["sim"]["error"] and len(hosts["sim"]["gpus"]) == 1
        out = overnight(capsys, "--lab", lab.path, "hosts").out
        assert "draining" in out and "no longer in hosts.toml" in out
        verbs.cancel(lab, [here], who="cli")
        await ended(lab, here)
        await until(lambda: [h["name"] for h in queries.host_objects(lab)] == ["sim2"])
        assert lab.store.run(waits).started_at is None  # type: ignore[union-attr]
        daemon.roster.far = monkey  # type: ignore[method-assign]
        verbs.cancel(lab, [waits, other], who="cli")
        await ended(lab, waits, other)
    lab.close()


async def test_a_cancel_gives_up_a_run_on_a_removed_host_that_is_out_of_reach(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host=TWO)
    async with serving(lab):
        run_id = submit(lab)
        await until(lambda: phase(lab, run_id) == "running")
        fault(lab, "sim", "down")
        edit(lab, '[[host]]\nname = "sim"\nkind = "fake"\ntypes = {H100 = 2}\nspeed = 1\n', "")
        await until(lambda: phase(lab, run_id) == "unreachable" and lab.store.hosts()[0].state == "down")
        verbs.cancel(lab, [run_id], who="cli")
        (run,) = await ended(lab, run_id)
        assert run.outcome == "lost" and "not in hosts.toml" in str(run.cause_text) and not lab.store.runs("retry_of IS NOT NULL")
    lab.close()


async def test_a_host_removed_while_no_daemon_ran_is_shown_as_long_as_a_run_may_be_there(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host=TWO)
    async with serving(lab):
        run_id = submit(lab)
        await until(lambda: phase(lab, run_id) == "running")
    edit(lab, '[[host]]\nname = "sim"\nkind = "fake"\ntypes = {H100 = 2}\nspeed = 1\n', "")
    async with serving(lab):
        await until(lambda: phase(lab, run_id) == "unreachable")
        sim = next(h for h in queries.host_objects(lab) if h["name"] == "sim")
        assert sim["state"] == "down" and "nobody connects to it" in sim["error"]
        assert {g["state"] for g in shown(lab).values() if g["host"] == "sim"} == {"down"}
        verbs.cancel(lab, [run_id], who="cli")
        await ended(lab, run_id)
        await until(lambda: [h["name"] for h in queries.host_objects(lab)] == ["sim2"])
    lab.close()


async def test_a_full_disk_is_said_wherever_the_host_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 300\nmin_free_disk_mib = 1000000000\n")
    async with serving(lab):
        await until(lambda: {g["state"] for g in shown(lab).values()} == {"held"})
        (gpu,), (host,) = shown(lab).values(), queries.host_objects(lab)
        assert "disk is below the floor" in gpu["note"] and "floor 1000000000 MiB" in host["error"] and host["state"] == "up"
        assert queries.lab_state(lab).idle_gpus == 0
        for words in (["hosts"], ["gpus"]):
            assert "disk is below the floor" in overnight(capsys, "--lab", lab.path, *words).out
        run_id = submit(lab)
        assert "disk is below the floor" in (queries.why_waiting(lab, lab.store.run(run_id)) or "")  # type: ignore[arg-type]
    lab.close()


async def test_how_long_a_host_has_been_so_is_not_told_of_a_time_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 300\n")
    async with serving(lab):
        await until(lambda: [h.state for h in lab.store.hosts()] == ["up"] and lab.store.gpus())
    first, gpu = lab.store.hosts()[0].since, lab.store.gpus()[0].since
    async with serving(lab) as daemon:  # at once again: nothing was missed
        await until(lambda: "sim" in daemon.roster.told and daemon.roster.devices)
        assert (lab.store.hosts()[0].since, lab.store.gpus()[0].since) == (first, gpu)
    monkeypatch.setattr("runner.roster.UNWATCHED_S", -1.0)  # as if it had been long
    async with serving(lab):
        await until(lambda: lab.store.hosts()[0].since > first and lab.store.gpus()[0].since > gpu)
    lab.close()


def gpu(**words: Any) -> Gpu:
    base: dict[str, Any] = {"uuid": "GPU-1", "host": "a", "idx": 0, "name": "X", "mem_total_mib": 80000, "state": "quarantined"}
    rest = {"reason": "900 MiB still in use after r0003 ended (3 MiB before it)", "since": time.time() - 200, "run_id": None}
    return Gpu(**{**base, **rest, "standby_run_id": None, "holder": None, "telemetry": None, **words})


def test_a_quarantine_says_who_holds_the_card_and_how_much_now(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    held = [{"pid": 77, "name": "python", "user": "bob", "used_mib": 850}]
    then = states.gpu_now(gpu(holder={"holders": held, "run_id": "r0003"}), None, lab.policy())
    assert "held by python (pid 77, bob, 850 MiB)" in str(then.reason)
    now = states.gpu_now(gpu(telemetry={"mem_used_mib": 901, "processes": [{"pid": 78, "used_mib": 5}]}), None, lab.policy())
    assert "a process (pid 78, 5 MiB)" in str(now.reason) and "901 MiB in use now" in str(now.reason)
    assert "no process is seen" in str(states.gpu_now(gpu(), None, lab.policy()).reason)
    assert "pid 5, pid 6" in str(states.gpu_now(gpu(holder={"pids": [5, 6]}), None, lab.policy()).reason)
    note = states.gpu_note({"state": "quarantined", "reason": now.reason, "since_s": 200.0})
    assert note is not None and note.startswith("for 3 min 20 s: ")
    lab.close()


def test_a_lock_is_told_by_lab_user_pid_and_time() -> None:
    note = {"lab_id": "abc", "run_id": "r0001", "user": "bob", "pid": 77, "since": time.time()}
    words = states.lock_words(note)
    assert words.startswith("held by another control room: lab abc, run r0001, user bob, pid 77, since ")
    assert "does not say" in states.lock_words({}) and "measures it" in states.lock_words({"lab_id": "setup", "pid": 5})
