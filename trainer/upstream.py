"""Lays prepared data out the way karpathy/autoresearch reads it: the same shards, the same tokenizer, the same byte lengths. Fixed.

    python upstream.py HOME_FOLDER     then run upstream with HOME=HOME_FOLDER; its own prepare.py finds everything prepared

Only parquet corpora (OVERNIGHT_CORPUS=FOLDER of shards) can be shared, since upstream reads nothing else.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
from corpora import DataError, find_corpus
from prepare import Dataset, load_dataset

UPSTREAM_BOS = "<|reserved_0|>"
PACKING_BUFFER, PACKING_BATCH = 1000, 128  # documents, as upstream's loader holds and reads them
VALIDATION_SHARD = "shard_06542.parquet"  # the name upstream pins


def lay_out(home: Path) -> str:
    """Write `home`/.cache/autoresearch for the corpus in use; returns its data id. Raised: DataError."""
    import tiktoken
    import torch

    corpus, dataset = find_corpus(), load_dataset()
    if corpus.kind != "shards":
        raise DataError(f"{corpus.root} holds no parquet shards, and upstream reads nothing else; name such a folder in OVERNIGHT_CORPUS")
    cache = home / ".cache" / "autoresearch"
    for name in ("data", "tokenizer"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    for path in corpus.files:
        link = cache / "data" / (VALIDATION_SHARD if path == corpus.files[-1] else path.name)
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    dataset.encoding()  # a damaged tokenizer is a sentence
    saved = json.loads((dataset.folder / "tokenizer.json").read_text(encoding="utf-8"))
    ranks = {base64.b64decode(token): rank for rank, token in enumerate(saved["tokens"])}
    special = {UPSTREAM_BOS: dataset.bos}
    encoding = tiktoken.Encoding(name="overnight", pat_str=saved["pattern"], mergeable_ranks=ranks, special_tokens=special)
    (cache / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(torch.from_numpy(np.array(dataset.token_bytes(), dtype=np.int32)), cache / "tokenizer" / "token_bytes.pt")
    return dataset.data_id


def reading_order(shard: Path, documents: int) -> list[tuple[int, int]]:
    """The slices in which upstream's loader reads a shard: at most 128 documents, never across two row groups."""
    import pyarrow.parquet

    layout = pyarrow.parquet.ParquetFile(shard).metadata
    groups = [layout.row_group(i).num_rows for i in range(layout.num_row_groups)]
    if sum(groups) != documents:  # empty documents were left out
        groups = [documents]
    slices, first = [], 0
    for size in groups:
        slices += [(first + at, first + min(at + PACKING_BATCH, size)) for at in range(0, size, PACKING_BATCH)]
        first += size
    return slices


def packed_rows(dataset: Dataset, count: int) -> np.ndarray:
    """Validation rows as upstream's evaluation has them, uint16 [count, seq_len + 1]: whole documents packed best-fit from a buffer of
    1,000, the shortest one cropped where none fits. They hold the beginnings of documents; what is cropped is never scored."""
    tokens = np.asarray(dataset.array("validation"))
    starts = np.flatnonzero(tokens == dataset.bos)
    documents = [tokens[a:b] for a, b in zip(starts, np.append(starts[1:], len(tokens)), strict=True)]
    slices = reading_order(find_corpus().files[-1], len(documents))
    waiting: list[np.ndarray] = []
    rows, taken = np.empty((count, dataset.seq_len + 1), dtype=np.uint16), 0
    for row in rows:
        at = 0
        while at < len(row):
            while len(waiting) < PACKING_BUFFER:
                start, end = slices[taken % len(slices)]
                waiting += documents[start:end]
                taken += 1
            room = len(row) - at
            lengths = [len(document) for document in waiting]
            fitting = [length if length <= room else -1 for length in lengths]
            best = int(np.argmax(fitting)) if max(fitting) > 0 else int(np.argmin(lengths))
            document = waiting.pop(best)[:room]
            row[at : at + len(document)] = document
            at += len(document)
    return rows


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: OVERNIGHT_CORPUS=SHARDS python upstream.py HOME_FOLDER", file=sys.stderr)
        return 2
    try:
        print(f"{lay_out(Path(sys.argv[1]))} laid out below {os.path.join(sys.argv[1], '.cache', 'autoresearch')}")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
