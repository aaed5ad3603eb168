"""The ssh engine against real sshd hosts in namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from runner.engines import dirs, sshlink
from runner.engines.base import Spec
from runner.engines.ssh import SshEngine
from runner.errors import HostError
from runner.lab import Lab
from tests.runner.engines.sshrig import Net, SshHost
from tests.runner.labs import make_lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]
FIRST_AND_LAST = "import time\nfor i in range({n}):\n    print('line', i, flush=True)\n    time.sleep({pause})\n"


async def until(condition: Callable[[], Any], limit_s: float = 30.0, what: str = "") -> Any:
    """Wait for an awaited state with a deadline."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = await condition()
        if value:
            return value
        await asyncio.sleep(0.05)
    raise AssertionError(f"not reached within {limit_s} s: {what}")


class Far:
    """An engine on one host, with runs staged as the daemon stages them and logs followed as it follows them."""

    def __init__(self, lab: Lab, host: SshHost, engine: SshEngine) -> None:
        self.lab, self.host, self.engine = lab, host, engine
        self.logs: dict[str, bytes] = {}

    async def up(self, slots: int = 1) -> Any:
        """Its report, once it has so many slots: a sampler's first look comes one card at a time."""

        async def there() -> Any:
            report = (await self.engine.capacity())[0]
            return report if report.up and len(report.slots) >= slots else None

        return await until(there, what=f"{self.host.name} is up: {self.engine.link.error}")

    async def submit(self, run_id: str, script: str, *, gpu: int = 0, **words: Any) -> Spec:
        """Stage and submit a python script."""
        report = await self.up()
        slot = report.slots[gpu]
        stage = self.lab.runs_dir / run_id
        if not stage.exists():
            (stage / "work").mkdir(parents=True)
            (stage / "work" / "train.py").write_text(script)
            spec = dirs.build_spec(
                self.engine.host, report.info, slot, run_id=run_id, lab_id=self.engine.lab_id, command=["{python}", "train.py"], budget_s=20,  # noqa: E501
                time_limit_s=words.pop("time_limit_s", 120), grace_s=1, max_log_mib=8, min_free_mib=0, **words,
            )  # fmt: skip
            (stage / "spec.json").write_bytes(dirs.spec_bytes(spec))
        made = Spec(run_id, slot, stage)
        await self.engine.submit(made)
        return made

    async def look(self, run_id: str) -> Any:
        """One tick: poll, and read what is new."""
        state = (await self.engine.poll([run_id], {run_id: self.host.name}))[run_id]
        if state.phase not in ("unknown", "absent", "waiting"):
            held = self.logs.setdefault(run_id, b"")
            try:
                self.logs[run_id] = held + await self.engine.read(run_id, self.host.name, "out.log", len(held))
            except HostError:
                return state
        return state

    async def wait(self, run_id: str, *phases: str, limit_s: float = 40.0) -> Any:
        async def there() -> Any:
            state = await self.look(run_id)
            return state if state.phase in (phases or ("ended", "refused", "lost")) else None

        return await until(there, limit_s, f"{run_id} in {phases}")

    def printed(self, run_id: str) -> bytes:
        """What the run printed, as the host has it."""
        return (self.host.run_dir(self.engine.lab_id, run_id) / "out.log").read_bytes()


@pytest.fixture
async def far(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes engines; hosts are left as they were found."""
    monkeypatch.setattr(sshlink, "BACK_OFF_S", (0.1, 0.3, 1.0))
    engines: list[SshEngine] = []

    async def make(number: int = 0, *, lab: Lab | None = None, config: list[Path] | None = None, users: bool = False, **host: Any) -> Far:
        lab = lab or make_lab(tmp_path)
        engine = SshEngine(lab, net.hosts[number].policy(**host), config=None if users else config or [net.config])
        await engine.start()
        engines.append(engine)
        return Far(lab, net.hosts[number], engine)

    yield make
    for engine in engines:
        await engine.close()
    for host in net.hosts:
        host.heal()


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


async def test_killed_sshd_comes_back_and_no_byte_is_missing_or_doubled(far: Any) -> None:
    one = await far()
    await one.submit("r0001", FIRST_AND_LAST.format(n=60, pause=0.1))
    await one.wait("r0001", "running")
    one.host.kill_sshd()
    await one.wait("r0001", "unknown")
    report = (await one.engine.capacity())[0]
    assert not report.up and report.error and [slot.uuid for slot in report.slots] == ["GPU-1a", "GPU-1b"]
    with pytest.raises(HostError):
        await one.engine.stop("r0001", "gpu1", "cancelled")
    one.host.start_sshd()
    state = await one.wait("r0001")
    assert state.status["exit_code"] == 0
    assert one.logs["r0001"] == one.printed("r0001") == b"".join(b"line %d\n" % i for i in range(60))


async def test_a_host_lost_while_it_is_asked_says_why_it_is_down(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await far()
    await one.up()

    async def lost_meanwhile(*_: Any, **__: Any) -> Any:
        one.host.kill_sshd()
        await until(told(lambda: not one.engine.link.up))
        raise HostError("lost")

    monkeypatch.setattr(one.engine, "_ask_states", lost_meanwhile)
    one.engine.asked_at = float("-inf")
    try:
        report = (await one.engine.capacity())[0]
        assert not report.up and "gpu1" in str(report.error)
    finally:
        one.host.start_sshd()


async def test_a_cut_link_makes_runs_unreachable_never_failed(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshlink, "KEEPALIVE_S", 1)
    one = await far()
    await one.submit("r0001", FIRST_AND_LAST.format(n=100, pause=0.1))
    await one.wait("r0001", "running")
    one.host.cut()
    try:
        await one.wait("r0001", "unknown")
        assert "gpu1" in str((await one.engine.capacity())[0].error)
        await asyncio.sleep(2)
        assert (await one.look("r0001")).phase == "unknown"
    finally:
        one.host.cut(False)
    state = await one.wait("r0001")
    assert state.status["exit_code"] == 0
    assert one.logs["r0001"] == b"".join(b"line %d\n" % i for i in range(100)) == one.printed("r0001")


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


async def test_a_frozen_host_is_out_of_contact_and_comes_back(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshlink, "KEEPALIVE_S", 1)
    one = await far()
    await one.submit("r0001", FIRST_AND_LAST.format(n=40, pause=0.1))
    await one.wait("r0001", "running")
    one.host.freeze()
    try:
        await one.wait("r0001", "unknown")
    finally:
        one.host.thaw()
    assert (await one.wait("r0001")).status["exit_code"] == 0
    assert one.logs["r0001"] == b"".join(b"line %d\n" % i for i in range(40))


async def test_an_unknown_and_a_changed_host_key_are_told_apart(net: Net, far: Any, tmp_path: Path) -> None:
    nobody = tmp_path / "config"
    (tmp_path / "known").touch()
    nobody.write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known\n")
    one = await far(config=[nobody])

    async def refused(word: str) -> Any:
        error = str((await one.engine.capacity())[0].error)
        return error if word in error else None

    error = await until(lambda: refused("unknown"))
    assert "SHA256:" in error and "ssh-keygen -lf" in error and str(tmp_path / "known") in error
    other = (net.hosts[1].folder / "host_key.pub").read_text().split()[:2]
    (tmp_path / "known").write_text(f"{one.host.address} {' '.join(other)}\n")
    one.engine.link.retry_now()
    error = await until(lambda: refused("CHANGED"))
    assert error.count("SHA256:") == 2
    forget = error.split("`")[1].split()
    assert forget[:2] == ["ssh-keygen", "-R"] and forget[3:] == ["-f", str(tmp_path / "known")]
    subprocess.run(forget, check=True, capture_output=True)
    assert (tmp_path / "known").read_text() == ""  # the advice does what it says, where the key is
    line = " ".join((one.host.folder / "host_key.pub").read_text().split()[:2])
    (tmp_path / "known").write_text(f"{one.host.address} {line}\n")
    one.engine.link.retry_now()
    await one.up()


async def test_the_advice_about_a_key_holds_for_an_alias_of_the_users_own_ssh_config(
    net: Net, far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No config is named, as in a user's lab: ~/.ssh/config says where the alias leads and which file knows its key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    known = tmp_path / ".ssh" / "known_hosts"
    known.touch()
    there = f"  HostName {net.hosts[0].address}\n  User root\n  IdentityFile {net.key}\n"
    hop = f"Host through\n  HostName {net.hosts[1].address}\n  User root\n  IdentityFile {net.key}\n  ProxyJump big\n"
    (tmp_path / ".ssh" / "config").write_text(f"Host big\n{there}Host big2\n{there}  HostKeyAlias cluster\n{hop}")
    for alias, name in (("big2", "cluster"), ("big", net.hosts[0].address)):
        one = await far(users=True, address=alias, user=None, identity=None)
        link = one.engine.link
        await until(told(lambda link=link: "unknown" in str(link.error)))
        line = link.error.next_step.split("known_hosts: ")[1]
        assert line.split()[0] == name
        key = (net.hosts[1].folder / "host_key.pub").read_text().split()[:2]
        known.write_text(f"{name} {' '.join(key)}\n")
        link.retry_now()
        await until(told(lambda link=link: "CHANGED" in str(link.error)))
        known.write_text("")
        if name == "cluster":
            behind = await far(1, users=True, address="through", user=None, identity=None)
            await until(told(lambda link=behind.engine.link: "on the way to gpu2" in str(link.error)))
            assert behind.engine.link.error.code == "host_key"
        known.write_text(f"{line}\n")
        link.retry_now()
        await one.up()


async def test_ssh_config_gives_the_alias_and_a_jump_host_leads_on(net: Net, far: Any, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host big\n  HostName {net.hosts[0].address}\n  User root\n  IdentityFile {net.key}\n"
        f"Host through\n  HostName {net.hosts[0].address}\n  User root\n  IdentityFile {net.key}\n  ProxyJump middle\n"
        f"Host middle\n  HostName {net.hosts[1].address}\n  User root\n  IdentityFile {net.key}\n"
        f"Host *\n  UserKnownHostsFile {net.known_hosts}\n"
    )
    one = await far(config=[config], address="big", user=None, identity=None)
    assert (await one.up()).info["hostname"] == "gpu1"
    two = await far(config=[config], address="through", user=None, identity=None)
    assert (await two.up()).info["hostname"] == "gpu1"
    three = await far(config=[config], address="big", user=None, identity=None, jump=["middle"])
    assert (await three.up()).info["hostname"] == "gpu1"
    log = (net.hosts[0].folder / "sshd.log").read_text()
    assert f"from {net.hosts[1].address}" in log


def told(condition: Callable[[], Any]) -> Callable[[], Any]:
    """A condition that needs no waiting, for `until`."""

    async def look() -> Any:
        return condition()

    return look


async def test_two_jump_hosts_are_gone_through_in_order_with_the_hosts_key(net: Net, far: Any, tmp_path: Path) -> None:
    first, second = net.hosts
    log = second.folder / "sshd.log"
    before = log.read_text().count(f"from {first.address}")
    hops = [f"root@{second.address}", f"root@{first.address}:22"]
    one = await far(1, jump=hops)
    assert (await one.up()).info["hostname"] == "gpu2"
    assert log.read_text().count(f"from {first.address}") > before and len(one.engine.link.hops) == 2
    one.engine.link.hops[0].abort()  # the way is cut in the middle
    await until(told(lambda: one.engine.link.connects == 2 and one.engine.link.up))
    (tmp_path / "known").write_text(net.known_hosts.read_text().replace(first.address, "elsewhere"))
    config = tmp_path / "config"
    config.write_text(f"Host *\n  UserKnownHostsFile {tmp_path / 'known'}\n")
    two = await far(1, jump=hops, config=[config])
    await until(told(lambda: "unknown" in str(two.engine.link.error)))
    error = str(two.engine.link.error)
    assert f"root@{first.address}:22 (on the way to gpu2)" in error and "SHA256:" in error


async def test_a_new_link_ends_the_one_that_was_cut_off(far: Any) -> None:
    one = await far()
    await one.up()

    def links() -> list[int]:
        return [pid for pid in one.host.pids() if b"b64decode" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    (first,) = links()
    os.kill(first, 19)  # it hears nothing of the loss, as behind a link that went without a word
    assert one.engine.link.connection
    one.engine.link.connection.abort()
    await until(lambda: asyncio.sleep(0, one.engine.link.connects == 2 and one.engine.link.up))
    await until(lambda: asyncio.sleep(0, not Path(f"/proc/{first}").exists() or first not in links()), what="the old link is gone")
    assert len(links()) == 1


async def test_keys_that_cannot_be_used_are_a_sentence_and_the_engine_goes_on(net: Net, far: Any, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True, timeout=20)

    async def said(engine: SshEngine, words: str) -> Any:
        return words in str((await engine.capacity())[0].error)

    one, two = await far(identity=str(locked)), await far(identity=str(tmp_path / "absent"))
    await until(lambda: said(one.engine, "passphrase"))
    await until(lambda: said(two.engine, "cannot be"))
    assert one.engine.link._task and not one.engine.link._task.done()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"python": "/no/such/python"}, "/no/such/python did not start.*Set python of gpu1"),
        ({"user": "nobody-at-all"}, "refused the login.*set user and identity"),
        ({"address": "{subnet}.200"}, "(cannot be reached: No route to host|did not answer).*Is it up"),
        ({"port": 2}, "cannot be reached: Connection refused.*Does sshd run there"),
        ({"workdir": "/proc/nowhere"}, "cannot be used.*Set workdir of gpu1"),
        ({"address": "no-such-name.invalid"}, "cannot be reached.*Correct its address"),
    ],
)
async def test_what_is_wrong_with_a_host_is_a_sentence(net: Net, far: Any, change: dict[str, Any], words: str) -> None:
    """And the sentence after it names what to look at."""
    change = {key: value.replace("{subnet}", net.subnet) if isinstance(value, str) else value for key, value in change.items()}
    one = await far(**change)

    async def said() -> Any:
        error = (await one.engine.capacity())[0].error or ""
        return error if re.search(words, error) else None

    error = await until(said)
    assert "gpu1" in error and "Traceback" not in error


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
