"""`hosts check` and `hosts setup` against real sshd hosts, and the judgements they are made of."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner import hostcare, hostsetup
from runner.engines import sshlink
from runner.engines.local import LocalEngine
from runner.engines.ssh import SshEngine
from runner.errors import HostError, RequestError
from runner.lab import Lab
from runner.policy import HostPolicy, TrainerPolicy
from tests.runner.engines.sshrig import Net
from tests.runner.labs import make_lab

NO_TORCH = "import json; print(json.dumps({'python': '3.12.1', 'torch_error': 'ImportError: no'}))"
system = [pytest.mark.system, pytest.mark.timeout(120)]


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The checks of a report by name."""
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture
async def engines(net: Net, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes started ssh engines."""
    monkeypatch.setattr(sshlink, "BACK_OFF_S", (0.1, 0.3, 1.0))
    made: list[SshEngine] = []

    async def make(lab: Lab, number: int = 0, **host: Any) -> SshEngine:
        config = host.pop("config", net.config)
        engine = SshEngine(lab, net.hosts[number].policy(**host), config=[config])
        await engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        await engine.close()
    for host in net.hosts:
        host.heal()


class TestOnHosts:
    """With real hosts."""

    pytestmark = system

    async def test_check_says_what_a_host_is_and_lacks(self, net: Net, engines: Any, tmp_path: Path) -> None:
        lab = make_lab(tmp_path, script="import torch\n")
        engine = await engines(lab, min_free_disk_mib=1)
        net.hosts[0].nvml.card("GPU-1a", procs="1:499")
        report = await hostcare.check(engine.host, engine)
        checks = by_name(report)
        assert checks["reachable"]["ok"] and "gpu1" in checks["reachable"]["text"] and checks["host key"]["ok"] and checks["clock"]["ok"]
        assert checks["GPUs"]["ok"] and checks["GPUs"]["text"] == "2 × NVIDIA H100 80GB HBM3"
        assert checks["GPU driver"]["text"] == "580.95.05, read through NVML"
        assert checks["python"]["value"] == ".".join(str(n) for n in sys.version_info[:3])
        assert checks["disk"]["ok"] and checks["disk"]["value"] > 1
        assert checks["data"]["ok"] is None
        # this Python's torch, if there is one, is built without CUDA: with GPUs there that makes the host unfit
        assert checks["torch"]["ok"] is False and report["state"] == "unfit" and "set python of gpu1" in report["next"].lower()
        assert [gpu["uuid"] for gpu in report["gpus"]] == ["GPU-1a", "GPU-1b"]

    async def test_check_of_silent_hosts_ends_in_time(
        self, net: Net, engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hostcare, "CONNECT_LIMIT_S", 3.0)
        lab = make_lab(tmp_path)
        config = tmp_path / "config"
        config.write_text("Host *\n  UserKnownHostsFile /dev/null\n")
        down, stranger = await engines(lab, port=2), await engines(lab, 1, config=config)
        one, two = await asyncio.gather(hostcare.check(down.host, down), hostcare.check(stranger.host, stranger))
        assert one["state"] == "down" and "cannot be reached" in one["error"] and by_name(one)["reachable"]["ok"] is False
        stranger.link.config = [net.config]
        again = await hostcare.check(stranger.host, stranger)  # the key is trusted now: what was found before does not count
        assert by_name(again)["reachable"]["ok"] and by_name(again)["host key"]["ok"]
        assert two["state"] == "down" and "SHA256:" in two["error"] and by_name(two)["host key"]["ok"] is False and two["next"]

    async def test_a_gpu_that_is_not_there_is_for_hosts_toml_to_mend(self, net: Net, engines: Any, tmp_path: Path) -> None:
        engine = await engines(make_lab(tmp_path), gpus=[0, 7])
        found = await hostcare.check(engine.host, engine)
        assert "the GPU 7, which it does not have. It has 0 (GPU-1a)" in found["error"]
        assert found["state"] == "unfit" and found["next"] == "Correct gpus of gpu1 in hosts.toml."

    async def test_setup_with_a_given_python_copies_the_trainer_and_prepares_data(self, net: Net, engines: Any, tmp_path: Path) -> None:
        lab = make_lab(tmp_path)
        write_trainer(tmp_path, "print('preparing'); open(os.path.join(os.environ['OVERNIGHT_DATA'], 'tokens.bin'), 'w').write('x')")
        lab = relabel(tmp_path)
        engine = await engines(lab)
        told: list[str] = []
        result = await hostsetup.setup(engine.host, engine, told.append)
        work = net.hosts[0].work
        assert (work / "data" / "tokens.bin").read_text() == "x" and (work / "trainer" / "train.py").exists()
        assert result["python"] == sys.executable and told[0] == "connecting"
        assert [step.split()[1] for step in result["steps"]] == ["1/5", "3/5", "4/5", "5/5"] and result["steps"][-1].endswith("ready")
        assert not (work / "venv").exists()
        again = await hostsetup.setup(engine.host, engine, told.append)
        assert again["steps"] == result["steps"]

    async def test_setup_makes_a_venv_with_what_the_trainer_needs(self, net: Net, engines: Any, tmp_path: Path) -> None:
        wheel = tiny_wheel(tmp_path)
        write_trainer(tmp_path, "import tiny_dependency; print('have it', tiny_dependency.__file__)")
        (tmp_path / "trainer" / "requirements.txt").write_text(f"# what it needs\n{wheel}\n")
        engine = await engines(relabel(tmp_path), python=None)
        result = await hostsetup.setup(engine.host, engine, lambda text: None)
        venv_python = f"{net.hosts[0].work}/venv/bin/python"
        assert result["python"] == venv_python == engine.info()["python"]
        assert any("have it" in line for line in result["log"])

    async def test_setup_lets_the_trainer_measure_a_gpu_under_its_lock(self, net: Net, engines: Any, tmp_path: Path) -> None:
        write_trainer(tmp_path, "")
        (tmp_path / "trainer" / "preflight.py").write_text(
            "import json, os\n"
            "found = {'gpu_name': 'NVIDIA H100 80GB HBM3', 'matmul_flops': 6e14, 'peak_flops': 989.5e12,\n"
            "         'choices': {'ATTENTION': 'cudnn'}}\n"
            "assert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-1a'\n"
            "json.dump(found, open(os.environ['OVERNIGHT_DATA'] + '/preflight-x.json', 'w'))\n"
        )
        engine = await engines(relabel(tmp_path), min_free_disk_mib=1)
        while not engine.telemetry.samples():
            await asyncio.sleep(0.05)
        result = await hostsetup.setup(engine.host, engine, lambda text: None)
        assert "STEP 5/5 measuring GPU-1a" in result["steps"] and result["notes"] == []
        assert (await engine.capacity())[0].info["preflights"][0]["matmul_flops"] == 6e14
        check = by_name(await hostcare.check(engine.host, engine))["preflight"]
        assert check["text"] == "NVIDIA H100 80GB HBM3: 600 TFLOP/s, 61 % of its peak; attention cudnn"

    async def test_setup_says_ready_exactly_where_check_says_fit(self, engines: Any, tmp_path: Path) -> None:
        write_trainer(tmp_path, "")
        lab = relabel(tmp_path)
        engine = await engines(lab, min_free_disk_mib=1)
        done = await hostcare.setup(engine.host, engine, lambda text: None)
        checks = by_name(done)
        assert "gpu1 is ready" in done["text"] and checks["torch"]["ok"] is None and "does not import torch" in checks["torch"]["text"]
        (tmp_path / "trainer" / "train.py").write_text("import torch\n")
        with pytest.raises(HostError, match="still not fit: ") as failure:
            await hostcare.setup(engine.host, engine, lambda text: None)
        report = await hostcare.check(engine.host, engine)
        assert report["state"] == "unfit" and report["error"] in failure.value.message
        assert "leave it out" in failure.value.next_step  # python was given: setting up again would change nothing

    async def test_setup_that_fails_says_which_step_and_shows_why(self, engines: Any, tmp_path: Path) -> None:
        write_trainer(tmp_path, "raise SystemExit('no corpus here')")
        engine = await engines(relabel(tmp_path))
        with pytest.raises(HostError, match="preparing the data failed") as failure:
            await hostsetup.setup(engine.host, engine, lambda text: None)
        assert "no corpus here" in failure.value.next_step

    async def test_setup_goes_on_through_a_lost_link_and_is_taken_up(self, net: Net, engines: Any, tmp_path: Path) -> None:
        write_trainer(tmp_path, "import time; open('runs', 'a').write('x'); time.sleep(4); print('counted', len(open('runs').read()))")
        lab = relabel(tmp_path)
        engine = await engines(lab)
        first = asyncio.create_task(hostsetup.setup(engine.host, engine, lambda text: None))
        trainer = net.hosts[0].work / "trainer" / "runs"
        for _ in range(400):
            await asyncio.sleep(0.05)
            if trainer.exists():
                break
        net.hosts[0].kill_sshd()
        first.cancel()  # the daemon dies as well
        with pytest.raises(asyncio.CancelledError):
            await first
        await engine.close()  # else both would keep the host connected, each ending the other's link
        net.hosts[0].start_sshd()
        other = await engines(lab)
        result = await hostsetup.setup(other.host, other, lambda text: None)
        assert "counted 1" in result["log"]  # found under way, not begun again


async def test_check_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcare.inspecting, "PROBE", NO_TORCH)
    lab = make_lab(tmp_path, script="from torch import nn\n")
    engine = LocalEngine(lab, HostPolicy("here", gpus=[]))
    await engine.start()
    try:
        report = await hostcare.check(engine.host, engine)
    finally:
        await engine.close()
    checks = by_name(report)
    assert checks["GPUs"]["ok"] is None and checks["python"]["ok"] and checks["torch"]["ok"] is False
    assert report["state"] == "unfit" and "ImportError: no" in report["error"]


def test_sizes_below_ten_gib_are_told_in_mib() -> None:
    engine: Any = type("E", (), {"floor_mib": 300})()
    report: Any = type("R", (), {"disk_free_mib": 812})()
    assert hostcare.disk(HostPolicy("h"), report, engine)["text"] == "812 MiB free, floor 300 MiB"


async def test_check_without_an_engine_is_a_sentence() -> None:
    report = await hostcare.check(HostPolicy("far", kind="ssh"), None)
    assert report["state"] == "down" and "no engine" in report["error"]


async def test_setup_of_this_machine_prepares_the_data_and_sees_that_it_is_fit(tmp_path: Path) -> None:
    write_trainer(tmp_path, "print('preparing'); open(os.path.join(os.environ['OVERNIGHT_DATA'], 'tokens.bin'), 'w').write('x')")
    lab = relabel(tmp_path)
    told: list[str] = []
    engine = LocalEngine(lab, HostPolicy("here", gpus=[], min_free_disk_mib=1))
    done = await hostcare.setup(engine.host, engine, told.append)
    assert (lab.data_dir / "tokens.bin").read_text() == "x" and done["log"] == ["preparing"] and "here is ready" in done["text"]
    assert "preparing data" in told[0] and by_name(done)["data"]["ok"]
    (tmp_path / "trainer" / "prepare.py").write_text("raise SystemExit('no corpus here')")
    with pytest.raises(HostError, match="Preparing the data failed") as failure:
        await hostsetup.setup(engine.host, engine, told.append)
    assert "no corpus here" in failure.value.next_step
    lab.close()


async def test_a_kind_that_needs_no_setup_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs no setup"):
        await hostsetup.setup(HostPolicy("sim", kind="fake"), None, lambda text: None)


@pytest.mark.parametrize(
    ("capability", "arch_list", "fits"),
    [
        ("9.0", ["sm_80", "sm_90"], True),
        ("8.9", ["sm_80", "sm_90"], True),  # binary compatible within a major version
        ("12.0", ["sm_80", "sm_90"], False),
        ("12.0", ["sm_90", "compute_90"], True),  # PTX is compiled on the spot
        ("7.5", ["sm_80", "sm_90"], False),
        ("12.0", ["sm_90a", "sm_120"], True),
    ],
)
def test_whether_a_torch_build_has_kernels_for_a_card(capability: str, arch_list: list[str], fits: bool) -> None:
    assert hostcare.supported(capability, arch_list) is fits


@pytest.mark.parametrize(
    ("driver", "build"), [(None, "cpu"), ("580.95.05", "default"), ("595.1", "default"), ("570.86", "cu126"), ("525.60.13", "cu126")]
)
def test_the_torch_build_follows_the_driver(driver: str | None, build: str) -> None:
    assert hostsetup.torch_build(driver) == build


def test_a_driver_too_old_is_said() -> None:
    with pytest.raises(HostError, match=r"470\.1 is too old"):
        hostsetup.torch_build("470.1")


def test_a_torch_build_beside_the_default_needs_a_named_index(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch==2.9.1\n")
    host, info = HostPolicy("far", kind="ssh"), {"workdir": "/w", "lock_dir": "/l"}
    with pytest.raises(HostError, match="cu126 build"):
        hostsetup.make_plan(host, TrainerPolicy(tmp_path), {"driver": "570.86"}, info)
    named = hostsetup.make_plan(host, TrainerPolicy(tmp_path, torch_index="file:///wheels/"), {"driver": "570.86"}, info)
    assert named["index_url"] == "file:///wheels/cu126"
    assert hostsetup.make_plan(host, TrainerPolicy(tmp_path), {"driver": "580.95"}, info)["index_url"] is None


def test_what_a_trainer_needs_comes_from_its_own_project(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch==2.9.1  # pinned\n-r other.txt\n\nnumpy\n")
    assert hostsetup.requirements(tmp_path) == ["torch==2.9.1", "numpy"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["torch==2.9.1", "kernels>=0.11"]\n')
    assert hostsetup.requirements(tmp_path) == ["torch==2.9.1", "kernels>=0.11"]


def write_trainer(folder: Path, prepare: str) -> None:
    """A trainer whose data command is a line of Python."""
    make_lab(folder)
    (folder / "trainer" / "prepare.py").write_text(f"import os\nTIME_BUDGET = 300\n{prepare}\n")


def relabel(folder: Path) -> Lab:
    """The lab again, with a data command."""
    shutil.rmtree(folder / "lab")
    hosts = folder / "hosts.toml"
    hosts.write_text('[trainer]\nfolder = "trainer"\ndata_command = ["{python}", "prepare.py"]\n[policy]\nbudget_s = 20\n')
    from runner.lab import open_lab

    return open_lab(folder / "lab", create=True)


def tiny_wheel(folder: Path) -> Path:
    """A wheel of one empty module, so that installing needs no network."""
    path = folder / "tiny_dependency-1.0-py3-none-any.whl"
    info = "tiny_dependency-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_dependency.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-dependency\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"tiny_dependency.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    os.utime(path)
    return path
