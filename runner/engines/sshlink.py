"""One ssh connection to one host, and the conversation over it: connect, put our on-host files there, ask, hear samples, come back
after a loss.

The one place that knows asyncssh's errors. A call either has an answer or raises HostError; whether a request that was cut off took
effect is for `poll` to find out, so every request may be asked twice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import random
import re
import shlex
import socket
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import asyncssh

from runner import onhost
from runner.engines import hostkeys
from runner.errors import HostError, OvernightError
from runner.policy import HostPolicy

KEEPALIVE_S, KEEPALIVE_COUNT = 5, 3  # a cut link is noticed after (3 + 1) x 5 s
CONNECT_LIMIT_S = 15.0
CALL_LIMIT_S = 20.0
BOOT_LIMIT_S = 60.0  # the first time 300 kB travel
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
DEFAULT_WORKDIR = "~/overnight"
MARKER = b"OVERNIGHT-LINK\n"
NOISE_LIMIT = 1 << 16
FOLDER = "the folder "  # how BOOT's refusal of a workdir begins
log = logging.getLogger("overnight.ssh")

# Runs on any Python the host has: says what is wrong with it, takes our files when they are not there yet, becomes the link's far end.
BOOT = """
import sys
out = getattr(sys.stdout, "buffer", sys.stdout)
def say(text):
    out.write(text.encode() + b"\\n"); out.flush()
out.write(b"OVERNIGHT-LINK\\n")
if sys.version_info < (3, 8):
    say('{"refused": "Python %d.%d is too old, 3.8 is needed"}' % sys.version_info[:2]); sys.exit(3)
import json, os, zlib
work, sha = os.path.expanduser(WORK), SHA
home = os.path.join(work, "onhost-" + sha)
try:
    os.makedirs(work, mode=0o700, exist_ok=True)
    have = os.path.isdir(home)
    say(json.dumps({"have": have}))
    if not have:
        length = int(sys.stdin.buffer.readline())
        pieces = json.loads(zlib.decompress(sys.stdin.buffer.read(length)).decode())
        stage = home + ".%d" % os.getpid()
        for name in pieces:
            path = os.path.join(stage, name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(pieces[name])
        try:
            os.rename(stage, home)
        except OSError:
            if not os.path.isdir(home):
                raise
except OSError as problem:
    say(json.dumps({"refused": "the folder %s cannot be used: %s" % (work, problem)})); sys.exit(3)
sys.path.insert(0, home)
from onhost import link
sys.exit(link.main(work, LAB, LOCKS))
"""


@cache
def parcel() -> tuple[str, bytes]:
    """What travels to a host: our on-host files and the one file of nvidia-ml-py; its name (a hash) and compressed bytes."""
    folder = Path(onhost.__file__).parent
    pieces = {f"onhost/{path.name}": path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    found = importlib.util.find_spec("pynvml")
    if found and found.origin:
        pieces["pynvml.py"] = Path(found.origin).read_text(encoding="utf-8")
    text = json.dumps(pieces, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:16], zlib.compress(text, 6)


class Channel:
    """The far end's process: frames in both directions."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        self.process = process
        self.write_lock = asyncio.Lock()

    async def send(self, frame: dict[str, Any], body: bytes = b"") -> None:
        """Write one frame whole."""
        if body:
            frame["bytes"] = len(body)
        async with self.write_lock:
            self.process.stdin.write(json.dumps(frame).encode() + b"\n")
            for at in range(0, len(body), 1 << 18):
                self.process.stdin.write(body[at : at + (1 << 18)])
                await self.process.stdin.drain()

    async def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame; None when the connection is gone."""
        try:
            line = await self.process.stdout.readuntil(b"\n")
            frame = json.loads(line)
            length = int(frame.get("bytes") or 0)
            return frame, await self.process.stdout.readexactly(length) if length else b""
        except (asyncio.IncompleteReadError, asyncssh.Error, OSError, ValueError):
            return None


class SshLink:
    """Keeps one host connected. `call` asks it something; `up`, `error` and `hello` say how things stand."""

    def __init__(
        self,
        host: HostPolicy,
        lab_id: str,
        on_sample: Callable[[dict[str, Any]], None],
        on_up: Callable[[], None],
        config: list[Path] | None = None,
    ) -> None:
        self.host, self.lab_id = host, lab_id
        self.on_sample, self.on_up = on_sample, on_up
        self.config = config
        self.up = False
        self.error: OvernightError | None = HostError(f"{host.name} is being connected.")
        self.hello: dict[str, Any] = {}
        self.skew_s = 0.0
        self.down_since: float | None = time.time()
        self.connection: asyncssh.SSHClientConnection | None = None
        self.hops: list[asyncssh.SSHClientConnection] = []  # open connections to the jump hosts
        self.begun = self.attempts = self.connects = self.calls = 0
        self._channel: Channel | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._ids = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._nudge, self._tried = asyncio.Event(), asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def home(self) -> str:
        """Where our files lie on the host."""
        return f"{self.hello['workdir']}/onhost-{parcel()[0]}"

    def start(self) -> None:
        """Begin to keep the host connected."""
        self._task = asyncio.create_task(self._keep(), name=f"ssh to {self.host.name}")

    async def close(self) -> None:
        """Let go of the host; its runs go on."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def first_try(self, limit_s: float) -> None:
        """Wait until the first attempt to connect has come to something, good or bad."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._tried.wait(), limit_s)

    def retry_now(self) -> None:
        """Cut a back-off short, because somebody asks."""
        self._nudge.set()

    # -- the connection -------------------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Connect, serve until the loss, back off, again."""
        failures = 0
        while True:
            self._nudge.clear()  # asked for from now on, another attempt follows this one at once
            self.begun += 1
            try:
                await self._once()
                failures = 0
                self.error = HostError(f"The connection to {self.host.name} was lost.", next_step="It is being connected again.")
            except OvernightError as problem:
                self.error = problem
                failures += 1
            except Exception as problem:
                log.exception("%s: unforeseen", self.host.name)
                self.error = HostError(f"{self.host.name}: {type(problem).__name__}: {problem}.", next_step="See daemon.log.")
                failures += 1
            finally:
                self._down()
                self.attempts += 1
                self._tried.set()
            wait_s = BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)] * random.uniform(0.8, 1.2)
            log.info("%s: %s; again in %.1f s", self.host.name, self.error, wait_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._nudge.wait(), wait_s)

    def _down(self) -> None:
        """What waits for an answer will not get one."""
        if self.up:
            self.down_since = time.time()
        self.up, self._channel = False, None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(HostError(f"The connection to {self.host.name} was lost; what was asked may have happened."))
        self._waiting.clear()
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
        while self.hops:
            self.hops.pop().abort()

    async def _once(self) -> None:
        """One connection from its start to its loss; raises HostError when it does not come up."""
        self.connection = await self._connect()
        self.connects += 1
        channel = await self._boot(self.connection)
        asked = time.time()
        first = await asyncio.wait_for(channel.receive(), BOOT_LIMIT_S)
        if first is None or "hello" not in first[0]:
            why = first[0].get("refused") if first else None
            raise HostError(
                f"{self.host.name}: {why or 'our program on the host ended at once'}.", next_step="See `overnight hosts check`."
            )
        self.hello = first[0]["hello"]
        self.skew_s = float(self.hello["now"]) - (asked + time.time()) / 2
        self._channel, self.up, self.error, self.down_since = channel, True, None, None
        self._tried.set()
        self.on_up()
        while (frame := await channel.receive()) is not None:
            self._take(*frame)

    def _take(self, frame: dict[str, Any], body: bytes) -> None:
        """A frame from the host: a sample, or the answer somebody waits for."""
        if "sample" in frame:
            self.on_sample(frame["sample"])
            return
        future = self._waiting.pop(int(frame.get("id") or 0), None)
        if future is None or future.done():
            return  # the asker gave up
        if "error" in frame:
            future.set_exception(HostError(f"{self.host.name}: {frame['error']}."))
        else:
            future.set_result((frame.get("value"), body))

    async def _connect(self) -> asyncssh.SSHClientConnection:
        """Open the connection, through the jump hosts in their order."""
        last: asyncssh.SSHClientConnection | None = None
        for words in self.host.jump:
            last = await self._open(hostkeys.hop(self.host, words), last)
            self.hops.append(last)
        return await self._open(self.host, last)

    async def _open(self, host: HostPolicy, tunnel: asyncssh.SSHClientConnection | None) -> asyncssh.SSHClientConnection:
        """One connection, perhaps through another; every way it can fail is a sentence."""
        options = hostkeys.options(host, self.config)
        if tunnel is not None:
            options["tunnel"] = tunnel
        try:
            return await asyncio.wait_for(
                asyncssh.connect(
                    **options,
                    keepalive_interval=KEEPALIVE_S,
                    keepalive_count_max=KEEPALIVE_COUNT,
                    connect_timeout=CONNECT_LIMIT_S,
                    login_timeout=CONNECT_LIMIT_S,
                ),
                CONNECT_LIMIT_S + 5,
            )
        except asyncssh.HostKeyNotVerifiable as problem:
            raise await hostkeys.explain(host, self.config, tunnel) from problem
        except (asyncio.TimeoutError, TimeoutError) as problem:
            raise HostError(
                f"{host.name} ({hostkeys.place(host)}) did not answer within {CONNECT_LIMIT_S:g} s.", next_step="Is it up?"
            ) from problem
        except asyncssh.PermissionDenied as problem:
            raise HostError(
                f"{host.name} ({hostkeys.place(host)}) refused the login: {problem.reason or 'permission denied'}.",
                next_step=f"Try `ssh {hostkeys.place(host)}`; set user and identity in hosts.toml, or load the key into your agent.",
            ) from problem
        except ValueError as problem:  # asyncssh's words for a key it cannot read, or a line of ~/.ssh/config
            raise HostError(
                f"{host.name}: ssh settings cannot be used: {problem}.",
                next_step="A key with a passphrase must be loaded into your ssh agent (`ssh-add`); leave identity out then.",
            ) from problem
        except (asyncssh.Error, OSError) as problem:
            raise self._not_reached(host, problem) from problem

    def _not_reached(self, host: HostPolicy, problem: Exception) -> HostError:
        """Why there is no connection, in the system's words, and what to look at."""
        said = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
        place = hostkeys.place(host)
        next_step = f"Is it up, and can this machine reach it? Try `ssh {place}`."
        if isinstance(problem, socket.gaierror):
            next_step = f"Correct its address in hosts.toml, or name it in ~/.ssh/config, and try `ssh {place}`."
        elif isinstance(problem, OSError) and problem.errno:
            said = os.strerror(problem.errno)  # asyncio's own words do not say why
            if problem.errno == errno.ECONNREFUSED:
                next_step = f"Does sshd run there, on that port? Try `ssh {place}`."
        return HostError(f"{host.name} ({place}) cannot be reached: {said}.", next_step=next_step)

    async def _boot(self, connection: asyncssh.SSHClientConnection) -> Channel:
        """Start our program on the host, sending it first when this version is not there yet."""
        name, packed = parcel()
        settings = {"WORK": self.host.workdir or DEFAULT_WORKDIR, "SHA": name, "LAB": self.lab_id}
        settings["LOCKS"] = self.host.env.get("OVERNIGHT_LOCK_DIR") or ""
        code = re.sub("WORK|SHA|LAB|LOCKS", lambda word: repr(settings[word[0]]), BOOT)
        script = f'import base64;exec(base64.b64decode("{base64.b64encode(code.encode()).decode()}"))'
        # -I: neither the login's folder nor its PYTHONPATH can put a module in our place
        command = f"exec {shlex.quote(self.host.python or 'python3')} -I -c '{script}'"
        try:
            process = await connection.create_process(command, encoding=None)
            channel = Channel(process)
            noise = await asyncio.wait_for(process.stdout.readuntil(MARKER), BOOT_LIMIT_S)
            if len(noise) > NOISE_LIMIT:
                raise HostError(f"The login of {self.host.name} prints too much before our program speaks.")
            first = await asyncio.wait_for(channel.receive(), BOOT_LIMIT_S)
            if first is not None and "have" in first[0]:
                if not first[0]["have"]:
                    process.stdin.write(b"%d\n" % len(packed) + packed)
                    await process.stdin.drain()
                return channel
            why = str(first[0].get("refused")) if first else "our program ended at once"
        except asyncio.IncompleteReadError:
            said = (await process.stderr.read(2000)).decode("utf-8", "replace").strip().split("\n")[-1]
            why = f"{self.host.python or 'python3'} did not start: {said or 'no reason given'}"
        except asyncio.TimeoutError:
            why = f"its login took longer than {BOOT_LIMIT_S:g} s before our program spoke; look at what its shell runs at login"
        except (asyncssh.Error, OSError) as problem:
            why = f"our program could not be started: {problem or type(problem).__name__}"
        key, allowed = ("workdir", "a folder you may write there") if why.startswith(FOLDER) else ("python", "a Python 3.8 or later")
        raise HostError(f"{self.host.name}: {why}.", next_step=f"Set {key} of {self.host.name} in hosts.toml to {allowed}.")

    # -- asking ---------------------------------------------------------------------------------------------------------------------------

    async def call(self, op: str, body: bytes = b"", *, limit_s: float = CALL_LIMIT_S, **args: Any) -> tuple[Any, bytes]:
        """Ask the host; its value and bytes. Raises HostError when it is out of reach, does not answer in time, or says no."""
        channel = self._channel
        if channel is None:
            raise HostError(f"{self.host.name} is out of reach: {self.error or 'not connected'}")
        number = next(self._ids)
        future: asyncio.Future[tuple[Any, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self.calls += 1
        # a frame is sent whole or not at all: giving up while it is on its way must not leave half of it in the channel
        sending = asyncio.create_task(channel.send({"id": number, "op": op, "args": args}, body))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)
        try:
            return await asyncio.wait_for(future, limit_s)
        except (asyncio.TimeoutError, TimeoutError) as problem:
            raise HostError(f"{self.host.name} did not answer {op!r} within {limit_s:g} s.") from problem
        finally:
            self._waiting.pop(number, None)

    def _sent(self, task: asyncio.Task[None]) -> None:
        """A frame is out, or the connection is gone (which `_keep` finds out for itself)."""
        self._sending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("%s: %s", self.host.name, task.exception())
