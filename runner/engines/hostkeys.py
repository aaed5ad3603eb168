"""How a `[[host]]` becomes ssh options, and what is wrong with a host key, told apart: never seen, or not the one it was."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shlex
from pathlib import Path
from typing import Any

import asyncssh

from runner.errors import HostError, HostKeyError, OvernightError
from runner.policy import HostPolicy

ASK_LIMIT_S = 10.0
KNOWN_HOSTS = "~/.ssh/known_hosts"


def place(host: HostPolicy) -> str:
    """The host as one would type it for ssh."""
    return (f"{host.user}@" if host.user else "") + (host.address or host.name) + (f" -p {host.port}" if host.port else "")


def options(host: HostPolicy, config: list[Path] | None = None) -> dict[str, Any]:
    """Arguments for asyncssh.connect. What hosts.toml leaves out comes from ~/.ssh/config (or `config`), as for ssh itself."""
    found: dict[str, Any] = {"host": host.address or host.name, "agent_forwarding": False}
    if config is not None:
        found["config"] = [str(path) for path in config]
    if host.port:
        found["port"] = host.port
    if host.user:
        found["username"] = host.user
    if host.identity:
        found["client_keys"] = [os.path.expanduser(host.identity)]
    return found


def hop(host: HostPolicy, words: str) -> HostPolicy:
    """A jump host (`user@name:port`) on the way to a host, reached with the same key."""
    user, _, place_ = words.rpartition("@")
    found = re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+)(?::(\d+))?|(.+)", place_)
    address, port = (found[1] or found[3] or found[5], found[2] or found[4]) if found else (place_, None)
    name = f"{words} (on the way to {host.name})"
    return dataclasses.replace(host, name=name, address=address, port=int(port) if port else None, user=user or None, jump=[])


async def explain(host: HostPolicy, config: list[Path] | None = None, tunnel: asyncssh.SSHClientConnection | None = None) -> OvernightError:
    """The error of a key that could not be verified: its fingerprint, whether it is unknown or has changed, and how to trust it."""
    wanted = options(host, config)
    ask: dict[str, Any] = {key: wanted[key] for key in ("host", "port", "config") if key in wanted}
    if tunnel is not None:
        ask["tunnel"] = tunnel
    # config=(): read ~/.ssh/config, as connecting does; without the word asyncssh reads none here
    resolved = asyncssh.SSHClientConnectionOptions(**{"config": (), **wanted})
    port = int(getattr(resolved, "port", None) or 22)
    name = str(getattr(resolved, "host_key_alias", None) or getattr(resolved, "host", None) or host.address or host.name)
    try:
        key = await asyncio.wait_for(asyncssh.get_server_host_key(**ask), ASK_LIMIT_S)
    except asyncssh.HostKeyNotVerifiable as problem:  # not this host's own key: fetching that trusts any
        return HostKeyError(
            f"A host on the way to {host.name} (ProxyJump of ~/.ssh/config) has a key that is not known: {problem}.",
            next_step="Log in there once with ssh and compare the fingerprint, or name it as `jump` in hosts.toml: it is shown here then.",
        )
    except (asyncssh.Error, OSError, asyncio.TimeoutError) as problem:
        return HostError(f"The host key of {host.name} could not be fetched: {problem or type(problem).__name__}.")
    if key is None:
        return HostError(f"{host.name} shows no host key.")
    files = [str(path) for path in getattr(resolved, "known_hosts", None) or [] if isinstance(path, (str, Path))] or [KNOWN_HOSTS]
    trusted = known_keys(files, name, port)
    fingerprint = key.get_fingerprint()
    spot = f"[{name}]:{port}" if port != 22 else name
    line = f"{spot} {key.export_public_key().decode().strip()}"
    shown = (
        f"{host.name} ({spot}) shows the {key.algorithm.decode() if isinstance(key.algorithm, bytes) else key.algorithm} key {fingerprint}"
    )
    if trusted:
        where = next(file for file in files if known_keys([file], name, port))
        remove = f"ssh-keygen -R {shlex.quote(spot)} -f {shlex.quote(os.path.expanduser(where))}"
        return HostKeyError(
            f"The host key of {host.name} has CHANGED: {shown}, but {where} knows {' and '.join(trusted)}.",
            next_step=f"If you know why (a new machine or installation): `{remove}`, then add to {where}: {line}. If not, do not connect.",
        )
    return HostKeyError(
        f"The host key of {host.name} is unknown: {shown}.",
        next_step=f"Compare it with `ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub` on the host, then add to {files[0]}: {line}",
    )


def known_keys(files: list[str], name: str, port: int) -> list[str]:
    """Fingerprints that the known_hosts files have for a host."""
    found: list[str] = []
    for file in files:
        try:
            matched = asyncssh.match_known_hosts(os.path.expanduser(file), name, "", port if port != 22 else None)
        except (OSError, ValueError, asyncssh.Error):
            continue  # no such file, or one that cannot be read: then it knows nothing
        found += [key.get_fingerprint() for key in matched[0] if hasattr(key, "get_fingerprint")]
    return list(dict.fromkeys(found))
