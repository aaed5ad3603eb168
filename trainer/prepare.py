"""Turns a corpus into rows of tokens on disk, feeds them to training, and measures bits per byte. Fixed: an experiment does not edit it.

    python prepare.py                          the embedded corpus (a few seconds; does nothing the second time)
    python prepare.py --from-folder FOLDER     any folder of text
    python prepare.py --shards 8               the shards karpathy/autoresearch trains on (fetched, about 90 MB each)

Prepared data lies in OVERNIGHT_DATA, else in `.data/` beside the corpus. What a result depends on is in `data_id` and EVALUATOR.
"""

from __future__ import annotations

import argparse
import base64
import bisect
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from corpora import HERE, Corpus, DataError, find_corpus, text_hash

TIME_BUDGET = 300  # seconds of training; the control room writes each run's budget here
EVALUATOR = "bytes-1"  # changes whenever the same model would score differently: results are compared only inside one version
FORMAT = 1  # of the files in the data folder
STAGING = re.compile(r"\..+-[0-9a-f]{12}-[0-9a-f]{8}\.\d+", re.DOTALL)  # a data folder that is being prepared
META_KEYS = frozenset({"data_id", "vocab_size", "bos", "seq_len", "train_text_tokens", "sizes", "tokenizer_sha256"})  # of meta.json

BOS = "<|bos|>"  # begins every document and every row
# GPT-4's split of text into words before merging, with numbers in pairs of digits
SPLIT_PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
TOKENIZER_CHARS = 200_000_000  # of training text the merges are learned from; more changes nothing that can be measured


@dataclass(frozen=True)
class Scale:
    """What goes with the size of a corpus: the row length, the vocabulary, and the text that is scored."""

    seq_len: int  # longest row in tokens, and the row length of the evaluation
    vocab_size: int
    window_bytes: int  # the evaluation reads windows of so many bytes, evenly strided over the validation text
    eval_bytes: int  # all windows together


# Embedded: 98k tokens in all, where the paired difference of two models has a standard error of about 0.001 bpb. Large: 4 to 5 M tokens.
EMBEDDED = Scale(seq_len=256, vocab_size=4096, window_bytes=1024, eval_bytes=416 << 10)
LARGE = Scale(seq_len=2048, vocab_size=8192, window_bytes=8192, eval_bytes=16 << 20)
EMBEDDED_BELOW_BYTES = 32 << 20  # a folder smaller than this is treated at the embedded scale


@dataclass(frozen=True)
class Dataset:
    """A prepared corpus on disk; arrays are memory maps until they are used."""

    folder: Path
    meta: dict[str, Any]

    @property
    def data_id(self) -> str:
        """Names corpus and tokenizer: equal ids mean the same text, the same tokens and the same scored windows."""
        return str(self.meta["data_id"])

    @property
    def vocab_size(self) -> int:
        return int(self.meta["vocab_size"])

    @property
    def seq_len(self) -> int:
        return int(self.meta["seq_len"])

    @property
    def bos(self) -> int:
        return int(self.meta["bos"])

    def array(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self.damaged(path.name) from error

    def damaged(self, name: str) -> DataError:
        """What to say of a file of this data that is not what it was."""
        return DataError(f"{self.folder / name} is missing or damaged; delete {self.folder} and run: python prepare.py")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 length of each token, 0 for BOS: int32 [vocab_size]."""
        return np.asarray(self.array("token_bytes"))

    def train_rows(self, seq_len: int) -> np.ndarray:
        """Packed training rows, uint16 [rows, seq_len + 1]; packed once per row length and kept on disk, if it takes them."""
        name = f"rows-{seq_len}"
        if not (self.folder / f"{name}.npy").exists():
            rows = None
            try:
                with _locked(self.folder.parent):
                    if not (self.folder / f"{name}.npy").exists():
                        rows = pack_rows(self.array("train"), seq_len, self.bos)
                        _save(self.folder, name, rows)
            except OSError:  # full, or not ours to write: the next run packs again
                return pack_rows(self.array("train"), seq_len, self.bos) if rows is None else rows
        return self.array(name)

    def dropped_share(self, rows: np.ndarray) -> float:
        """Share of the training tokens that no row holds (BOS tokens left out on both sides)."""
        kept = int(np.count_nonzero(rows != self.bos))
        return 1 - kept / int(self.meta["train_text_tokens"])

    def eval_rows(self) -> np.ndarray:
        """The scored windows, cut into uint16 [rows, seq_len + 1]; a row begins with the last token of the one before."""
        tokens = self.array("eval")
        count = -(-(len(tokens) - 1) // self.seq_len)
        padded = np.full(count * self.seq_len + 1, self.bos, dtype=np.uint16)  # BOS has no bytes, so padding is never scored
        padded[: len(tokens)] = tokens
        return np.lib.stride_tricks.sliding_window_view(padded, self.seq_len + 1)[:: self.seq_len]

    def encoding(self) -> Any:
        """The tiktoken encoding."""
        import tiktoken

        try:
            saved = json.loads((self.folder / "tokenizer.json").read_text(encoding="utf-8"))
            ranks = {base64.b64decode(token): rank for rank, token in enumerate(saved["tokens"])}
            return tiktoken.Encoding(name="overnight", pat_str=saved["pattern"], mergeable_ranks=ranks, special_tokens={BOS: len(ranks)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.damaged("tokenizer.json") from error


# --- finding and preparing --------------------------------------------------------------------------------------------


def data_root(corpus: Corpus | None) -> Path:
    """OVERNIGHT_DATA, else `.data/` beside the real corpus folder (a run's `corpus` or the file in it may be a link there)."""
    if named := os.environ.get("OVERNIGHT_DATA"):
        return Path(named).expanduser()
    if corpus is None:
        return HERE / ".data"
    real = corpus.files[0].resolve().parent
    return (real.parent if corpus.kind == "embedded" and real.name == "corpus" else HERE) / ".data"


def _shards_root() -> Path:
    """Where shards are fetched to: the text that OVERNIGHT_CORPUS names need not be there yet, or be whole."""
    try:
        return data_root(find_corpus())
    except DataError:
        return data_root(None)


def load_dataset(where: str | None = None, say: Callable[[str], None] = lambda text: None) -> Dataset:
    """The prepared corpus at `where` (see corpora.find_corpus), prepared now if it never was. Raised: DataError."""
    corpus = find_corpus(where)
    root = data_root(corpus)
    try:
        root.mkdir(parents=True, exist_ok=True)
        known = root / f"known-{corpus.signature()}"
        if dataset := _known(known):
            return dataset
        with _locked(root):
            if dataset := _known(known):
                return dataset  # another process prepared it while we waited
            folder = _prepare(corpus, root, say)
            _write(known, folder.name.encode())
    except OSError as error:
        at = Path(str(error.filename or root))
        if at.is_relative_to(corpus.root) and not at.is_relative_to(root):
            raise DataError(f"cannot read {error.filename}: {error.strerror}; mend it, or name other text in OVERNIGHT_CORPUS") from error
        raise DataError(
            f"cannot prepare data in {root}: {error.strerror or error}; name a writable folder with room in OVERNIGHT_DATA"
        ) from error
    except ModuleNotFoundError as error:
        raise DataError(f"preparing {corpus.root} needs the Python package {error.name}: pip install {error.name}") from error
    dataset = _open(folder)
    assert dataset is not None
    return dataset


def _known(note: Path) -> Dataset | None:
    """The dataset that a note beside it names; None when there is no such note, or nothing of ours behind it."""
    try:
        name = note.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return _open(note.parent / name)


def _open(folder: Path) -> Dataset | None:
    """The dataset in `folder`; None when there is none of this format. Raised: DataError when its parts do not fit together."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT or not META_KEYS <= meta.keys():
            return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    dataset = Dataset(folder, meta)
    try:
        tokenizer = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except OSError as error:
        raise dataset.damaged("tokenizer.json") from error
    if tokenizer != meta["tokenizer_sha256"]:  # a run does not need it, but nobody could recompute its result
        raise dataset.damaged("tokenizer.json")
    sizes = {name: len(dataset.array(name)) for name in ("train", "validation", "eval", "token_bytes")}
    if sizes != meta["sizes"] or sizes["token_bytes"] != dataset.vocab_size:
        raise DataError(f"the data in {folder} does not fit its vocabulary or its size; delete the folder and run: python prepare.py")
    return dataset


def _prepare(corpus: Corpus, root: Path, say: Callable[[str], None]) -> Path:
    started = time.perf_counter()
    train, validation = corpus.read(say)
    if not train or not validation:
        raise DataError(f"{corpus.root} has {len(train)} training and {len(validation)} validation documents; both are needed")
    total_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in train) + sum(map(len, validation))
    scale = EMBEDDED if total_bytes < EMBEDDED_BELOW_BYTES else LARGE
    say(f"{corpus.name}: {len(train) + len(validation):,} documents, {total_bytes / 1e6:.1f} MB; learning {scale.vocab_size:,} tokens")
    tokenizer = _train_tokenizer(train, scale.vocab_size)
    corpus_hash = text_hash(train, validation)
    tokenizer_hash = hashlib.sha256(json.dumps(tokenizer).encode()).hexdigest()
    data_id = f"{corpus.name}-{corpus_hash[:12]}-{tokenizer_hash[:8]}"
    folder = root / data_id
    for left in (path for path in root.iterdir() if STAGING.fullmatch(path.name)):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed: we hold the lock, so nobody works in it
    staging = root / f".{data_id}.{os.getpid()}"
    staging.mkdir()
    try:
        _write(staging / "tokenizer.json", json.dumps(tokenizer).encode())
        encoding = Dataset(staging, {}).encoding()
        lengths = [len(base64.b64decode(token)) for token in tokenizer["tokens"]] + [0]
        arrays = {
            "train": encode(encoding, train),
            "validation": encode(encoding, validation),
            "eval": encode(encoding, eval_windows(validation, scale)),
            "token_bytes": np.array(lengths, dtype=np.int32),
        }
        for name, array in arrays.items():
            _save(staging, name, array)
        bos = encoding.encode_single_token(BOS)
        meta = {
            "format": FORMAT,
            "data_id": data_id,
            "corpus": corpus.name,
            "kind": corpus.kind,
            "corpus_sha256": corpus_hash,
            "tokenizer_sha256": tokenizer_hash,
            "vocab_size": encoding.n_vocab,
            "bos": bos,
            "seq_len": scale.seq_len,
            "documents": [len(train), len(validation)],
            "train_text_tokens": int(np.count_nonzero(arrays["train"] != bos)),
            "eval_tokens": len(arrays["eval"]),
            "eval_bytes": int(arrays["token_bytes"][arrays["eval"]].sum()),
            "sizes": {name: len(array) for name, array in arrays.items()},
        }
        _write(staging / "meta.json", json.dumps(meta, indent=1).encode())
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    say(
        f"{meta['train_text_tokens']:,} training tokens, {meta['eval_tokens']:,} scored tokens ({meta['eval_bytes']:,} bytes) "
        f"in {time.perf_counter() - started:.1f} s: {folder}"
    )
    return folder


def _train_tokenizer(documents: list[str], vocab_size: int) -> dict[str, Any]:
    import rustbpe

    def texts() -> Iterator[str]:
        left = TOKENIZER_CHARS
        for text in documents:
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return

    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts(), vocab_size - 1, pattern=SPLIT_PATTERN)
    ranks = sorted(((rank, bytes(token)) for token, rank in tokenizer.get_mergeable_ranks()))
    return {"pattern": tokenizer.get_pattern(), "tokens": [base64.b64encode(token).decode() for _, token in ranks]}


def encode(encoding: Any, documents: list[str]) -> np.ndarray:
    """All documents in one uint16 array, each led by BOS; a pool of threads, since the encoder releases the interpreter lock."""
    bos = np.array([encoding.encode_single_token(BOS)], dtype=np.uint16)

    def one(text: str) -> np.ndarray:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except UnicodeEncodeError:  # lone surrogates: replaced, as tiktoken does for str input
            return encoding.encode_to_numpy(
                text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), disallowed_special=()
            ).astype(np.uint16)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts = [part for tokens in pool.map(one, documents, chunksize=64) for part in (bos, tokens)]
    return np.concatenate(parts)


def eval_windows(validation: list[str], scale: Scale) -> list[str]:
    """Windows of `window_bytes`, evenly strided over the validation text: fixed by byte offset, the same for every vocabulary."""
    data = "\n\n".join(validation).encode("utf-8", "replace")
    count = max(1, min(scale.eval_bytes, len(data)) // scale.window_bytes)
    stride = len(data) // count

    def boundary(offset: int) -> int:
        while offset < len(data) and data[offset] & 0xC0 == 0x80:  # not inside a character
            offset += 1
        return offset

    starts = [boundary(i * stride) for i in range(count)]
    return [data[start : boundary(min(start + scale.window_bytes, start + stride))].decode("utf-8") for start in starts]


def pack_rows(tokens: np.ndarray, seq_len: int, bos: int) -> np.ndarray:
    """Rows of seq_len + 1 tokens that begin with BOS. Long documents are split (each piece gets its BOS), short pieces are packed best-fit,
    and the piece that fills a row is split too, so that nothing is dropped but the tail that fills no row."""
    capacity = seq_len + 1
    starts = np.flatnonzero(tokens == bos)
    ends = np.append(starts[1:], len(tokens))
    rows: list[list[tuple[int, int]]] = []  # a row is a list of text spans; BOS is written before each
    pieces: list[tuple[int, int]] = []  # (length, start) of text without BOS, kept sorted
    for start, end in zip((starts + 1).tolist(), ends.tolist(), strict=True):
        while end - start >= seq_len:
            rows.append([(seq_len, start)])
            start += seq_len
        if end > start:
            pieces.append((end - start, start))
    pieces.sort()
    while pieces:
        row, room = [], capacity
        while room >= 2 and pieces:
            at = bisect.bisect_right(pieces, (room - 1, len(tokens))) - 1
            if at >= 0:
                length, start = pieces.pop(at)
            else:  # none fits whole: fill the row with the head of the shortest, keep its rest
                (whole, start), length = pieces.pop(0), room - 1
                bisect.insort(pieces, (whole - length, start + length))
            row.append((length, start))
            room -= length + 1
        if room < 2:
            rows.append(row)
    packed = np.full((len(rows), capacity), bos, dtype=np.uint16)
    for line, row in zip(packed, rows, strict=True):
        at = 1
        for length, start in row:
            line[at : at + length] = tokens[start : start + length]
            at += length + 1
    return packed


# --- measuring ------------------------------------------------------------------------------------------------------


def evaluate_bpb(token_nats: Callable[[Any, Any], Any], dataset: Dataset, batch_rows: int, device: Any) -> float:
    """Bits per byte on the scored windows, independent of vocabulary and batch.

    `token_nats(inputs, targets)` returns the loss of every token in nats, [rows, seq_len]. Targets without bytes (BOS) are not scored.
    The loss of each row is left in eval_nats.npy, so that a part of a large evaluation can be recomputed.
    """
    import torch

    rows = torch.from_numpy(np.array(dataset.eval_rows()).view(np.int16)).to(device)
    token_bytes = torch.from_numpy(np.array(dataset.token_bytes())).to(device)
    row_nats = []
    scored_bytes = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows].long() & 0xFFFF
        missing = batch_rows - len(batch)  # keep the batch shape, so that a compiled model is not compiled again
        if missing:
            batch = torch.cat([batch, torch.full((missing, batch.shape[1]), dataset.bos, device=device)])
        sizes = token_bytes[batch[:, 1:]]
        losses = token_nats(batch[:, :-1], batch[:, 1:]).detach().view_as(sizes)
        row_nats.append(torch.where(sizes > 0, losses, 0.0).sum(dim=1, dtype=torch.float64))
        scored_bytes += sizes.sum()
    per_row = torch.cat(row_nats)[: len(rows)].cpu().numpy()
    with contextlib.suppress(OSError):  # a full disk costs a quicker verification, not the result
        np.save("eval_nats.npy", per_row, allow_pickle=False)
    return float(per_row.sum()) / (math.log(2) * int(scored_bytes))


# --- files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the data folder's lock: of two processes that prepare the same data, one works and the other waits."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, data: bytes) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_bytes(data)
    os.replace(staging, path)


def _save(folder: Path, name: str, array: np.ndarray) -> None:
    """Write an array whole or not at all; called under the lock, so what lies there half written is of a process that was killed."""
    for left in folder.glob(f".{name}.*.npy"):
        left.unlink(missing_ok=True)
    staging = folder / f".{name}.{os.getpid()}.npy"
    np.save(staging, array, allow_pickle=False)
    os.replace(staging, folder / f"{name}.npy")


def main() -> int:
    sys.stdout.reconfigure(errors="backslashreplace")  # the name of a folder need not be UTF-8
    parser = argparse.ArgumentParser(description="Prepare data for training. Does nothing when it is prepared already.")
    parser.add_argument(
        "--from-folder",
        metavar="FOLDER",
        help="a folder of text files or parquet shards (default: OVERNIGHT_CORPUS, else the embedded corpus)",
    )
    parser.add_argument("--shards", type=int, metavar="N", help="fetch and prepare N training shards of climbmix and the validation shard")
    arguments = parser.parse_args()
    if arguments.from_folder and arguments.shards is not None:
        parser.error("take --from-folder or --shards, not both")
    folder = arguments.from_folder
    try:
        if arguments.shards is not None:
            from download import fetch_shards

            folder = str(fetch_shards(_shards_root() / "climbmix", arguments.shards)[0].parent)
        dataset = load_dataset(folder, say=print)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"ready: {dataset.data_id}, vocabulary {dataset.vocab_size:,}, rows of {dataset.seq_len} tokens in {dataset.folder}")
    if folder:
        print(f"train on it with: OVERNIGHT_CORPUS={Path(folder).resolve()} python train.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
