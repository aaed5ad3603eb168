"""Runs that look alive but do something stupid: detectors, each with evidence, computable from log, telemetry and clock.

Pure: a `View` of one run (or of the lab) in, findings out. Raising, clearing and rate limits belong to the caller (watch.py); none of them
stops a run unless the policy's `kill_on_flags` names it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from runner.records import Json, Point, Run, Severity, Stage
from runner.text import ago

STEPS_WITHOUT_NEWS = 5  # median step times; upstream prints every step
SILENT_S = 30.0
SLOW = 0.6  # of the class's median speed at that configuration
CPU_SLOW = 0.8  # a CPU host's budget is meaningless sooner: 5 % of speed is 0.006 val_bpb there
FLAT_SHARE = 0.30
NEIGHBOUR_MIB = 64  # less is a monitor's or a display's
LOW_MFU = 5.0  # percent: nobody's training step is that bad on a path that works
FLOOR_SHARE = 0.25  # of the rate that a preflight of this host measured
WALL_RATIO, WALL_EXTRA_S = 2.0, 60.0
CLIFF = 0.8
USEFUL_EPOCHS = 4  # so often repeated text is about as good as new (Muennighoff et al. 2023, arXiv 2305.16264)
# NVML clocks-event reasons (nvml.h): 0x4 software power cap; the others are slowdowns nobody wants.
POWER_CAP, SLOWDOWNS = 0x4, {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


# What `kill_on_flags` may name: flags about a run that still goes on.
RUN_KINDS = (
    "stalled", "no_output", "slow", "throttled", "power_capped", "pcie_degraded", "ecc_errors", "shared_gpu", "flat_loss", "nan",
    "unchanged_source", "same_model", "more_epochs", "evaluation_shrunk", "mfu_impossible", "mfu_low", "batch_cliff", "cpu_contention",
    "no_first_step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """A warning with its evidence, one sentence."""

    kind: str
    severity: str
    evidence: str


@dataclass(frozen=True, slots=True)
class View:
    """What detectors see of one run. `peers` are finished runs of its class and configuration, `class_runs` of its class and budget."""

    run: Run
    now: float
    points: Sequence[Point] = ()
    sample: Json | None = None
    mfu_percent: float | None = None
    class_mfu: Sequence[float] = ()
    peer_tok_s: Sequence[float] = ()
    smaller_batch: tuple[str, int, float] | None = None  # (run id, its device batch, its tok_s) of the same config but a smaller one
    baseline_epochs: float | None = None
    measured_flops: float | None = None  # of this host's preflight
    achieved_flops: float | None = None
    same_as: str | None = None  # an earlier run with the same effective source
    same_model: tuple[str, str] | None = None  # an earlier run whose sizes round to the very same model, and the sizes
    evaluated_share: float | None = None  # of the evaluation set, at this device batch
    cpu_load: tuple[float, int] | None = None  # (load average, cores) of a CPU host


Detector = Callable[[View], Iterator[Finding]]


def detect(view: View) -> list[Finding]:
    """Every finding of every detector about one run."""
    return [finding for detector in DETECTORS for finding in detector(view)]


def stalled(v: View) -> Iterator[Finding]:
    """(a) The GPU is busy, and no step has come for five median step times."""
    run = v.run
    if not _training(run) or run.last_output_at is None or v.sample is None or run.dt_ms is None:
        return
    steps = [p.dt_ms for p in v.points[-50:] if p.dt_ms is not None]
    step_s = (statistics.median(steps) if steps else run.dt_ms) / 1000
    quiet, util = v.now - run.last_output_at, v.sample.get("util_pct")
    if isinstance(util, (int, float)) and util >= 50 and quiet > max(STEPS_WITHOUT_NEWS * step_s, 5.0):
        yield Finding(
            "stalled",
            Severity.WARN,
            f"no step for {ago(quiet)}, {quiet / max(step_s, 1e-9):.0f} times its step of {step_s:.2f} s, "
            f"while the GPU is {util:.0f} % busy",
        )


def silent(v: View) -> Iterator[Finding]:
    """(l) No bytes for half a minute after the first step."""
    run = v.run
    if run.phase == "running" and run.stage != Stage.EVALUATING and (run.step or 0) >= 1 and run.last_output_at is not None:
        quiet = v.now - run.last_output_at
        allowed = max(SILENT_S, STEPS_WITHOUT_NEWS * (run.dt_ms or 0) / 1000)
        if quiet > allowed:
            yield Finding("no_output", Severity.WARN, f"no output for {ago(quiet)} since step {run.step}")


def slow(v: View) -> Iterator[Finding]:
    """(b) Tokens per second far below what its class does at that configuration; throttle reasons say why where they can."""
    run = v.run
    if run.tok_s is None or len(v.peer_tok_s) < 2 or (run.share or 0) < 0.05:
        return
    usual = statistics.median(v.peer_tok_s)
    cpu = (run.gpu_uuid or "").startswith("CPU")
    if run.tok_s < (CPU_SLOW if cpu else SLOW) * usual:
        why = "; ".join(_throttles(v.sample)) or "a fallback attention path, eager mode or a neighbour would look like this"
        yield Finding(
            "slow",
            Severity.WARN,
            f"{run.tok_s:,.0f} tokens/s, {100 * run.tok_s / usual:.0f} % of the median {usual:,.0f} "
            f"of {len(v.peer_tok_s)} runs of its class at this configuration ({why})",
        )


def held_back(v: View) -> Iterator[Finding]:
    """Throttled, power-capped below the card's default, or on a degraded PCIe link, while it trains."""
    if v.sample is None or not _training(v.run):
        return
    reasons = _throttles(v.sample)
    if reasons:
        yield Finding(
            "throttled",
            Severity.WARN,
            f"the GPU slows itself down ({', '.join(reasons)}) at {_show(v.sample, 'temp_c', '°C')}, "
            f"{_show(v.sample, 'sm_mhz', ' MHz')} of {_show(v.sample, 'sm_max_mhz', ' MHz')}",
        )
    limit, default = v.sample.get("power_limit_w"), v.sample.get("power_default_w")
    if limit and default and limit < 0.95 * default:
        yield Finding(
            "power_capped", Severity.INFO, f"its power limit is {limit:.0f} W of the card's {default:.0f} W: a low MFU is honest here"
        )
    gen, most, width, widest = (v.sample.get(k) for k in ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max"))
    busy = (v.sample.get("util_pct") or 0) >= 50  # an idle link lowers its generation to save power
    if busy and ((gen and most and gen < most) or (width and widest and width < widest)):
        yield Finding("pcie_degraded", Severity.WARN, f"its PCIe link runs at gen {gen} x{width}, the card can do gen {most} x{widest}")


def neighbours(v: View) -> Iterator[Finding]:
    """Other processes on the run's GPU, and memory errors of the card: both make its figures suspect."""
    if v.sample is None or not v.run.live:
        return
    named = [p for p in v.sample.get("processes") or [] if p.get("name")]  # a container does not see whose the others are
    others = [p for p in named if p.get("run") != v.run.id and (p.get("used_mib") or 0) >= NEIGHBOUR_MIB]
    if others:
        said = ", ".join(f"pid {p['pid']} {p['name']} ({p.get('user') or '?'}, {p['used_mib']} MiB)" for p in others[:3])
        yield Finding("shared_gpu", Severity.WARN, f"it does not have the GPU to itself: {said}")
    errors = v.sample.get("ecc_uncorrected")
    if errors:
        yield Finding("ecc_errors", Severity.BAD, f"the GPU counts {errors} uncorrected memory errors since its driver was loaded")


def flat(v: View) -> Iterator[Finding]:
    """(c) Loss flat or rising for 30 % of the budget."""
    known = [(p.share, p.loss) for p in v.points if p.share is not None and p.loss is not None]
    if not known or not _training(v.run) or known[-1][0] < FLAT_SHARE + 0.05:
        return
    share, now = known[-1]
    recent = [(s, x) for s, x in known if s >= share - FLAT_SHARE]
    before = [x for s, x in known if s <= share - FLAT_SHARE + 1e-9][-3:]
    if len(recent) < 5 or not before:
        return
    then = statistics.median(before)
    lowest = statistics.median([x for _, x in recent[-5:]])
    if lowest >= then * (1 - 0.002):
        yield Finding(
            "flat_loss", Severity.WARN, f"the loss went from {then:.4f} to {now:.4f} over the last {100 * FLAT_SHARE:.0f} % of the budget"
        )


def not_a_number(v: View) -> Iterator[Finding]:
    """(d) The last progress lines hold no finite loss."""
    last = v.points[-3:]
    if len(last) == 3 and all(p.loss is None for p in last):
        yield Finding("nan", Severity.BAD, f"no finite loss in the last steps (step {last[-1].step})")


def unchanged(v: View) -> Iterator[Finding]:
    """(e) An edit was announced, and the source is in effect that of an earlier run."""
    run = v.run
    if v.same_as and run.purpose in ("experiment", "tune") and (run.hypothesis or run.overrides):
        yield Finding("unchanged_source", Severity.WARN, f"in effect the same source as {v.same_as}, though a change was announced")


def one_model(v: View) -> Iterator[Finding]:
    """(f) Its sizes round to a model that was measured before."""
    if v.same_model is not None:
        other, sizes = v.same_model
        said = f"{sizes} gives the very model of {other} (as both printed it): their difference is noise"
        yield Finding("same_model", Severity.WARN, said)


def wall_time(v: View) -> Iterator[Finding]:
    """(g) Much more wall time than training time."""
    run = v.run
    if run.wall_s is None or not run.training_s:
        return
    if run.wall_s > WALL_RATIO * run.training_s and run.wall_s - run.training_s > WALL_EXTRA_S:
        yield Finding(
            "wall_over_training",
            Severity.WARN,
            f"{run.wall_s:.0f} s of wall time for {run.training_s:.0f} s of counted training: {run.wall_s / run.training_s:.1f} times",
        )


def epochs(v: View) -> Iterator[Finding]:
    """(j) It sees the data again where the baseline did not, or more often than repeated text teaches anything."""
    run, first = v.run, v.baseline_epochs
    if run.epoch is None:
        return
    if run.epoch > USEFUL_EPOCHS:
        known = first is not None and first > USEFUL_EPOCHS  # the baseline said so already
        yield Finding(
            "more_epochs",
            Severity.INFO if known else Severity.WARN,
            f"it is in epoch {run.epoch:g}: beyond {USEFUL_EPOCHS} passes repeated text teaches ever less, and validation gets worse while "
            "training loss falls; give it more text, a shorter budget or a smaller model",
        )
    elif first is not None and run.epoch >= 2 > first:
        yield Finding(
            "more_epochs",
            Severity.INFO,
            f"it is in epoch {run.epoch:g}, the baseline ended in epoch {first:g}: it repeats data, and its training loss flatters it",
        )


def evaluation(v: View) -> Iterator[Finding]:
    """The evaluation set shrinks with a device batch that does not divide it."""
    if v.evaluated_share is not None and v.evaluated_share < 0.995:
        yield Finding(
            "evaluation_shrunk",
            Severity.WARN,
            f"its device batch makes the evaluation skip {100 * (1 - v.evaluated_share):.1f} % "
            "of the validation tokens: the result is not quite comparable",
        )


def mfu(v: View) -> Iterator[Finding]:
    """MFU that cannot be, that is far below the class, or below what any working path gives; the floor needs no known peak."""
    run, value = v.run, v.mfu_percent
    if (run.share or 0) < 0.05:
        return
    floor = _below_floor(v)
    if value is None:
        if floor is not None:
            yield floor
        return
    if value > 100:
        yield Finding("mfu_impossible", Severity.WARN, f"an MFU of {value:.0f} % cannot be: the printed FLOPs or tokens are wrong")
        return
    if len(v.class_mfu) >= 3 and value < statistics.median(v.class_mfu) / 3:
        usual = statistics.median(v.class_mfu)
        yield Finding("mfu_low", Severity.WARN, f"an MFU of {value:.1f} %, the median of its class is {usual:.1f} %")
    elif floor is not None:
        yield floor
    elif value < LOW_MFU and not v.class_mfu:
        yield Finding(
            "mfu_low", Severity.WARN, f"an MFU of {value:.1f} % on a first run: a broken attention or compile path looks like this"
        )


def _below_floor(v: View) -> Finding | None:
    """Tokens a second far below what the measured matrix rate of the GPU allows, on the very first run, too."""
    if not (v.measured_flops and v.achieved_flops and v.run.tok_s and v.achieved_flops < FLOOR_SHARE * v.measured_flops):
        return None
    expected = FLOOR_SHARE * v.measured_flops * v.run.tok_s / v.achieved_flops
    return Finding(
        "mfu_low",
        Severity.WARN,
        f"{v.run.tok_s:,.0f} tokens/s, where at least {expected:,.0f} were to be expected: preflight measured "
        f"{v.measured_flops / 1e12:.1f} TFLOP/s of matrix products on this GPU; look at attention and compile",
    )


def cliff(v: View) -> Iterator[Finding]:
    """A larger device batch that gives fewer tokens per second."""
    run = v.run
    own = run.constants.get("DEVICE_BATCH_SIZE")
    if v.smaller_batch is None or run.tok_s is None or not isinstance(own, int):
        return
    other, batch, tok_s = v.smaller_batch
    if v.peer_tok_s and statistics.median(v.peer_tok_s) >= CLIFF * tok_s:
        return  # others are fast at this very batch: something else holds this run back
    if run.tok_s < CLIFF * tok_s:
        yield Finding(
            "batch_cliff",
            Severity.WARN,
            f"device batch {own} gives {run.tok_s:,.0f} tokens/s, batch {batch} gave {tok_s:,.0f} ({other}): it is beyond the cliff",
        )


def contention(v: View) -> Iterator[Finding]:
    """Other work on a CPU host makes its time budget meaningless."""
    if v.cpu_load is not None and (v.run.gpu_uuid or "").startswith("CPU") and v.run.phase == "running":
        load, cores = v.cpu_load
        if load > 1.5 * cores + 1:
            yield Finding(
                "cpu_contention", Severity.WARN, f"a load of {load:.1f} on {cores} cores: a wall-clock budget buys fewer steps than usual"
            )


def long_compile(v: View) -> Iterator[Finding]:
    """Started long ago, and no first step yet."""
    run = v.run
    if run.phase == "running" and run.started_at is not None and not run.step and run.first_step_at is None:
        waited = v.now - run.started_at
        if waited > max(300.0, run.budget_s):
            yield Finding("no_first_step", Severity.WARN, f"no first step {ago(waited)} after its start: it compiles, downloads or hangs")


DETECTORS: tuple[Detector, ...] = (
    stalled,
    silent,
    slow,
    held_back,
    neighbours,
    flat,
    not_a_number,
    unchanged,
    one_model,
    wall_time,
    epochs,
    evaluation,
    mfu,
    cliff,
    contention,
    long_compile,
)


def _training(run: Run) -> bool:
    return run.phase == "running" and (run.step or 0) >= 1 and run.stage in (None, Stage.TRAINING)


def _throttles(sample: Json | None) -> list[str]:
    bits = (sample or {}).get("throttle")
    return [name for bit, name in SLOWDOWNS.items() if bits & bit] if isinstance(bits, int) else []


def _show(sample: Json, key: str, unit: str) -> str:
    value = sample.get(key)
    return f"{value:.0f}{unit}" if isinstance(value, (int, float)) and math.isfinite(value) else "-"


@dataclass(frozen=True, slots=True)
class LabView:
    """What the lab's own detectors see."""

    now: float
    queued: int
    paused: bool
    idle: Sequence[tuple[str, float]] = ()  # (GPU, seconds idle)
    blocked: bool = False  # the queue waits for a GPU type that none of the idle ones is
    last_agent_call_s: float | None = None
    gains: Sequence[tuple[float, str]] = ()  # (gain over the best before it, badge) of experiments, oldest first
    foreign: Sequence[tuple[str, str, str]] = ()  # (GPU UUID, state, reason)


IDLE_S = 60.0
AGENT_QUIET_S = 900.0
FLAT_GAINS = 20


def detect_lab(v: LabView) -> list[tuple[str, Finding]]:
    """Findings about the lab and its GPUs: (subject, finding)."""
    found: list[tuple[str, Finding]] = []
    idle = [(gpu, s) for gpu, s in v.idle if s > IDLE_S]
    if v.queued and idle and not v.paused and not v.blocked:
        said = f"GPUs stand idle for {ago(IDLE_S)} or more while runs wait"
        found.append(("lab", Finding("idle_with_queue", Severity.WARN, said)))
    if not v.queued and idle and v.last_agent_call_s is not None and v.last_agent_call_s > AGENT_QUIET_S and not v.paused:
        said = f"GPUs stand idle, nothing is queued, and no agent has called for {ago(AGENT_QUIET_S)} or more: it may wait for an answer"
        found.append(("lab", Finding("agent_quiet", Severity.WARN, said)))
    recent = v.gains[-FLAT_GAINS:]
    if len(recent) == FLAT_GAINS and all(badge == "within noise" or gain <= 0 for gain, badge in recent):
        said = f"none of the last {FLAT_GAINS} experiments beat the best beyond noise: try another kind, or a longer budget"
        found.append(("lab", Finding("diminishing_returns", Severity.INFO, said)))
    found += [(uuid, Finding("foreign_process", Severity.WARN, reason)) for uuid, state, reason in v.foreign if state == "foreign"]
    found += [(uuid, Finding("orphan_process", Severity.BAD, reason)) for uuid, state, reason in v.foreign if state == "quarantined"]
    return found
