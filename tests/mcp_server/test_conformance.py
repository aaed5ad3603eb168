"""The official conformance suite and the inspector, run by conformance.sh; skipped, with the reason, where npm or network is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("conformance.sh")
SKIPPED = 77


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_official_suite_finds_only_what_the_baseline_explains() -> None:
    more = ["--clients"] if os.environ.get("OVERNIGHT_TEST_CLIENTS") else []
    done = subprocess.run(
        [str(SCRIPT), *more],
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == SKIPPED:
        pytest.skip(lines[-1])
    assert done.returncode == 0, "\n".join(lines[-80:])
    assert sum(line.startswith("ok ") for line in lines) == (6 if more else 4)


def test_every_entry_of_a_baseline_has_its_reason() -> None:
    for path in SCRIPT.parent.glob("conformance-*.yml"):
        entries = [line for line in path.read_text().splitlines() if line.startswith("  - ")]
        assert entries and all(len(line.partition(" # ")[2]) >= 7 for line in entries), path.name
