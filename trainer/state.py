"""Files of tensors a run leaves behind: the checkpoint that verification loads, and the state an interrupted run goes on from.

Fixed: an experiment does not edit it. A file is written whole or not at all, and a full disk costs the file, never the run.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from typing import Any

import torch
from report import Report

CHECKPOINT_FILE = "checkpoint.pt"
STATE_FILE = "state.pt"


def save(content: dict[str, Any], path: str, report: Report, otherwise: str) -> bool:
    """Write `content` to `path`; on failure report why and what `otherwise` follows from it."""
    try:
        torch.save(content, path + ".part")
        os.replace(path + ".part", path)
        return True
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        why, free_mib = str(error).splitlines()[0], shutil.disk_usage(".").free >> 20
    with contextlib.suppress(OSError):  # before anything is said, and with the error's hold on the file let go: the log may be on this disk
        os.remove(path + ".part")
    cause = "disk_full" if free_mib < 1024 else "checkpoint"
    report.problem(cause, f"{path} could not be written ({why}; {free_mib} MiB free): {otherwise}")
    return False


def load(path: str, identity: dict[str, Any], device: torch.device, report: Report) -> dict[str, Any] | None:
    """The state an interrupted run of the same experiment left in this folder; None when there is none that fits."""
    if not os.path.exists(path):
        return None
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        same = state["identity"] == identity
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        report.note(f"{path} cannot be read ({str(error).splitlines()[0][:100]}); starting from the beginning")
        return None
    if not same:
        report.note(f"{path} is of another experiment; starting from the beginning")
        return None
    return state
