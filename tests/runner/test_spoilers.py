"""Scripts that spoil their own run directory, flood their log or claim nonsense: the run still ends and can be cancelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import queries, verbs
from runner.lab import Lab
from runner.records import Submission
from tests.runner.daemons import ended, serving, until
from tests.runner.labs import make_lab

pytestmark = pytest.mark.timeout(240)
SPOILER = '''"""Spoils its run directory as MODE says, then prints upstream's summary."""
import os
import shutil
import sys
import time

SEED = 42
MODE = "links"
WAIT_S = 1.0
VAL_BPB = "0.97"
home = os.environ["OVERNIGHT_RUN_DIR"]


def replace(name, make):
    if os.path.lexists(name):
        os.remove(name)
    make(name)


def step(n, loss=3.1):
    print(f"\\rstep {n:05d} ({10 * n:.1f}%) | loss: {loss:.6f} | lrm: 1.00 | dt: 9ms | tok/sec: 9 | mfu: 9.0% | "
          "epoch: 1 | remaining: 9s    ", end="", flush=True)


step(1)
if MODE == "links":
    replace("../out.log", lambda n: os.symlink("/etc/passwd", n))
    replace("events.jsonl", lambda n: os.symlink("/etc/passwd", n))
    replace("../status.json", lambda n: os.symlink("/etc/passwd", n))
elif MODE == "folders":
    for name in ("../out.log", "../status.json", "../heartbeat", "../lock", "events.jsonl", "../status.spare"):
        replace(name, os.mkdir)
elif MODE == "pipes":
    replace("../out.log", os.mkfifo)
    replace("events.jsonl", os.mkfifo)
elif MODE == "all_gone":
    shutil.rmtree(home)
elif MODE == "files_gone":
    for name in os.listdir(".."):
        if name != "work":
            os.remove("../" + name)
elif MODE == "flood":
    for n in range(3000):
        sys.stdout.write(("x" * 999 + "\\n"))
elif MODE == "oom":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    sys.exit(1)
time.sleep(WAIT_S)
print(f"\\n---\\nval_bpb:          {VAL_BPB}\\ntraining_seconds: 3.0\\ntotal_seconds:    4.0")
print("peak_vram_mb:     1.0\\nmfu_percent:      1.0")
print("total_tokens_M:   1.0\\nnum_steps:        1\\nnum_params_M:     1.0\\ndepth:            8", flush=True)
'''


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU locks of these tests' own: the CPU slot is shared by everybody on a machine."""
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    hosts = '[[host]]\nname = "here"\nkind = "local"\ngpus = []\n'
    made = make_lab(
        tmp_path, policy="min_free_disk_mib = 1\nmin_budget_s = 0.1\ngrace_s = 0.5\nmax_log_mib = 1\n", hosts=hosts, script=SPOILER
    )
    yield made
    made.close()


def submit(lab: Lab, **overrides: Any) -> str:
    return verbs.submit(lab, Submission(overrides=overrides, budget_s=20, allow_duplicate=True), who="cli").run_ids[0]


def flags(lab: Lab, run_id: str) -> dict[str, str]:
    return {f.kind: f.evidence or "" for f in lab.store.flags(run_id)}


@pytest.mark.parametrize(
    ("mode", "why"),
    [("links", "out.log: it is a symbolic link"), ("folders", "out.log: it is a folder"), ("pipes", "out.log: it is a pipe")],
)
async def test_files_that_cannot_be_read_are_flagged_and_the_run_ends(lab: Lab, mode: str, why: str) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, MODE=mode))
    assert (run.outcome, run.exit_code) == ("no_result", 0) and why in flags(lab, run.id)["unreadable"]
    assert queries.read_log(lab, run.id).text == "" and lab.store.gpus()[0].run_id is None
    assert lab.store.count_runs() == 1


@pytest.mark.parametrize("mode", ["links", "folders", "pipes", "files_gone"])
async def test_whatever_a_run_did_to_its_files_it_can_be_cancelled(lab: Lab, mode: str) -> None:
    async with serving(lab):
        run_id = submit(lab, MODE=mode, WAIT_S=600.0)
        await until(lambda: lab.store.count_runs("step = 1 OR phase = 'running'"))
        await until(
            lambda: (
                (lab.run_dir(run_id) / "status.json").is_file() and not (lab.run_dir(run_id) / "spec.json").exists()
                if mode == "files_gone"
                else "unreadable" in flags(lab, run_id)
            )
        )
        verbs.cancel(lab, [run_id], who="cli")
        (run,) = await ended(lab, run_id)
    assert run.outcome == "cancelled"


async def test_a_run_that_deletes_its_directory_is_lost_and_not_tried_again(lab: Lab) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, MODE="all_gone", WAIT_S=600.0))
        (after,) = await ended(lab, submit(lab, MODE="fine"))  # its supervisor let go of the CPU slot
    assert (run.outcome, run.cause) == ("lost", "run_dir_gone") and after.outcome == "completed" and lab.store.count_runs() == 2


async def test_a_run_that_deletes_its_control_files_is_followed_to_its_end(lab: Lab) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, MODE="files_gone", WAIT_S=9.0))
    assert (run.outcome, run.exit_code) == ("no_result", 0) and lab.store.count_runs() == 1


async def test_the_summary_behind_a_flood_is_read(lab: Lab) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, MODE="flood"))
    assert (run.outcome, run.val_bpb, run.depth) == ("completed", 0.97, 8)
    assert "bytes in the middle of its output were dropped" in flags(lab, run.id)["log_capped"]
    assert "bytes of output were left out here" in queries.read_log(lab, run.id, limit=1 << 21).text


async def test_what_is_printed_behind_a_progress_line_is_quoted_without_it(lab: Lab) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, MODE="oom"))
    assert run.cause == "oom" and run.cause_text is not None
    assert run.cause_text.endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "remaining" not in run.cause_text


@pytest.mark.parametrize("printed", ["nan", "-inf"])
async def test_a_result_that_is_no_number_is_named_as_it_was_printed(lab: Lab, printed: str) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, MODE="fine", VAL_BPB=printed))
    assert (run.outcome, run.cause) == ("diverged", "nan") and run.cause_text is not None
    assert f"printed val_bpb {printed}" in run.cause_text and "3.1" in run.cause_text and "became" not in run.cause_text
