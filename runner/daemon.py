"""The daemon: makes what is match what is wanted. One per lab, held by a lock; it may be killed at any moment and started again.

Run it in the foreground with `overnight daemon run`; clients start it detached (daemonctl.py). Its loops: watch the database for
clients' writes, place and start runs, follow each host's runs, record telemetry, answer requests, beat. SIGTERM ends the daemon and
touches no run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from runner import daemonlock, dispatch, finishing, follow, moving, reconcile, requests, telemetry, upkeep
from runner.engines import make_engine
from runner.engines.base import Engine, State
from runner.errors import DaemonError, LabError, OvernightError, PolicyError
from runner.lab import Lab, open_lab
from runner.records import HostState, Outcome, Phase, Severity
from runner.research import lineage
from runner.roster import Roster, Track
from runner.watch import Watch

VERSION = "0.1.0"
WATCH_S = 0.05  # a client's write is seen within 100 ms
LOOK_S = 2.0  # the queue is looked at this often even when nothing changed
POLL_S = {"local": 0.1, "fake": 0.1, "ssh": 0.5}
IDLE_POLL_S = 0.5
FLUSH_S = 1.0
BEAT_S = 1.0
KEEP_EVERY_S = 15.0  # kept runs become commits this often
POLICY_S = 2.0
THIN_S = 600.0
TIDY_S = 20.0
WATCH_RUNS_S = 1.0
LOG_BYTES = 8 << 20
PROBES = 25
NOBODY_ASKS = "it is no longer in hosts.toml, and nobody connects to it"
log = logging.getLogger("overnight.daemon")


class Daemon:
    """The loops over one open lab. `run` returns when `stop` is set."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.roster = Roster(lab)
        self.stop = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.dispatcher = dispatch.Dispatcher(self.roster, self.spawn)
        self.answers = requests.Desk(self.roster, self.spawn)
        self.runs_watch = Watch(lab)
        self.kept_at = 0.0
        self.started_at = time.time()
        self.boot_id = _boot_id()
        self.followers: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until told to stop; runs go on afterwards."""
        self.roster.load()  # before the first beat: it tells how long nobody watched
        self.beat()
        self.lab.store.set_setting("daemon_stopped", False)
        upkeep.sweep_stages(self.roster)
        await self.sync_hosts()
        self.every("watch", WATCH_S, self.watch)
        self.every("look", 0.0, self.look)
        self.every("telemetry", 1.0, self.telemetry)
        self.every("flush", FLUSH_S, self.flush)
        self.every("beat", BEAT_S, self.beat_once)
        self.every("policy", POLICY_S, self.policy)
        self.every("thin", THIN_S, self.thin)
        self.every("tidy", TIDY_S, self.tidy)
        self.every("watch runs", WATCH_RUNS_S, self.watch_runs)
        try:
            await self.stop.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """End the loops, write what was read, close the engines."""
        while self.tasks:  # again and again: before Python 3.12 wait_for can swallow a cancellation
            for task in self.tasks:
                task.cancel()
            await asyncio.wait(self.tasks, timeout=0.5)
        with contextlib.suppress(LabError):
            follow.flush(self.roster)
            self.beat("stopped")
        for engine in self.roster.engines.values():
            with contextlib.suppress(OvernightError, TimeoutError):
                await asyncio.wait_for(engine.close(), 5)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task with an owner: its failure is logged, and it ends with the daemon."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s failed", task.get_name(), exc_info=task.exception())

    def every(self, name: str, seconds: float, step: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """A loop that survives its own failures: each is logged once, shown in daemon.note, and tried again."""
        return self.spawn(self._loop(name, seconds, step), name)

    async def _loop(self, name: str, seconds: float, step: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while not self.stop.is_set():
            try:
                await step()
                if failures:
                    self.roster.note(name, None)
                    log.info("%s works again", name)
                failures = 0
            except OvernightError as error:
                failures += 1
                self.roster.note(name, str(error))
                if failures == 1:
                    log.warning("%s: %s", name, error)
            except Exception as error:
                failures += 1
                self.roster.note(name, f"{name}: {type(error).__name__}: {error} (see daemon.log)")
                if failures in (1, 10, 100):
                    log.exception("%s failed", name)
            await asyncio.sleep(min(0.2 * 2 ** min(failures, 5), 5.0) if failures else seconds)

    # the loops

    async def watch(self) -> None:
        """Wake the dispatcher when a client wrote."""
        version = self.roster.store.data_version()
        if version != getattr(self, "seen_version", None):
            self.seen_version = version
            self.roster.changed.set()

    async def look(self) -> None:
        """Wait for a change (or a while), then take over wishes, place, start, and answer requests."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.roster.changed.wait(), LOOK_S)
        self.roster.changed.clear()
        await self.dispatcher.look()
        self.answers.look()

    async def watch_runs(self) -> None:
        """Detectors, pruning and promotion; only pruning asks for a run's end."""
        for stop in self.runs_watch.tick():
            track = self.roster.tracks.get(stop.run_id)
            engine = self.roster.engines.get(track.run.host or "") if track is not None else None
            if track is not None and engine is not None and track.stop_asked is None:
                await reconcile.ask_stop(self.roster, engine, track, stop.reason, stop.evidence)
        if time.monotonic() - self.kept_at > KEEP_EVERY_S and lineage.pending(self.lab):
            self.kept_at = time.monotonic()
            await asyncio.to_thread(self.runs_watch.keep)
        if self.runs_watch.submitted:
            self.runs_watch.submitted = False
            self.roster.changed.set()

    async def follow_host(self, name: str, engine: Engine) -> None:
        """Poll one host's runs and bring their rows up to date; at once again when a run ended."""
        if self.roster.engines.get(name) is not engine:
            raise asyncio.CancelledError  # replaced, and our cancellation was swallowed on the way (wait_for before Python 3.12)
        tracks = self.roster.on_host(name)
        if not tracks:
            await asyncio.sleep(IDLE_POLL_S if engine.kind == "ssh" else 0.0)
            return
        states = await engine.poll([t.run.id for t in tracks], {t.run.id: name for t in tracks})
        for track in tracks:
            state = states.get(track.run.id)
            if state is not None and self.roster.tracks.get(track.run.id) is track:
                await self._observe(engine, track, state)

    async def _observe(self, engine: Engine, track: Track, state: State) -> None:
        """One run, so that what is wrong with it stays its own affair."""
        place = f"run {track.run.id}"
        try:
            await reconcile.observe(self.roster, engine, track, state)
        except OvernightError as error:
            if self.roster.notes.get(place) != str(error):  # ten times a second, and each time the same
                log.info("%s: %s", track.run.id, error)
            self.roster.note(place, str(error))
        except Exception as error:  # bytes nobody foresaw must not stop the runs beside it
            if place not in self.roster.notes:
                log.exception("%s cannot be followed", track.run.id)
            self.roster.note(place, f"{track.run.id} cannot be followed: {type(error).__name__}: {error} (see daemon.log)")
        else:
            self.roster.note(place, None)

    async def telemetry(self) -> None:
        """One round of reports from all engines; a host that hangs does not hold up the others."""
        engines = list(self.roster.engines.items())
        found = await asyncio.gather(*(asyncio.wait_for(e.capacity(), 5) for _, e in engines), return_exceptions=True)
        reports = []
        for (name, _), result in zip(engines, found, strict=True):
            if isinstance(result, BaseException):
                self.roster.note(f"host {name}", f"host {name}: {result or type(result).__name__}")
            else:
                self.roster.note(f"host {name}", None)
                reports += result
        telemetry.record(self.roster, reports)

    async def flush(self) -> None:
        follow.flush(self.roster)

    async def beat_once(self) -> None:
        """Alive; but a database that was deleted or replaced is seen by nobody, and the lock would keep out who serves the new one."""
        if self.roster.store.moved():
            log.error("lab.db was deleted or replaced under this daemon: it ends; runs go on")
            self.stop.set()
            return
        self.beat()

    def beat(self, note: str | None = None) -> None:
        """The daemon's row: alive, and what goes wrong now."""
        words = note or "; ".join(dict.fromkeys(self.roster.notes.values()))[:500] or None
        self.roster.store.beat(pid=os.getpid(), boot_id=self.boot_id, started_at=self.started_at, version=VERSION, note=words)

    async def policy(self) -> None:
        """Take over an edited hosts.toml that loosens nothing, and hosts that came or went."""
        self.roster.note("policy", self.lab.sync_policy())
        await self.sync_hosts()

    async def tidy(self) -> None:
        await upkeep.tidy(self.roster)

    async def thin(self) -> None:
        telemetry.thin(self.roster)

    async def sync_hosts(self) -> None:
        """An engine and a follower for each host of the policy; a host that went or moved keeps its engine until its last run ended."""
        wanted = {h.name: moving.in_use(self.roster, h) for h in self.lab.policy().hosts}
        for name, host in wanted.items():
            if self.roster.hosts.get(name) == host:
                continue
            if name in self.roster.engines:
                await self.drop_engine(name)  # runs are taken up again by the new engine, as after a restart
            self.roster.hosts[name] = host
            if self.roster.fitness.went_well(name):  # a human changed something about it
                self.roster.store.clear_flag(name, "unfit")
            try:
                engine = make_engine(self.lab, host)
                await engine.start()
            except (PolicyError, ImportError) as error:
                self.roster.note(f"host {name}", f"host {name}: {error}")
                continue
            self.roster.engines[name] = engine
            moving.record(self.roster, host)
            for track in self.roster.on_host(name):
                self.roster.store.clear_flag(track.run.id, "host_removed")
            self.followers[name] = self.every(f"follow {name}", POLL_S[host.kind], lambda n=name, e=engine: self.follow_host(n, e))  # type: ignore[misc]
        for name in [n for n in self.roster.hosts if n not in wanted]:
            if not self.roster.on_host(name):
                await self.drop_engine(name)
                del self.roster.hosts[name]
                self.roster.store.upsert_host(name, state="removed", since=time.time())
                for uuid in [u for u, d in self.roster.devices.items() if d.slot.host == name]:
                    del self.roster.devices[uuid]
                    self.roster.store.delete_gpu(uuid)
        self._forget_strangers(set(wanted))
        self._face_orphans()

    def _face_orphans(self) -> None:
        """Runs on a host that hosts.toml no longer names and that we do not reach: said so, and ended only when a human asks."""
        policy = self.lab.policy()
        for track in list(self.roster.tracks.values()):
            name = track.run.host or ""
            report = self.roster.reports.get(name)
            drains = name in self.roster.hosts  # its engine still tries
            if drains and (policy.host(name) is not None or (report is not None and report.up)):
                continue
            if track.run.wanted == "cancel":
                why = f"cancelled while its host {name} was not in hosts.toml; it may still run there"
                finishing.end(self.roster, track, Outcome.LOST, cause="host_removed", cause_text=why)
            elif track.run.phase != Phase.UNREACHABLE and not drains:
                self.roster.update(track, phase=Phase.UNREACHABLE, unreachable_since=time.time())
                evidence = f"its host {name} is no longer in hosts.toml: put it back to follow the run, or cancel the run to give it up"
                self.roster.store.raise_flag(track.run.id, "host_removed", Severity.BAD, evidence)

    def _forget_strangers(self, wanted: set[str]) -> None:
        """Hosts and GPUs of an earlier policy that hold nothing any more."""
        for gpu in self.roster.store.gpus():
            if gpu.host not in wanted and gpu.host not in self.roster.hosts and not self.roster.on_host(gpu.host):
                self.roster.store.delete_gpu(gpu.uuid)
        for host in self.roster.store.hosts():
            if host.name in wanted or host.name in self.roster.hosts:
                continue
            state, error = (HostState.DOWN, NOBODY_ASKS) if self.roster.on_host(host.name) else (HostState.REMOVED, None)
            if host.state != state:
                self.roster.store.upsert_host(host.name, state=state, since=time.time(), error=error)

    async def drop_engine(self, name: str) -> None:
        """Stop following a host and close its engine."""
        follower = self.followers.pop(name, None)
        if follower is not None:
            follower.cancel()
        engine = self.roster.engines.pop(name, None)
        self.roster.reports.pop(name, None)  # what it said of its python and folders may be true no more
        if engine is not None:
            await engine.close()


def hold_lock(lab_path: Path) -> int:
    """The lab's one daemon lock; the descriptor must stay open. Raised: DaemonError naming the pid that has it."""
    path = lab_path / daemonlock.LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DaemonError(
            f"The lock {path} cannot be opened: {error.strerror}.", next_step="It must be a plain file of yours; move away what is there."
        ) from error
    if not _flock(fd):
        pid = daemonlock.daemon_pid(lab_path) or "not said"
        os.close(fd)
        raise DaemonError(
            f"A daemon serves {lab_path} already (pid {pid}).",
            next_step="See it with `overnight daemon status`, end it with `overnight daemon stop`.",
        )
    with contextlib.suppress(OSError):
        daemonlock.write_pid(fd, 0)  # whoever had it before is gone: nobody shall take its pid for ours
    return fd


def _flock(fd: int) -> bool:
    """Take the lock; a client that only looks whether it is held has it for microseconds, so one refusal is not the answer."""
    for _ in range(PROBES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def sign_lock(fd: int) -> None:
    """Write our pid into the lock."""
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
        daemonlock.write_pid(fd, os.getpid())


async def serve(lab: Lab) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    daemon = Daemon(lab)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop.set)
    await daemon.run()


def main(argv: list[str] | None = None) -> int:
    """`overnight daemon run`: serve one lab in the foreground."""
    parser = argparse.ArgumentParser(prog="overnight daemon run", description=__doc__)
    parser.add_argument("--lab", help="the lab's folder")
    parser.add_argument("--detached", action="store_true", help="log to daemon.log only")
    args = parser.parse_args(argv)
    try:
        lab = open_lab(args.lab, create=True)
        fd = hold_lock(lab.path)
        if args.detached:
            lab.close()  # a database connection must not cross a fork
            if os.fork():
                os._exit(0)  # whoever started us has its answer, and no child to wait for
            lab = open_lab(lab.path)
        sign_lock(fd)
    except OvernightError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, DaemonError) else error.exit_code
    _open_log(lab.path, to_stderr=not args.detached)
    log.info("daemon %s serves %s (pid %d)", VERSION, lab.path, os.getpid())
    try:
        asyncio.run(serve(lab))
    except OvernightError as error:
        log.error("%s", error)
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        lab.close()
        os.close(fd)
    log.info("daemon ends; runs go on")
    return 0


def _open_log(folder: Path, *, to_stderr: bool) -> None:
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [logging.StreamHandler()] if to_stderr else []
    with contextlib.suppress(OSError):
        os.close(os.open(folder / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600))
        handlers.append(logging.handlers.RotatingFileHandler(folder / "daemon.log", maxBytes=LOG_BYTES, backupCount=1))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    logging.getLogger("asyncssh").setLevel(logging.WARNING)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
