"""The ssh engine against real sshd hosts in namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.engines import dirs
from runner.engines.base import Spec
from runner.engines.ssh import SshEngine
from runner.errors import HostError
from tests.runner.engines.sshfar import FIRST_AND_LAST, Far, until
from tests.runner.labs import make_lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]


async def test_a_run_from_start_to_end(far: Any) -> None:
    one = await far(env={"EXTRA": "yes"})
    report = await one.up(slots=2)
    assert [slot.uuid for slot in report.slots] == ["GPU-1a", "GPU-1b"] and report.slots[0].baseline_mib == 500
    assert report.info["hostname"] == "gpu1" and report.boot_id == one.host.boot_file.read_text().strip()
    assert report.boot_id != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spec = await one.submit("r0001", "import os, json; print(json.dumps(dict(os.environ))); raise SystemExit(3)")
    await one.engine.submit(spec)  # once more: nothing happens
    state = await one.wait("r0001")
    assert (state.phase, state.status["exit_code"], state.status["gpu_memory"]["GPU-1a"]["clean"]) == ("ended", 3, True)
    environment = json.loads(one.logs["r0001"])
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1a" and environment["EXTRA"] == "yes"
    assert environment["OVERNIGHT_DATA"] == f"{one.host.work}/data"
    assert not {"SSH_CONNECTION", "SSH_CLIENT", "FAKE_NVML_STATE", "SSH_AUTH_SOCK"} & set(environment)
    assert one.logs["r0001"] == one.printed("r0001")
    await one.engine.forget("r0001", "gpu1")
    assert not one.host.run_dir(one.engine.lab_id, "r0001").exists()
    assert (await one.look("r0001")).phase == "absent"


async def test_one_round_trip_answers_for_all_runs_and_brings_their_logs(far: Any) -> None:
    one = await far()
    for n, gpu in ((1, 0), (2, 1)):
        await one.submit(f"r000{n}", FIRST_AND_LAST.format(n=1000, pause=0.01), gpu=gpu)
        await one.wait(f"r000{n}", "running")

    async def printed() -> bool:
        for run_id in ("r0001", "r0002"):
            await one.look(run_id)
        return all(b"line 20\n" in one.logs[run_id] for run_id in ("r0001", "r0002"))

    await until(printed)
    before = one.engine.link.calls
    for _ in range(10):
        states = await one.engine.poll(["r0001", "r0002"], {})
        for run_id in states:
            one.logs[run_id] += await one.engine.read(run_id, "gpu1", "out.log", len(one.logs[run_id]))
            assert await one.engine.read(run_id, "gpu1", "work/events.jsonl", 0) == b""
    assert one.engine.link.calls - before == 10
    for run_id in states:
        await one.engine.stop(run_id, "gpu1", "cancelled", True)
        await one.wait(run_id)
        assert one.logs[run_id] == one.printed(run_id) and one.logs[run_id].startswith(b"line 0\n")


async def test_times_of_a_host_whose_clock_is_off_are_shown_by_ours(far: Any) -> None:
    one = await far()
    await one.submit("r0001", "print('hello')")
    true = (await one.wait("r0001")).status
    one.engine.link.skew_s = 3600.0  # as measured when connecting to a host that is an hour ahead
    shown = (await one.look("r0001")).status
    for field in ("queued_at", "started_at", "ended_at"):
        assert shown[field] == pytest.approx(true[field] - 3600)
    assert shown["elapsed_s"] == true["elapsed_s"]


async def test_what_came_ahead_of_an_ended_run_is_let_go(far: Any) -> None:
    one = await far()
    for n in (1, 2):
        await one.submit(f"r000{n}", "print('x' * 100000)")
        await one.wait(f"r000{n}")
    assert one.engine.ahead.keys() == {"r0002"} == one.engine.sizes.keys()
    assert await one.engine.read("r0001", "gpu1", "out.log", 0) == b"x" * 100_000 + b"\n"  # asked for again, it is fetched again


async def test_a_big_log_and_offsets_anywhere(far: Any, tmp_path: Path) -> None:
    one = await far()
    await one.submit("r0001", "import sys\nfor i in range(200000): sys.stdout.write('%019d\\n' % i)")
    await one.wait("r0001")
    whole = one.printed("r0001")
    assert len(whole) == 4_000_000
    for _ in range(10):
        one.logs["r0001"] += await one.engine.read("r0001", "gpu1", "out.log", len(one.logs["r0001"]))
    assert one.logs["r0001"] == whole
    assert await one.engine.read("r0001", "gpu1", "out.log", 123_456, 789) == whole[123_456:124_245]
    assert await one.engine.read("r0001", "gpu1", "out.log", len(whole)) == b"" == await one.engine.read("r0001", "gpu1", "no", 0)
    assert await one.engine.fetch("r0001", "gpu1", ["out.log", "status.json", "absent"], tmp_path / "m") == ["out.log", "status.json"]
    assert (tmp_path / "m" / "out.log").read_bytes() == whole
    with pytest.raises(HostError, match="no name inside"):
        await one.engine.read("r0001", "gpu1", "../../../../../../etc/passwd", 0)


async def test_large_files_travel_once_per_host(far: Any, tmp_path: Path) -> None:
    one = await far()
    corpus = tmp_path / "corpus.bin"
    corpus.write_bytes(os.urandom(9_000_000))
    for n in (1, 2):
        stage = one.lab.runs_dir / f"r000{n}" / "work"
        stage.mkdir(parents=True)
        (stage / "corpus.bin").symlink_to(corpus)
        (stage / "train.py").write_text("import hashlib; print(hashlib.sha256(open('corpus.bin','rb').read()).hexdigest())")
        shutil.move(str(stage), str(tmp_path / "w"))
        stage.parent.rmdir()
        report = await one.up()
        spec = dirs.build_spec(
            one.engine.host, report.info, report.slots[0], run_id=f"r000{n}", lab_id=one.engine.lab_id, command=["{python}", "train.py"],
            budget_s=1, time_limit_s=60, grace_s=1, max_log_mib=1, min_free_mib=0,
        )  # fmt: skip
        stage.parent.mkdir()
        shutil.move(str(tmp_path / "w"), str(stage))
        (stage.parent / "spec.json").write_bytes(dirs.spec_bytes(spec))
        before = one.engine.link.calls
        await one.engine.submit(Spec(f"r000{n}", report.slots[0], stage.parent))
        assert one.engine.link.calls - before == (5 if n == 1 else 1)  # place, three pieces, place; then place alone
        state = await one.wait(f"r000{n}")
        import hashlib

        assert state.status["exit_code"] == 0
        assert one.logs[f"r000{n}"].decode().strip() == hashlib.sha256(corpus.read_bytes()).hexdigest()


async def test_reboot_makes_runs_lost_and_the_next_can_start(far: Any) -> None:
    one = await far()
    await one.submit("r0001", FIRST_AND_LAST.format(n=10000, pause=0.1))
    await one.wait("r0001", "running")
    await asyncio.to_thread(one.host.reboot)
    state = await one.wait("r0001", "lost")
    assert state.status["boot_id"] != (await one.up()).boot_id
    assert one.logs["r0001"] == one.printed("r0001")
    await one.submit("r0002", "print('after')")
    assert (await one.wait("r0002")).status["exit_code"] == 0


async def test_a_killed_supervisor_on_the_host_is_lost_and_swept(far: Any) -> None:
    one = await far()
    await one.submit("r0001", "import os, time\nif os.fork() == 0: os.setsid()\nos.write(1, b'up\\n')\ntime.sleep(1000)")
    state = await one.wait("r0001", "running")
    await until(lambda: _printed(one, "r0001", b"up\nup\n"))
    inside = [pid for pid in one.host.pids() if b"supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert inside and state.status["supervisor"]["pid"] not in inside  # its pid is the host's own, not ours
    os.kill(inside[0], 9)
    await one.wait("r0001", "lost")
    await one.submit("r0002", "print('after')")
    assert (await one.wait("r0002")).status["exit_code"] == 0


async def _printed(one: Far, run_id: str, text: bytes) -> bool:
    await one.look(run_id)
    return text in one.logs.get(run_id, b"")


async def test_standby_is_handed_the_gpu_while_the_control_room_sleeps(far: Any, tmp_path: Path) -> None:
    one = await far()
    await one.submit("r0001", FIRST_AND_LAST.format(n=20, pause=0.1))
    await one.wait("r0001", "running")
    await one.submit("r0002", "print('second')", wait_lock_s=60)
    await one.submit("r0003", "print('third')", wait_lock_s=60)
    await one.wait("r0003", "waiting")
    await one.engine.close()
    again = Far(one.lab, one.host, SshEngine(one.lab, one.engine.host, config=one.engine.link.config))
    await until(lambda: asyncio.sleep(0, one.host.run_dir(one.engine.lab_id, "r0003").joinpath("out.log").exists()))
    await again.engine.start()
    await again.up()
    ends = [(await again.wait(f"r000{n}")).status for n in (1, 2, 3)]
    assert [status["exit_code"] for status in ends] == [0, 0, 0]
    assert again.logs == {"r0001": one.printed("r0001"), "r0002": b"second\n", "r0003": b"third\n"}
    assert ends[1]["started_at"] - ends[0]["ended_at"] < 2 and ends[2]["started_at"] > ends[1]["started_at"]
    await again.engine.close()


async def test_two_labs_on_one_host_never_share_a_gpu(far: Any, tmp_path: Path) -> None:
    one, two = await far(), await far(lab=make_lab(tmp_path / "other"))
    assert one.engine.lab_id != two.engine.lab_id
    await one.submit("r0001", FIRST_AND_LAST.format(n=10000, pause=0.1))
    await one.wait("r0001", "running")
    await two.submit("r0001", "print('mine')")
    refused = await two.wait("r0001")
    assert refused.phase == "refused" and refused.status["holder"]["lab_id"] == one.engine.lab_id
    await two.submit("r0002", "print('mine')", gpu=1)
    assert (await two.wait("r0002")).status["exit_code"] == 0
    assert (await one.look("r0001")).phase == "running"


async def test_a_lost_gpu_is_seen_and_the_run_goes_on_being_followed(far: Any) -> None:
    one = await far()
    await one.submit("r0001", FIRST_AND_LAST.format(n=10000, pause=0.1))
    await one.wait("r0001", "running")
    one.host.nvml.card("GPU-1a", lost=1)

    async def seen() -> Any:
        samples = (await one.engine.capacity())[0].samples
        return next((s for s in samples if s["uuid"] == "GPU-1a" and s["error"]), None)

    assert "lost" in (await until(seen))["error"]
    assert (await one.look("r0001")).phase == "running"
    await one.engine.stop("r0001", "gpu1", "cancelled", True)
    assert (await one.wait("r0001")).status["gpu_memory"]["GPU-1a"]["clean"] is None


async def test_files_that_a_far_run_spoiled_are_named_and_the_run_is_still_ended(far: Any) -> None:
    one = await far()
    spoil = "import os, time\nos.remove('../out.log')\nos.symlink('/etc/passwd', '../out.log')\nos.mkfifo('events.jsonl')\n"
    spoil += "time.sleep(300)\n"
    await one.submit("spoiled", spoil)

    async def named() -> Any:
        state = await one.look("spoiled")
        return state if len(state.unreadable) == 2 else None

    state = await until(named)
    assert state.phase == "running" and "symbolic link" in state.unreadable["out.log"]
    assert "a pipe" in state.unreadable["work/events.jsonl"]
    assert b"root:" not in one.logs["spoiled"]
    await one.engine.stop("spoiled", one.host.name, "cancelled")
    ended = await one.wait("spoiled")
    assert ended.phase == "ended" and ended.status["stop_reason"] == "cancelled"
    folder = one.lab.runs_dir / "spoiled"
    assert await one.engine.fetch("spoiled", one.host.name, ["out.log", "status.json"], folder) == ["status.json"]
