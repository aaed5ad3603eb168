"""From a queued row to a run directory ready to start: work/ materialised, spec.json written, renamed into place whole.

Only files of this machine are touched; the engine carries them to where they run. A directory that was staged before a crash is used
again as it is.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import measuring, verifying
from runner.engines import dirs
from runner.errors import LabError
from runner.materialise import materialise
from runner.records import Purpose

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.engines.base import Slot
    from runner.lab import Lab
    from runner.policy import HostPolicy
    from runner.records import Run

STANDBY_WAIT_S = 7 * 86400.0  # a standby waits for its GPU until it is taken back
IMPORTS_TORCH = re.compile(r"^\s*(?:import|from)\s+torch\b", re.MULTILINE)


def stage_run(lab: Lab, run: Run, slot: Slot, host: HostPolicy, info: Mapping[str, Any], *, standby: bool) -> Path:
    """Make `runs/ID` ready for the engine; returns it. `info` is the report of the host it will run on.

    Raised: RequestError when the source or policy cannot be used, LabError when the disk cannot be written.
    """
    final = lab.run_dir(run.id)
    text = lab.source_text(run.source_sha)
    spec = spec_of(lab, run, slot, host, info, text, standby=standby)
    if _staged(final, spec):
        return final
    tmp = lab.runs_dir / f".stage-{run.id}"
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True, mode=0o700)
        materialise(lab.policy().trainer, text, run.budget_s, tmp / "work")
        if run.purpose == Purpose.VERIFY:
            verifying.deliver(lab.policy().trainer, tmp / "work")
        (tmp / "spec.json").write_bytes(dirs.spec_bytes(spec))
        (tmp / "spec.json").chmod(0o600)
        shutil.rmtree(final, ignore_errors=True)
        tmp.rename(final)
    except OSError as error:
        shutil.rmtree(tmp, ignore_errors=True)
        raise LabError(
            f"The directory of {run.id} cannot be written in {lab.runs_dir}: {error.strerror or error}.",
            next_step="Free some disk space; the run waits in the queue.",
        ) from error
    return final


def spec_of(lab: Lab, run: Run, slot: Slot, host: HostPolicy, info: Mapping[str, Any], text: str, *, standby: bool) -> dict[str, Any]:
    """spec.json of FORMAT.md section 3, with the policy's limits."""
    policy = lab.policy()
    limits = policy.limits
    return dirs.build_spec(
        host,
        info,
        slot,
        run_id=run.id,
        lab_id=str(lab.store.meta("lab_id")),
        command=_command(lab, run, slot, info),
        budget_s=run.budget_s,
        time_limit_s=run.budget_s if run.purpose == Purpose.PREFLIGHT else run.budget_s * limits.wall_factor + limits.wall_extra_s,
        grace_s=limits.grace_s,
        max_log_mib=limits.max_log_mib,
        min_free_mib=limits.min_free_disk_mib if host.min_free_disk_mib is None else host.min_free_disk_mib,
        wait_lock_s=STANDBY_WAIT_S if standby else 0.0,
        warm=["torch"] if standby and IMPORTS_TORCH.search(text) else None,
    )


def _command(lab: Lab, run: Run, slot: Slot, info: Mapping[str, Any]) -> list[str]:
    """What the run executes: the trainer's command, or the program that its purpose is about."""
    if run.purpose == Purpose.VERIFY:
        return verifying.command_of(lab, run, slot, info)
    return measuring.command_of(run) if run.purpose == Purpose.PREFLIGHT else lab.policy().trainer.command


def unstage(lab: Lab, run_id: str) -> None:
    """Remove the directory of a run that never started, in a way that never leaves half of it under its name."""
    tmp = lab.runs_dir / f".stage-{run_id}"
    shutil.rmtree(tmp, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        lab.run_dir(run_id).rename(tmp)
    shutil.rmtree(tmp, ignore_errors=True)


def _staged(final: Path, spec: dict[str, Any]) -> bool:
    """Whether an earlier attempt left a whole directory for the same slot."""
    try:
        found = json.loads((final / "spec.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and all(found.get(key) == spec[key] for key in ("gpus", "lab_id", "argv"))
