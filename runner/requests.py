"""What only the daemon can answer, because only it talks to hosts: rows of `requests`, each answered by a handler of its own.

A handler returns the result as a plain object or raises an OvernightError, which becomes the request's error. Requests that were being
worked on when a daemon died are asked again by the next one: every handler may be repeated.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from runner import measuring, states, telemetry, verifying
from runner.dispatch import Spawn
from runner.errors import BadValue, OvernightError, UnknownName
from runner.onhost import memory
from runner.records import GpuState, Severity
from runner.research.surroundings import MODULES

if TYPE_CHECKING:
    from runner.records import Request
    from runner.roster import Roster

LIMIT_S = 12 * 3600.0  # a verification may wait for its slot
VERIFY_LOOK_S = 0.2
RUNS_NEED = ("python", "torch", "attention")  # checks without which no run gets going
FRESH_LOOKS = 30  # a release waits three seconds for a card's next sample
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
    uuid = found[0]
    device = devices[uuid]
    for _ in range(FRESH_LOOKS):  # what its memory holds now, not what it held before somebody asked
        if uuid.startswith("CPU:") or ((device.sample or {}).get("at") or 0) >= request.created_at:
            break
        await asyncio.sleep(0.1)
    was, reason = str(device.state), device.reason
    used, limit = (device.sample or {}).get("mem_used_mib"), memory.limit_mib(device.slot.baseline_mib)
    if device.state != GpuState.QUARANTINED:
        text = f"{uuid} was not quarantined, but {was}{f': {reason}' if reason else ''}."
    else:
        desk.roster.release(uuid)
        desk.store.event(request.who, "gpu_release", uuid, f"was quarantined: {reason}")
        text = f"{uuid} is no longer quarantined; its memory is free again."
        if uuid.startswith("CPU:"):
            text = f"{uuid} is no longer quarantined."
        elif used is None:
            text = f"{uuid} is no longer quarantined; how much of its memory is in use cannot be read."
        elif used > limit:
            people = (device.sample or {}).get("processes") or []
            by = states.people_words(people) if people else "a process that is not seen from here"
            held, retry_s = {"processes": people}, 0.0 if people else 15.0  # when they go is seen; what nobody sees is tried again
            desk.roster.set_device(uuid, GpuState.FOREIGN, f"{used} MiB still in use by {by}", holder=held, retry_s=retry_s)
            text = f"{uuid} is no longer quarantined, but {used} MiB are still in use by {by}: no run starts there until that is gone."
    telemetry.write_gpus(desk.roster)
    return {"uuid": uuid, "was": was, "state": str(device.state), "reason": reason, "mem_used_mib": used, "text": text}


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
        note_check(desk, report)
    return {"hosts": list(reports)}


def note_check(desk: Desk, report: dict[str, Any]) -> None:
    """When a host was checked, and whether runs can get going there; a check that could not look says nothing of that."""
    name = str(report["name"])
    modules = report.pop(MODULES, None)
    if modules:
        desk.store.set_setting(MODULES, {**desk.store.setting(MODULES, {}), name: modules})
    if any(h.name == name for h in desk.store.hosts()):
        desk.store.upsert_host(name, checked_at=time.time())
    if report["state"] == "down":
        return
    why = next((f"{c['name']}: {c['text']}" for c in report["checks"] if c["ok"] is False and c["name"] in RUNS_NEED), None)
    if desk.roster.fitness.checked(name, why):
        if why is None:
            desk.store.clear_flag(name, "unfit")
        else:
            desk.store.raise_flag(name, "unfit", Severity.BAD, f"{desk.roster.fitness.why(name)}; it takes no run for now")
        desk.roster.changed.set()


async def host_setup(desk: Desk, request: Request) -> dict[str, Any]:
    """Set a host up; resumable, with progress."""
    hostcare = importlib.import_module("runner.hostcare")
    name = str(request.args.get("host") or request.args.get("name") or "")
    if name not in desk.roster.hosts:
        raise UnknownName("host", name, desk.roster.hosts, where="hosts.toml")
    result = await hostcare.setup(desk.roster.hosts[name], desk.roster.engines.get(name), desk.progress(request))
    note_check(desk, {"name": name, "state": "up", "checks": result["checks"], MODULES: result.pop(MODULES, None)})
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
