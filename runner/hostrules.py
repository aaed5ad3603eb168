"""What a `[[host]]` of hosts.toml may say, beyond the types of its keys: each complaint names the key, what is wrong and what is allowed.

Pure, but for `missing_files`, which looks at this machine and is asked only when a file is taken over: an accepted policy must stay
readable when a key file goes away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.policy import HostPolicy

Complaint = tuple[str, str, str]  # key, what is wrong, what is allowed
REACH_KEYS = ("address", "port", "user", "identity", "jump", "workdir")
FAKE_KEYS = ("types", "surface", "speed", "crash_share")
PLACE = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9._:%\[\]-]{0,252}")
HOP = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?" + PLACE.pattern)
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@\\-]{0,63}\$?")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
UUID = re.compile(r"(?:GPU|MIG)-[A-Za-z0-9/-]{1,80}")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")
HOST_WORDS = "a host name, an IP address or a Host alias of ~/.ssh/config, without user, options or spaces"


def complaints(host: HostPolicy, given: dict[str, Any]) -> Iterator[Complaint]:
    """Everything that is wrong with a host; `given` is its table as written."""
    if host.kind != "ssh":
        yield from (
            (key, f"belongs to a host of kind ssh, and this one is {host.kind}", "to leave it out") for key in REACH_KEYS if key in given
        )
    if host.kind != "fake":
        yield from (
            (key, f"belongs to a host of kind fake, and this one is {host.kind}", "to leave it out") for key in FAKE_KEYS if key in given
        )
    for key, form, allowed in (("address", PLACE, HOST_WORDS), ("user", USER, "the name of an account")):
        value = getattr(host, key)
        if value is not None and not form.fullmatch(value):
            yield key, f"is {value!r}", allowed
    for hop in host.jump:
        if not HOP.fullmatch(hop):
            yield "jump", f"names {hop!r}", 'hosts to go through, such as ["gate", "me@gate2:2222"]'
    yield from paths(host)
    yield from cards(host.gpus)
    for name, value in host.env.items():
        if not ENV_NAME.fullmatch(name):
            yield "env", f"names {name!r}", "names of letters, digits and underscore, not beginning with a digit"
        if "\x00" in value:
            yield "env", f"holds a NUL in {name}", "values without it"
    for name, value in host.labels.items():
        if not name.strip() or UNPRINTABLE.search(name + value):
            yield "labels", f"holds {name!r} = {value!r}", "texts of one line"


def paths(host: HostPolicy) -> Iterator[Complaint]:
    """Folders and programs on the host, and the key file here."""
    whole = "a whole path, from / or ~/"
    for key in ("workdir", "identity"):
        value = getattr(host, key)
        if value is not None and (not re.match(r"/|~/.|~$", value) or UNPRINTABLE.search(value)):
            yield key, f"is {value!r}", whole
    if host.python is not None and (UNPRINTABLE.search(host.python) or not re.fullmatch(r"/.+|[^/~\s-][^/\s]*", host.python)):
        yield "python", f"is {host.python!r}", "a whole path from /, or the name of a program on the host's PATH"


def cards(gpus: str | list[Any]) -> Iterator[Complaint]:
    """The GPUs a host gives."""
    allowed = '"all", a list of indices (0, 1, …) or UUIDs ("GPU-…", "MIG-…"), or [] for its CPU alone'
    if isinstance(gpus, str):
        if gpus != "all":
            yield "gpus", f"is {gpus!r}", allowed
        return
    for gpu in gpus:
        known = isinstance(gpu, int) and not isinstance(gpu, bool) and 0 <= gpu < 1024
        if not known and not (isinstance(gpu, str) and UUID.fullmatch(gpu)):
            yield "gpus", f"names {gpu!r}", allowed
        elif gpus.count(gpu) > 1:
            yield "gpus", f"names {gpu!r} twice", "each GPU once"


def missing_files(host: HostPolicy) -> Iterator[Complaint]:
    """Files of this machine that a host needs and that are not there."""
    if host.identity is not None and not Path(host.identity).expanduser().is_file():
        yield "identity", f"is {host.identity!r}, which is no file here", "the path of a private key, or to leave it out for your ssh agent"
    if host.surface not in (None, "builtin") and not Path(str(host.surface)).is_file():
        yield "surface", f"is {host.surface!r}, which is no file here", 'a Python file with score() and DEFAULTS, or "builtin"'
