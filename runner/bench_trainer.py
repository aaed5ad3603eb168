"""Two trainers on one GPU, one set of text, one tokenizer and one budget, in turns, with a table: `overnight bench trainer --against PATH`.

Works for any checkout whose script prints the summary block. Where its prepare.py has an evaluate_bpb of upstream's form, both models are
also scored by the same code on the same rows (`common bpb`, `packed bpb`): their own figures are of two evaluations. Imports no torch.

    python -m runner.bench_trainer --against PATH --shards FOLDER --budget 60 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.errors import BadValue, EngineError, OvernightError
from runner.materialise import materialise
from runner.policy import TrainerPolicy, usual_budget
from runner.sources import constants, override
from runner.text import one_line
from trainer.peaks import peak_flops

OURS = Path(__file__).parents[1] / "trainer"
COMMON_TAIL = "\n\nimport common_score\n\nevaluate_bpb = common_score.wrap(evaluate_bpb)\n"
UPSTREAM_EVAL_TOKENS = 8 * 524_288  # of its own evaluation; upstream's 40 times would take longer than a short run
WARM_STEPS = 10  # steps left out of the median step time
_SUMMARY = re.compile(r"^([a-zA-Z_]+):\s+([-+.\d]+(?:e[-+]?\d+)?)\s*$", re.MULTILINE)
_STEP = re.compile(r"\| dt: (\d+)ms \|")
_FLOPS = re.compile(r"^Estimated FLOPs per token: (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one side; None where the script does not say."""

    side: str
    budget_s: float
    val_bpb: float | None
    common_bpb: float | None  # windows all over the validation text
    packed_bpb: float | None  # rows packed from the beginnings of its documents, as upstream evaluates
    tokens_m: float | None
    steps: int | None
    step_ms: float | None
    tok_s: float | None
    mfu_percent: float | None  # by the side's own FLOP count over this GPU's peak
    training_s: float | None
    outside_s: float | None  # launch to exit, less training and less the common scoring
    peak_vram_mb: float | None
    dropped_percent: float | None  # of the training tokens, by packing
    wall_s: float
    exit_code: int
    last_words: str | None = None  # of a run that failed: the last line of its log


@dataclass(frozen=True, slots=True)
class Side:
    """A trainer and the environment its runs need."""

    name: str
    folder: Path
    environment: dict[str, str]
    shims: tuple[str, ...] = ()


def gpu_name() -> str | None:
    """Name of the first GPU by nvidia-smi; None when there is none."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def read_row(side: str, budget_s: float, log: str, events: str, wall_s: float, exit_code: int, peak: float | None) -> Row:
    """The row of a run from its output and its events."""
    block = log[log.rfind("\n---\n") :] if "\n---\n" in log else ""
    found = {key: float(value) for key, value in _SUMMARY.findall(block) if value != "-"}
    common = {key: float(value) for key, value in _SUMMARY.findall(log) if key.startswith(("common_", "packed_"))}
    times = [int(value) for value in _STEP.findall(log)][WARM_STEPS:]
    summary = next((event for event in map(_object, reversed(events.splitlines())) if event.get("event") == "summary"), {})
    steps, tokens_m, training_s = found.get("num_steps"), found.get("total_tokens_M"), found.get("training_seconds")
    step_ms = statistics.median(times) if times else None
    tok_s = 1e9 * tokens_m / steps / step_ms if tokens_m and steps and step_ms else None
    flops = _FLOPS.search(log)
    mfu = 100 * float(flops[1]) * tok_s / peak if flops and tok_s and peak else None
    dropped = summary.get("train_tokens_dropped_share")
    said = [line.strip() for line in log.splitlines() if line.strip()]
    return Row(
        side,
        budget_s,
        found.get("val_bpb"),
        common.get("common_bpb"),
        common.get("packed_bpb"),
        tokens_m,
        int(steps) if steps else None,
        step_ms,
        tok_s,
        mfu,
        training_s,
        None if training_s is None else wall_s - training_s - common.get("common_seconds", 0.0),
        found.get("peak_vram_mb"),
        100 * dropped if isinstance(dropped, (int, float)) else None,
        wall_s,
        exit_code,
        one_line(said[-1], 300) if exit_code and said else None,
    )


def _object(line: str) -> dict[str, object]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def run_once(side: Side, budget_s: float, python: str, common: Path | None, peak: float | None, keep: Path) -> Row:
    """Lay out one run of `side` in a folder of its own, run it to its end and read it."""
    work = Path(tempfile.mkdtemp(prefix=f"{side.name}-", dir=keep))
    source, budget = _is_trainer(side.folder)
    policy = TrainerPolicy(folder=side.folder, shims=list(side.shims), budget=budget)
    materialise(policy, source, int(budget_s) if budget_s.is_integer() else budget_s, work)
    _prepare_copy(work, common is not None)
    environment = {**os.environ, **side.environment, "PYTHONUNBUFFERED": "1", **({"OVERNIGHT_COMMON": str(common)} if common else {})}
    started = time.monotonic()
    with open(work / "out.log", "wb") as log:
        command = [python, "train.py"]
        done = subprocess.run(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    wall_s = time.monotonic() - started
    text = (work / "out.log").read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    events = work / "events.jsonl"
    return read_row(side.name, budget_s, text, events.read_text(encoding="utf-8") if events.exists() else "", wall_s, done.returncode, peak)


def _is_trainer(folder: Path) -> tuple[str, str]:
    """Its script, and where its budget stands. Raised: BadValue."""
    try:
        source = (folder / "train.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadValue(f"{folder} has no readable train.py ({why}).", next_step="Name a checkout of a trainer.") from None
    budget = usual_budget(folder)
    if budget is None:
        raise BadValue(f"{folder} has no prepare.py with a TIME_BUDGET.", next_step="Compare with a checkout whose budget can be set.")
    return source, budget


def _prepare_copy(work: Path, common: bool) -> None:
    """Shorten upstream's own evaluation and append the common scoring; a prepare.py of another form stays as it is."""
    path = work / "prepare.py"
    text = path.read_text(encoding="utf-8")
    if isinstance(constants(text).get("EVAL_TOKENS"), int):
        text = override(text, {"EVAL_TOKENS": UPSTREAM_EVAL_TOKENS})
    if common and re.search(r"^def evaluate_bpb\(", text, re.MULTILINE):
        (work / "common_score.py").write_bytes((OURS / "common_score.py").read_bytes())
        main = text.find('\nif __name__ == "__main__":')
        text = text + COMMON_TAIL if main < 0 else text[:main] + COMMON_TAIL + text[main:]
    path.write_text(text, encoding="utf-8")


COMMON_ROWS = """
import sys, numpy as np
from pathlib import Path
from prepare import load_dataset
from upstream import packed_rows
data, out = load_dataset(), Path(sys.argv[1])
rows = data.eval_rows()
np.save(out / "common.npy", rows); np.save(out / "packed.npy", packed_rows(data, min(2048, len(rows))))
np.save(out / "token_bytes.npy", data.token_bytes())
"""


def lay_out_data(python: str, shards: Path, keep: Path) -> tuple[dict[str, str], dict[str, str], Path]:
    """Prepare the shards for both sides. Returns the environments of ours and of upstream's, and the folder of the common rows.

    Raised: BadValue for a folder that holds no shards, EngineError when the data cannot be prepared.
    """
    if len(list(shards.glob("shard_*.parquet"))) < 2:
        raise BadValue(
            f"{shards} holds no two files shard_*.parquet (the last one is validation); the other side reads nothing else.",
            next_step="`python trainer/prepare.py --shards 2` fetches some, or write your text as parquet with a column `text`.",
        )
    shards = shards.resolve()
    home, common = keep / "home", keep / "common"
    common.mkdir(parents=True, exist_ok=True)
    ours = {"OVERNIGHT_CORPUS": str(shards), "OVERNIGHT_DATA": str(keep / "data")}
    for command in (["prepare.py"], ["upstream.py", str(home)], ["-c", COMMON_ROWS, str(common)]):
        env = {**os.environ, **ours}
        done = subprocess.run([python, *command], cwd=OURS, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()
            raise EngineError(f"Preparing the data failed: {last[-1] if last else command[0]}", next_step="Mend that and run it again.")
    return ours, {**ours, "HOME": str(home)}, common  # a fork of ours reads the same text as upstream does


def bench(
    against: Path,
    shards: Path,
    budgets_s: list[float],
    rounds: int,
    keep: Path,
    *,
    shim: bool = False,
    python: str = sys.executable,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Ours and `against` in turns, `rounds` times each at every budget. Raises BadValue for no trainer, EngineError for no data."""
    for budget_s in budgets_s:
        if not 0 < budget_s < math.inf:
            raise BadValue(f"A budget of {budget_s:g} s cannot be.", next_step="--budget takes seconds above 0.")
    for folder in (OURS, against):  # before ours has trained for minutes
        _is_trainer(folder)
    keep = keep.resolve()  # the programs that fill it stand elsewhere
    ours_env, theirs_env, common = lay_out_data(python, shards, keep)
    name, peak = gpu_name(), None
    if name:
        peak = peak_flops(name)
    say(f"{name or 'no GPU'}; peak {'?' if peak is None else f'{peak / 1e12:.1f} TFLOP/s'}")
    kernels = (str(OURS / "shims" / "kernels.py"),) if shim else ()
    sides = (Side("ours", OURS, ours_env), Side("theirs", against.resolve(), theirs_env, kernels))
    rows = []
    for budget_s in budgets_s:
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                row = run_once(side, budget_s, python, common, peak, keep)
                rows.append(row)
                say(json.dumps(asdict(row)))
                if row.exit_code:
                    say(f"{row.side} ended with exit code {row.exit_code}: {row.last_words or 'it said nothing'}")
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, missing as `-`."""
    columns: list[tuple[str, Callable[[Row], object], str]] = [
        ("side", lambda r: r.side, ""),
        ("budget s", lambda r: r.budget_s, "g"),
        ("own bpb", lambda r: r.val_bpb, ".4f"),
        ("common bpb", lambda r: r.common_bpb, ".4f"),
        ("packed bpb", lambda r: r.packed_bpb, ".4f"),
        ("tokens M", lambda r: r.tokens_m, ".1f"),
        ("steps", lambda r: r.steps, "d"),
        ("step ms", lambda r: r.step_ms, ".1f"),
        ("tok/s", lambda r: r.tok_s, ",.0f"),
        ("MFU %", lambda r: r.mfu_percent, ".1f"),
        ("outside budget s", lambda r: r.outside_s, ".1f"),
        ("launch to exit s", lambda r: r.wall_s, ".1f"),
        ("peak MB", lambda r: r.peak_vram_mb, ".0f"),
        ("dropped %", lambda r: r.dropped_percent, ".2f"),
    ]
    head = "| " + " | ".join(name for name, _, _ in columns) + " |\n|" + "---|" * len(columns)
    lines = []
    for row in rows:
        cells = [(value(row), form) for _, value, form in columns]
        lines.append("| " + " | ".join("-" if cell is None else format(cell, form) for cell, form in cells) + " |")
    return "\n".join([head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare this trainer with another checkout on one GPU.")
    parser.add_argument("--against", type=Path, required=True, help="a checkout of karpathy/autoresearch or a fork")
    parser.add_argument("--shards", type=Path, required=True, help="a folder of parquet shards; the last one is validation")
    parser.add_argument("--budget", type=float, action="append", metavar="SECONDS", help="may be given several times (default: 60)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shim", action="store_true", help="answer the other side's `kernels` package with PyTorch's attention")
    parser.add_argument("--keep", type=Path, help="keep data and runs in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as scratch:
        keep = arguments.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        try:
            rows = bench(
                arguments.against,
                arguments.shards,
                arguments.budget or [60.0],
                arguments.rounds,
                keep,
                shim=arguments.shim,
                say=lambda text: print(text, flush=True),  # noqa: T201
            )
        except OvernightError as error:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
            return error.exit_code
    print(table(rows))  # noqa: T201
    return 0 if all(row.exit_code == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
