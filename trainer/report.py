"""How a run tells the world what it does: one JSON line per event, one progress line per step, one summary block at the end.

Fixed: an experiment does not edit it. Standard library only. The summary block and the progress line are those of karpathy/autoresearch, so
every tool that reads upstream's logs reads these. `BudgetClock` decides what counts as training time.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any, NoReturn

EVENTS_FILE = "events.jsonl"
WAITING_LINE_S = 5.0
STEP_EVENTS_PER_S = 10  # a CPU run of tiny steps would otherwise write more events than numbers anyone looks at
UNCOUNTED_STEPS = {"cpu": 1, "cuda": 10}  # warm-up (compilation, caches, clocks) that the budget does not pay for
MAX_LOSS = 100.0  # nats; ln(vocabulary) is about 9, so above this the run has diverged

# (key, format) in upstream's order: readers find the block by its `---` and each line by its key
SUMMARY = (
    ("val_bpb", ".6f"),
    ("training_seconds", ".1f"),
    ("total_seconds", ".1f"),
    ("peak_vram_mb", ".1f"),
    ("mfu_percent", ".2f"),
    ("total_tokens_M", ".1f"),
    ("num_steps", "d"),
    ("num_params_M", ".1f"),
    ("depth", "d"),
)


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity inside it replaced by None: JSON has no word for them, and missing is not a number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class BudgetClock:
    """Counts training seconds. The first `uncounted` steps (compilation, warm-up of caches and clocks) are free, as upstream's are."""

    def __init__(self, budget_s: float, uncounted: int) -> None:
        self.budget_s, self.uncounted = budget_s, uncounted
        self.steps, self.trained_s, self.dt_s = 0, 0.0, 0.0
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Leave out the time since the last step (a checkpoint was written, say)."""
        self._last = time.perf_counter()

    def resume(self, steps: int, trained_s: float) -> None:
        """Go on from a saved state: steps and seconds that were counted before the interruption."""
        self.steps, self.trained_s = steps, trained_s

    def step_done(self) -> None:
        now = time.perf_counter()
        self.dt_s, self._last = now - self._last, now
        self.steps += 1
        if self.steps > self.uncounted:
            self.trained_s += self.dt_s

    @property
    def share(self) -> float:
        return min(self.trained_s / self.budget_s, 1.0)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.budget_s - self.trained_s)

    @property
    def done(self) -> bool:
        return self.steps > self.uncounted and self.trained_s >= self.budget_s


class Report:
    """Writes `events.jsonl` in the working directory, the progress line and the summary."""

    def __init__(self, path: str = EVENTS_FILE) -> None:
        self._file: IO[str] | None = None
        try:
            self._file = open(path, "a", encoding="utf-8")
        except OSError as error:
            print(f"{path}: {error.strerror}; training goes on without events", file=sys.stderr, flush=True)
        self._next_step_at = 0.0
        self._progress_open = False  # a `\r` line has been started and not ended

    def event(self, name: str, **fields: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"t": time.time(), "event": name, **finite(fields)}, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not cost the run: the summary on stdout still counts
            self._file = None
            print(f"events.jsonl: {error.strerror}; training goes on without events", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def stage(self, stage: str) -> None:
        self._end_progress()
        self.event("stage", stage=stage)

    @contextlib.contextmanager
    def waiting(self, what: str, on: bool = True) -> Iterator[None]:
        """Print a line every few seconds until the block ends: a cold compilation idles the GPU for half a minute and is no hang."""
        if not on:
            yield
            return
        done, started = threading.Event(), time.monotonic()

        def tell() -> None:
            while not done.wait(WAITING_LINE_S):
                print(f"{what}: {time.monotonic() - started:.0f} s so far", flush=True)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        print(f"{what}: done in {time.monotonic() - started:.1f} s", flush=True)

    def note(self, text: str) -> None:
        self._end_progress()
        print(text, flush=True)
        self.event("note", text=text)

    def step(
        self, clock: BudgetClock, loss: float, loss_raw: float, lrm: float, tok_s: float, mfu_percent: float | None, epoch: int
    ) -> None:
        """Report one finished step; `loss` is the smoothed one, in nats per token."""
        step, share = clock.steps - 1, clock.share
        mfu = "-" if mfu_percent is None else f"{mfu_percent:.1f}%"
        print(
            f"\rstep {step:05d} ({100 * share:.1f}%) | loss: {loss:.6f} | lrm: {lrm:.2f} | dt: {clock.dt_s * 1000:.0f}ms | "
            f"tok/sec: {int(tok_s):,} | mfu: {mfu} | epoch: {epoch} | remaining: {clock.remaining_s:.0f}s    ",
            end="",
            flush=True,
        )
        self._progress_open = True
        now = time.monotonic()
        if step == 0 or clock.done or now >= self._next_step_at:
            self._next_step_at = now + 1 / STEP_EVENTS_PER_S
            self.event(
                "step",
                step=step,
                share=share,
                loss=loss,
                loss_raw=loss_raw,
                lrm=lrm,
                dt_ms=clock.dt_s * 1000,
                tok_s=tok_s,
                mfu_percent=mfu_percent,
                epoch=epoch,
                remaining_s=clock.remaining_s,
            )

    def check_loss(self, step: int, loss_raw: float) -> None:
        """End the run at once when its loss is NaN, infinite or above 100: nothing good follows, and the slot is worth more."""
        if math.isfinite(loss_raw) and loss_raw <= MAX_LOSS:
            return
        print("FAIL", flush=True)  # on the progress line, as upstream does
        self._progress_open = False
        self.fail("diverged", f"step {step}: the loss is {loss_raw:g}; lower the learning rates or lengthen the warm-up")

    def problem(self, cause: str, text: str) -> None:
        """Report a fault that costs something but not the run."""
        self._end_progress()
        self.event("error", cause=cause, text=text)
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def fail(self, cause: str, text: str) -> NoReturn:
        """Say what ended the run in one sentence, for people (stderr) and programs (an `error` event), and exit with 1."""
        self._end_progress()
        self.event("error", cause=cause, text=text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(1)

    def summary(self, values: dict[str, Any], **more: Any) -> None:
        """Print the summary block; a value that is missing or not finite is printed as `-`. `more` goes to the event alone."""
        self._end_progress()
        values = finite(values)
        print("---")
        for key, form in SUMMARY:
            value = values.get(key)
            print(f"{key + ':':<17} {'-' if value is None else format(value, form)}")
        sys.stdout.flush()
        self.event("summary", **values, **more)

    def _end_progress(self) -> None:
        if self._progress_open:
            print()
            self._progress_open = False
