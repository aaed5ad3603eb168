"""Looking after hosts, on request: `check` says what a host is and lacks, `setup` makes it ready. Called by the daemon only, which
holds the connections.

A check has a deadline and never raises: what cannot be told is a check of its own that failed. `setup` runs on the host under a
supervisor, so that a lost link or a restarted daemon does not stop it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from runner import hostsetup, measuring
from runner.engines.local import LocalEngine
from runner.engines.ssh import SshEngine
from runner.errors import HostError, OvernightError
from runner.onhost import inspecting
from runner.research.surroundings import MODULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.engines.base import Engine, HostReport
    from runner.lab import Lab
    from runner.policy import HostPolicy

CONNECT_LIMIT_S = 25.0
SAMPLES_LIMIT_S = 8.0
PROBE_LIMIT_S = 60.0
SKEW_NOTED_S = 2.0
Check = dict[str, Any]


def verdict(name: str, ok: bool | None, text: str, value: Any = None) -> Check:
    """One line of the table; `ok` is None where it does not apply."""
    return {"name": name, "ok": ok, "value": value, "text": text}


async def check(host: HostPolicy, engine: Engine | None) -> dict[str, Any]:
    """The `hosts check` object of one host (FORMAT.md section 5)."""
    began = time.time()
    checks: list[Check] = []
    report: HostReport | None = None
    failure: OvernightError | None = None
    try:
        if engine is None:
            raise HostError(f"{host.name} has no engine.", next_step="See `overnight daemon status` for the reason.")
        report = await reach(engine)
        checks = await look(host, engine, report)
    except OvernightError as problem:
        failure = problem
        unknown = problem.code == "host_key"
        checks = [verdict("host key", False, problem.message) if unknown else verdict("reachable", False, problem.message)]
    bad = next((one for one in checks if one["ok"] is False), None)
    return {
        "name": host.name,
        "kind": host.kind,
        "state": "down" if failure else "unfit" if bad else "up",
        "since_s": round(time.time() - began, 1),
        "error": failure.message if failure else bad["text"] if bad else None,
        "next": failure.next_step if failure else advice(host, bad),
        "checks": checks,
        MODULES: report.info.get(MODULES) if report else None,
        "gpus": [
            {"uuid": s.uuid, "name": s.name, "index": s.index, "mem_total_mib": s.mem_total_mib} for s in (report.slots if report else [])
        ],
    }


async def setup(host: HostPolicy, engine: Engine | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Make a host ready and see that it is: {host, python, steps, notes, checks, text, log}. Raises HostError when a step fails, or when
    the check still finds the host unfit afterwards.
    """
    done = await hostsetup.setup(host, engine, progress)
    progress("checking it")
    report = await check(host, engine)
    if report["error"]:
        raise HostError(
            f"All steps of setting up {host.name} are done, and it is still not fit: {report['error']}.", next_step=report["next"]
        )
    text = " ".join([f"{host.name} is ready; its runs use {done['python']}.", *(f"Note: {note}." for note in done["notes"])])
    return {**done, "checks": report["checks"], MODULES: report[MODULES], "text": text}


def advice(host: HostPolicy, bad: Check | None) -> str:
    """The next thing to try."""
    if bad is None:
        return ""
    if bad["name"] in ("python", "torch", "attention") and host.kind == "local":
        return f"Set python of {host.name} in hosts.toml to one that can do this; as it is, runs use the one Overnight runs with."
    if bad["name"] in ("python", "torch", "attention") and host.python is not None:
        return (
            f"Set python of {host.name} in hosts.toml to an interpreter that can do this, or leave it out: `hosts setup` makes a venv then."
        )
    if bad["name"] in ("python", "torch", "data"):
        return f"Run `overnight hosts setup {host.name}`, or set python of {host.name} in hosts.toml to an interpreter that has torch."
    if bad["name"] == "disk":
        return f"Free space on {host.name}, or lower its min_free_disk_mib."
    if bad["name"] == "GPUs" and "hosts.toml gives" in bad["text"]:
        return f"Correct gpus of {host.name} in hosts.toml."
    if bad["name"] in ("GPUs", "GPU driver"):
        return f"Try nvidia-smi on {host.name}."
    return ""


async def reach(engine: Engine) -> HostReport:
    """The host's report once it is connected and its GPUs were read; raises the reason when that takes too long."""
    link = getattr(engine, "link", None)
    deadline = time.monotonic() + CONNECT_LIMIT_S
    before = link.begun if link is not None else 0  # what an earlier attempt found may have been mended since
    if link is not None:
        link.retry_now()
    while True:
        report = (await engine.capacity())[0]
        if report.up and (report.slots or time.monotonic() > deadline - CONNECT_LIMIT_S + SAMPLES_LIMIT_S):
            return report
        settled = link is not None and link.attempts > before and link.error is not None and link.error.code == "host_key"
        if settled or time.monotonic() > deadline:
            raise (
                link.error if link is not None and link.error is not None else HostError(report.error or f"{report.host} does not answer.")
            )
        await asyncio.sleep(0.1)


async def look(host: HostPolicy, engine: Engine, report: HostReport) -> list[Check]:
    """All checks of a host that answers."""
    checks = [verdict("reachable", True, where(host, report), report.info.get("hostname"))]
    if host.kind == "fake":
        return [*checks, gpus(report)]
    if isinstance(engine, SshEngine):
        checks.append(verdict("host key", True, "as in known_hosts"))
        checks.append(clock(report))
    uuids = [slot.uuid for slot in report.slots if not slot.uuid.startswith("CPU:")]
    asked = {"python": report.info["python"], "gpus": uuids, "lock_dir": report.info["lock_dir"], "data_dir": report.info["data_dir"]}
    try:
        found = await ask(engine, {**asked, "probe_limit_s": PROBE_LIMIT_S})
    except (OvernightError, asyncio.TimeoutError) as problem:
        return [*checks, gpus(report), verdict("python", False, f"the host could not be asked: {problem or 'no answer in time'}")]
    report.info[MODULES] = (found.get("run_python") or {}).get("modules")
    checks += [
        gpus(report),
        driver(report, found),
        *interpreter(found, bool(uuids), torch_needed(engine)),
        disk(host, report, engine),
        data(report, found),
    ]
    checks += [*measured(report), *strangers(report), *holders(engine, found)]
    return checks


async def ask(engine: Engine, args: dict[str, Any]) -> dict[str, Any]:
    """onhost.inspecting on the machine itself."""
    if isinstance(engine, SshEngine):
        return await engine.inspect(**args)
    if isinstance(engine, LocalEngine):
        work = asyncio.to_thread(inspecting.inspect, str(engine.lab_dir), args)
        return await asyncio.wait_for(work, PROBE_LIMIT_S + 10)
    raise HostError("Hosts of this kind have nothing to look into.")


def where(host: HostPolicy, report: HostReport) -> str:
    """Which machine answered."""
    info = report.info
    return f"{info.get('hostname') or host.name}, Linux {info.get('kernel') or '?'}, {info.get('cpu_cores') or '?'} cores"


def clock(report: HostReport) -> Check:
    """The host's clock against ours: a difference is allowed for, and worth knowing."""
    skew = float(report.info.get("clock_skew_s") or 0)
    if abs(skew) < SKEW_NOTED_S:
        return verdict("clock", True, f"within {SKEW_NOTED_S:g} s of this machine's", skew)
    return verdict(
        "clock", None, f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's; times shown are corrected", skew
    )


def gpus(report: HostReport) -> Check:
    """What the sampler sees."""
    if not report.slots:
        return verdict("GPUs", False, report.error or "no GPU, and nothing read yet", 0)
    if report.slots[0].uuid.startswith("CPU:"):
        return verdict("GPUs", None, f"none: one slot on {report.slots[0].name}", 0)
    names: dict[str, int] = {}
    for slot in report.slots:
        names[slot.name] = names.get(slot.name, 0) + 1
    lost = [f"{s['uuid']} ({s['error']})" for s in report.samples if s.get("error")]
    text = ", ".join(f"{n} × {name}" for name, n in names.items())
    if lost:
        return verdict("GPUs", False, f"{text}; cannot be read: {', '.join(lost)}", len(report.slots))
    return verdict("GPUs", report.error is None, report.error or text, len(report.slots))


def driver(report: HostReport, found: dict[str, Any]) -> Check:
    """How the GPUs are read."""
    sample = next(iter(report.samples), {})
    version = sample.get("driver") or found.get("driver")
    if not version:
        return verdict("GPU driver", None, "none")
    source = "NVML" if sample.get("source") == "nvml" else str(sample.get("source") or "nothing")
    return verdict("GPU driver", True, f"{version}, read through {source}", version)


def torch_needed(engine: Engine) -> bool:
    """Whether the runs of this lab need torch."""
    lab: Lab | None = getattr(engine, "lab", None)
    return lab is None or hostsetup.needs_torch(lab.policy().trainer.folder)


def interpreter(found: dict[str, Any], has_gpus: bool, needed: bool) -> list[Check]:
    """Python, torch, CUDA and attention of the interpreter that runs use; torch is no fault where the trainer does not need it."""
    checks = _interpreter(found, has_gpus)
    if needed:
        return checks
    unneeded = " (this trainer does not import torch)"
    return [c if c["name"] == "python" or c["ok"] else {**c, "ok": None, "text": c["text"] + unneeded} for c in checks]


def _interpreter(found: dict[str, Any], has_gpus: bool) -> list[Check]:
    probe = found.get("run_python") or {"error": "no interpreter is known"}
    if probe.get("error"):
        return [verdict("python", False, str(probe["error"]))]
    checks = [verdict("python", True, str(probe["python"]), probe["python"])]
    if probe.get("torch_error"):
        return [*checks, verdict("torch", False, f"cannot be imported: {probe['torch_error']}")]
    torch = f"{probe['torch']}, CUDA {probe.get('torch_cuda') or 'none'}"
    if not has_gpus:
        return [*checks, verdict("torch", True, torch, probe["torch"])]
    if not probe.get("cuda_available"):
        why = "this build has no CUDA" if not probe.get("torch_cuda") else f"it does not get on with driver {found.get('driver') or '?'}"
        return [*checks, verdict("torch", False, f"{torch}: sees no GPU, {why}", probe["torch"])]
    missing = [c for c in probe.get("capability") or [] if not supported(c, probe.get("arch_list") or [])]
    if missing:
        return [*checks, verdict("torch", False, f"{torch}: has no kernels for compute capability {missing[0]}", probe["torch"])]
    works = probe.get("attention") or []
    attention = verdict("attention", bool(set(works) - {"math"}), f"works: {', '.join(works) or 'nothing'}", works)
    return [*checks, verdict("torch", True, torch, probe["torch"]), attention]


def supported(capability: str, arch_list: list[str]) -> bool:
    """Whether a torch build has code for a GPU: its own, or an older one of the same major version (binary compatible), or PTX."""
    major, minor = (int(part) for part in capability.split("."))
    for arch in arch_list:
        digits = "".join(ch for ch in arch.split("_")[-1] if ch.isdigit())
        if not digits:
            continue
        have_major, have_minor = int(digits[:-1] or 0), int(digits[-1])
        if arch.startswith("compute") and (have_major, have_minor) <= (major, minor):
            return True
        if have_major == major and have_minor <= minor:
            return True
    return not arch_list


def disk(host: HostPolicy, report: HostReport, engine: Engine) -> Check:
    """Free disk against the floor below which no run starts."""
    floor = host.min_free_disk_mib if host.min_free_disk_mib is not None else getattr(engine, "floor_mib", 0)
    free = report.disk_free_mib
    if free is None:
        return verdict("disk", None, "free space unknown")
    return verdict("disk", free >= floor, f"{size(free)} free, floor {size(floor)}", free)


def size(mib: int) -> str:
    """MiB as people say it."""
    return f"{mib} MiB" if mib < 10 * 1024 else f"{mib / 1024:.1f} GiB"


def data(report: HostReport, found: dict[str, Any]) -> Check:
    """Whether data and tokenizer were prepared. A trainer that prepares its own at the first run needs none."""
    names = found.get("data_files")
    if not names:
        return verdict("data", None, f"none in {report.info['data_dir']} yet; `hosts setup` or the first run prepares it")
    return verdict("data", True, f"{len(names)} files in {report.info['data_dir']}", names[:10])


def measured(report: HostReport) -> list[Check]:
    """What the trainer's preflight measured on the GPU models of this host."""
    known = {name: measuring.found_on(report.info, name) for name in dict.fromkeys(slot.name for slot in report.slots)}
    return [verdict("preflight", True, measuring.said(one), one.get("matmul_flops")) for one in known.values() if one is not None]


def strangers(report: HostReport) -> list[Check]:
    """Processes on the GPUs right now; whose they are is for people to see."""
    seen = [
        f"GPU {s.get('index')}: pid {p['pid']} {p.get('name') or '?'} ({p.get('user') or '?'}, {p.get('used_mib') or '?'} MiB)"
        for s in report.samples
        for p in s.get("processes") or []
    ]
    return [verdict("GPU processes", None, "; ".join(seen[:8]), len(seen))] if seen else []


def holders(engine: Engine, found: dict[str, Any]) -> list[Check]:
    """GPUs that another lab or user has locked."""
    ours = getattr(engine, "lab_id", None)
    held = [
        f"{uuid} is locked by {note.get('user') or 'somebody'} (run {note.get('run_id') or '?'} of another lab)"
        for uuid, note in (found.get("holders") or {}).items()
        if note is not None and note.get("lab_id") != ours
    ]
    return [verdict("locks", None, "; ".join(held), len(held))] if held else []
