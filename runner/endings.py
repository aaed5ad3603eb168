"""How a run ended, and the cause where its last words tell it.

The exception a traceback ends in decides, never a word found anywhere in the log: "inf" is part of "info", and an out-of-memory error
may well pass through triton. A host out of reach is not an end and never comes here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from runner.records import Outcome, Run
from runner.text import clean

__all__ = ["End", "classify_end", "last_lines"]

LINES_KEPT = 14
LINE_LIMIT = 300
FOREIGN_MIB = 1024  # memory of somebody else on the GPU that makes an OOM theirs rather than the run's

# (cause, pattern over the exception's text, sentence). The first match counts, so the special stands before the general.
_CAUSES: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (cause, re.compile(text, re.IGNORECASE), said)
    for cause, text, said in (
        (
            "oom",
            r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|HIP out of memory|cudaErrorMemoryAllocation"
            r"|CUBLAS_STATUS_ALLOC_FAILED",
            "The GPU's memory was too small for it",
        ),
        (
            "oom_host",
            r"^MemoryError|DefaultCPUAllocator: can't allocate|Cannot allocate memory",
            "The machine's memory was too small for it",
        ),
        ("disk_full", r"No space left on device|Errno 28|Disk quota exceeded|PytorchStreamWriter failed", "The disk is full"),
        ("import", r"^(?:\w+\.)*(?:ModuleNotFoundError|ImportError)\b", "A module it needs is not installed on this host"),
        (
            "attention_backend",
            r"no kernel image is available|FlashAttention.{0,40}(?:only supports|requires)|No available kernel"
            r"|flash[-_ ]?attn|flash[-_]attention",
            "Its attention kernel does not run on this GPU; scaled_dot_product_attention does",
        ),
        (
            "no_gpu",
            r"No CUDA GPUs are available|Found no NVIDIA driver|driver version is insufficient|CUDA driver initialization failed"
            r"|no CUDA-capable device|CUDA unknown error|Torch not compiled with CUDA",
            "It found no GPU it could use",
        ),
        ("syntax", r"^(?:SyntaxError|IndentationError|TabError)\b", "The script is not valid Python"),
        (
            "compile",
            r"torch\._dynamo|torch\._inductor|BackendCompilerFailed|triton\S*\.(?:CompilationError|OutOfResources)|InductorError"
            r"|CppCompileError",
            "torch.compile failed",
        ),
        (
            "cuda",
            r"CUDA error|device-side assert|CUBLAS_STATUS|CUDNN_STATUS|illegal memory access|AcceleratorError|ECC error",
            "CUDA reported an error",
        ),
        ("assert", r"^AssertionError\b", "An assertion of the script failed"),
        (
            "network",
            r"URLError|ConnectionError|HTTPError|MaxRetryError|NameResolutionError|ReadTimeout|ConnectTimeout|LocalEntryNotFoundError"
            r"|OfflineModeIsEnabled",
            "It could not fetch something over the network",
        ),
        ("no_data", r"^(?:FileNotFoundError|NotADirectoryError)\b", "A file it needs is not there"),
        ("interrupted", r"^KeyboardInterrupt\b", "It was interrupted"),
    )
)
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failed|Failure|OutOfResources|StopIteration)\b(?::.*)?$"
)
_OTHER_PROCESS = re.compile(r"(?<!this )Process \d+ has ([\d.]+) (GiB|MiB) memory in use")
_NAN_SUMMARY = re.compile(r"^val_bpb\s*:\s+([-+]?(?:nan|inf)\w*)", re.IGNORECASE | re.MULTILINE)
_FAIL = re.compile(r"^[ \t]*(?:step[ \t]+\d.*[ \t])?FAIL[ \t]*$", re.MULTILINE)
_GLUED = re.compile(r"^\s*(step\s+\d+\b.*\|.*?\bremaining:\s*\d+\s*s)\s*(\S.*)$")
_SAID = {
    "diverged": "The loss left the finite numbers",
    "bad_setting": "Its constants do not fit",
    "no_data": "Its data is not there",
    "no_bf16": "This device has no bfloat16",
    "oom": "The GPU's memory was too small for it",
    "disk_full": "The disk is full",
}


@dataclass(frozen=True, slots=True)
class End:
    """What became of a run: outcome, cause (None where it cannot be told), one sentence, and the lines that show it."""

    outcome: str
    cause: str | None
    cause_text: str | None
    last_lines: str | None


def classify_end(status: dict[str, Any] | None, run: Run, tail: str, *, summary_seen: bool, error: tuple[str, str] | None = None) -> End:
    """Outcome and cause of a run that is over.

    `status` is the supervisor's last status.json, None when it never said "ended"; `tail` the end of the log; `error` what an `error`
    event said.
    """
    lines = _unglued(clean(tail).split("\n"))
    shown = last_lines(lines)
    has_result = summary_seen or run.val_bpb is not None
    if status is None and has_result:
        return End(Outcome.COMPLETED, "no_status", "Its supervisor went without a last word, after the summary; the result stands.", shown)
    if status is None:
        return End(Outcome.LOST, "no_status", "Its supervisor went without a last word: the host restarted, or somebody killed it.", shown)
    if status.get("unkillable"):
        pids = ", ".join(str(p) for p in list(status["unkillable"])[:5])
        return End(Outcome.KILL_FAILED, "unkillable", f"Process {pids} did not die of SIGKILL; the GPU is not free.", shown)
    stopped = _stopped(status, has_result)
    if stopped is not None:
        return End(*stopped, shown)
    if status.get("phase") == "refused" or status.get("reason") in ("gpu-locked", "lock-timeout", "exec-failed"):
        return End(*_refused(status), shown)
    if status.get("reason") == "supervisor-terminated":
        return End(Outcome.LOST, "host_shutdown", "Its supervisor was terminated from outside, as when a host goes down.", shown)
    return End(*_own_end(status, run, lines, error), shown)


def _unglued(lines: list[str]) -> list[str]:
    """The lines, with what was printed behind a progress line (which has no end of its own) on a line of its own."""
    out: list[str] = []
    for line in lines:
        glued = _GLUED.match(line)
        out += [glued[1], glued[2]] if glued else [line]
    return out


def _stopped(status: dict[str, Any], has_result: bool) -> tuple[str, str | None, str | None] | None:
    """The end of a run that we stopped, or None when it ended by itself."""
    reason = _stop_reason(status.get("stop_reason"))
    if status.get("reason") == "time-limit":
        reason = "timed_out"
    elif status.get("reason") != "stopped":
        return None  # a stop that came too late stopped nothing
    if has_result and reason in ("timed_out", "hung_after_summary", "cancelled", "pruned"):
        return Outcome.COMPLETED, "hung_after_summary", "It did not exit after its summary and was stopped; the result stands."
    if reason == "timed_out":
        return Outcome.TIMED_OUT, "time_limit", f"It ran into its time limit{_after(status)} and was stopped."
    if reason == "pruned":
        return Outcome.PRUNED, "pruned", "Its loss was hopeless against finished runs of its class, and it was stopped."
    if reason == "nan":
        return Outcome.DIVERGED, "nan", "Its loss was not a finite number for many steps, and it was stopped."
    if reason == "hung_after_summary":
        return Outcome.NO_RESULT, "hung_after_summary", "It was stopped after a summary that holds no val_bpb."
    return Outcome.CANCELLED, reason if reason != "cancelled" else None, "It was cancelled."


def _stop_reason(text: Any) -> str:
    if isinstance(text, str):
        try:
            text = json.loads(text)
        except ValueError:
            return text.strip() or "cancelled"
    if isinstance(text, dict):
        text = text.get("reason")
    return text if isinstance(text, str) and text else "cancelled"


def _after(status: dict[str, Any]) -> str:
    elapsed = status.get("elapsed_s")
    return f" after {elapsed:.0f} s" if isinstance(elapsed, (int, float)) else ""


def _refused(status: dict[str, Any]) -> tuple[str, str, str]:
    reason, detail = str(status.get("reason")), clean(str(status.get("detail") or ""), keep_newlines=False)[:200]
    said = {
        "gpu-locked": ("gpu_locked", "Another process holds the GPU's lock"),
        "lock-timeout": ("gpu_locked", "The GPU's lock did not come free in time"),
        "gpu-memory": ("oom_external", "Somebody else's memory is on the GPU"),
        "disk-full": ("disk_full", "The host's disk is full"),
        "exec-failed": ("exec_failed", "Its command could not be started"),
    }
    cause, sentence = said.get(reason, ("refused", f"The host refused it ({reason})"))
    return Outcome.CRASHED, cause, f"{sentence}: {detail}." if detail else f"{sentence}."


def _own_end(status: dict[str, Any], run: Run, lines: list[str], error: tuple[str, str] | None) -> tuple[str, str | None, str | None]:
    code, signal = status.get("exit_code"), status.get("exit_signal")
    if signal is None and isinstance(code, int) and code > 128 and code - 128 in _SIGNALS:
        signal = code - 128  # a shell in between reports it so
    clean_exit = code == 0 and not signal
    if run.val_bpb is not None:
        if clean_exit:
            return Outcome.COMPLETED, None, None
        how = f"signal {_SIGNALS.get(signal, signal)}" if signal else f"exit code {code}"
        return Outcome.COMPLETED, "exit_after_summary", f"It ended with {how} after its summary; the result stands."
    tail = "\n".join(lines)
    printed = _NAN_SUMMARY.search(tail)
    if (error and error[0] == "diverged") or _FAIL.search(tail):
        return Outcome.DIVERGED, "nan" if printed else "diverged", "Its loss became NaN or larger than 100."
    if printed:
        loss = f"; its last training loss was {run.loss:.6g}" if run.loss is not None else ""
        return Outcome.DIVERGED, "nan", f"It printed val_bpb {printed[1]}{loss}."
    if error:
        return Outcome.CRASHED, *_external(error[0], error[1] or _SAID.get(error[0], error[0]), status, tail)
    if status.get("log_error") == "ENOSPC":  # its last words had no room either
        outcome = Outcome.NO_RESULT if clean_exit else Outcome.CRASHED
        return outcome, "disk_full", f"The host's disk was full; {status.get('log_dropped') or 0} bytes of its output were lost."
    if clean_exit:
        return Outcome.NO_RESULT, "no_summary", "It exited with code 0 and printed no val_bpb."
    exception = _exception(lines)
    if exception:
        return Outcome.CRASHED, *_exception_cause(exception, status, tail)
    if signal:
        return Outcome.CRASHED, *_signal_cause(signal, status)
    for cause, pattern, said in _CAUSES:  # no traceback: native code prints its last words alone
        line = next((x for x in reversed(lines[-40:]) if pattern.search(x.strip())), None)
        if line:
            return Outcome.CRASHED, *_external(cause, f"{said}: {line.strip()[:200]}", status, tail)
    return Outcome.CRASHED, "exit_code", f"It ended with exit code {code} and no traceback."


def _exception(lines: list[str]) -> str | None:
    """The line a traceback ends in, with the next few lines (torch puts the reason there); the last one counts."""
    for i in range(len(lines) - 1, -1, -1):
        if _EXCEPTION.match(lines[i]) and "\n".join(lines[max(0, i - 200) : i]).find("Traceback (most recent call last)") >= 0:
            return " ".join(x.strip() for x in lines[i : i + 3] if x.strip())
    return next((x.strip() for x in reversed(lines[-20:]) if _EXCEPTION.match(x)), None)


def _exception_cause(exception: str, status: dict[str, Any], tail: str) -> tuple[str, str]:
    for cause, pattern, said in _CAUSES:
        if pattern.search(exception):
            return _external(cause, f"{said}: {exception[:240]}", status, tail)
    return _external("exception", f"It ended in {exception[:240]}", status, tail)


def _external(cause: str, text: str, status: dict[str, Any], tail: str) -> tuple[str, str]:
    """An out-of-memory error is not the run's own where somebody else's memory was on the GPU."""
    text = text if text.endswith(".") else f"{text}."
    if cause != "oom":
        return cause, text
    foreign = max((_mib(m) for m in _OTHER_PROCESS.finditer(tail)), default=0.0)
    memory = status.get("gpu_memory")
    for entry in memory.values() if isinstance(memory, dict) else ():
        if isinstance(entry, dict):
            baseline = entry.get("baseline_mib")
            foreign = max(foreign, baseline if isinstance(baseline, (int, float)) else 0)
    if foreign >= FOREIGN_MIB:
        return "oom_external", f"Out of GPU memory while other processes held {foreign / 1024:.1f} GiB of it: {text}"
    return cause, text


def _mib(match: re.Match[str]) -> float:
    return float(match[1]) * (1024 if match[2] == "GiB" else 1)


def _signal_cause(signal: int, status: dict[str, Any]) -> tuple[str, str]:
    name = _SIGNALS.get(signal, f"signal {signal}")
    if signal == 9:
        rss = status.get("max_rss_kib")
        size = f"; it had used {rss / 2**20:.1f} GiB" if isinstance(rss, (int, float)) and rss else ""
        return "killed_by_os", f"It was killed with SIGKILL by something else, most often the machine's out-of-memory killer{size}."
    if signal in (4, 7, 8, 11):
        return "segfault", f"Native code crashed ({name})."
    return "signal", f"It was ended by {name} from outside or by itself."


def last_lines(lines: list[str]) -> str | None:
    """The last lines that say something; of a run of progress lines the last one alone."""
    kept: list[str] = []
    progress = False
    for raw in reversed(lines[-400:]):
        line = raw.rstrip()
        if not line:
            continue
        is_progress = line.lstrip().startswith("step ") and "|" in line
        if is_progress and progress:
            continue
        progress = is_progress
        kept.append(line[:LINE_LIMIT])
        if len(kept) == LINES_KEPT:
            break
    return "\n".join(reversed(kept)) or None
