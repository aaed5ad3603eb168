"""The local engine with real supervisors and the real sampler."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from runner.engines import dirs
from runner.engines.base import HostReport, Slot, Spec
from runner.engines.local import LocalEngine
from runner.errors import EngineError
from runner.lab import Lab
from runner.policy import HostPolicy
from tests.runner.labs import make_lab
from tests.runner.onhost.rig import FakeNvml, Rig


async def until(condition: Callable[[], Any], limit_s: float = 15.0) -> Any:
    """Wait for an awaited state with a deadline."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = await condition()
        if value:
            return value
        await asyncio.sleep(0.02)
    raise AssertionError(f"not reached within {limit_s} s")


class Bench:
    """A lab, an engine on it, and runs staged as the daemon stages them."""

    def __init__(self, lab: Lab, engine: LocalEngine) -> None:
        self.lab, self.engine = lab, engine

    async def report(self) -> HostReport:
        return (await self.engine.capacity())[0]

    async def slot(self) -> Slot:
        return (await self.report()).slots[0]

    async def submit(self, run_id: str, script: str, **words: Any) -> Spec:
        """Stage and submit a shell run."""
        report = await self.report()
        slot = report.slots[0]
        stage = self.lab.runs_dir / run_id
        (stage / "work").mkdir(parents=True)
        spec = dirs.build_spec(
            self.engine.host, report.info, slot, run_id=run_id, lab_id="lab", command=["/bin/sh", "-c", script], budget_s=20,
            time_limit_s=words.pop("time_limit_s", 60), grace_s=1, max_log_mib=1, min_free_mib=0, **words,
        )  # fmt: skip
        (stage / "spec.json").write_bytes(dirs.spec_bytes(spec))
        made = Spec(run_id, slot, stage)
        await self.engine.submit(made)
        return made

    async def state(self, run_id: str) -> Any:
        return (await self.engine.poll([run_id], {run_id: "here"}))[run_id]

    async def wait(self, run_id: str, *phases: str) -> Any:
        async def there() -> Any:
            state = await self.state(run_id)
            return state if state.phase in (phases or ("ended", "refused", "lost")) else None

        return await until(there)


@pytest.fixture
async def bench(tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes engines; ends their runs afterwards."""
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    engines: list[LocalEngine] = []

    async def make(**host: Any) -> Bench:
        lab = make_lab(tmp_path)
        engine = LocalEngine(lab, HostPolicy("here", **host))
        await engine.start()
        engines.append(engine)
        return Bench(lab, engine)

    yield make
    for engine in engines:
        await engine.close()
        rig.dirs += [path for path in Path(engine.run_dir("x")).parent.glob("*") if path.is_dir()]


async def test_without_a_gpu_there_is_one_cpu_slot(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    here = await bench(gpus=[])
    report = await here.report()
    assert report.up and report.error is None and report.boot_id and report.disk_free_mib
    assert [(slot.uuid, slot.index, slot.mem_total_mib) for slot in report.slots] == [("CPU:here", None, None)]
    assert report.slots[0].name.startswith("CPU ") and "core" in report.slots[0].name


async def test_a_run_from_start_to_end(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    here = await bench(gpus=[], env={"EXTRA": "yes"})
    spec = await here.submit("r0001", "env; echo '{}' > events.jsonl; exit 3")
    await here.engine.submit(spec)  # once more: nothing happens
    state = await here.wait("r0001")
    assert (state.phase, state.status["exit_code"], state.events_bytes) == ("ended", 3, 3)
    log = (await here.engine.read("r0001", "here", "out.log", 0)).decode()
    assert state.log_bytes == len(log)
    environment = dict(line.split("=", 1) for line in log.splitlines())
    assert environment["OVERNIGHT_RUN_ID"] == "r0001" and environment["OVERNIGHT_BUDGET_S"] == "20" and environment["EXTRA"] == "yes"
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["PYTHONUNBUFFERED"] == "1"
    assert environment["OVERNIGHT_DATA"] == str(here.lab.data_dir)
    assert not {"ANTHROPIC_API_KEY", "SSH_AUTH_SOCK", "OVERNIGHT_LOCK_DIR", "VIRTUAL_ENV"} & set(environment)
    assert await here.engine.read("r0001", "here", "out.log", 5, 6) == log[5:11].encode()
    assert await here.engine.read("r0001", "here", "out.log", 10**6) == b"" == await here.engine.read("r0001", "here", "none", 0)


async def test_the_second_cpu_run_waits_its_turn(bench: Any) -> None:
    here = await bench(gpus=[])
    await here.submit("r0001", "until [ -e go ]; do sleep 0.05; done")
    await here.wait("r0001", "running")
    await here.submit("r0002", "true", wait_lock_s=60)
    await here.submit("r0003", "true")
    refused = await here.wait("r0003")
    assert refused.phase == "refused" and refused.status["holder"]["run_id"] == "r0001"
    assert (await here.state("r0002")).phase == "waiting"
    (here.lab.runs_dir / "r0001" / "work" / "go").touch()
    assert (await here.wait("r0002")).status["exit_code"] == 0


async def test_a_new_engine_takes_up_what_the_old_one_started(bench: Any) -> None:
    here = await bench(gpus=[])
    await here.submit("r0001", "echo one; until [ -e go ]; do sleep 0.05; done; echo two")
    await here.wait("r0001", "running")
    await here.engine.close()
    (here.lab.runs_dir / "r0001" / "work" / "go").touch()
    again = Bench(here.lab, LocalEngine(here.lab, here.engine.host))
    assert (await again.wait("r0001")).status["exit_code"] == 0
    assert await again.engine.read("r0001", "here", "out.log", 0) == b"one\ntwo\n"


async def test_a_killed_supervisor_is_lost_and_swept_never_failed(bench: Any) -> None:
    here = await bench(gpus=[])
    await here.submit("r0001", "(setsid sleep 300 &) ; sleep 300")
    state = await here.wait("r0001", "running")
    os.kill(state.status["supervisor"]["pid"], 9)
    state = await here.wait("r0001", "lost")
    assert state.status["phase"] == "running"
    await here.submit("r0002", "true")
    assert (await here.wait("r0002")).status["exit_code"] == 0  # the slot is free again


async def test_states_of_runs_that_never_were(bench: Any) -> None:
    here = await bench(gpus=[])
    assert (await here.state("r0009")).phase == "absent"
    (here.lab.runs_dir / "r0010" / "work").mkdir(parents=True)
    assert (await here.state("r0010")).phase == "absent"
    await here.engine.stop("r0009", "here", "cancelled")
    await here.engine.forget("r0009", "here")


async def test_stop_and_force(bench: Any) -> None:
    here = await bench(gpus=[])
    await here.submit("r0001", "trap '' TERM; while :; do sleep 0.1; done")
    await here.wait("r0001", "running")
    await here.engine.stop("r0001", "here", "timed_out", force=True)
    status = (await here.wait("r0001")).status
    assert (status["reason"], status["stop_reason"], status["exit_signal"]) == ("stopped", "timed_out", 9)


async def test_a_run_that_cannot_be_started_says_why(bench: Any) -> None:
    here = await bench(gpus=[])
    stage = here.lab.runs_dir / "r0001"
    stage.mkdir()
    (stage / "spec.json").write_text("{")
    with pytest.raises(EngineError, match=r"r0001 could not be started on here: .*spec.json"):
        await here.engine.submit(Spec("r0001", await here.slot(), stage))


async def test_names_never_lead_out_of_the_run_directory(bench: Any, tmp_path: Path) -> None:
    here = await bench(gpus=[])
    (tmp_path / "secret").write_text("secret")
    await here.submit("r0001", f"ln -s {tmp_path}/secret link; mkdir d; ln -s {tmp_path} d/up; ln -s {tmp_path}/secret ../outlink; true")
    await here.wait("r0001")
    for name in ("../secret", "work/../../secret", str(tmp_path / "secret"), "work/link", "work/d/up/secret", "outlink"):
        try:
            found = await here.engine.read("r0001", "here", name, 0)
        except EngineError:
            continue
        assert found == b"", name
    assert await here.engine.fetch("r0001", "here", ["work/link", "outlink", "out.log"], tmp_path / "into") == ["out.log"]


async def test_forget_keeps_the_record_and_drops_the_bulk(bench: Any) -> None:
    here = await bench(gpus=[])
    await here.submit("r0001", "echo log; echo '{}' > events.jsonl; mkdir d; echo x > d/big; echo x > checkpoint.pt; sleep 0.3")
    await here.wait("r0001", "running")
    with pytest.raises(Exception, match="supervisor"):
        await here.engine.forget("r0001", "here")
    await here.wait("r0001")

    async def forgotten() -> bool:
        try:
            await here.engine.forget("r0001", "here")
        except Exception:
            return False
        return True

    await until(forgotten)
    run = here.lab.runs_dir / "r0001"
    assert [path.name for path in (run / "work").iterdir()] == ["events.jsonl"] and (run / "out.log").read_text() == "log\n"


async def test_our_children_import_nothing_from_the_working_folder(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("runner", "torch", "json", "onhost", "pynvml", "fcntl"):
        (trap / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write({name!r})\nraise SystemExit(1)\n")
    monkeypatch.chdir(trap)
    monkeypatch.setenv("PYTHONPATH", str(trap))
    here = await bench()
    await here.report()
    await here.submit("r0001", "true") if (await here.report()).slots else None
    await here.wait("r0001")
    assert not (tmp_path / "sprung").exists()


async def test_gpus_are_slots_known_by_uuid(bench: Any, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nvml.env.items():
        monkeypatch.setenv(name, value)
    nvml.card("GPU-a", used=500)
    nvml.card("GPU-b", used=40_000, procs=f"{os.getpid()}:39000")
    nvml.card("GPU-c", fail="used:3")
    here = await bench(labels={"rack": "7"})
    report = await here.report()
    assert [(s.uuid, s.index, s.name, s.mem_total_mib, s.baseline_mib) for s in report.slots] == [
        ("GPU-a", 0, "NVIDIA H100 80GB HBM3", 81559, 500),
        ("GPU-b", 1, "NVIDIA H100 80GB HBM3", 81559, None),
        ("GPU-c", 2, "NVIDIA H100 80GB HBM3", None, None),
    ]
    assert report.slots[0].labels == {"rack": "7"} and [s["uuid"] for s in report.samples] == ["GPU-a", "GPU-b", "GPU-c"]
    await here.submit("r0001", "echo $CUDA_VISIBLE_DEVICES")
    status = (await here.wait("r0001")).status
    assert status["gpu_memory"]["GPU-a"]["clean"] is True and status["gpu_memory"]["GPU-a"]["baseline_mib"] == 500
    assert await here.engine.read("r0001", "here", "out.log", 0) == b"GPU-a\n"


async def test_hosts_toml_chooses_gpus_by_index_or_uuid(bench: Any, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nvml.env.items():
        monkeypatch.setenv(name, value)
    for uuid in ("GPU-a", "GPU-b", "GPU-c"):
        nvml.card(uuid)
    here = await bench(gpus=[0, "GPU-c", 7])
    report = await here.report()
    assert [slot.uuid for slot in report.slots] == ["GPU-a", "GPU-c"]
    assert report.error and "GPU 7" in report.error


def test_a_driver_that_stops_answering_leaves_the_slots_and_marks_every_sample() -> None:
    telemetry = dirs.Telemetry(HostPolicy("here"))
    line = {"at": 1.0, "uuid": "GPU-a", "index": 0, "name": "X", "util_pct": 50, "error": None, "mem_total_mib": 10, "mem_used_mib": 1}
    telemetry.take(json.dumps(line).encode())
    telemetry.take(b"not json\n")
    telemetry.take(json.dumps({"at": 2.0, "fatal": "NVML: Driver Not Loaded", "absent": False}).encode())
    sample = telemetry.samples()[0]
    assert sample["error"] == "NVML: Driver Not Loaded" and sample["util_pct"] is None and sample["name"] == "X" and sample["at"] == 2.0
    assert [slot.uuid for slot in telemetry.slots(2)] == ["GPU-a"] and "Driver Not Loaded" in (telemetry.trouble() or "")


def test_a_card_the_sampler_stopped_speaking_of_is_said_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(dirs.time, "monotonic", lambda: clock[0])
    telemetry = dirs.Telemetry(HostPolicy("here"))

    def speak(*uuids: str) -> None:
        for index, uuid in enumerate(uuids):
            telemetry.take(json.dumps({"at": 1.0, "uuid": uuid, "index": index, "name": "X", "util_pct": 5, "error": None}).encode())

    speak("GPU-a", "GPU-b")
    for _ in range(20):
        clock[0] += 1
        speak("GPU-a")
    lines = {line["uuid"]: line for line in telemetry.samples()}
    assert lines["GPU-a"]["error"] is None and "not seen" in lines["GPU-b"]["error"] and lines["GPU-b"]["util_pct"] is None
    speak("GPU-a", "GPU-b")
    clock[0] += 60  # nobody could be heard: that says nothing of the cards
    assert all(line["error"] is None for line in telemetry.samples())
    speak("GPU-a")  # heard again, card by card
    assert all(line["error"] is None for line in telemetry.samples())


def test_a_machine_whose_gpus_cannot_be_read_is_not_taken_for_one_without() -> None:
    telemetry = dirs.Telemetry(HostPolicy("here"))
    telemetry.take(json.dumps({"at": 2.0, "fatal": "NVML: Driver/library version mismatch", "absent": False}).encode())
    assert telemetry.slots(2) == [] and "mismatch" in (telemetry.trouble() or "")
    telemetry.take(json.dumps({"at": 3.0, "fatal": "no NVIDIA driver here", "absent": True}).encode())
    assert [slot.uuid for slot in telemetry.slots(2)] == ["CPU:here"] and telemetry.trouble() is None


def test_the_interpreter_of_a_run_is_the_hosts(tmp_path: Path) -> None:
    info = {"environment": {"PATH": "/bin"}, "data_dir": "/d", "cache_dir": "/c", "python": "/opt/py", "lock_dir": "/l"}
    slot = Slot("far", "GPU-a", "X", 0, 10)
    spec = dirs.build_spec(
        HostPolicy("far", env={"HF_HOME": "/h"}), info, slot, run_id="r0001", lab_id="l", command=["{python}", "train.py"], budget_s=300,
        time_limit_s=900, grace_s=10, max_log_mib=64, min_free_mib=5, warm=["torch"],
    )  # fmt: skip
    assert spec["argv"] == ["/opt/py", "train.py"] and spec["warm"] == ["torch"] and spec["gpus"] == ["GPU-a"]
    assert spec["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-a" and spec["env"]["HF_HOME"] == "/h" and spec["env"]["PATH"] == "/bin"
    assert sys.executable not in json.dumps(spec)
