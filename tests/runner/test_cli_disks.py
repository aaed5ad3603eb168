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
echo reading
$O leaderboard; echo "code $?"
$O runs --json; echo "code $?"
$O --once; echo "code $?"
$O --readonly --once; echo "code $?"
""",
    )
    refused, told = lines[: lines.index("reading")], lines[lines.index("reading") :]
    assert refused == ["code 1"] and sum("read-only" in line for line in lines) == 1, lines
    assert told.count("code 0") == 4 and told.count("Leaderboard") == 2, lines


def test_a_lab_that_was_not_closed_in_order_is_read_on_a_read_only_disk_with_its_newest_rows(tmp_path: Path) -> None:
    lines = in_a_small_disk(
        tmp_path / "disk",
        """
$O queue pause --why "the newest row" > /dev/null
mkdir kept; cp -a lab kept/lab
{python} - <<'END'
import os, shutil
from runner.lab import open_lab
lab = open_lab("lab")
lab.store.event("cli", "note", "lab", "not folded in")
for name in ("lab.db", "lab.db-wal", "lab.db-shm"):
    shutil.copy("lab/" + name, "kept/lab/" + name)
END
mount -o remount,ro $PWD
$O --lab kept/lab events --json; echo "code $?"
""".replace("{python}", f"{sys.executable} -I"),
    )
    assert lines[-1] == "code 0" and "not folded in" in lines[-2], lines
