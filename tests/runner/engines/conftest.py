"""The fixture that makes engines on the rig's ssh hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.engines import sshlink
from runner.engines.ssh import SshEngine
from runner.lab import Lab
from tests.runner.engines.sshfar import Far
from tests.runner.engines.sshrig import Net
from tests.runner.labs import make_lab


@pytest.fixture
async def far(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes engines; hosts are left as they were found."""
    monkeypatch.setattr(sshlink, "BACK_OFF_S", (0.1, 0.3, 1.0))
    engines: list[SshEngine] = []

    async def make(number: int = 0, *, lab: Lab | None = None, config: list[Path] | None = None, users: bool = False, **host: Any) -> Far:
        lab = lab or make_lab(tmp_path)
        engine = SshEngine(lab, net.hosts[number].policy(**host), config=None if users else config or [net.config])
        await engine.start()
        engines.append(engine)
        return Far(lab, net.hosts[number], engine)

    yield make
    for engine in engines:
        await engine.close()
    for host in net.hosts:
        host.heal()
