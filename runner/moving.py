"""A host whose entry of hosts.toml leads elsewhere than it did (another address, account or folder) while runs of ours are on it.

They are followed where they are until the last has ended, and nothing new starts; only then is the new place used. Where each host was
reached is kept in the lab, because the edit may come while no daemon runs.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from runner.records import HostState

if TYPE_CHECKING:
    from runner.policy import HostPolicy
    from runner.roster import Roster

REACHED = "hosts_reached"  # setting: host -> how it was reached
PLACE = ("kind", "address", "port", "user")
HERE = (*PLACE, "workdir")  # what decides where a run's directory is
WAY = (*HERE, "identity", "jump")
GIVEN_UP_S = 60.0  # so long out of contact, an old address is given up: a machine that came back under another is found there
WORDS = "hosts.toml leads elsewhere now; that place is used when the last run here has ended"


def in_use(roster: Roster, host: HostPolicy) -> HostPolicy:
    """The entry to use now: as hosts.toml has it, but for the way to a place that runs are still on."""
    before: dict[str, Any] | None = roster.store.setting(REACHED, {}).get(host.name)
    if before is None or not _differ(before, host, HERE) or not roster.on_host(host.name):
        return host
    if _differ(before, host, PLACE) and _out_of_contact(roster, host.name):
        return host
    return dataclasses.replace(host, **{key: before[key] for key in WAY})


def record(roster: Roster, host: HostPolicy) -> None:
    """Remember how a host is reached from now on."""
    known = roster.store.setting(REACHED, {})
    way = {key: getattr(host, key) for key in WAY}
    if known.get(host.name) != way:
        roster.store.set_setting(REACHED, {**known, host.name: way})


def moves(roster: Roster, name: str) -> bool:
    """Whether a host is still used where hosts.toml no longer has it."""
    now, wanted = roster.hosts.get(name), roster.lab.policy().host(name)
    return now is not None and wanted is not None and any(getattr(now, key) != getattr(wanted, key) for key in HERE)


def _differ(before: dict[str, Any], host: HostPolicy, keys: tuple[str, ...]) -> bool:
    return any(before.get(key) != getattr(host, key) for key in keys)


def _out_of_contact(roster: Roster, name: str) -> bool:
    row = next((h for h in roster.store.hosts() if h.name == name), None)
    return row is not None and row.state == HostState.DOWN and time.time() - row.since > GIVEN_UP_S
