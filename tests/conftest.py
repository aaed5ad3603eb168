"""What every test starts from: no lab, no configuration of the person who runs it, and lock files of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No OVERNIGHT_* of the caller reaches a test; GPU locks lie in the tests' own folder, never in the machine's shared one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("OVERNIGHT_")]:
            patch.delenv(name)
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield
