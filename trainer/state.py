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
from device import first_line
from report import Report

CHECKPOINT_FILE = "checkpoint.pt"
STATE_FILE = "state.pt"
PARTS = frozenset({"identity", "model", "optimizer", "clock"})  # of a state


def save(content: dict[str, Any], path: str, report: Report, otherwise: str) -> bool:
    """Write `content` to `path`; on failure report why and what `otherwise` follows from it."""
    try:
        with open(path + ".part", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # or a machine that loses power keeps the name and not the bytes
        os.replace(path + ".part", path)
        return True
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        why, free_mib = first_line(error), shutil.disk_usage(".").free >> 20
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
        if not isinstance(state, dict) or not PARTS <= state.keys():
            raise ValueError("it is no state of a run")
    except (OSError, RuntimeError, EOFError, ValueError, IndexError, KeyError, TypeError, pickle.UnpicklingError) as error:
        report.note(f"{path} cannot be read ({first_line(error)}); starting from the beginning")
        return None
    if state["identity"] != identity:
        report.note(f"{path} is of another experiment; starting from the beginning")
        return None
    return state
