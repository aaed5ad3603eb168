"""What a run's end is called: the words of the status, the last exception, and never a word that merely occurs in the log."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from runner.reading import classify_end
from runner.records import Run
from tests.runner import upstream_bytes as upstream


def a_run(**known: Any) -> Run:
    empty: dict[str, Any] = {f.name: None for f in fields(Run)}
    return Run(**{**empty, "id": "r0001", "seq": 1, "phase": "running", "purpose": "experiment", **known})


def ended(code: int | None = 0, signal: int | None = None, **more: Any) -> dict[str, Any]:
    return {"v": 1, "phase": "ended", "reason": "signal" if signal else "exit", "exit_code": code, "exit_signal": signal, **more}


def traceback(last: str) -> str:
    return (
        f'info: inf found no triton problem\nTraceback (most recent call last):\n  File "train.py", line 3, in <module>\n    x()\n{last}\n'
    )


def classify(
    status: dict[str, Any] | None, tail: str = "", summary: bool = False, error: tuple[str, str] | None = None, **known: Any
) -> Any:
    return classify_end(status, a_run(**known), tail, summary_seen=summary, error=error)


def outcome(*args: Any, **kwargs: Any) -> tuple[str, str | None]:
    end = classify(*args, **kwargs)
    return str(end.outcome), end.cause


def test_exits_by_itself() -> None:
    assert outcome(ended(0), summary=True, val_bpb=0.99) == ("completed", None)
    assert outcome(ended(0), "done\n") == ("no_result", "no_summary")
    assert outcome(ended(0), "---\nval_bpb: nan\n", summary=True) == ("diverged", "nan")
    assert outcome(ended(1), upstream.progress(20) + "FAIL\n") == ("diverged", "diverged")
    assert outcome(ended(139), "", summary=True, val_bpb=0.99) == ("completed", "exit_after_summary")
    assert outcome(ended(3), "some words\n") == ("crashed", "exit_code")
    assert outcome(ended(1), "self test: FAIL\n") == ("crashed", "exit_code")


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "oom"),
        ("triton.runtime.autotuner.OutOfMemoryError: out", "oom"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "attention_backend"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "cuda"),
        ("ModuleNotFoundError: No module named 'kernels'", "import"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "import"),
        ("AssertionError", "assert"),
        ("AssertionError: TOTAL_BATCH_SIZE % tokens == 0", "assert"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("torch._dynamo.exc.Unsupported: xError: no", "compile"),
        ("torch._inductor.exc.InductorError: CppCompileError: C++ compile error", "compile"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'tokenizer.pkl'", "no_data"),
        ("urllib.error.URLError: <urlopen error>", "network"),
        ("ValueError: infinite loop of info", "exception"),
        ("MemoryError", "oom_host"),
        ("KeyboardInterrupt", "interrupted"),
    ],
)
def test_the_exception_decides(last: str, cause: str) -> None:
    end = classify(ended(1), traceback(last))
    assert (end.outcome, end.cause) == ("crashed", cause)
    assert end.cause_text.endswith(".")
    assert last[:20] in end.cause_text
    assert last in end.last_lines


def test_the_reason_on_the_next_line_counts() -> None:
    tail = traceback("RuntimeError: \nNo available kernel. Aborting execution.")
    assert outcome(ended(1), tail) == ("crashed", "attention_backend")


def test_loader_says_success_then_the_first_launch_dies() -> None:
    tail = "Using Flash Attention 3\nCUDA error (flash_fwd.h:45): no kernel image is available for execution on the device\n"
    assert outcome(ended(1), tail) == ("crashed", "attention_backend")


def test_out_of_memory_beside_somebody_else_is_theirs() -> None:
    tail = traceback("torch.OutOfMemoryError: CUDA out of memory. Process 4711 has 40.00 GiB memory in use. Of the allocated memory 2 GiB")
    assert outcome(ended(1), tail) == ("crashed", "oom_external")
    memory = {"GPU-1": {"used_mib": 41000, "baseline_mib": 40960, "holders": []}}
    assert outcome(ended(1, gpu_memory=memory), traceback("torch.OutOfMemoryError: CUDA out of memory.")) == ("crashed", "oom_external")
    own = traceback("torch.OutOfMemoryError: CUDA out of memory. Including non-PyTorch memory, this Process 99 has 30.00 GiB memory in use")
    assert outcome(ended(1, gpu_memory={"GPU-1": {"baseline_mib": 3}}), own) == ("crashed", "oom")


@pytest.mark.parametrize(
    ("status", "result", "expected"),
    [
        (ended(None, 15, reason="stopped", stop_reason='{"reason": "cancelled", "force": false}'), False, ("cancelled", None)),
        (ended(None, 15, reason="stopped", stop_reason='{"reason": "cancelled"}'), True, ("completed", "hung_after_summary")),
        (ended(None, 15, reason="stopped", stop_reason="pruned"), False, ("pruned", "pruned")),
        (ended(None, 15, reason="stopped", stop_reason={"reason": "nan"}), False, ("diverged", "nan")),
        (ended(None, 9, reason="time-limit", elapsed_s=1500.0), False, ("timed_out", "time_limit")),
        (ended(None, 9, reason="time-limit"), True, ("completed", "hung_after_summary")),
        (ended(None, 15, reason="stopped", stop_reason='{"reason": "hung_after_summary"}'), True, ("completed", "hung_after_summary")),
        (ended(0, stop_reason='{"reason": "cancelled"}'), True, ("completed", None)),  # it was done before the stop reached it
        (ended(None, 9, reason="supervisor-terminated"), False, ("lost", "host_shutdown")),
        ({"phase": "refused", "reason": "gpu-memory", "detail": "40 GiB held by pid 9"}, False, ("crashed", "oom_external")),
        ({"phase": "refused", "reason": "disk-full"}, False, ("crashed", "disk_full")),
        ({"phase": "ended", "reason": "exec-failed", "detail": "no such file: python9"}, False, ("crashed", "exec_failed")),
        (ended(None, 9, unkillable=[4711]), False, ("kill_failed", "unkillable")),
        (None, False, ("lost", "no_status")),
    ],
)
def test_ends_that_were_not_its_own(status: Any, result: bool, expected: tuple[str, str | None]) -> None:
    assert outcome(status, "", summary=result, val_bpb=0.99 if result else None) == expected


def test_signals() -> None:
    end = classify(ended(None, 9, max_rss_kib=8 << 20))
    assert end.cause == "killed_by_os"
    assert "8.0 GiB" in end.cause_text
    assert outcome(ended(None, 11)) == ("crashed", "segfault")
    assert outcome(ended(137)) == ("crashed", "killed_by_os")


def test_what_the_trainer_says_itself_counts() -> None:
    assert outcome(ended(1), "", error=("bad_setting", "1000 is no multiple of 2048")) == ("crashed", "bad_setting")
    assert outcome(ended(1), "", error=("diverged", "loss is nan")) == ("diverged", "diverged")


def test_last_lines_are_clean_and_short() -> None:
    tail = "".join(upstream.progress(s) for s in range(300)) + "\n\x1b[31mred\x1b[0m [bold]x[/bold]\n" + "y" * 4000
    shown = classify(ended(1), tail).last_lines
    lines = shown.split("\n")
    assert len(lines) == 3
    assert lines[0].startswith("step 00299")
    assert lines[1] == "red [bold]x[/bold]"
    assert max(map(len, lines)) <= 300


def test_a_disk_too_full_for_the_last_words_is_named_by_the_supervisor() -> None:
    full = {"log_error": "ENOSPC", "log_dropped": 812}
    assert outcome(ended(1, **full), "step 1\n") == ("crashed", "disk_full")
    assert outcome(ended(None, 7, **full)) == ("crashed", "disk_full")
    assert outcome(ended(0, **full)) == ("no_result", "disk_full")
    assert outcome(ended(0, **full), val_bpb=0.99) == ("completed", None)
