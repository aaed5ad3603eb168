"""Recomputes the bits per byte of a finished run from its checkpoint, without trusting anything the run wrote. Fixed.

    python verify.py RUN_DIRECTORY [--claim 1.6390] [--holdout TEXT_FILE]

Run the trainer folder's own, not the run's copy. It prints one JSON object: verdict (verified, refuted, unverifiable), why, recomputed.
The run's code loads the model in a child process that is sent tokens and answers with logits. Text, tokens, byte lengths, normalisation and
sum are this process's own. A model that has learned the validation text by heart passes all of this but a holdout.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import hashlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from corpora import DataError, find_corpus, text_hash
from prepare import BOS, EMBEDDED, EMBEDDED_BELOW_BYTES, EVALUATOR, LARGE, SPLIT_PATTERN, Dataset, encode, eval_windows, load_dataset

HERE = Path(__file__).parent
BATCH_ROWS = 8
PREFIX_LENGTHS, PREFIXES_EACH = 32, 8  # places where the model is shown nothing but the past
SAMPLED_LOGITS = 1 << 31  # above so many numbers (8 GB) a random part of the rows is recomputed, against what the run claims of each row
CHEAPEST_ROWS = 64  # of those, the rows that claim the least for each byte
TOLERANCE_BPB = 0.003  # a bfloat16 run recomputed in float32 moved by less
HOLDOUT_RATIO = 2.0  # a holdout that costs so many times the claim was not predicted, and the validation text was
PR_SET_DUMPABLE = 4  # prctl(2)
TOLERANCE_NATS = 0.05  # of one token between two shapes of the same input
LEAN_NATS = 0.01  # of them all on average: rounding goes both ways, and so much of a token is about TOLERANCE_BPB
CHANCE_SIGMAS = 5.0  # random places are no harder than their rows; so much harder is no chance


class Refuted(Exception):
    """Raised when the model does not do what the run claims; the text says what was seen."""


class Unverifiable(Exception):
    """Raised when there is no way to recompute; the text says why and what would make it possible."""


@dataclass
class Verdict:
    verdict: str
    why: str
    claimed: float | None = None
    recomputed: float | None = None
    holdout: float | None = None
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluator: str = EVALUATOR
    data: str | None = None
    v: int = field(default=1)


# --- the model, in a process of its own --------------------------------------------------------------------------------

READY = b"ready"
CHILD = """
import os, struct, sys
work, checkpoint, device, inbox, outbox = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
sys.path.insert(0, work)
import numpy as np, torch
import train
model = train.load_model(checkpoint, device)
if device == "cpu":
    try:
        import ctypes
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0), libc.mallopt(-1, 1 << 30)  # keep freed memory: see device.keep_freed_memory
    except (OSError, AttributeError):
        pass
reader, writer = os.fdopen(inbox, "rb"), os.fdopen(outbox, "wb")
writer.write(b"ready"); writer.flush()
with torch.no_grad():
    while head := reader.read(8):
        rows, length = struct.unpack("<ii", head)
        tokens = np.frombuffer(reader.read(4 * rows * length), dtype=np.int32).reshape(rows, length)
        logits = model(torch.from_numpy(tokens.astype(np.int64)).to(device)).float().cpu().contiguous().numpy()
        writer.write(struct.pack("<q", logits.ndim) + struct.pack(f"<{logits.ndim}q", *logits.shape))
        writer.write(memoryview(logits).cast("B")); writer.flush()
"""


class Model:
    """The run's model behind a pipe: tokens in, logits out. Its prints, its patches and its memory stay in its own process."""

    MARKS = ("OVERNIGHT_RUN_ID", "OVERNIGHT_RUN_DIR")  # without them the control room takes its processes on the GPU for a stranger's
    SHIM = "OVERNIGHT_SHIM_ATTENTION"  # shims/kernels.py makes another model of it
    KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TMPDIR", SHIM, *MARKS)

    def __init__(self, work: Path, device: str, vocab_size: int, deadline_s: float) -> None:
        self.vocab_size, self.timed_out = vocab_size, False
        self._buffer = np.empty(0, dtype=np.float32)
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        self._reader, self._writer = os.fdopen(from_child, "rb"), os.fdopen(to_child, "wb")
        self._errors = tempfile.TemporaryFile()
        command = [sys.executable, "-c", CHILD, str(work), str(work / "checkpoint.pt"), device, str(child_in), str(child_out)]
        kept = {name: os.environ[name] for name in self.KEPT_ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(command, cwd=work, env=kept, pass_fds=(child_in, child_out), start_new_session=True,
                                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors)  # fmt: skip
        os.close(child_in)
        os.close(child_out)
        self._timer = threading.Timer(deadline_s, self._time_out)
        self._timer.daemon = True
        self._timer.start()
        self._loaded = False

    def nats(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Loss of every token in nats, float64 [rows, length], by our own normalisation of the model's logits."""
        rows, length = inputs.shape
        if not self._loaded:  # waited for here, so that several can load at once
            self._receive(len(READY))
            self._loaded = True
        try:
            self._writer.write(struct.pack("<ii", rows, length) + inputs.astype(np.int32).tobytes())
            self._writer.flush()
        except BrokenPipeError:
            self._died()
        dimensions = struct.unpack("<q", self._receive(8))[0]
        shape = struct.unpack(f"<{dimensions}q", self._receive(8 * dimensions)) if 0 < dimensions < 8 else ()
        if shape != (rows, length, self.vocab_size):
            expected = (rows, length, self.vocab_size)
            raise Refuted(f"the model answered with an array of shape {shape} instead of {expected}, a logit for each token")
        logits = self._logits(shape)
        chosen = np.take_along_axis(logits, targets[..., None].astype(np.int64), axis=-1)[..., 0].astype(np.float64)
        largest = logits.max(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore", over="ignore"):  # in place: 33 MB a batch would otherwise be copied three times
            np.exp(np.subtract(logits, largest, out=logits), out=logits)
            nats = np.log(logits.sum(axis=-1, dtype=np.float64)) + largest[..., 0] - chosen
        if not np.isfinite(nats).all():
            raise Refuted("the model answers with logits that are not finite")
        return nats

    def close(self) -> None:
        self._timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with whatever it started
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._writer.close()
        self._reader.close()
        self._errors.close()

    def _logits(self, shape: tuple[int, ...]) -> np.ndarray:
        """The child's answer, in a buffer that the next answer overwrites."""
        size = math.prod(shape)
        if len(self._buffer) < size:
            self._buffer = np.empty(size, dtype=np.float32)
        if self._reader.readinto(memoryview(self._buffer[:size]).cast("B")) < 4 * size:
            self._died()
        return self._buffer[:size].reshape(shape)

    def _time_out(self) -> None:
        self.timed_out = True
        self._process.kill()

    def _receive(self, size: int) -> bytes:
        data = self._reader.read(size)
        if len(data) < size:
            self._died()
        return data

    def _died(self) -> NoReturn:
        self._process.wait()
        if self.timed_out:
            raise Unverifiable("the model did not answer in time; verify again with a longer --deadline or on a faster --device")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = "".join(c for c in lines[-1] if c.isprintable())[:200] if lines else f"exit code {self._process.returncode}"
        if "has no attribute 'load_model'" in last:
            raise Unverifiable("the run's train.py has no load_model(checkpoint_path, device): docs/verify.md shows how to add it")
        raise Unverifiable(f"the run's load_model or model failed: {last}")


# --- the text, from the corpus itself ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """Rows to score with the byte length of every target."""

    rows: np.ndarray  # int [N, seq_len + 1]
    sizes: np.ndarray  # int [N, seq_len]


def trusted_text(dataset: Dataset) -> Scored:
    """The scored windows, encoded anew from the corpus: the data folder may have been written to by anyone's run. Raised: Unverifiable."""
    dataset.encoding()  # a damaged tokenizer is a sentence
    saved = json.loads((dataset.folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer_hash = hashlib.sha256(json.dumps(saved).encode()).hexdigest()
    again = f"delete {dataset.folder} and run: python prepare.py"
    if tokenizer_hash != dataset.meta["tokenizer_sha256"]:
        raise Unverifiable(f"tokenizer.json in {dataset.folder} was changed; {again}")
    if saved["pattern"] != SPLIT_PATTERN:
        raise Unverifiable(f"tokenizer.json in {dataset.folder} splits text by a pattern that is not this trainer's; {again}")
    corpus = find_corpus()
    train, validation = corpus.read()
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in train) + sum(map(len, validation))
    scale = EMBEDDED if size < EMBEDDED_BELOW_BYTES else LARGE
    data_id = f"{corpus.name}-{text_hash(train, validation)[:12]}-{tokenizer_hash[:8]}"
    if (data_id, scale.seq_len) != (dataset.data_id, dataset.seq_len):
        raise Unverifiable(f"{dataset.folder} does not belong to the text in {corpus.root}, which is {data_id}; {again}")
    return scored(dataset, eval_windows(validation, scale))


def scored(dataset: Dataset, windows: list[str]) -> Scored:
    """Windows of text as rows of tokens with the bytes of each target, by the tokenizer alone. Raised: Unverifiable."""
    saved = json.loads((dataset.folder / "tokenizer.json").read_text(encoding="utf-8"))
    lengths = np.array([len(base64.b64decode(token)) for token in saved["tokens"]] + [0])
    encoding = dataset.encoding()
    bos = encoding.encode_single_token(BOS)
    tokens = encode(encoding, windows)
    if (covered := int(lengths[tokens].sum())) != (size := sum(len(window.encode()) for window in windows)):
        raise Unverifiable(f"the tokens stand for {covered:,} of {size:,} bytes of the scored text: the tokenizer leaves some of it out")
    count = -(-(len(tokens) - 1) // dataset.seq_len)
    padded = np.full(count * dataset.seq_len + 1, bos, dtype=np.int64)
    padded[: len(tokens)] = tokens
    rows = np.lib.stride_tricks.sliding_window_view(padded, dataset.seq_len + 1)[:: dataset.seq_len]
    return Scored(rows, lengths[rows[:, 1:]])


# --- the checks --------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """One verification: where the run is, on what device, with how much time."""

    work: Path
    dataset: Dataset
    device: str
    deadline_s: float
    random: np.random.Generator = field(default_factory=np.random.default_rng)  # a run cannot know which rows and places are looked at

    @contextlib.contextmanager
    def model(self) -> Iterator[Model]:
        model = Model(self.work, self.device, self.dataset.vocab_size, self.deadline_s)
        try:
            yield model
        finally:
            model.close()

    def places(self, text: Scored, sample: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """Random (rows of the sample, length) where only the past is shown; the last length is never the whole row."""
        seq_len = text.rows.shape[1] - 1
        lengths = self.random.choice(np.arange(2, seq_len), size=min(PREFIX_LENGTHS, seq_len - 2), replace=False)
        return [(self.random.choice(sample, PREFIXES_EACH), int(length)) for length in sorted(lengths)]

    def prefix_nats(self, model: Model, text: Scored, places: list[tuple[np.ndarray, int]]) -> np.ndarray:
        """The loss at the last token of each prefix, from a process that never sees what follows."""
        return np.concatenate([model.nats(text.rows[rows, :length], text.rows[rows, 1 : length + 1])[:, -1] for rows, length in places])

    def row_nats(self, model: Model, text: Scored, sample: np.ndarray, kept: set[int]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Scored nats of each row of the sample, and the losses of all tokens of the rows in `kept`."""
        sums, tokens = [], {}
        for start in range(0, len(sample), BATCH_ROWS):
            part = sample[start : start + BATCH_ROWS]
            nats = model.nats(text.rows[part, :-1], text.rows[part, 1:])
            sums.append(np.where(text.sizes[part] > 0, nats, 0.0).sum(axis=1))
            tokens.update({int(row): line for row, line in zip(part, nats, strict=True) if int(row) in kept})
        return np.concatenate(sums), tokens

    def run(self, text: Scored, claimed_rows: np.ndarray | None) -> tuple[float, int]:
        """Bits per byte over all rows and the number of rows recomputed. Raised: Refuted, Unverifiable.

        What a model says of a place with and without the rest of its row comes from the one pass that is summed, in random order: it
        cannot behave for a first few questions and look ahead afterwards.
        """
        sample = self._sample(text, claimed_rows)
        places = self.places(text, sample)
        with self.model() as first, self.model() as second:
            alone = self.prefix_nats(first, text, places)  # before the other sees a whole row: it could tell what comes
            sums, tokens = self.row_nats(second, text, sample, {int(row) for rows, _ in places for row in rows})
        seen = np.array([tokens[int(row)][length - 1] for rows, length in places for row in rows])
        moved = np.abs(alone - seen)
        if moved.max() > TOLERANCE_NATS * 4 or moved.mean() > TOLERANCE_NATS:
            count = int((moved > TOLERANCE_NATS).sum())
            raise Refuted(
                f"the model looks at later tokens: at {count} of {len(moved)} places its loss is another one when what follows "
                f"is not shown, by up to {moved.max():.2f} nats"
            )
        if (lean := float(np.mean(alone - seen))) > LEAN_NATS:
            raise Refuted(
                f"the model looks at later tokens: its loss is {lean:.3f} nats lower, over {len(seen)} places, when what follows is shown"
            )
        known = {(int(row), length) for rows, length in places for row in rows}
        harder = np.array([tokens[row][length - 1] - tokens[row].mean() for row, length in known])
        if harder.mean() > CHANCE_SIGMAS * harder.std() / math.sqrt(len(harder)):
            raise Refuted(
                f"the model knew where it was asked: those {len(known)} random places cost it {harder.mean():.2f} nats more than "
                f"their rows do on average"
            )
        total_bytes = int(text.sizes.sum())
        if claimed_rows is None or len(sample) == len(text.rows):
            return float(sums.sum()) / (math.log(2) * total_bytes), len(sample)
        claimed = claimed_rows[sample]
        off = np.abs(sums - claimed) > 0.01 * np.abs(sums) + 1.0
        if off.any() or abs(sums.sum() - claimed.sum()) > 0.003 * sums.sum():
            raise Refuted(f"of {len(sample)} rows recomputed, {int(off.sum())} have another loss than the run claims for them")
        return float(claimed_rows.sum()) / (math.log(2) * total_bytes), len(sample)

    def _sample(self, text: Scored, claimed_rows: np.ndarray | None) -> np.ndarray:
        """Rows to recompute, in random order: all, or of a large evaluation those that claim to be the cheapest and a random part."""
        count = len(text.rows)
        affordable = max(2 * CHEAPEST_ROWS, SAMPLED_LOGITS // (text.sizes.shape[1] * self.dataset.vocab_size))
        if count <= affordable or claimed_rows is None:
            return self.random.permutation(count)
        order = np.argsort(claimed_rows / np.maximum(text.sizes.sum(axis=1), 1))  # a lie about few rows must make them cheap
        chosen = self.random.choice(order[CHEAPEST_ROWS:], size=affordable - CHEAPEST_ROWS, replace=False)
        return self.random.permutation(np.concatenate([order[:CHEAPEST_ROWS], chosen]))


def claimed_row_nats(work: Path, rows: int) -> np.ndarray | None:
    """What the run says each row cost, when it says so for all of them."""
    try:
        claimed = np.load(work / "eval_nats.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = claimed.shape == (rows,) and np.issubdtype(claimed.dtype, np.floating) and bool(np.isfinite(claimed).all())
    return claimed.astype(np.float64) if fits else None


def read_claim(work: Path) -> float | None:
    """val_bpb of the last summary event; None when the run has none."""
    claim = None
    with contextlib.suppress(OSError):
        for line in (work / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                event = json.loads(line)
                if event.get("event") == "summary" and isinstance(event.get("val_bpb"), float):
                    claim = event["val_bpb"]
    return claim


def verify(
    work: Path, claim: float | None, device: str, holdout: str | None = None, deadline_s: float = 900, data: str | None = None
) -> Verdict:
    """The verdict on the run in `work`; `holdout` is text, `data` the data id that the run named."""
    started = time.monotonic()
    result = Verdict("unverifiable", "", claim if claim is not None else read_claim(work))
    try:
        if result.claimed is None or not math.isfinite(result.claimed):
            raise Unverifiable("the run claims no val_bpb; give one with --claim")
        for name in ("train.py", "checkpoint.pt"):
            if not (work / name).is_file():
                raise Unverifiable(f"{work / name} is missing: only a run that wrote a checkpoint can be recomputed")
        check = Check(work, load_dataset(), device, deadline_s)
        text = trusted_text(check.dataset)
        result.data = check.dataset.data_id
        if data is not None and data != result.data:
            raise Unverifiable(f"the run names {data} as its data, and the text here is {result.data}")
        result.recomputed, result.rows = check.run(text, claimed_row_nats(work, len(text.rows)))
        result.tokens = result.rows * (text.rows.shape[1] - 1)
        off = result.recomputed - result.claimed
        result.verdict = "refuted" if abs(off) > TOLERANCE_BPB else "verified"
        result.why = f"claimed {result.claimed:.6f}, recomputed {result.recomputed:.6f} ({off:+.6f}) on {result.tokens:,} tokens"
        if holdout is not None:
            result.holdout, _ = check.run(scored(check.dataset, [holdout]), None)
            if result.verdict == "verified" and result.holdout > HOLDOUT_RATIO * result.recomputed:
                raise Refuted(
                    f"a text that no run has seen costs it {result.holdout:.6f}, {result.holdout / result.recomputed:.1f} times "
                    f"its {result.recomputed:.6f}: it has the validation text by heart"
                )
    except Refuted as refuted:
        result.verdict, result.why = "refuted", str(refuted)
    except (Unverifiable, DataError) as reason:
        result.verdict, result.why = "unverifiable", str(reason)
    result.seconds = round(time.monotonic() - started, 2)
    return result


def hide_memory() -> None:
    """Keep other processes of this user, the model's among them, from reading the targets in this one's memory. Root still can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def held_out(path: Path) -> str:
    """The holdout's text; the file is removed when it lies in this folder, before any code of the run could read it."""
    text = path.read_text(encoding="utf-8")
    if path.resolve().parent == HERE.resolve():
        path.unlink()
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Recompute the val_bpb of a finished run. Prints one JSON object.")
    parser.add_argument("work", type=Path, metavar="RUN_DIRECTORY", help="the run's working directory, with train.py and checkpoint.pt")
    parser.add_argument("--claim", type=float, help="the val_bpb to check (default: the run's own summary event)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--holdout", type=Path, help="a UTF-8 text that no run has seen; scored as well, and removed when it lies here")
    parser.add_argument("--data", help="the data id that the run named; another text here makes it unverifiable")
    parser.add_argument("--deadline", type=float, default=900, metavar="SECONDS")
    arguments = parser.parse_args()
    if arguments.work.resolve() == HERE.resolve():
        print("error: run verify.py from the trainer folder and name the run's directory", file=sys.stderr)
        return 2
    hide_memory()
    try:
        holdout = held_out(arguments.holdout) if arguments.holdout else None
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: the holdout {arguments.holdout} cannot be read: {error}", file=sys.stderr)
        return 2
    result = verify(arguments.work, arguments.claim, arguments.device, holdout, arguments.deadline, arguments.data)
    print(json.dumps(asdict(result)))
    return 0 if result.verdict == "verified" else 1


if __name__ == "__main__":
    sys.exit(main())
