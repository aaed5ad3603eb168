"""From what clients want to what starts and ends: approvals, cancels of waiting runs, placements and launches.

Each step may be cut short by a kill: the row of a run is written before anything is started, and starting is idempotent by run id.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from runner import finishing, launch, measuring, moving, reconcile, scheduler, states, telemetry, verifying
from runner.engines.base import Spec
from runner.errors import EngineError, HostError, LabError, PolicyError, RequestError
from runner.fitness import TRAINER
from runner.records import GpuState, Outcome, Phase, Severity
from runner.research import classes
from runner.roster import left_s

if TYPE_CHECKING:
    from runner.records import Host
    from runner.roster import Device, Roster, Track

MAX_LAUNCHES = 3  # an engine that refuses a run so often is not asked again
BACK_OFF_S = 5.0
SETTLING_S = 8.0  # hosts need a moment after a start before a run may be called impossible to place
COUNT_S = 5.0  # summing up the hours of all runs reads the whole table
QUEUE = (
    "id, priority, seq, gpu_type, want_host, agent, created_at",
    "phase != 'ended' AND phase = 'queued' AND wanted = 'run' ORDER BY priority DESC, seq",
)
log = logging.getLogger("overnight.dispatch")
Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class Dispatcher:
    """Looks at the queue whenever something changed; `spawn` gives a launch its own task."""

    def __init__(self, roster: Roster, spawn: Spawn) -> None:
        self.roster = roster
        self.store = roster.store
        self.spawn = spawn
        self.started = time.monotonic()
        self.paused_agents: set[str] = set()
        self.limit: str | None = None
        self.counted_at, self.gpu_hours = float("-inf"), 0.0
        self.impossible = {f.subject for f in self.store.flags() if f.kind == "cannot_place"}

    async def look(self) -> None:
        """One pass: take over what clients wrote, place what can be placed, start what was placed."""
        self.take_over()
        plan = self.plan()
        for run_id, why in plan.withdraw.items():
            await self.withdraw(run_id, why)
        self.write_placements(plan.placements)
        for track in self.unlaunched():  # the new ones among them
            track.launching = True
            self.spawn(self.launch(track), f"launch {track.run.id}")
        telemetry.write_gpus(self.roster)
        self.flag_impossible(plan.impossible)

    def take_over(self) -> None:
        """Wanted columns of waiting and live runs: cancels, approvals, declines."""
        store, roster = self.store, self.roster
        for run_id, phase, force in store.tally("id, phase, wanted_force", "wanted = 'cancel' AND phase != 'ended'"):
            track = roster.tracks.get(run_id)
            if track is not None:
                if track.run.wanted != "cancel" or track.run.wanted_force != force:
                    track.run = store.run(run_id) or track.run
            elif phase in (Phase.QUEUED, Phase.PROPOSED):
                self._close(run_id, Outcome.CANCELLED, "cancelled before it started")
        for run_id, approval, why in store.tally(
            "id, approval, approval_why", "phase != 'ended' AND phase = 'proposed' AND approval IN ('approved', 'declined', 'none')"
        ):
            if approval == "declined":
                self._close(run_id, Outcome.DECLINED, why or "declined")
            else:
                store.update_run(run_id, phase=Phase.QUEUED)

    def _close(self, run_id: str, outcome: str, why: str) -> None:
        with self.store.transaction():
            self.store.update_run(run_id, phase=Phase.ENDED, outcome=outcome, cause_text=why, ended_at=time.time())
            self.store.clear_flag(run_id, "cannot_place")
            self.store.event("daemon", "ended", run_id, f"{outcome}: {why}")

    # placing

    def plan(self) -> scheduler.Plan:
        """The scheduler's answer for the queue and slots of this moment."""
        store = self.store
        rows = store.tally(*QUEUE)
        first = measuring.before_first_runs(self.roster) if rows else {}
        if first:
            rows = store.tally(*QUEUE)
        if not rows:
            self.roster.note("launch", None)
        self.paused_agents = set(store.setting("paused_agents", []))
        self.limit = self.spent() or self.roster.fitness.hold(TRAINER)
        wishes = []
        for run_id, priority, seq, gpu_type, host, agent, created_at in rows:
            hold = self.held(agent)
            if priority <= verifying.LAST:
                priority, quiet = verifying.turn(created_at, time.monotonic() - self.roster.moved_at)
                hold = hold or quiet
            wishes.append(scheduler.Wish(run_id, (-priority, seq), gpu_type, host, hold))
        plan = measuring.place(
            wishes,
            self.views(),
            first,
            handed_ahead=self.roster.lab.policy().limits.handed_ahead,
            paused=bool(store.setting("queue_paused", False)),
        )
        if self.roster.fitness.probing(TRAINER):
            del plan.placements[1:]
        return plan

    def held(self, agent: str) -> str | None:
        """Why runs of an agent may not start now, as found at the beginning of this pass."""
        return self.limit or (f"its agent {agent} is paused" if agent in self.paused_agents else None)

    def spent(self) -> str | None:
        """Why nothing may start any more: a limit of the policy is used up."""
        limits = self.roster.lab.policy().limits
        if limits.max_gpu_hours is not None:
            if time.monotonic() - self.counted_at > COUNT_S:
                self.counted_at = time.monotonic()
                self.gpu_hours = float(self.store.tally("coalesce(sum(wall_s), 0)")[0][0]) / 3600
            if self.gpu_hours >= limits.max_gpu_hours:
                return f"the GPU hours are used up ({self.gpu_hours:.1f} of {limits.max_gpu_hours:g})"
        began = self.store.setting("night_started_at")
        if limits.max_wall_hours is not None and began is not None and time.time() - float(began) >= limits.max_wall_hours * 3600:
            return f"the night is over ({limits.max_wall_hours:g} hours)"
        return None

    def views(self) -> list[scheduler.SlotView]:
        """All slots of hosts that are up, as the scheduler sees them."""
        now = time.time()
        holds = {h.name: self._hold(h) for h in self.store.hosts()}
        taken: dict[str, int] = {}
        for track in self.roster.tracks.values():
            if not track.standby:
                taken[track.run.host or ""] = taken.get(track.run.host or "", 0) + 1
        return [self._view(d, holds.get(d.slot.host), taken, now) for d in self.roster.devices.values() if d.state != GpuState.LOST]

    def _view(self, device: Device, hold: str | None, taken: dict[str, int], now: float) -> scheduler.SlotView:
        slot = device.slot
        track = self.roster.occupant(slot.uuid)
        host = self.roster.hosts.get(slot.host)
        usable = track is None and device.state == GpuState.FREE and now >= device.retry_at
        left = left_s(track, now) if track else None
        if left is not None and host is not None and host.kind == "fake":
            left /= host.speed  # the script's seconds are simulated ones
        why_not = None
        if device.state in (GpuState.QUARANTINED, GpuState.FOREIGN):
            why_not = f"{device.state}: {device.reason}"
        if device.deselected:
            hold = "hosts.toml no longer gives it to us"
        if usable and hold is None and host is not None:
            taken[slot.host] = taken.get(slot.host, 0) + 1
            if host.max_runs is not None and taken[slot.host] > host.max_runs:
                hold = f"max_runs = {host.max_runs} is reached"
        if hold is None and self.roster.fitness.probing(slot.host) and (not usable or taken.get(slot.host, 0) > 1):
            hold = "it is unfit, and tries one run first"
        waiting = tuple(
            scheduler.Wish(t.run.id, (-t.run.priority, t.run.seq), t.run.gpu_type, t.run.want_host, self.held(t.run.agent))
            for t in self.roster.waiting(slot.uuid)
            if t.stop_asked is None
        )
        return scheduler.SlotView(
            slot.host,
            slot.uuid,
            slot.name,
            usable,
            track.run.id if track else None,
            waiting,
            left,
            hold,
            self.roster.far(slot.host),
            why_not,
        )

    def _hold(self, host: Host) -> str | None:
        """Why a host takes no new run."""
        report = self.roster.reports.get(host.name)
        if report is None or not report.up:
            return f"it is out of reach ({host.error or 'not connected yet'})"
        hold = states.host_hold(dataclasses.replace(host, disk_free_mib=report.disk_free_mib), self.roster.lab.policy())
        if hold or moving.moves(self.roster, host.name):
            return hold or moving.WORDS
        unfit = self.roster.fitness.hold(host.name)
        return f"it is unfit: {unfit}" if unfit else None

    def write_placements(self, placements: list[scheduler.Placement]) -> None:
        """Rows first: from here on the runs are `starting`, whatever happens to this process."""
        if placements:
            evaluator = classes.evaluator_id(self.roster.lab.policy().trainer)
            with self.store.transaction():
                for p in placements:
                    device = self.roster.devices[p.uuid]
                    driver = (device.sample or {}).get("driver")
                    self.store.update_run(
                        p.run_id,
                        phase=Phase.STARTING,
                        stage="standby" if p.standby else None,
                        host=p.host,
                        engine=self.roster.engines[p.host].kind,
                        gpu_uuid=p.uuid,
                        gpu_name=device.slot.name,
                        driver=driver,
                        evaluator=evaluator,
                        placed_at=time.time(),
                    )
                    self.store.clear_flag(p.run_id, "cannot_place")
            for p in placements:
                run = self.store.run(p.run_id)
                if run is not None:
                    self.roster.track(run, standby=p.standby)

    def unlaunched(self) -> list[Track]:
        """Placed runs that nobody starts: left so by a crash, or to be tried again after a failure. A host that went out of hosts.toml
        starts none; what was placed there goes back to the queue once the host is seen not to have it.
        """
        now, policy = time.monotonic(), self.roster.lab.policy()
        return [
            t
            for t in self.roster.tracks.values()
            if t.launches == 0
            and t.run.phase == Phase.STARTING
            and t.run.started_at is None
            and not t.launching
            and t.run.wanted == "run"
            and now >= t.launch_again_at
            and policy.host(t.run.host or "") is not None
        ]

    async def withdraw(self, run_id: str, why: str) -> None:
        """Take a standby back; its end as `withdrawn` puts it into the queue again."""
        track = self.roster.tracks.get(run_id)
        if track is None or track.stop_asked is not None or track.launching:
            return
        engine, report = self.roster.engines.get(track.run.host or ""), self.roster.reports.get(track.run.host or "")
        if report is None or not report.up:
            return  # what was handed ahead is there so that a host out of contact does not idle
        if engine is not None:
            log.info("%s is taken back: %s", run_id, why)
            await reconcile.ask_stop(self.roster, engine, track, "withdrawn", why)

    # starting

    async def launch(self, track: Track) -> None:
        """Stage the run's directory and start it; every way this can fail leaves a row that says what happens next."""
        run, roster = track.run, self.roster
        engine, host, device = roster.engines.get(run.host or ""), roster.hosts.get(run.host or ""), roster.devices.get(run.gpu_uuid or "")
        report = roster.reports.get(run.host or "")
        if engine is None or host is None or device is None or report is None:
            track.launch_again_at = time.monotonic() + 1.0
            track.launching = False
            return
        try:
            stage = await asyncio.to_thread(launch.stage_run, roster.lab, run, device.slot, host, report.info, standby=track.standby)
            await engine.submit(Spec(run.id, device.slot, stage, track.standby))
            track.launches += 1
            roster.note("launch", None)
            if roster.fitness.went_well(TRAINER):
                self.store.clear_flag("lab", "trainer_unusable")
        except HostError as error:
            log.info("%s: %s", run.id, error)  # whether it started is unknown: poll says
            track.launch_again_at = time.monotonic() + BACK_OFF_S
        except LabError as error:
            roster.note("launch", str(error))
            device.retry_at = time.time() + BACK_OFF_S
            reconcile.back_to_queue(roster, track)
        except EngineError as error:
            await self._refused(track, device, error)
        except RequestError as error:
            self._cannot_lay_out(track, error)
        finally:
            track.launching = False

    def _cannot_lay_out(self, track: Track, error: RequestError) -> None:
        """The run's fault, unless run after run fails so: then the trainer folder is at fault and the queue waits."""
        unusable = isinstance(error, PolicyError) and self.roster.fitness.failed(TRAINER, track.run.id, str(error))
        if unusable:
            self.store.raise_flag("lab", "trainer_unusable", Severity.BAD, f"no run can be laid out, the queue waits: {error}")
            reconcile.back_to_queue(self.roster, track)
        else:
            finishing.end(self.roster, track, Outcome.CRASHED, cause="materialise", cause_text=str(error))

    async def _refused(self, track: Track, device: Device, error: EngineError) -> None:
        """The engine could not start it: another try in the queue, a few times, unless the host is at fault."""
        run, host = track.run, track.run.host or ""
        self.store.event("daemon", "not_started", run.id, str(error))
        failed = sum(e.verb == "not_started" for e in self.store.events(subject=run.id))
        device.retry_at = time.time() + BACK_OFF_S
        if finishing.note_failure(self.roster, run, str(error)) or failed < MAX_LAUNCHES:
            reconcile.back_to_queue(self.roster, track)
        else:
            finishing.end(self.roster, track, Outcome.CRASHED, cause="not_started", cause_text=f"{host}: {error}")

    def flag_impossible(self, impossible: dict[str, str]) -> None:
        """A run that no host can take says so; the flag goes when one can."""
        if time.monotonic() - self.started < SETTLING_S:
            return
        for run_id in impossible.keys() - self.impossible:
            self.store.raise_flag(run_id, "cannot_place", Severity.WARN, f"it cannot start anywhere: {impossible[run_id]}")
        for run_id in self.impossible - impossible.keys():
            self.store.clear_flag(run_id, "cannot_place")
        self.impossible = set(impossible)
