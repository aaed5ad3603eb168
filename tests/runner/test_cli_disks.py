"""A full disk and a read-only one, for real: small file systems of memory in a mount namespace of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.labs import SCRIPT

ALLOWED = (
    os.geteuid() == 0
    and shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
)
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(90),
    pytest.mark.skipif(not ALLOWED, reason="needs root and the right to mount (unshare, tmpfs)"),
]
OVERNIGHT = f"{sys.executable} -I -m runner.cli"


def in_a_small_disk(folder: Path, script: str, size: str = "1m") -> list[str]:
    """The lines a shell script prints in a lab on a file system of that size; every command of ours is called through $O."""
    folder.mkdir()
    (folder.parent / "train.py").write_text(SCRIPT)
    begin = f"""
set -u; O="{OVERNIGHT}"
mount -t tmpfs -o size={size} none {folder}; cd {folder}
mkdir trainer; cp {folder.parent}/train.py trainer; echo 'TIME_BUDGET = 300' > trainer/prepare.py
printf '[trainer]\\nfolder = "trainer"\\n' > hosts.toml
$O policy accept > /dev/null
"""
    done = subprocess.run(["unshare", "-m", "bash", "-c", begin + script], capture_output=True, text=True, timeout=80)
    assert "Traceback" not in done.stdout + done.stderr, done
    return (done.stdout + done.stderr).splitlines()


def test_a_full_disk_is_named_and_nothing_is_lost_on_it(tmp_path: Path) -> None:
    lines = in_a_small_disk(
        tmp_path / "disk",
        """
$O queue pause --why before > /dev/null
head -c 2000000 /dev/zero > filler 2> /dev/null
$O run --json; echo "code $?"
rm filler
$O events --json; echo "code $?"
""",
    )
    refused, code, events, last = [line for line in lines if not line.startswith("head:")]
    assert code == "code 1" and '"error"' in refused and ("full" in refused or "No space left" in refused), lines
    assert last == "code 0" and "pause_queue" in events and '"before"' in events


def test_a_read_only_disk_is_named(tmp_path: Path) -> None:
    lines = in_a_small_disk(
        tmp_path / "disk",
        """
mount -o remount,ro $PWD
$O run; echo "code $?"
$O leaderboard; echo "code $?"
""",
    )
    assert lines.count("code 1") == 2 and sum("read-only" in line for line in lines) == 2, lines
