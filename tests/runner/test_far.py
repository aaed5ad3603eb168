"""Labs on real ssh hosts with the real daemon: the whole way, and faults that need all of it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import queries
from runner.records import GpuState
from tests.runner.daemons import until
from tests.runner.engines.sshrig import Net
from tests.runner.far import FarLab

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture
def far(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes labs on the net's hosts; the hosts are left clean."""
    monkeypatch.setenv("OVERNIGHT_SSH_CONFIG", str(net.config))
    made: list[FarLab] = []

    def make(**words: Any) -> FarLab:
        made.append(FarLab(net, tmp_path / f"lab{len(made)}", **words))
        return made[-1]

    yield make
    for lab in made:
        lab.close()
    for host in net.hosts:
        host.heal()
        shutil.rmtree(net.folder / f"witness-{host.name}", ignore_errors=True)


async def test_twenty_runs_on_two_hosts_with_two_gpus_each_and_a_killed_daemon(far: Any) -> None:
    lab = far()
    ids = [lab.submit(LINES=20, CHILD=n % 5 == 0) for n in range(20)]
    lab.daemon()
    await until(lambda: sum(lab.run(i).ended for i in ids) >= 4, 60)
    lab.kill_daemon()
    await asyncio.sleep(1.0)  # runs end and standbys start with nobody watching
    lab.daemon()
    runs = await lab.all_ended(90)
    assert lab.verify() == {"completed": 20}
    assert {run.gpu_uuid for run in runs} == {"GPU-1a", "GPU-1b", "GPU-2a", "GPU-2b"} and {run.host for run in runs} == {"gpu1", "gpu2"}
    steps = [[p.step for p in lab.lab.store.points(run.id)] for run in runs]
    assert all(found == list(range(20)) for found in steps)


async def test_a_link_cut_longer_than_the_keepalive(far: Any, net: Net) -> None:
    lab = far()
    lab.daemon()
    ids = [lab.submit(LINES=2000, LINE_S=0.1) for _ in range(4)]
    await until(lambda: all(lab.run(i).phase == "running" and lab.run(i).step for i in ids), 40)
    net.hosts[0].cut()
    try:
        here = [i for i in ids if lab.run(i).host == "gpu1"]
        await until(lambda: all(lab.run(i).phase == "unreachable" for i in here), 40)
        assert all(lab.run(i).unreachable_since for i in here)
        assert all(lab.run(i).phase == "running" for i in ids if i not in here)
        await until(lambda: next(h for h in lab.lab.store.hosts() if h.name == "gpu1").state == "down", 10)
    finally:
        net.hosts[0].cut(False)
    await until(lambda: all(lab.run(i).phase == "running" for i in ids), 40)
    for run_id in ids:
        lab.cancel(run_id)
    runs = await lab.all_ended(60)
    assert [run.outcome for run in runs] == ["cancelled"] * 4
    lab.verify()


async def test_a_host_that_reboots_loses_its_runs_and_they_are_retried_once(far: Any, net: Net) -> None:
    lab = far(policy="retry_lost = 1\n")
    lab.daemon()
    ids = [lab.submit(LINES=60, LINE_S=0.1) for _ in range(4)]
    await until(lambda: all(lab.run(i).step for i in ids), 40)
    await asyncio.to_thread(net.hosts[0].reboot)
    await lab.all_ended(90)
    outcomes = lab.verify()
    assert outcomes == {"completed": 4, "lost": 2}
    assert all("restarted" in (run.cause_text or "") for run in lab.runs() if run.outcome == "lost")


async def test_a_run_that_fills_the_disk_ends_as_disk_full_and_the_host_waits(far: Any, net: Net) -> None:
    host = net.hosts[0]
    host.work.mkdir(exist_ok=True)
    subprocess.run(host.enter("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(host.work)), check=True)
    try:
        lab = far(policy="max_log_mib = 4\n", host="min_free_disk_mib = 8")
        lab.daemon()
        run_id = lab.submit("gpu1", FILL=True)
        run = (await lab.ended(run_id))[0]
        assert (run.outcome, run.cause) == ("crashed", "disk_full"), (run.outcome, run.cause, run.cause_text)
        waits = lab.submit("gpu1")
        await until(lambda: any(f.subject == "gpu1" and f.kind == "disk_low" for f in lab.lab.store.flags()), 40)
        await until(lambda: lab.run(waits).phase == "queued", 40)
        free = host.work / "labs"
        subprocess.run(host.enter("find", str(free), "-name", "big", "-delete"), check=True)
        assert (await lab.ended(waits))[0].outcome == "completed"
    finally:
        subprocess.run(host.enter("umount", "-l", str(host.work)), check=False)


async def test_a_lost_gpu_takes_no_run_and_the_others_go_on(far: Any, net: Net) -> None:
    lab = far()
    lab.daemon()
    await until(lambda: len(lab.lab.store.gpus()) == 4, 30)
    net.hosts[0].nvml.card("GPU-1a", lost=1)

    def state() -> str:
        return next(g.state for g in lab.lab.store.gpus() if g.uuid == "GPU-1a")

    await until(lambda: state() == GpuState.LOST, 30)
    ids = [lab.submit(LINES=5) for _ in range(8)]
    runs = await lab.ended(*ids)
    assert {run.outcome for run in runs} == {"completed"} and "GPU-1a" not in {run.gpu_uuid for run in runs}
    net.hosts[0].nvml.card("GPU-1a", lost=None)
    await until(lambda: state() == GpuState.FREE, 30)
    lab.verify()


async def test_two_labs_share_the_hosts_and_never_a_gpu(far: Any) -> None:
    one, two = far(), far()
    assert one.witness == two.witness  # one journal per host: a GPU given to both would show
    one.daemon()
    two.daemon()
    for _ in range(8):
        one.submit(LINES=10), two.submit(LINES=10)
    await one.all_ended(120)
    await two.all_ended(120)
    assert not [line for line in one.journal() if line[0] == "DOUBLE"]
    assert all(run.outcome == "completed" for lab in (one, two) for run in lab.runs())


async def test_a_host_that_moves_in_hosts_toml_keeps_its_runs_until_they_have_ended(far: Any, net: Net) -> None:
    lab, host = far(policy="handed_ahead = 1\n"), net.hosts[0]
    lab.daemon()
    ids = [lab.submit(LINES=80, LINE_S=0.1) for _ in range(4)]
    await until(lambda: all(lab.run(i).step for i in ids), 40)
    text = lab.lab.hosts_file.read_text().replace(f'workdir = "{host.work}"', f'workdir = "{host.folder}/work-2"')
    lab.lab.hosts_file.write_text(text)
    lab.lab.accept(text)

    def gpu1() -> Any:
        return next(h for h in queries.host_objects(lab.lab) if h["name"] == "gpu1")

    await until(lambda: gpu1()["state"] == "draining", 20)
    assert "leads elsewhere" in gpu1()["error"]
    lab.kill_daemon()  # the next one finds only the new text
    lab.daemon()
    runs = await lab.ended(*ids, deadline_s=60)
    assert [run.outcome for run in runs] == ["completed"] * 4
    await until(lambda: gpu1()["state"] == "up" and gpu1()["error"] is None, 20)
    after = [lab.submit() for _ in range(4)]
    await lab.ended(*after)
    assert (host.folder / "work-2" / "labs").is_dir()
    lab.verify()
    shutil.rmtree(host.folder / "work-2")
