"""Every error Overnight raises on purpose, in one tree.

OvernightError                  a sentence for a person; never a traceback
├── RequestError                the request was wrong: exit code 2
│   ├── UnknownName             a run, wave, host, constant or argument that does not exist; names the nearest
│   ├── BadValue                a value out of range or of the wrong type
│   ├── Refused                 understood, but policy or state forbids it
│   ├── Duplicate               the same experiment exists already; names it
│   └── PolicyError             hosts.toml cannot be used; names file, key, allowed values
├── LabError                    the lab folder or database cannot be used: exit code 1
├── HostError                   a machine could not be reached or used
│   └── HostKeyError            its host key is unknown or has changed
├── EngineError                 an engine could not do what it was asked
└── DaemonError                 the daemon would not start, or does not answer

Foreign errors are mapped at one seam each: sqlite in sqlite_errors, ssh in engines.ssh, NVML in onhost.sampler,
subprocess in engines.local.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FEW_NAMES = 12  # so many can be listed whole when none is near
LISTED = {kind: f"`overnight {kind}s` lists them." for kind in ("run", "wave", "host")}


class OvernightError(Exception):
    """A failure with a sentence of its own: what, where, and the next thing to try."""

    code = "failed"
    exit_code = 1

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        stop = "." if self.next_step and self.message and self.message[-1] not in ".!?:;" else ""
        return f"{self.message}{stop} {self.next_step}".strip()

    def as_json(self) -> dict[str, str]:
        """The `error` object of `--json` answers and of failed requests."""
        return {"code": self.code, "message": self.message, "next": self.next_step}


class RequestError(OvernightError):
    """Raised when the request itself is wrong; nothing was changed."""

    code = "bad_request"
    exit_code = 2


class UnknownName(RequestError):
    """Raised when a name does not exist; carries the nearest ones that do."""

    code = "unknown_name"

    def __init__(self, kind: str, name: str, known: Iterable[str], *, where: str = "") -> None:
        names = list(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or nearest_ignoring_case(name, names)
        if near:
            hint = f"Did you mean {' or '.join(near)}?"
        else:
            hint = f"Known: {', '.join(names)}." if 0 < len(names) <= FEW_NAMES else LISTED.get(kind, "")
        super().__init__(f"There is no {kind} {name!r}{' in ' + where if where else ''}.", next_step=hint)
        self.near = near
        self.kind = kind


class BadValue(RequestError):
    """Raised when a value is out of range or of the wrong type."""

    code = "bad_value"


class Refused(RequestError):
    """Raised when policy or state forbids what was asked."""

    code = "refused"


class Duplicate(RequestError):
    """Raised when an equal experiment exists already; `run_id` names it."""

    code = "duplicate"

    def __init__(self, message: str, run_id: str, *, next_step: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.run_id = run_id


class PolicyError(RequestError):
    """Raised when hosts.toml cannot be used; names file, key and allowed values."""

    code = "bad_policy"


class LabError(OvernightError):
    """Raised when the lab folder or its database cannot be used."""

    code = "lab"


class HostError(OvernightError):
    """Raised when a machine cannot be reached or used."""

    code = "host"


class HostKeyError(HostError):
    """Raised when a host's key is unknown or has changed."""

    code = "host_key"


class EngineError(OvernightError):
    """Raised when an engine could not do what it was asked."""

    code = "engine"


class DaemonError(OvernightError):
    """Raised when the daemon would not start or does not answer."""

    code = "daemon"


def nearest_ignoring_case(name: str, known: Iterable[str]) -> list[str]:
    """Names that match when case is ignored, for `matrix_lr` against `MATRIX_LR`."""
    by_lower = {k.lower(): k for k in known}
    return [by_lower[m] for m in difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.5)]


ERROR_CODES: dict[str, type[OvernightError]] = {
    c.code: c
    for c in (OvernightError, RequestError, BadValue, Refused, PolicyError, LabError, HostError, HostKeyError, EngineError, DaemonError)
}
