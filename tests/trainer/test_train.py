"""The script an experiment edits, run as a run runs it: small, on the CPU, by rewriting its constants."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
from .conftest import TRAINER, Folder, wait_for

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
SMALL = {"DEPTH": "1", "ASPECT_RATIO": "32", "HEAD_DIM": "16", "SEQ_LEN": "32", "TOTAL_BATCH_SIZE": "512"}


def test_a_run_learns_and_reports(folder: Folder) -> None:
    folder.constants(**SMALL)
    folder.constants("prepare.py", TIME_BUDGET="4")
    done = folder.run("train.py")
    assert done.returncode == 0, done.stderr
    assert "Model config: " in done.stdout and "Estimated FLOPs per token: " in done.stdout and "\n---\nval_bpb:" in done.stdout
    start, summary, steps = folder.events("start")[0], folder.events("summary")[0], folder.events("step")
    assert [event["stage"] for event in folder.events("stage")] == ["training", "evaluating"]
    assert start["budget_s"] == 4 and start["seed"] == 42 and start["constants"]["DEPTH"] == 1 and start["data"].startswith("small-")
    assert start["attributes"]["total_batch"] == 512 and start["attributes"]["device_batch"] == 16 and start["gpu_name"] is None
    assert steps[0]["step"] == 0 and steps[-1]["step"] == summary["num_steps"] - 1 and steps[-1]["share"] == 1.0
    assert min(event["dt_ms"] for event in steps) > 0.1  # on a CPU no step is launched ahead of the one that is reported
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    uniform = math.log2(start["vocab_size"]) / 3  # bits a byte of a model that knows nothing, at 3 bytes a token or so
    assert 0 < summary["val_bpb"] < uniform
    assert summary["mfu_percent"] is None and summary["peak_vram_mb"] is None and 4 <= summary["training_seconds"] < 60
    assert summary["train_tokens_dropped_share"] < 0.02 and (folder.path / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"OPTIMIZER": '"adamw"'},
        {"VALUE_EMBEDDINGS": "False"},
        {"TOTAL_BATCH_SIZE": "2**10", "DEVICE_BATCH_SIZE": "8"},
        {"WARMUP_RATIO": "0.5"},
    ],
)
def test_constants_change_the_run(folder: Folder, change: dict[str, str]) -> None:
    folder.constants(**{**SMALL, **change})
    folder.constants("prepare.py", TIME_BUDGET="0.2")
    done = folder.run("train.py")
    assert done.returncode == 0, done.stderr
    start = folder.events("start")[0]
    if "OPTIMIZER" in change:
        assert start["attributes"]["optimizer"] == "adamw"
    if "DEVICE_BATCH_SIZE" in change:
        assert start["attributes"]["device_batch"] == 8 and start["attributes"]["total_batch"] == 1024
    if "VALUE_EMBEDDINGS" in change:
        assert start["model_config"]["value_embeddings"] is False
    if "WARMUP_RATIO" in change:
        assert folder.events("step")[0]["lrm"] == 0.0


def test_rows_much_shorter_than_those_of_the_evaluation(folder: Folder) -> None:
    folder.constants(**{**SMALL, "SEQ_LEN": "16"})
    folder.constants("prepare.py", TIME_BUDGET="0.2")
    done = folder.run("train.py")
    assert done.returncode == 0, done.stderr
    assert folder.events("summary")[0]["val_bpb"] > 0


def test_the_device_batch_follows_a_smaller_total(folder: Folder) -> None:
    folder.constants(**{**SMALL, "TOTAL_BATCH_SIZE": "96"})
    folder.constants("prepare.py", TIME_BUDGET="0.2")
    assert folder.run("train.py").returncode == 0
    assert folder.events("start")[0]["attributes"]["device_batch"] == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"TOTAL_BATCH_SIZE": "500"}, "the nearest that is: 512"),
        ({"DEVICE_BATCH_SIZE": "5"}, "take 4, or None"),
        ({"OPTIMIZER": '"sgd"'}, "OPTIMIZER is 'sgd'; it must be one of: muon, adamw"),
        ({"DEPTH": "2.5"}, "whole number above 0"),
        ({"LOSS": '"fused"'}, "needs a GPU"),
        ({"ATTENTION": '"flex"'}, "ATTENTION is 'flex', but it needs a GPU; these work here: default, flash, math"),
        ({"SOFTCAP": "0"}, "SOFTCAP is 0; it must be a number above 0"),
        ({"MATRIX_LR": "'0.04'"}, "MATRIX_LR is '0.04'; it must be a number"),
        ({"WARMUP_RATIO": "None"}, "WARMUP_RATIO is None; it must be a number"),
        ({"WEIGHT_DECAY": "1e999"}, "WEIGHT_DECAY is inf; it must be a number"),
        ({"SEED": "None"}, "SEED is None; it must be a whole number from 0"),
        ({"SEED": "2**70"}, "it must be a whole number from 0 to 2**63 - 1"),
        ({"OPTIMIZER": "None"}, "OPTIMIZER is None; it must be one of: muon, adamw"),
        ({"ATTENTION": '"sdpa"'}, "ATTENTION is 'sdpa'; it must be one of: default, cudnn, flash, efficient, math, flex, fa4, fa3, fa2"),
        ({"HEAD_DIM": "15"}, "must be even"),
        ({"TOTAL_BATCH_SIZE": "2**20", "DEVICE_BATCH_SIZE": "2**15"}, "lower TOTAL_BATCH_SIZE"),
        ({"SEQ_LEN": "2**22", "TOTAL_BATCH_SIZE": "2**22"}, "the corpus fills 0 rows, fewer than one pass of 1; lower SEQ_LEN"),
    ],
)
def test_constants_that_do_not_fit_are_one_sentence(folder: Folder, change: dict[str, str], says: str) -> None:
    folder.constants(**{**SMALL, **change})
    broken = folder.run("train.py")
    assert broken.returncode == 1 and says in broken.stderr and broken.stderr.count("\n") == 1
    assert folder.events()[-1]["event"] == "error" and folder.events()[-1]["cause"] == "bad_setting"


@pytest.mark.parametrize("budget", ["0", "-1", "'60'", "None", "1e999"])
def test_a_budget_that_cannot_be_is_one_sentence(folder: Folder, budget: str) -> None:
    folder.constants(**SMALL)
    folder.constants("prepare.py", TIME_BUDGET=budget)
    broken = folder.run("train.py")
    assert broken.returncode == 1 and "TIME_BUDGET in prepare.py is" in broken.stderr and broken.stderr.count("\n") == 1
    assert folder.events()[-1]["cause"] == "bad_setting"


def test_a_model_that_the_machines_memory_cannot_hold_is_one_sentence(folder: Folder) -> None:
    folder.constants(**{**SMALL, "HEAD_DIM": "2**31"})  # a matrix of 4 million TB
    broken = folder.run("train.py")
    assert broken.returncode == 1 and "error: out of memory outside the training steps" in broken.stderr, broken.stderr
    assert broken.stderr.count("\n") == 1 and folder.events()[-1]["cause"] == "oom"


def test_a_learning_rate_that_diverges_ends_the_run_at_once(folder: Folder) -> None:
    folder.constants(**{**SMALL, "SOFTCAP": "1e9", "UNEMBEDDING_LR": "1e4"})
    folder.constants("prepare.py", TIME_BUDGET="60")
    broken = folder.run("train.py")
    assert broken.returncode == 1 and "FAIL" in broken.stdout and "---" not in broken.stdout
    assert folder.events()[-1]["cause"] == "diverged" and not (folder.path / "checkpoint.pt").exists()


def test_the_same_seed_gives_the_same_losses(folder: Folder) -> None:
    folder.constants(**SMALL)
    folder.constants("prepare.py", TIME_BUDGET="0.2")
    losses = []
    for _ in range(2):
        (folder.path / "events.jsonl").unlink(missing_ok=True)
        assert folder.run("train.py", OMP_NUM_THREADS="1").returncode == 0
        losses.append(folder.events("step")[0]["loss_raw"])
    assert losses[0] == losses[1]
    folder.constants(SEED="7")
    (folder.path / "events.jsonl").unlink()
    assert folder.run("train.py", OMP_NUM_THREADS="1").returncode == 0
    assert folder.events("step")[0]["loss_raw"] != losses[0]


def test_an_interrupted_run_goes_on_from_its_state(folder: Folder) -> None:
    folder.constants(**{**SMALL, "CHECKPOINT_EVERY_S": "0.05"})
    folder.constants("prepare.py", TIME_BUDGET="3")
    process = folder.start("train.py")
    try:
        wait_for(lambda: (folder.path / "state.pt").exists(), 60)
    finally:
        process.kill()
        process.wait()
    done = folder.run("train.py")
    assert done.returncode == 0, done.stderr
    note = next(event["text"] for event in folder.events("note") if "going on from step" in event["text"])
    step = int(note.split("step ")[1].split(",")[0])
    starts = [i for i, event in enumerate(folder.events()) if event["event"] == "start"]
    after = [event for event in folder.events()[starts[1] :] if event["event"] == "step"]
    assert step > 0 and after[0]["step"] == step and after[0]["share"] > 0
    assert folder.events("summary")[0]["num_steps"] > step
    for constant, value in (("SEED", "43"), ("MATRIX_LR", "0.03")):  # another experiment in the same folder does not take that state up
        folder.constants(**{constant: value})
        assert folder.run("train.py").returncode == 0
        assert "is of another experiment" in folder.events("note")[-1]["text"]


# b"": what a power failure leaves of a file that was not synced
@pytest.mark.parametrize("left", [b"half a file", b"", [1], {"identity": {}}, 0])
def test_a_damaged_state_is_left_aside(folder: Folder, left: object) -> None:
    import torch

    folder.constants(**SMALL)
    folder.constants("prepare.py", TIME_BUDGET="0.2")
    if isinstance(left, bytes):
        (folder.path / "state.pt").write_bytes(left)
    else:
        torch.save(torch.zeros(3) if left == 0 else left, folder.path / "state.pt")
    assert folder.run("train.py").returncode == 0
    assert "state.pt cannot be read" in folder.events("note")[-1]["text"] and folder.events("step")[0]["step"] == 0


def test_what_a_full_disk_cut_short_is_gone_before_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAINER))
    import state
    import torch

    class Disk:
        """A report whose own disk is the full one."""

        def problem(self, cause: str, text: str) -> None:
            assert "could not be written" in text and not (tmp_path / "x.pt.part").exists()
            assert writers[0].closed  # nothing holds the file open: its room is free again
            said.append(cause)

    def half(content: object, file: IO[bytes]) -> None:
        file.write(b"half")
        writers.append(file)
        raise RuntimeError("unexpected pos 1250624 vs 1250512")

    said: list[str] = []
    writers: list[IO[bytes]] = []
    monkeypatch.setattr(torch, "save", half)
    assert not state.save({}, str(tmp_path / "x.pt"), Disk(), "this run cannot be verified")
    assert len(said) == len(writers) == 1


def test_a_checkpoint_that_cannot_be_written_costs_the_verification_not_the_result(folder: Folder) -> None:
    folder.constants(**SMALL)
    folder.constants("prepare.py", TIME_BUDGET="0.2")
    (folder.path / "checkpoint.pt.part").mkdir()
    done = folder.run("train.py")
    assert done.returncode == 0 and "val_bpb:" in done.stdout and "cannot be verified" in done.stderr and done.stderr.count("\n") == 1
    assert folder.events("error")[0]["cause"] in ("checkpoint", "disk_full") and folder.events()[-1]["event"] == "summary"


GPU_FULL = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.')"
RAM_FULL = "RuntimeError('[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can\\'t allocate memory: you tried 2 GiB.')"


@pytest.mark.parametrize(
    ("limit", "says", "full"),
    [(5, "DEVICE_BATCH_SIZE = 4 fits", GPU_FULL), (0, "not even one row does", GPU_FULL), (5, "DEVICE_BATCH_SIZE = 4 fits", RAM_FULL)],
)
def test_out_of_memory_names_the_largest_batch_that_fits(folder: Folder, limit: int, says: str, full: str) -> None:
    folder.constants(**SMALL)
    text = (folder.path / "train.py").read_text()
    forward = '        """Cross-entropy of every token in nats, [B, T]."""\n'
    assert text.count(forward) == 1
    refusal = f"""        import weakref
        alive = vars(GPT).get("alive") or weakref.WeakSet()
        GPT.alive, activations = alive, type("Activations", (), dict())()
        alive.add(activations)
        if len(idx) > {limit} or len(alive) > 1:  # what a failed pass held must be free before fewer rows are tried
            raise {full}
"""
    (folder.path / "train.py").write_text(text.replace(forward, forward + refusal))
    broken = folder.run("train.py")
    assert broken.returncode == 1 and "16 rows of 32 tokens at once do not fit" in broken.stderr and says in broken.stderr
    assert broken.stderr.count("\n") == 1 and folder.events()[-1]["cause"] == "oom"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["both", "optimizer"])
def test_a_compiler_that_fails_costs_speed_and_is_said(folder: Folder, mode: str) -> None:
    folder.constants(**{**SMALL, "COMPILE": f'"{mode}"'})
    done = folder.run("-W", "ignore", "train.py", timeout_s=280, CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=str(folder.path / "cache"))
    assert done.returncode == 0, done.stderr
    notes = [event["text"] for event in folder.events("note") if "torch.compile failed" in event["text"]]
    assert len(notes) == 1 and "goes on without it" in notes[0] and notes[0] in done.stdout
    (attributes,) = folder.events("attributes")
    assert attributes["attributes"]["compile"] == "none" and attributes["attributes"]["compile_failed"]
    assert folder.events("start")[0]["attributes"]["compile"] == mode
    assert folder.events("step")[0]["step"] == 0 and folder.events()[-1]["event"] == "summary"


def test_an_error_of_the_script_under_the_compiler_stays_an_error(folder: Folder) -> None:
    folder.constants(**SMALL)
    text = (folder.path / "train.py").read_text()
    forward = '        """Cross-entropy of every token in nats, [B, T]."""\n'
    (folder.path / "train.py").write_text(text.replace(forward, forward + "        raise ValueError('my own mistake')\n"))
    broken = folder.run("train.py")
    assert broken.returncode == 1 and "my own mistake" in broken.stderr and not folder.events("attributes")


def test_what_is_the_compilers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAINER))
    import ending
    import torch
    from torch._dynamo.exc import BackendCompilerFailed, Unsupported

    try:
        failed = BackendCompilerFailed(lambda: None, RuntimeError("no compiler here"), None)
        assert ending.compiler_fault(failed) and ending.compiler_fault(Unsupported("graph break"))
        assert ending.compiler_fault(ValueError("mine")) is None and ending.compiler_fault(torch.OutOfMemoryError("2 GiB")) is None
        failed.__cause__ = torch.OutOfMemoryError("while tuning")
        wrapped = RuntimeError("outer")
        wrapped.__cause__ = failed
        assert ending.compiler_fault(wrapped)
    finally:
        for name in ("ending", "corpora", "device", "report", "settings", "prepare"):
            sys.modules.pop(name, None)


def test_a_long_wait_prints_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAINER))
    import report

    try:
        monkeypatch.setattr(report, "WAITING_LINE_S", 0.01)
        told = report.Report(str(tmp_path / "events.jsonl"))
        printed = ""
        with told.waiting("compiling"):
            until = time.monotonic() + 20
            while "so far" not in printed and time.monotonic() < until:
                printed += capsys.readouterr().out
        assert "compiling: 0 s so far" in printed and "compiling: done in" in capsys.readouterr().out
        with told.waiting("compiling", False):
            pass
        assert capsys.readouterr().out == ""
        told.close()
    finally:
        sys.modules.pop("report", None)
