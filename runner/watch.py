"""What the daemon does with the research code at every tick: watch live runs, settle ended ones, prune, promote.

Detectors see views built here; a flag goes up once (after two looks in a row, or at once when bad) and comes down after a quiet minute.
All of it may be repeated after a crash: nothing is remembered that the database does not say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runner import board, health, measuring, queries, verbs
from runner.errors import Duplicate, OvernightError
from runner.health import Finding, LabView, View
from runner.lab import Lab
from runner.mfu import mfu_percent
from runner.records import Gpu, GpuState, Outcome, Point, Purpose, Run, Severity, Trust
from runner.research import classes, lineage, promotion, pruning, statics, trust, waves
from runner.research.noise import gain, pooled
from runner.scheduler import matches_type

LOOK_EVERY_S = 5.0  # detectors; pruning is judged at every tick
QUIET_S = 60.0  # a condition must be gone so long before its flag comes down
PEERS_KEPT_S = 15.0
LAB_EVERY_S = 20.0
SETTLED_AT_ONCE = 40
SETTLED = "settled_to"  # in `meta`
SCAN_EVERY_S = 30.0  # for a run whose whole life fell between two rounds
log = logging.getLogger("overnight.watch")


@dataclass(frozen=True, slots=True)
class Stop:
    """A run that the policy wants ended, the word for its stop file, and the evidence."""

    run_id: str
    reason: str
    evidence: str


@dataclass(slots=True)
class _Seen:
    first: float
    last: float
    looks: int = 1
    up: bool = False


@dataclass(slots=True)
class _Peers:
    """What finished runs of a class and budget say, kept for some seconds."""

    at: float
    runs: list[Run]
    curves: list[pruning.Curve]
    pruned: int
    speeds: dict[tuple[Any, ...], list[float]]  # tokens a second by configuration
    rates: list[float]  # MFU, percent
    baseline_epochs: float | None


@dataclass(slots=True)
class Watch:
    """The daemon's memory of what it watches; losing it costs nothing but a second look."""

    lab: Lab
    clock: Callable[[], float] = time.time
    seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)
    peers: dict[tuple[str, float], _Peers] = field(default_factory=dict)
    curves: dict[str, pruning.Curve] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)  # asked to end; their rows may not say so yet
    held: set[str] = field(default_factory=set)  # hopeless, and kept for their wave
    looked: dict[str, float] = field(default_factory=dict)
    models: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    settled_to: int | None = None  # the event of the last end that was settled
    scanned_at: float = 0.0
    unsettled: bool = True  # more ended than one round takes
    lab_at: float = 0.0
    fixed: tuple[float, dict[str, Any]] = (0.0, {})
    submitted: bool = False  # runs were queued since the daemon last looked

    def tick(self) -> list[Stop]:
        """One round; returns the runs that the policy wants stopped, with reason and evidence."""
        now, store = self.clock(), self.lab.store
        live = store.runs("phase != 'ended' AND phase = 'running'")  # both, so that the index of live runs serves
        gpus = {g.uuid: g for g in queries.gpus_now(self.lab)}
        stops = self._prune(live, now)
        due = [r for r in live if now - self.looked.get(r.id, 0.0) >= LOOK_EVERY_S]
        for run in due:
            self.looked[run.id] = now
            self._report(run.id, health.detect(self._view(run, gpus.get(run.gpu_uuid or ""), now)), now)
        if now - self.lab_at >= LAB_EVERY_S:
            self.lab_at = now
            for subject, finding in health.detect_lab(self._lab_view(list(gpus.values()), now)):
                self._report(subject, [finding], now)
        if self._settle(now):
            self._promote()
        self._lower(now, {r.id for r in live})
        return stops

    # pruning

    def _prune(self, live: list[Run], now: float) -> list[Stop]:
        mode = self.lab.policy().limits.pruning
        stops: list[Stop] = []
        for run in live:
            repeat = run.purpose not in pruning.PRUNABLE or run.repeat_of is not None
            if mode == "off" or repeat or run.share is None or run.wanted != "run":
                continue
            at = sum(s <= run.share + 1e-9 for s in pruning.GRID)
            if self.judged.get(run.id, 0) >= at:
                continue
            self.judged[run.id] = at
            peers = self._peers(run, now)
            found = pruning.judge(mode, run.share, pruning.sampled(self.lab.store.points(run.id)), peers.curves, peers.pruned)
            if found is None:
                continue
            if run.id not in self.stopping and (level := waves.last_of_level(self.lab, run, self.stopping)) is not None:
                if run.id not in self.held:
                    why = f"hopeless, but the last of its wave with {level}: it goes on, so that the wave can tell what that does"
                    self.lab.store.event("daemon", "not_pruned", run.id, why)
                self.held.add(run.id)
                continue
            self.stopping.add(run.id)
            stops.append(Stop(run.id, "pruned", found.evidence))
        return stops

    def _peers(self, run: Run, now: float) -> _Peers:
        """Finished runs of the run's class and budget, with their curves."""
        key = (run.class_key or classes.class_key(run) or "", run.budget_s)
        kept = self.peers.get(key)
        if kept is not None and now - kept.at < PEERS_KEPT_S:
            return kept
        store = self.lab.store
        runs = store.runs(
            "class_key = ? AND budget_s = ? AND outcome = 'completed' AND val_bpb IS NOT NULL", key, order="seq DESC", limit=200
        )
        pruned = store.count_runs("class_key = ? AND budget_s = ? AND outcome = 'pruned'", key)
        curves = [self._curve(r) for r in runs if board.unranked_reason(r.val_bpb, r.trust, r.trust_why) is None]
        policy = self.lab.policy()
        speeds: dict[tuple[Any, ...], list[float]] = {}
        for r in runs:
            if r.tok_s is not None:
                speeds.setdefault(_config(r), []).append(r.tok_s)
        rates = [m for r in runs if (m := mfu_percent(r, policy)) is not None and m <= 100]  # what cannot be is no measure
        epochs = next((r.epoch for r in runs if r.purpose == Purpose.BASELINE), None)
        self.peers[key] = _Peers(now, runs, curves, pruned, speeds, rates, epochs)
        return self.peers[key]

    def _curve(self, run: Run) -> pruning.Curve:
        if run.id not in self.curves:
            self.curves[run.id] = pruning.Curve(run.id, pruning.sampled(self.lab.store.points(run.id)), run.val_bpb, run.budget_s)
        return self.curves[run.id]

    # views

    def _view(self, run: Run, gpu: Gpu | None, now: float) -> View:
        policy = self.lab.policy()
        peers = self._peers(run, now)
        flops = run.flops_per_token
        local = gpu is not None and (h := policy.host(gpu.host)) is not None and h.kind == "local"
        return View(
            run=run,
            now=now,
            points=self._recent(run),
            sample=gpu.telemetry if gpu else None,
            mfu_percent=mfu_percent(run, policy),
            class_mfu=peers.rates,
            peer_tok_s=peers.speeds.get(_config(run), ()),
            smaller_batch=_smaller_batch(run, peers.runs),
            baseline_epochs=peers.baseline_epochs,
            achieved_flops=flops * run.tok_s if flops and run.tok_s else None,
            measured_flops=self._measured(gpu),
            same_as=self._same_as(run),
            same_model=self._same_model(run, peers.runs),
            evaluated_share=self._evaluated(run),
            cpu_load=(os.getloadavg()[0], os.cpu_count() or 1) if local else None,
        )

    def _recent(self, run: Run) -> list[Point]:
        """The last third of the budget, a row in four where there are many: enough to see a flat loss, and cheap."""
        since = (run.share or 0.0) - health.FLAT_SHARE - 0.05
        rows = self.lab.store.tally(
            "step, t, share, loss, tok_s, dt_ms, mfu",
            "run_id = ? AND (share IS NULL OR share >= ?) ORDER BY step",
            (run.id, since),
            table="points",
        )
        return [Point(*row) for row in (rows if len(rows) < 100 else [*rows[:-3:4], *rows[-3:]])]

    def _same_model(self, run: Run, peers: list[Run]) -> tuple[str, str] | None:
        """`same_model` of the run, worked out once it has said what its model is."""
        if not run.model_config:
            return None
        if run.id not in self.models:
            self.models[run.id] = same_model(run, peers)
        return self.models[run.id]

    def _measured(self, gpu: Gpu | None) -> float | None:
        """The matmul rate a preflight of this GPU's host measured, FLOP/s."""
        host = next((h for h in self.lab.store.hosts() if gpu is not None and h.name == gpu.host), None)
        return measuring.matmul_flops(host.info, gpu.name) if host is not None and gpu is not None else None

    def _same_as(self, run: Run) -> str | None:
        """An earlier run with the same effective source and budget that this one does not claim to repeat or retry."""
        if run.repeat_of or run.retry_of or run.promoted_from or run.purpose not in (Purpose.EXPERIMENT, Purpose.TUNE):
            return None
        rows = self.lab.store.tally(
            "id",
            "effective_sha = ? AND budget_s = ? AND seq < ? AND outcome = 'completed' AND class_key IS ? ORDER BY seq LIMIT 1",
            (run.effective_sha, run.budget_s, run.seq, run.class_key or classes.class_key(run)),
        )
        return str(rows[0][0]) if rows else None

    def _evaluated(self, run: Run) -> float | None:
        """The share of the evaluation tokens that whole device batches cover, for upstream's evaluation by steps."""
        now = self.clock()
        if now - self.fixed[0] > PEERS_KEPT_S:
            self.fixed = now, statics.fixed_constants(self.lab.policy().trainer)
        fixed = self.fixed[1]
        batch, length, tokens = run.constants.get("DEVICE_BATCH_SIZE"), fixed.get("MAX_SEQ_LEN"), fixed.get("EVAL_TOKENS")
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (batch, length, tokens)):
            return None
        step = int(batch or 1) * int(length or 1)
        return (int(tokens or 1) // step) * step / int(tokens or 1)

    def _lab_view(self, gpus: list[Gpu], now: float) -> LabView:
        state = queries.lab_state(self.lab)
        idle = [(g.uuid, now - g.since) for g in gpus if g.state == GpuState.FREE]
        waiting = queries.queue(self.lab) if state.queued and idle else []
        names = {g.name for g in gpus if g.state == GpuState.FREE}
        blocked = bool(waiting) and all(r.gpu_type and not any(matches_type(r.gpu_type, n) for n in names) for r in waiting)
        foreign = [(g.uuid, g.state, g.reason or "") for g in gpus if g.state in (GpuState.FOREIGN, GpuState.QUARANTINED)]
        return LabView(
            now=now,
            queued=state.queued,
            paused=state.paused or bool(state.paused_agents),
            idle=idle,
            blocked=blocked,
            last_agent_call_s=state.last_agent_call_s,
            gains=self._gains(state.best_class, state.best_budget_s),
            foreign=foreign,
        )

    def _gains(self, class_key: str | None, budget_s: float | None) -> list[tuple[float, str]]:
        """Each experiment's gain over the best before it, in order of submission; the last few."""
        groups, _ = board.collect(self.lab, class_key, budget_s)
        floor = pooled(g.values for g in groups)
        ordered = sorted(groups, key=lambda g: g.seqs[0])
        before: list[board.Group] = []  # the best up to each
        for group in ordered:
            before.append(group if not before or group.mean < before[-1].mean else before[-1])
        pairs = list(zip(ordered[1:], before, strict=False))[-health.FLAT_GAINS :]
        return [(found.value, found.badge) for new, best in pairs for found in (gain(new.values, best.values, floor),)]

    # flags

    def _report(self, subject: str, findings: list[Finding], now: float) -> None:
        for finding in findings:
            key = (subject, finding.kind)
            seen = self.seen.get(key)
            if seen is None:
                seen = self.seen[key] = _Seen(now, now)
            else:
                seen.looks, seen.last = seen.looks + 1, now
            if not seen.up and seen.looks < 2 and finding.severity != Severity.BAD:
                continue  # once may be chance
            if not seen.up:
                seen.up = True
                if self.lab.store.raise_flag(subject, finding.kind, str(finding.severity), finding.evidence):
                    log.info("%s: %s: %s", subject, finding.kind, finding.evidence)
                    self._kill(subject, finding)

    def _kill(self, subject: str, finding: Finding) -> None:
        """Stop the run when the policy names this kind of flag; by default none is named."""
        if finding.kind in self.lab.policy().limits.kill_on_flags and self.lab.store.run(subject) is not None:
            verbs.cancel(self.lab, [subject], who="daemon", why=f"policy kill_on_flags: {finding.kind}: {finding.evidence}")

    def _lower(self, now: float, live: set[str]) -> None:
        """Take flags down whose condition has been away for a while; those of ended runs stay as they were."""
        for (subject, kind), seen in list(self.seen.items()):
            is_run = subject.startswith("r") and subject[1:].isdigit()
            if now - seen.last <= QUIET_S or (is_run and subject not in live):
                if is_run and subject not in live and now - seen.last > QUIET_S:
                    del self.seen[subject, kind]
                continue
            if seen.up:
                self.lab.store.clear_flag(subject, kind)
            del self.seen[subject, kind]
        for run_id in [r for r in self.looked if r not in live]:
            self.looked.pop(run_id, None)
            self.judged.pop(run_id, None)
            self.models.pop(run_id, None)

    # ended runs

    def _settle(self, now: float) -> bool:
        """Flags that only the end can give, for runs whose end was written down since the last one looked at; whether there was any. The
        mark is an event, not a time: a run that ended out of contact is settled when its end is known. It outlives the daemon.
        """
        active = {str(i) for (i,) in self.lab.store.tally("id", "phase != 'ended'")}
        gone, self.active = self.active - active, active
        if not gone and not self.unsettled and now - self.scanned_at < SCAN_EVERY_S:
            return False
        self.scanned_at = now
        since = self._mark(now)
        newest = int(self.lab.store.tally("coalesce(max(id), 0)", table="events")[0][0])
        ends = self.lab.store.tally(
            "id, subject", "id > ? AND verb = 'ended' AND who = 'daemon' ORDER BY id LIMIT ?", (since, SETTLED_AT_ONCE), table="events"
        )
        self.unsettled = len(ends) == SETTLED_AT_ONCE
        self.settled_to = int(ends[-1][0]) if self.unsettled else max(newest, since)
        if not ends:
            return False
        self.peers.clear()
        for _, run_id in ends:
            run = self.lab.store.run(str(run_id))
            if run is not None and run.outcome == Outcome.COMPLETED:
                self._settle_one(run, now)
        self.lab.store.set_meta(SETTLED, str(self.settled_to))
        return True

    def _mark(self, now: float) -> int:
        """The event up to which ends were settled; in a lab that has no mark yet, an hour ago."""
        if self.settled_to is None:
            kept = self.lab.store.meta(SETTLED)
            hour = self.lab.store.tally("coalesce(max(id), 0)", "at < ?", (now - 3600,), table="events") if kept is None else []
            self.settled_to = int(kept) if kept is not None else int(hour[0][0])
        return self.settled_to

    def _settle_one(self, run: Run, now: float) -> None:
        peers = self._peers(run, now)
        view = View(
            run=run,
            now=now,
            mfu_percent=mfu_percent(run, self.lab.policy()),
            same_as=self._same_as(run),
            evaluated_share=self._evaluated(run),
            points=(),
            same_model=self._same_model(run, peers.runs),
            baseline_epochs=peers.baseline_epochs,
        )
        for finding in health.detect(view):
            self.lab.store.raise_flag(run.id, finding.kind, str(finding.severity), finding.evidence)
        if run.trust_why:
            kind = "held" if board.is_held(run.trust_why) else "doubtful"
            self.lab.store.raise_flag(run.id, kind, Severity.WARN, run.trust_why.removeprefix(board.HELD))
        self._verify(run)
        claim = self.lab.store.run(run.base_run or "") if run.purpose == Purpose.VERIFY else None
        if claim is not None and claim.trust == Trust.REFUTED:  # what stood behind it is the best now, and nobody has looked at that
            groups, _ = board.collect(self.lab, claim.class_key, claim.budget_s)
            if groups and (best := self.lab.store.run(groups[0].ids[0])) is not None:
                self._verify(best)

    def _verify(self, run: Run) -> None:
        why = trust.wants_verification(self.lab, run)
        asked = why and self.lab.store.tally("count(*)", "verb = 'verify' AND args LIKE ?", (f'%"{run.id}"%',), table="requests")[0][0]
        if why and not asked:
            verbs.ask(self.lab, "verify", {"run": run.id, "why": why}, who="daemon")

    def keep(self) -> None:
        """Commit what was kept since the last look; called from a thread of its own, for git may take a while."""
        try:
            lineage.commit_kept(self.lab)
            self.lab.store.clear_flag("lab", "lineage")
        except OvernightError as error:
            self.lab.store.raise_flag("lab", "lineage", Severity.INFO, str(error))

    def _promote(self) -> None:
        try:
            with self.lab.store.transaction():
                for due in promotion.due(self.lab):
                    where: dict[str, Any] = {"gpu_type": due.gpu_type, "budget_s": due.budget_s}
                    why = f"promoted by policy: {due.why}"
                    with contextlib.suppress(Duplicate):  # by hand, in other words: no reason to hold the others back
                        verbs.promote(self.lab, due.run_id, who="daemon", seeds=due.seeds, why=why, **where)
                        self.submitted = True
            self.lab.store.clear_flag("lab", "promotion_refused")
        except OvernightError as error:
            self.lab.store.raise_flag("lab", "promotion_refused", Severity.WARN, str(error))


def _config(run: Run) -> tuple[Any, ...]:
    """What speed depends on and an experiment may change: the model and the batches."""
    return (repr(run.model_config), *(run.constants.get(k) for k in ("TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE", "SEQ_LEN")))


SIZES = frozenset({"ASPECT_RATIO", "HEAD_DIM", "DEPTH", "WIDTH", "MODEL_DIM", "N_EMBD", "N_HEAD"})


def same_model(run: Run, peers: list[Run]) -> tuple[str, str] | None:
    """(id, constants) of a finished run that printed the very model this one has, though sizes differ by name."""
    if not run.model_config or run.repeat_of or run.purpose not in (Purpose.EXPERIMENT, Purpose.TUNE):
        return None
    for other in peers:
        if other.seq < run.seq and other.model_config == run.model_config:
            names = {k for k in run.constants.keys() | other.constants.keys() if run.constants.get(k) != other.constants.get(k)} - {"SEED"}
            if names and names <= SIZES:
                return other.id, ", ".join(f"{n} = {run.constants.get(n)}" for n in sorted(names))
    return None


def _smaller_batch(run: Run, same: list[Run]) -> tuple[str, int, float] | None:
    """The fastest run of the same model and total batch with a smaller device batch."""
    own = run.constants.get("DEVICE_BATCH_SIZE")
    if not isinstance(own, int) or isinstance(own, bool):
        return None
    found = [
        (r.id, int(b), float(r.tok_s))
        for r in same
        if isinstance(b := r.constants.get("DEVICE_BATCH_SIZE"), int)
        and b < own
        and r.tok_s
        and r.constants.get("TOTAL_BATCH_SIZE") == run.constants.get("TOTAL_BATCH_SIZE")
        and repr(r.model_config) == repr(run.model_config)
    ]
    return max(found, key=lambda f: f[2]) if found else None
