"""How a run ends that cannot go on: each cause in one sentence, for people and for programs. Fixed: an experiment does not edit it.

A failure of torch.compile is the one that need not end a run: `compiler_fault` tells it from an error of the script.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from corpora import DataError
from device import NoBfloat16, empty_cache, first_line
from report import Report
from settings import BadSetting, Plan

COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "triton")


def exhausts(error: BaseException) -> bool:
    """Whether it says that memory is used up: PyTorch has a type for a GPU's, and only words for the machine's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def compiler_fault(error: BaseException) -> str | None:
    """The first line of a failure that is the compiler's own; None for any other error, out of memory among them."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return None
        if type(seen).__module__.startswith(COMPILER_MODULES):
            return first_line(seen)
        seen = seen.__cause__
    return None


def out_of_memory(plan: Plan, foreign_gib: float, fits: Callable[[int], None], report: Report) -> NoReturn:
    """Say what would have fitted: `fits(rows)` is tried with fewer and fewer rows until it does not run out of memory."""
    rows = plan.device_rows // 2
    while rows:
        empty_cache()
        try:
            fits(rows)
            break
        except (RuntimeError, MemoryError) as error:
            if not exhausts(error):
                raise
            rows //= 2
    tried = f"{plan.device_rows} rows of {plan.seq_len} tokens at once do not fit in memory"
    advice = f"DEVICE_BATCH_SIZE = {rows} fits" if rows else "not even one row does: make the model smaller"
    if foreign_gib >= 1:
        report.fail("oom_external", f"{tried}: other processes held {foreign_gib:.1f} GiB of it at the start; free them, or {advice}")
    report.fail("oom", f"{tried}; {advice}")


@contextlib.contextmanager
def one_sentence(report: Report) -> Iterator[None]:
    """Turn what a user can mend into a sentence with its cause, and exit with 1; everything else stays a traceback."""
    try:
        yield
    except DataError as error:
        report.fail("no_data", str(error))
    except NoBfloat16 as error:
        report.fail("no_bf16", str(error))
    except BadSetting as error:
        report.fail("bad_setting", str(error))
    except Exception as error:
        if exhausts(error):
            report.fail("oom", f"out of memory outside the training steps ({first_line(error)}); make the model smaller, or free some")
        reason = compiler_fault(error)
        if reason is None:
            raise
        report.fail("compile", f'torch.compile failed ({reason}); COMPILE = "none" runs without it, slower')
