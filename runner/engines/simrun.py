"""One simulated run: what it prints and when, worked out once from its source, its GPU and its id.

Everything follows from the run directory (spec.json, the source in work/, status.json), so a simulated run can be taken up again at any
moment by another process and goes on as if nothing had happened. Times here are simulated seconds since the run's start.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner import sources
from runner.engines import surface

START_S = 14.0  # imports, data and compile, from a warm cache
IMPORT_S = 8.0  # the part of the start that is importing torch: a standby does it while the run before still trains
EVAL_S = 11.0  # upstream's sample in program.md: 325.9 s in all for 300.1 s of training
LINE_EVERY_S = 5.0  # one progress line kept for so much training
VOCAB = 8192
BATCH, ROWS = "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE"


class Tape:
    """Bytes that appear at known moments: what exists at a time is a prefix of the whole."""

    def __init__(self, pieces: list[tuple[float, bytes]]) -> None:
        self.bytes = b"".join(b for _, b in pieces)
        self.times = [t for t, _ in pieces]
        self.ends = [0, *itertools.accumulate(len(b) for _, b in pieces)]

    def due(self, at_s: float) -> int:
        """How many bytes exist at a time."""
        return self.ends[bisect.bisect_right(self.times, at_s)]


@dataclass(frozen=True, slots=True)
class Script:
    """The course of one run: what its log and events hold when, and how it ends."""

    log: Tape
    events: Tape
    ends_s: float
    exit_code: int
    mem_mib: int


def constants_of(text: str, known: Mapping[str, float]) -> dict[str, float]:
    """The constants of a source that the surface knows, as numbers; others are ignored (they have no effect here).

    A device batch of None is left to the script, as in our trainer: the most that the surface runs well and the total batch divides by.
    """
    names = "|".join(map(re.escape, known))
    lines = re.findall(rf"^(?:{names})\s*(?::[^=\n]+)?=[^=].*$", text, re.MULTILINE)
    found = sources.constants("\n".join(lines))
    numbers = {k: v for k, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    if found.get(ROWS, 0) is None:
        total = numbers.get(BATCH, known.get(BATCH, surface.DEFAULTS[BATCH]))
        numbers[ROWS] = next((n for n in range(int(known[ROWS]), 0, -1) if not total % (n * surface.SEQ_LEN)), int(known[ROWS]))
    return numbers


def write_script(run_id: str, text: str, gpu: str, budget_s: float, crash_share: float, of: Any = surface) -> Script:
    """Work out the course of a run on the surface `of` (a module with `score` and `DEFAULTS`)."""
    constants = constants_of(text, of.DEFAULTS)
    chance = zlib.crc32(f"chance {run_id}".encode()) / 2**32
    try:
        result = of.score(constants, _short(gpu, of), budget_s, zlib.crc32(run_id.encode()))
    except (ValueError, ArithmeticError):  # a negative learning rate, a batch of 0: the script would not survive it either
        result = surface.Result("crashed", None, 0.0, lambda share: float("nan"))
    full = {**surface.DEFAULTS, **{k: v for k, v in {**of.DEFAULTS, **constants}.items() if k in surface.DEFAULTS}}
    full |= {k: surface.DEFAULTS[k] for k in surface.POSITIVE if full[k] <= 0}
    body = _Body(full, gpu, budget_s)
    body.head()
    if result.outcome == "crashed" and result.training_s <= 0:
        return body.crash(
            START_S * 0.6,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.50 GiB."
            if _fits_batch(full)
            else "AssertionError: TOTAL_BATCH_SIZE must be a multiple of DEVICE_BATCH_SIZE * MAX_SEQ_LEN",
        )
    stop = budget_s
    if result.outcome in ("crashed", "diverged"):
        stop = result.training_s
    flaky = result.outcome == "completed" and chance < crash_share
    if flaky:
        stop = budget_s * (0.02 + 0.9 * chance / max(crash_share, 1e-9))
    body.train(result.curve, stop)
    if flaky or result.outcome == "crashed":
        return body.crash(START_S + stop, "RuntimeError: CUDA error: unspecified launch failure")
    if result.outcome == "diverged":
        return body.fail(START_S + stop)
    return body.summary(float(result.val_bpb))


def _short(gpu: str, of: Any) -> str:
    """The name of a card as the surface knows it (`SPEED` or `CARDS`), or the name itself."""
    known = [k for k in getattr(of, "CARDS", None) or getattr(of, "SPEED", {}) if k in gpu]
    return max(known, key=len) if known else gpu


def _fits_batch(c: Mapping[str, float]) -> bool:
    return c["DEVICE_BATCH_SIZE"] > 0 and not c["TOTAL_BATCH_SIZE"] % (c["DEVICE_BATCH_SIZE"] * surface.SEQ_LEN)


class _Body:
    """Collects what a run prints, in upstream's form."""

    def __init__(self, constants: Mapping[str, float], gpu: str, budget_s: float) -> None:
        self.c, self.gpu, self.budget_s = constants, gpu, budget_s
        self.width = surface.width_of(constants)
        self.depth = int(constants["DEPTH"])
        self.steps = surface.steps_of(constants, gpu, budget_s)
        self.matrix_params = 12 * self.depth * self.width**2
        self.params = self.matrix_params + 2 * VOCAB * self.width
        self.flops = 6 * self.matrix_params + 12 * self.depth * self.width * surface.SEQ_LEN // 2
        self.tok_s = self.steps * constants["TOTAL_BATCH_SIZE"] / budget_s
        self.mfu = 100 * self.flops * self.tok_s / (surface.card(gpu)[2] * 1e12)
        self.vram_mb = 1024 * 40 * (constants["DEVICE_BATCH_SIZE"] / 128) * (self.width / 512) ** 0.8 * (self.depth / 8)
        self.chunks: list[tuple[float, bytes]] = []
        self.events: list[tuple[float, bytes]] = []

    def print(self, at_s: float, text: str) -> None:
        self.chunks.append((at_s, text.encode()))

    def event(self, at_s: float, **fields: Any) -> None:
        self.events.append((at_s, json.dumps({"t": round(at_s, 3), **fields}).encode() + b"\n"))

    def head(self) -> None:
        config = {"sequence_len": surface.SEQ_LEN, "vocab_size": VOCAB, "n_layer": self.depth, "n_embd": self.width}
        self.print(
            START_S * 0.5,
            f"Vocab size: {VOCAB:,}\nModel config: {config}\nEstimated FLOPs per token: {self.flops:e}\n"
            f"Time budget: {self.budget_s:.0f}s\nGradient accumulation steps: 1\n",
        )
        self.event(
            START_S * 0.5,
            event="start",
            v=1,
            constants=dict(self.c),
            attributes={"attention_backend": "simulated"},
            gpu_name=self.gpu,
            torch="simulated",
            cuda="simulated",
            flops_per_token=float(self.flops),
            num_params=self.params,
            model_config=config,
            data="simulated",
            evaluator="simulated",
            vocab_size=VOCAB,
            budget_s=self.budget_s,
            seed=int(self.c["SEED"]),
        )
        self.event(START_S * 0.5, event="stage", stage="compiling")

    def train(self, curve: Any, until_s: float) -> None:
        self.event(START_S, event="stage", stage="training")
        lines = max(int(self.budget_s / LINE_EVERY_S), 8)
        for i in range(1, lines + 1):
            share = i / lines
            if share * self.budget_s > until_s + 1e-9:
                break
            step = max(int(self.steps * share), i)
            left = max(self.budget_s * (1 - share), 0)
            dt_ms = 1000 * self.budget_s / self.steps
            self.print(
                START_S + share * self.budget_s,
                f"\rstep {step:05d} ({100 * share:.1f}%) | loss: {curve(share):.6f} | lrm: {min(1.0, 2 * (1 - share)):.2f} | "
                f"dt: {dt_ms:.0f}ms | tok/sec: {self.tok_s:,.0f} | mfu: {self.mfu:.1f}% | epoch: 1 | remaining: {left:.0f}s    ",
            )

    def finish(self, ends_s: float, code: int) -> Script:
        return Script(Tape(self.chunks), Tape(self.events), ends_s, code, int(self.vram_mb))

    def crash(self, at_s: float, words: str) -> Script:
        self.print(at_s, f'\nTraceback (most recent call last):\n  File "train.py", line 1, in <module>\n{words}\n')
        return self.finish(at_s, 1)

    def fail(self, at_s: float) -> Script:
        self.print(at_s, "FAIL\n")
        return self.finish(at_s, 1)

    def summary(self, val_bpb: float) -> Script:
        self.event(START_S + self.budget_s, event="stage", stage="evaluating")
        ends_s = START_S + self.budget_s + EVAL_S
        tokens_m = self.steps * self.c["TOTAL_BATCH_SIZE"] / 1e6
        rows = [
            ("val_bpb", f"{val_bpb:.6f}"),
            ("training_seconds", f"{self.budget_s + 0.1:.1f}"),
            ("total_seconds", f"{ends_s:.1f}"),
            ("peak_vram_mb", f"{self.vram_mb:.1f}"),
            ("mfu_percent", f"{self.mfu:.2f}"),
            ("total_tokens_M", f"{tokens_m:.1f}"),
            ("num_steps", str(self.steps)),
            ("num_params_M", f"{self.params / 1e6:.1f}"),
            ("depth", str(self.depth)),
        ]
        self.print(ends_s, "\n---\n" + "".join(f"{k + ':':<18}{v}\n" for k, v in rows))
        return self.finish(ends_s, 0)
