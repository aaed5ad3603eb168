"""What places and starts runs: one interface, an engine for each kind of host."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from runner.errors import PolicyError

if TYPE_CHECKING:
    from runner.engines.base import Engine
    from runner.lab import Lab
    from runner.policy import HostPolicy

# Imported when a host of the kind is there: the control room of one workstation needs no ssh.
ENGINES = {
    "local": ("runner.engines.local", "LocalEngine"),
    "ssh": ("runner.engines.ssh", "SshEngine"),
    "fake": ("runner.engines.fake", "FakeEngine"),
}


def make_engine(lab: Lab, host: HostPolicy) -> Engine:
    """The engine of a `[[host]]`. Raised: PolicyError for a kind that is not supported."""
    if host.kind not in ENGINES:
        raise PolicyError(
            f"hosts.toml: host {host.name!r}: kind {host.kind!r} is not supported.", next_step=f"Allowed: {', '.join(ENGINES)}."
        )
    module, name = ENGINES[host.kind]
    engine: Engine = getattr(importlib.import_module(module), name)(lab, host)
    return engine
