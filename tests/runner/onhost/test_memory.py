"""A slot is free only when its GPU's memory is back: the supervisor against the drivable NVML stand-in."""

from __future__ import annotations

import os

import pytest

from tests.runner.onhost.rig import FakeNvml, Rig


@pytest.fixture
def env(nvml: FakeNvml) -> dict[str, str]:
    """The supervisor's environment: sees the stand-in."""
    return {**os.environ, **nvml.env}


def test_memory_is_read_at_release_and_the_baseline_learned(rig: Rig, nvml: FakeNvml, env: dict[str, str]) -> None:
    nvml.card("GPU-a", used=512)
    status = rig.wait(rig.start("true", gpus=["GPU-a"], launch_env=env))
    assert status["gpu_memory"]["GPU-a"] == {"used_mib": 512, "baseline_mib": 512, "holders": [], "clean": True, "error": None}


def test_foreign_memory_refuses_the_start_and_names_the_holder(rig: Rig, nvml: FakeNvml, env: dict[str, str]) -> None:
    nvml.card("GPU-a", used=40_000, procs=f"{os.getpid()}:40000")
    run = rig.start("touch ran", gpus=["GPU-a"], mem_baseline_mib={"GPU-a": 500}, launch_env=env)
    status = rig.wait(run)
    assert (status["phase"], status["reason"]) == ("refused", "gpu-memory") and "40000 MiB" in status["detail"]
    holder = status["gpu_memory"]["GPU-a"]["holders"][0]
    assert holder["pid"] == os.getpid() and holder["used_mib"] == 40_000 and holder["user"]
    assert not (run / "work" / "ran").exists() and not rig.held("GPU-a")


def test_memory_that_never_comes_back_is_said_with_its_holder(rig: Rig, nvml: FakeNvml, env: dict[str, str]) -> None:
    nvml.card("GPU-a", used=500)
    run = rig.start("echo up; until [ -e go ]; do sleep 0.05; done", gpus=["GPU-a"], launch_env=env)
    rig.log_has(run, "up")
    nvml.card("GPU-a", used=9_000, procs=f"{os.getpid()}:8500")
    (run / "work" / "go").touch()
    memory = rig.wait(run)["gpu_memory"]["GPU-a"]
    assert (memory["clean"], memory["used_mib"], memory["baseline_mib"]) == (False, 9_000, 500)
    assert memory["holders"][0]["pid"] == os.getpid()
    # and the next run does not start into it, although no lock is held
    assert rig.wait(rig.start("true", gpus=["GPU-a"], mem_baseline_mib={"GPU-a": 500}, launch_env=env))["reason"] == "gpu-memory"


def test_the_next_run_waits_for_memory_that_is_only_slow_to_come_back(rig: Rig, nvml: FakeNvml, env: dict[str, str]) -> None:
    nvml.card("GPU-a", used=9_000)
    run = rig.start("true", gpus=["GPU-a"], mem_baseline_mib={"GPU-a": 500}, launch_env=env)
    assert rig.status(run)["phase"] == "starting"
    nvml.card("GPU-a", used=510)
    assert rig.wait(run)["exit_code"] == 0


def test_a_hung_driver_delays_the_release_but_never_blocks_it(rig: Rig, nvml: FakeNvml, env: dict[str, str]) -> None:
    nvml.card("GPU-a", used=500)
    run = rig.start("echo up; until [ -e go ]; do sleep 0.05; done", gpus=["GPU-a"], launch_env=env)
    rig.log_has(run, "up")
    nvml.card("GPU-a", hang=1)
    (run / "work" / "go").touch()
    status = rig.wait(run, limit_s=18)
    assert status["exit_code"] == 0 and status["gpu_memory"]["GPU-a"]["clean"] is None


def test_a_lost_gpu_is_said(rig: Rig, nvml: FakeNvml, env: dict[str, str]) -> None:
    nvml.card("GPU-a", used=500)
    run = rig.start("echo up; until [ -e go ]; do sleep 0.05; done; exit 1", gpus=["GPU-a"], launch_env=env)
    rig.log_has(run, "up")
    nvml.card("GPU-a", lost=1)
    (run / "work" / "go").touch()
    memory = rig.wait(run)["gpu_memory"]["GPU-a"]
    assert memory["clean"] is None and memory["used_mib"] is None
