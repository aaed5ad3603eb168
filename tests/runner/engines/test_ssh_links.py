"""The way to an ssh host: keys, aliases, jump hosts, and links that are cut, frozen or taken over."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.engines import sshlink
from runner.engines.ssh import SshEngine
from runner.errors import HostError
from tests.runner.engines.sshfar import FIRST_AND_LAST, told, until
from tests.runner.engines.sshrig import Net

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]


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
