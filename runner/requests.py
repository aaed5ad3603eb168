"""What only the daemon can answer, because only it talks to hosts: rows of `requests`, each answered by a handler of its own.

A handler returns the result as a plain object or raises an OvernightError, which becomes the request's error. Requests that were being
worked on when a daemon died are asked again by the next one: every handler may be repeated.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from runner import measuring, verifying
from runner.dispatch import Spawn
from runner.errors import BadValue, OvernightError, UnknownName
from runner.records import GpuState

if TYPE_CHECKING:
    from runner.records import Request
    from runner.roster import Roster

LIMIT_S = 12 * 3600.0  # a verification may wait for its slot
VERIFY_LOOK_S = 0.2
log = logging.getLogger("overnight.requests")
Handler = Callable[["Desk", "Request"], Awaitable[Any]]


class Desk:
    """Takes up asked requests, one task each."""

    def __init__(self, roster: Roster, spawn: Spawn) -> None:
        self.roster = roster
        self.store = roster.store
        self.spawn = spawn
        self.working: set[int] = set()

    def look(self) -> None:
        """Start a task for every request that nobody works on."""
        for request in [*self.store.requests("working"), *self.store.requests("asked")]:
            if request.id not in self.working:
                self.working.add(request.id)
                self.spawn(self.answer(request), f"request {request.id}")

    async def answer(self, request: Request) -> None:
        """Work on one request and write its result or its error."""
        try:
            self.store.update_request(request.id, state="working")
            handler = HANDLERS.get(request.verb)
            if handler is None:
                raise UnknownName("request", request.verb, HANDLERS)
            result = await asyncio.wait_for(handler(self, request), LIMIT_S)
            self.store.update_request(request.id, state="done", result=result)
        except asyncio.TimeoutError:
            self.fail(request, OvernightError(f"{request.verb} took longer than {LIMIT_S:.0f} s and was given up."))
        except OvernightError as error:
            self.fail(request, error)
        except Exception as error:
            log.exception("request %d (%s) failed", request.id, request.verb)
            self.fail(request, OvernightError(f"{request.verb} failed: {type(error).__name__}: {error}.", next_step="See daemon.log."))
        finally:
            self.working.discard(request.id)

    def fail(self, request: Request, error: OvernightError) -> None:
        """The request's error, as --json prints it."""
        self.store.update_request(request.id, state="failed", error=error.as_json())

    def progress(self, request: Request) -> Callable[[str], None]:
        """A function that shows how far a request is."""
        return lambda text: self.store.update_request(request.id, progress=text)


async def gpu_release(desk: Desk, request: Request) -> dict[str, Any]:
    """Bring a quarantined GPU back, by UUID or a unique part of it."""
    wanted = str(request.args.get("uuid") or request.args.get("gpu") or "")
    devices = desk.roster.devices
    found = [u for u in devices if u == wanted] or [u for u in devices if wanted and wanted.lower() in u.lower()]
    if len(found) != 1:
        raise (
            UnknownName("GPU", wanted, devices)
            if not found
            else BadValue(f"{wanted!r} names {len(found)} GPUs.", next_step="Give the whole UUID.")
        )
    device = devices[found[0]]
    was, reason = str(device.state), device.reason
    if device.state == GpuState.QUARANTINED:
        desk.roster.release(found[0])
        desk.store.event(request.who, "gpu_release", found[0], f"was quarantined: {reason}")
    return {"uuid": found[0], "was": was, "state": str(device.state), "reason": reason}


async def hosts_check(desk: Desk, request: Request) -> dict[str, Any]:
    """Check all hosts (or those named) at once; each has a deadline of its own."""
    hostcare = importlib.import_module("runner.hostcare")
    names = [str(n) for n in request.args.get("hosts") or desk.roster.hosts]
    for name in names:
        if name not in desk.roster.hosts:
            raise UnknownName("host", name, desk.roster.hosts, where="hosts.toml")
    reports = await asyncio.gather(*(hostcare.check(desk.roster.hosts[n], desk.roster.engines.get(n)) for n in names))
    for report in reports:
        measuring.checked(desk.roster, report, request.who)
    return {"hosts": list(reports)}


async def host_setup(desk: Desk, request: Request) -> dict[str, Any]:
    """Set a host up; resumable, with progress."""
    hostcare = importlib.import_module("runner.hostcare")
    name = str(request.args.get("host") or request.args.get("name") or "")
    if name not in desk.roster.hosts:
        raise UnknownName("host", name, desk.roster.hosts, where="hosts.toml")
    result = await hostcare.setup(desk.roster.hosts[name], desk.roster.engines.get(name), desk.progress(request))
    return dict(result)


async def fetch(desk: Desk, request: Request) -> dict[str, Any]:
    """Mirror files of a run's directory from its host."""
    run = desk.store.run(str(request.args.get("run") or request.args.get("id") or ""))
    if run is None:
        raise UnknownName("run", str(request.args.get("run")), [])
    engine = desk.roster.engines.get(run.host or "")
    if engine is None:
        raise BadValue(f"{run.id} has not been on a host that is in hosts.toml now ({run.host or 'none'}).")
    names = [str(n) for n in request.args.get("names") or ["out.log", "status.json", "work/events.jsonl"]]
    if any(n.startswith("/") or ".." in n.split("/") for n in names):
        raise BadValue(f"{names} names a file outside the run's directory.", next_step="Give paths inside runs/ID.")
    got = await engine.fetch(run.id, run.host or "", names, desk.roster.lab.run_dir(run.id))
    return {"run": run.id, "files": got}


async def verify(desk: Desk, request: Request) -> dict[str, Any]:
    """Recompute a run's result from its checkpoint, on its host and in a slot of its own."""
    wanted = str(request.args.get("run") or request.args.get("id") or "")
    run = desk.store.run(wanted)
    if run is None:
        raise UnknownName("run", wanted, [])
    lab = desk.roster.lab
    check = verifying.queue_check(lab, run, request)
    desk.roster.changed.set()
    phase = None
    while True:
        row = desk.store.run(check)
        if row is None or row.ended:
            return verifying.answer_of(lab, run.id, check)
        if row.phase != phase:
            phase = row.phase
            desk.progress(request)(f"{check} recomputes it on {run.host}: {phase}")
        await asyncio.sleep(VERIFY_LOOK_S)


HANDLERS: dict[str, Handler] = {
    "gpu_release": gpu_release,
    "hosts_check": hosts_check,
    "host_setup": host_setup,
    "fetch": fetch,
    "verify": verify,
}
