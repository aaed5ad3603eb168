"""What crosses borders: frozen records and the words of the state machine (FORMAT.md gives each field's meaning).

Facts only. Nothing here is derived (MFU, rank, gain and age live in queries), and nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Word(str, Enum):
    """A word of the state machine; prints, compares and serialises as its text."""

    def __str__(self) -> str:
        return str(self.value)


class Phase(Word):
    """Where a run is in its life, as observed."""

    PROPOSED = "proposed"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    FINISHING = "finishing"
    ENDED = "ended"
    UNREACHABLE = "unreachable"


class Stage(Word):
    """What a run on a slot is doing."""

    STANDBY = "standby"
    COMPILING = "compiling"
    TRAINING = "training"
    EVALUATING = "evaluating"


class Outcome(Word):
    """What happened to a run, observed at its end."""

    COMPLETED = "completed"
    NO_RESULT = "no_result"
    CRASHED = "crashed"
    DIVERGED = "diverged"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    DECLINED = "declined"
    PRUNED = "pruned"
    LOST = "lost"
    KILL_FAILED = "kill_failed"


class Purpose(Word):
    """Why a run exists; baselines and repeats are never pruned."""

    EXPERIMENT = "experiment"
    BASELINE = "baseline"
    REPEAT = "repeat"
    PROMOTION = "promotion"
    VERIFY = "verify"
    PREFLIGHT = "preflight"
    TUNE = "tune"


class Verdict(Word):
    """What was decided about a run."""

    KEEP = "keep"
    DISCARD = "discard"


class Trust(Word):
    """How far the printed val_bpb can be believed."""

    CLAIMED = "claimed"
    VERIFIED = "verified"
    REFUTED = "refuted"
    UNVERIFIABLE = "unverifiable"


class Severity(Word):
    """How loud a flag is."""

    INFO = "info"
    WARN = "warn"
    BAD = "bad"


class GpuState(Word):
    """Whether a GPU can take a run. The last two are only shown, never stored: what its host's state makes of it."""

    FREE = "free"
    BUSY = "busy"
    QUARANTINED = "quarantined"
    FOREIGN = "foreign"
    LOST = "lost"
    DOWN = "down"
    HELD = "held"


class HostState(Word):
    """How a host is found."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    UNFIT = "unfit"
    REMOVED = "removed"


LIVE_PHASES = (Phase.STARTING, Phase.RUNNING, Phase.FINISHING, Phase.UNREACHABLE)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One row of `runs`. Wanted fields are written by verbs, observed ones by the daemon (FORMAT.md section 2)."""

    # wanted
    id: str
    seq: int
    created_at: float
    purpose: str
    source_sha: str
    effective_sha: str
    overrides: Json
    constants: Json
    base_run: str | None
    parent: str | None
    hypothesis: str | None
    wave_id: str | None
    cell: Json | None
    retry_of: str | None
    repeat_of: str | None
    promoted_from: str | None
    budget_s: float
    seed: int | None
    priority: float
    gpu_type: str | None
    want_host: str | None
    agent: str
    wanted: str
    wanted_force: int
    approval: str
    approval_why: str | None
    verdict: str | None
    verdict_by: str | None
    verdict_why: str | None
    verdict_at: float | None
    # observed
    phase: str
    stage: str | None
    outcome: str | None
    cause: str | None
    cause_text: str | None
    last_lines: str | None
    host: str | None
    engine: str | None
    gpu_uuid: str | None
    gpu_name: str | None
    class_key: str | None
    attributes: Json | None
    model_config: Json | None
    placed_at: float | None
    started_at: float | None
    first_step_at: float | None
    ended_at: float | None
    unreachable_since: float | None
    last_output_at: float | None
    exit_code: int | None
    exit_signal: int | None
    step: int | None
    share: float | None
    loss: float | None
    tok_s: float | None
    dt_ms: float | None
    epoch: float | None
    remaining_s: float | None
    val_bpb: float | None
    training_s: float | None
    total_s: float | None
    wall_s: float | None
    peak_vram_mb: float | None
    mfu_reported: float | None
    flops_per_token: float | None
    tokens_m: float | None
    num_steps: int | None
    params_m: float | None
    depth: int | None
    torch: str | None
    driver: str | None
    evaluator: str | None
    data_hash: str | None
    trust: str | None
    verified_bpb: float | None
    trust_why: str | None
    log_offset: int
    events_offset: int
    log_bytes: int | None
    log_dropped: int | None

    @property
    def live(self) -> bool:
        """Whether the run holds a slot, as far as is known; a standby only waits for one."""
        return self.phase in LIVE_PHASES and not self.waiting

    @property
    def waiting(self) -> bool:
        """Whether the run waits for a slot: in the queue, for approval, or handed ahead to a busy GPU as its standby."""
        return self.phase in (Phase.QUEUED, Phase.PROPOSED) or (self.phase == Phase.STARTING and self.stage == Stage.STANDBY)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the run."""
        return self.phase == Phase.ENDED


@dataclass(frozen=True, slots=True)
class Wave:
    """Runs submitted together; `factors` maps a constant to its values, in order."""

    id: str
    seq: int
    created_at: float
    kind: str
    title: str | None
    hypothesis: str | None
    base_sha: str
    base_run: str | None
    factors: dict[str, list[Any]]
    repeats: int
    budget_s: float
    agent: str


@dataclass(frozen=True, slots=True)
class Point:
    """One progress line kept: smoothed training loss in nats at a step."""

    step: int
    t: float | None
    share: float | None
    loss: float | None
    tok_s: float | None
    dt_ms: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device of one host, known by UUID; `telemetry` is the newest sampler line."""

    uuid: str
    host: str
    idx: int | None
    name: str
    mem_total_mib: int | None
    state: str
    reason: str | None
    since: float
    run_id: str | None
    standby_run_id: str | None
    holder: Json | None
    telemetry: Json | None


@dataclass(frozen=True, slots=True)
class Host:
    """One machine; `paused` and `drain` are wanted, the rest observed."""

    name: str
    kind: str
    paused: int
    drain: int
    state: str
    since: float
    error: str | None
    boot_id: str | None
    info: Json | None
    checked_at: float | None
    disk_free_mib: int | None


@dataclass(frozen=True, slots=True)
class Flag:
    """A machine-made warning with its evidence, raised once per (subject, kind)."""

    subject: str
    kind: str
    severity: str
    evidence: str
    raised_at: float
    cleared_at: float | None


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the audit trail."""

    id: int
    at: float
    who: str
    verb: str
    subject: str | None
    why: str | None
    detail: Json | None


@dataclass(frozen=True, slots=True)
class Request:
    """Something only the daemon can answer, asked by a client."""

    id: int
    verb: str
    args: Json
    who: str
    state: str
    progress: str | None
    result: Json | None
    error: Json | None
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One second of one GPU, kept for the run it belongs to."""

    gpu_uuid: str
    at: int
    run_id: str | None
    util_pct: float | None = None
    mem_used_mib: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temp_c: float | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    throttle: int | None = None
    tok_s: float | None = None


@dataclass(frozen=True, slots=True)
class DaemonRow:
    """Who serves the lab: the daemon's identity and last beat."""

    pid: int
    boot_id: str
    started_at: float
    beat_at: float
    version: str
    note: str | None


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for one run (or `seeds` repeats of it); exactly one of `source`, `path`, `diff` and `base` says what to run.

    `source` is a script's text, `path` a file of the trainer folder, `base` a run id (or None for the trainer's own script), `diff` a
    unified diff against `base`.
    """

    source: str | None = None
    path: str | None = None
    diff: str | None = None
    base: str | None = None
    overrides: Json = field(default_factory=dict)
    budget_s: float | None = None
    hypothesis: str | None = None
    parent: str | None = None
    purpose: str = Purpose.EXPERIMENT
    gpu_type: str | None = None
    host: str | None = None
    priority: float = 0.0
    seeds: int = 1
    allow_duplicate: bool = False
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """A request for many runs: the grid of `factors`, or the listed `cells`, each `repeats` times."""

    factors: dict[str, list[Any]] = field(default_factory=dict)
    cells: list[Json] = field(default_factory=list)
    base: str | None = None
    source: str | None = None
    path: str | None = None
    overrides: Json = field(default_factory=dict)
    repeats: int = 1
    budget_s: float | None = None
    title: str | None = None
    hypothesis: str | None = None
    gpu_type: str | None = None
    host: str | None = None
    priority: float = 0.0
    purpose: str = Purpose.EXPERIMENT
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """What a submission did: new (or, on a replay, the same) ids, and what the caller should know."""

    run_ids: list[str]
    wave_id: str | None
    notes: list[str]
    replay: bool = False
