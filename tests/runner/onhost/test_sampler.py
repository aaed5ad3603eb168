"""The sampler as a process, against the drivable NVML stand-in and a stand-in nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.onhost import nvml as nvml_reader
from runner.onhost import rundirs
from tests.runner.onhost.rig import FakeNvml


class Sampler:
    """A running sampler; `batch` gives its next lines by UUID."""

    def __init__(self, env: dict[str, str], *args: str) -> None:
        command = [*rundirs.launch_command(sys.executable, "sampler"), *args]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env})

    def line(self) -> dict[str, Any]:
        assert self.process.stdout
        text = self.process.stdout.readline()
        assert text, "the sampler ended"
        return dict(json.loads(text))

    def until(self, condition: Any) -> dict[str, Any]:
        """The first line that meets a condition (pytest's time limit is the deadline)."""
        while True:
            line = self.line()
            if condition(line):
                return line

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def sampler(nvml: FakeNvml) -> Iterator[Any]:
    """Starts samplers with the stand-in."""
    made: list[Sampler] = []

    def start(*args: str, env: dict[str, str] | None = None) -> Sampler:
        made.append(Sampler(env or nvml.env, *(args or ("--interval", "0.1"))))
        return made[-1]

    yield start
    for one in made:
        one.end()


def test_every_field_of_the_format_is_there_with_its_unit(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card(
        "GPU-a", util=97, memutil=40, used=61_000, power=650_123, temp=71, sm=1755, throttle="24", ecc=2, procs=f"{os.getpid()}:60500"
    )
    line = sampler().line()
    assert set(line) == {*nvml_reader.FIELDS, "cpu_lock"}  # the first line of a round speaks of the CPU's lock too
    expected = {
        "uuid": "GPU-a", "index": 0, "name": "NVIDIA H100 80GB HBM3", "util_pct": 97, "mem_util_pct": 40, "mem_used_mib": 61_000,
        "mem_total_mib": 81_559, "power_w": 650.1, "power_limit_w": 700.0, "power_default_w": 700.0, "temp_c": 71, "sm_mhz": 1755,
        "sm_max_mhz": 1980, "mem_mhz": 2619, "throttle": 0x24, "pstate": 0, "ecc_uncorrected": 2, "pcie_gen": 5, "pcie_width": 16,
        "energy_j": 1.0, "mig": None, "driver": "580.95.05", "error": None, "source": "nvml",
    }  # fmt: skip
    assert {key: line[key] for key in expected} == expected
    process = line["processes"][0]
    assert process["pid"] == os.getpid() and process["used_mib"] == 60_500 and process["user"] and process["name"]


def test_what_the_driver_reserves_is_not_memory_in_use(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card("GPU-a", used=0, reserved=615)
    assert sampler().line()["mem_used_mib"] == 0


@pytest.mark.parametrize("code", [3, 999, 4, 13])
def test_a_field_the_card_does_not_give_is_none_and_harms_no_other(nvml: FakeNvml, sampler: Any, code: int) -> None:
    fields = {
        "util": "util_pct", "used": "mem_used_mib", "power": "power_w", "limit": "power_limit_w",
        "default": "power_default_w", "temp": "temp_c",
        "sm": "sm_mhz", "smmax": "sm_max_mhz", "memclk": "mem_mhz", "throttle": "throttle", "pstate": "pstate", "ecc": "ecc_uncorrected",
        "gen": "pcie_gen", "width": "pcie_width", "energy": "energy_j", "procs": "processes", "name": "name", "mig": "mig",
    }  # fmt: skip
    for number, key in enumerate(fields):
        if number < 16:
            nvml.card(f"GPU-{key}", fail=f"{key}:{code}", util=50, temp=60)
    one = sampler()
    lines = {line["uuid"]: line for line in (one.line() for _ in nvml.cards)}
    for key in list(fields)[:16]:
        line = lines[f"GPU-{key}"]
        assert line[fields[key]] is None and line["error"] is None, key
        assert sum(value is not None for value in line.values()) >= 20, key


def test_absurd_and_wrapped_values_are_none(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card("GPU-a", util=4294967295, used=99_999_999, power=4294967295, temp=4294967295, sm=4294967295, gen=4294967295, width=0)
    line = sampler().line()
    for field in ("util_pct", "mem_used_mib", "power_w", "temp_c", "sm_mhz", "pcie_gen", "pcie_width"):
        assert line[field] is None, field
    assert line["mem_total_mib"] == 81_559


def test_processes_of_the_host_seen_from_a_container(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card("GPU-a", procs="4194000:100,4194001")  # pids that mean nothing here, one without its memory
    assert sampler().line()["processes"] == [
        {"pid": 4194000, "name": None, "user": None, "run": None, "used_mib": 100},
        {"pid": 4194001, "name": None, "user": None, "run": None, "used_mib": None},
    ]


def test_a_process_of_a_run_says_which(nvml: FakeNvml, sampler: Any) -> None:
    mine = subprocess.Popen(["sleep", "60"], env={"OVERNIGHT_RUN_ID": "r0042", "PATH": os.environ["PATH"]})
    try:
        nvml.card("GPU-a", procs=f"{mine.pid}:100,{os.getpid()}:200")
        first, second = sampler().until(lambda line: line["processes"][0]["name"] == "sleep")["processes"]
        assert (first["run"], second["run"]) == ("r0042", None)
    finally:
        mine.kill()
        mine.wait()


def test_a_gpu_lost_and_found_again_never_hides_the_others(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card("GPU-a"), nvml.card("GPU-b", util=11)
    one = sampler()
    one.until(lambda line: line["uuid"] == "GPU-b" and line["error"] is None)
    nvml.card("GPU-a", lost=1)
    lost = one.until(lambda line: line["uuid"] == "GPU-a" and line["error"])
    assert "lost" in lost["error"] and lost["index"] == 0 and lost["util_pct"] is None
    assert one.until(lambda line: line["uuid"] == "GPU-b")["util_pct"] == 11
    nvml.card("GPU-a", lost=None)
    one.until(lambda line: line["uuid"] == "GPU-a" and line["error"] is None)


def test_a_hung_driver_gives_lines_with_an_error_never_silence(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card("GPU-a")
    one = sampler("--interval", "0.1", "--limit", "0.3")
    one.until(lambda line: line["error"] is None)
    nvml.card("GPU-a", hang=1)
    line = one.until(lambda line: line.get("error"))
    assert line["uuid"] == "GPU-a" and "did not answer" in line["error"] and line["util_pct"] is None
    nvml.card("GPU-a", hang=None)
    one.until(lambda line: line.get("uuid") == "GPU-a" and line["error"] is None)


def test_mig_instances_are_lines_of_their_own(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card("GPU-a", mig="MIG-1:100:9728,MIG-2:9000:9728", power=100_000)
    one = sampler()
    first, second = one.line(), one.line()
    assert (first["uuid"], second["uuid"], first["mig"]) == ("MIG-1", "MIG-2", "GPU-a")
    assert second["mem_used_mib"] == 9_000 and second["mem_total_mib"] == 9_728 and second["power_w"] == 100.0
    assert second["util_pct"] is None and "MIG" in second["name"]


def test_no_driver_is_told_from_gpus_that_cannot_be_read(nvml: FakeNvml, sampler: Any, tmp_path: Path) -> None:
    line = sampler("--once", env={**nvml.env, "PATH": str(tmp_path)}).line()  # no state file: the driver is not loaded
    assert "fatal" in line
    assert line["absent"] is not nvml_reader.driver_present()


def test_it_ends_with_its_reader(nvml: FakeNvml, sampler: Any) -> None:
    nvml.card("GPU-a")
    one = sampler()
    one.line()
    one.process.stdin.close()
    assert one.process.wait(timeout=10) == 0


SMI = """#!/bin/sh
case "$*" in
*--query-compute-apps*) echo "GPU-a, 1, 60500"; echo "GPU-a, 4194000, [N/A]"; exit 0;;
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
*uuid,index,*) ;;
*) echo ok; exit 0;;
esac
echo "GPU-a, 0, NVIDIA GeForce RTX 4090, 535.54.03, P2, 97, 40, 21000, 24564, 440.21, 450.00, 450.00, 71, 2520, 3105, 10501, 0x0000000000000004, [N/A], 4, 4, 16, 16"
echo "GPU-b, 1, NVIDIA GeForce RTX 4090, 535.54.03, P8, [Unknown Error], [N/A], 0, 24564, [Not Supported], 450.00, 450.00, 30, 210, 3105, 405, 0x01, [N/A], 1, 4, 16, 16"
"""  # noqa: E501


def test_without_nvml_it_reads_nvidia_smi_old_names_included(sampler: Any, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    one = sampler("--once", env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH": "", "FAKE_NVML_STATE": ""})
    first, second = one.line(), one.line()
    assert set(first) == {*nvml_reader.FIELDS, "cpu_lock"} and first["source"] == "nvidia-smi"
    assert (first["util_pct"], first["power_w"], first["power_limit_w"], first["throttle"], first["pstate"]) == (97, 440.21, 450.0, 4, 2)
    assert first["ecc_uncorrected"] is None and second["util_pct"] is None and second["power_w"] is None and second["processes"] == []
    assert [(p["pid"], p["used_mib"]) for p in first["processes"]] == [(1, 60_500), (4194000, None)]
