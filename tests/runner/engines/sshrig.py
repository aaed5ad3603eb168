"""Real ssh hosts on one machine: each with its own network, processes, boot id and host name (namespaces), a real sshd, and fake GPUs.

What a test may do to them: kill_sshd, start_sshd, cut, reboot, freeze, thaw, and change what NVML says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.policy import HostPolicy
from tests.runner.onhost.rig import FakeNvml, until

NETS = iter("abcdefghijklmnop")
INIT = """import os, signal, time
signal.signal(15, lambda *a: os._exit(0))
while True:
    try: os.wait()
    except ChildProcessError: time.sleep(0.05)
"""


def missing() -> str | None:
    """Why ssh hosts cannot be had here."""
    if os.geteuid() != 0:
        return "ssh hosts in namespaces need root"
    lacking = [tool for tool in ("sshd", "ip", "unshare", "nsenter", "ssh-keygen") if not tool_path(tool)]
    return f"ssh hosts need {', '.join(lacking)} (make test-deps)" if lacking else None


def tool_path(tool: str) -> str | None:
    """Where a system program is."""
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def free_subnet() -> str:
    """A subnet no other test run on this machine uses."""
    taken = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, timeout=10, check=True).stdout
    start = os.getpid()
    return next(net for net in (f"10.79.{(start + n) % 250}" for n in range(250)) if f" {net}.254/" not in taken)


def run(*command: str) -> None:
    """A command that must work."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class SshHost:
    """One machine of the test's little network."""

    def __init__(self, net: Net, number: int) -> None:
        self.net, self.number = net, number
        self.name, self.address = f"gpu{number}", f"{net.subnet}.{number}"
        self.netns = f"{net.tag}n{number}"
        self.folder = net.folder / self.name
        self.work = self.folder / "work"
        self.work.mkdir(parents=True)
        self.boot_file = self.folder / "boot_id"
        self.nvml = FakeNvml(net.nvml_library)
        self.nvml.state = self.folder / "nvml_state"
        self.nvml.env["FAKE_NVML_STATE"] = str(self.nvml.state)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.init = 0
        self.sshd: subprocess.Popen[bytes] | None = None
        run("ip", "netns", "add", self.netns)
        veth = f"{net.tag}v{number}"
        run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", self.netns)
        run("ip", "link", "set", veth, "master", net.bridge, "up")
        for words in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
            run("ip", "netns", "exec", self.netns, "ip", *words)
        self.host_key("host_key")
        self.write_sshd_config()
        self.boot()

    def host_key(self, name: str, *, known: bool = True) -> None:
        """Make a host key, and let the client know it."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
        if known:
            with self.net.known_hosts.open("a") as file:
                file.write(f"{self.address} {' '.join((self.folder / f'{name}.pub').read_text().split()[:2])}\n")

    def write_sshd_config(self, **env: str) -> None:
        """The sshd's settings; `env` is what logins find in their environment."""
        env = {**self.nvml.env, "OVERNIGHT_LOCK_DIR": str(self.folder / "locks"), **env}
        setenv = " ".join(f'"{name}={value}"' for name, value in env.items())
        (self.folder / "sshd_config").write_text(
            f"Port 22\nListenAddress {self.address}\nHostKey {self.folder}/host_key\nPidFile {self.folder}/pid\n"
            f"AuthorizedKeysFile {self.net.key}.pub\nStrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            f"UsePAM no\nSubsystem sftp internal-sftp\nMaxStartups 100\nSetEnv {setenv}\n"
        )

    def boot(self) -> None:
        """Switch on: a fresh boot id, an init, sshd."""
        self.boot_file.write_text(f"{uuid.uuid4()}\n")
        # a home and a shell of its own: the login must not run what this machine's root has in its .bashrc
        accounts = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        (self.folder / "home").mkdir(exist_ok=True)
        passwd = self.folder / "passwd"
        passwd.write_text("\n".join([f"root:x:0:0:root:{self.folder}/home:/bin/sh", *accounts]) + "\n")
        script = (
            f"hostname {self.name}; mount --bind {self.boot_file} /proc/sys/kernel/random/boot_id; mount --bind {passwd} /etc/passwd; "
            f"exec {sys.executable} -I -S -c '{INIT}'"
        )
        command = ["ip", "netns", "exec", self.netns, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child"]
        outer = subprocess.Popen([*command, "sh", "-c", script], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes.append(outer)

        def child() -> int:
            for name in os.listdir("/proc"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    if name.isdigit() and int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1]) == outer.pid:
                        if b"while True" in Path(f"/proc/{name}/cmdline").read_bytes():
                            return int(name)
            return 0

        self.init = until(child, what="the host's init")
        self.start_sshd()

    def enter(self, *command: str) -> list[str]:
        """A command line that runs on the host."""
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-p", "-u", *command]

    def start_sshd(self) -> None:
        """Let logins in (again)."""
        os.makedirs("/run/sshd", exist_ok=True)
        log = (self.folder / "sshd.log").open("ab")
        command = self.enter(str(tool_path("sshd")), "-D", "-e", "-f", f"{self.folder}/sshd_config")
        self.sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        log.close()
        self.processes.append(self.sshd)

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((self.address, 22), 0.3):
                return True
            return False

        until(listens, what=f"sshd of {self.name}")

    def pids(self, comm: str | None = None) -> list[int]:
        """The host's processes as this machine numbers them, init left out."""
        mine = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and int(name) != self.init and os.readlink(f"/proc/{name}/ns/pid") == mine:
                    if comm is None or Path(f"/proc/{name}/comm").read_text().strip().startswith(comm):
                        found.append(int(name))
        return found

    def kill_rest(self) -> None:
        """End everything that is not sshd."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if not Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)

    def heal(self) -> None:
        """As it was at the start of a test."""
        self.kill_rest()
        for card in list(self.nvml.cards):
            self.nvml.card(card, lost=None, hang=None, used=500, procs="")
        shutil.rmtree(self.work, ignore_errors=True)

    def kill_sshd(self) -> None:
        """kill -9 of the listener and of all sessions; what they started goes on."""
        for pid in self.pids("sshd"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.sshd:
            self.sshd.wait(timeout=10)

    def cut(self, off: bool = True) -> None:
        """Pull the network cable, or plug it in."""
        run("ip", "netns", "exec", self.netns, "ip", "link", "set", "eth0", "down" if off else "up")

    def freeze(self) -> None:
        """Stop every process of the host."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on (and nsenter and unshare, which stop themselves when their child is stopped)."""
        for pid in [*self.pids(), *(process.pid for process in self.processes if process.poll() is None)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def off(self) -> None:
        """Every process of the host dies at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        for process in self.processes:
            try:
                process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=3)
        self.processes.clear()

    def reboot(self) -> None:
        """Off and on again, with another boot id."""
        self.off()
        self.boot()

    def policy(self, **words: Any) -> HostPolicy:
        """The host as hosts.toml would have it."""
        base: dict[str, Any] = {"kind": "ssh", "address": self.address, "user": "root", "identity": str(self.net.key)}
        return HostPolicy(self.name, **{**base, "workdir": str(self.work), "python": sys.executable, **words})

    def run_dir(self, lab_id: str, run_id: str) -> Path:
        """A run's directory on the host."""
        return self.work / "labs" / lab_id / "runs" / run_id

    def remove(self) -> None:
        """Switch off and take the namespace away."""
        self.off()
        subprocess.run(["ip", "netns", "del", self.netns], capture_output=True, timeout=10, check=False)


class Net:
    """The bridge between the client and its hosts, and the client's ssh settings."""

    def __init__(self, folder: Path, nvml_library: Path) -> None:
        self.folder, self.nvml_library = folder, nvml_library
        self.tag = f"o{os.getpid() % 100000}{next(NETS)}"
        self.subnet = free_subnet()
        self.bridge = f"{self.tag}b"
        self.key, self.known_hosts, self.config = folder / "client", folder / "known_hosts", folder / "ssh_config"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        self.known_hosts.touch()
        self.config.write_text(f"Host *\n  UserKnownHostsFile {self.known_hosts}\n")
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.subnet}.254/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        self.hosts: list[SshHost] = []

    def add(self) -> SshHost:
        """One more machine."""
        self.hosts.append(SshHost(self, len(self.hosts) + 1))
        return self.hosts[-1]

    def close(self) -> None:
        """Take everything down."""
        for host in self.hosts:
            host.remove()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, timeout=10, check=False)


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Net]:
    """A network with two hosts; skipped with the reason where it cannot be had."""
    why = missing()
    if why:
        pytest.skip(why)
    try:
        net = Net(tmp_path_factory.mktemp("ssh"), nvml_library)
    except (RuntimeError, OSError, subprocess.SubprocessError) as problem:
        pytest.skip(f"namespaces cannot be had here: {problem}")
    try:
        for _ in range(2):
            host = net.add()
            for letter in "ab":
                host.nvml.card(f"GPU-{host.number}{letter}", used=500)
        yield net
    finally:
        net.close()
