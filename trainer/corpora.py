"""Where the text comes from: the embedded corpus, a folder of text files, or parquet shards as karpathy/climbmix-400b-shuffle has them.

Fixed: an experiment does not edit it. Every corpus becomes two lists of documents, training and validation, and a hash of the whole text.
The corpus is `OVERNIGHT_CORPUS` (a file or folder) when that is set, else `corpus/` beside this file.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT_SEPARATOR = "\x1e"  # in .txt.xz: ASCII record separator, which no document contains
VALIDATION_EVERY, VALIDATION_AT = 12, 5  # document i is validation when i % 12 == 5: spread over all years of the embedded corpus
SHARD_GLOB = "shard_*.parquet"
TEXT_SUFFIXES = frozenset(".c .cc .cpp .cu .cuh .go .h .hpp .html .java .js .jsonl .md .py .pyi .rs .rst .tex .ts .txt".split())
MAX_FILE_BYTES = 16 << 20  # a larger "text" file is a dump or a data set and would drown the rest
MOST_BLANKS = 500_000  # in a row: both tokenizers run out of stack between 600,000 and a million
BLANKS = re.compile(rf"\s{{{MOST_BLANKS + 1}}}")


class DataError(Exception):
    """Raised when there is no usable data; its text says what is missing, where, and what to do next."""


@dataclass(frozen=True)
class Corpus:
    """A place that text can be read from; `kind` is embedded, folder or shards."""

    kind: str
    files: tuple[Path, ...]
    root: Path

    @property
    def name(self) -> str:
        name = self.files[0].name.removesuffix(".txt.xz") if self.kind == "embedded" else self.root.name
        return os.fsencode(name).decode("utf-8", "replace")  # a name on disk need not be UTF-8

    def signature(self) -> str:
        """A cheap fingerprint that says whether the text may have changed: an archive's bytes, else names, sizes and times."""
        if self.kind == "embedded":
            return hashlib.sha256(self.files[0].read_bytes()).hexdigest()[:16]
        lines = [f"{self.root.resolve()}"]
        for path in self.files:
            stat = path.stat()
            lines.append(f"{path.relative_to(self.root)} {stat.st_size} {stat.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def read(self, say: Callable[[str], None] = lambda text: None) -> tuple[list[str], list[str]]:
        """Training and validation documents, in a fixed order; files that are no documents are counted in words to `say`."""
        if self.kind == "shards":
            *parts, last = self.files  # the last shard is validation, as upstream pins it
            train, validation = [text for path in parts for text in read_shard(path)], read_shard(last)
            return self._without_blanks(train, say), self._without_blanks(validation, say)
        documents, left_out = (_read_embedded(self.files[0]), "") if self.kind == "embedded" else _read_folder(self.files)
        documents = self._without_blanks(documents, say)
        if len(documents) < VALIDATION_EVERY:
            raise DataError(
                f"{self.root} holds {len(documents)} usable documents{f' (left out: {left_out})' if left_out else ''}; "
                f"at least {VALIDATION_EVERY} are needed to split off validation: a text file is one document, "
                "so split a long one into a folder of its own, or name a folder with more text"
            )
        if left_out:
            say(f"{self.root}: left out {left_out}")
        train = [text for i, text in enumerate(documents) if i % VALIDATION_EVERY != VALIDATION_AT]
        return train, documents[VALIDATION_AT::VALIDATION_EVERY]

    def _without_blanks(self, documents: list[str], say: Callable[[str], None]) -> list[str]:
        """The documents that can be split into words at all."""
        kept = [text for text in documents if len(text) <= MOST_BLANKS or not BLANKS.search(text)]
        if len(kept) < len(documents):
            say(f"{self.root}: left out {len(documents) - len(kept)} with over {MOST_BLANKS:,} blanks in a row")
        return kept


def find_corpus(where: str | None = None) -> Corpus:
    """The corpus at `where`, else at OVERNIGHT_CORPUS, else beside this file. Raised: DataError when there is none."""
    chosen = where or os.environ.get("OVERNIGHT_CORPUS")
    root = Path(chosen).expanduser() if chosen else HERE / "corpus"
    if not root.exists():
        source = "OVERNIGHT_CORPUS" if chosen and not where else "the corpus"
        raise DataError(f"no text at {root} ({source}); name a folder of text: python prepare.py --from-folder FOLDER")
    if root.is_file():
        return Corpus(_kind_of_file(root), (root,), root.parent)
    if shards := sorted(root.glob(SHARD_GLOB)):
        if len(shards) < 2:
            raise DataError(
                f"{root} holds one parquet shard; at least two are needed (the last one is validation): python prepare.py --shards 2"
            )
        return Corpus("shards", tuple(shards), root)
    if archives := sorted(root.glob("*.txt.xz")):
        return Corpus("embedded", (archives[0],), root)
    files = tuple(
        sorted(
            path
            for path in root.rglob("*")
            if path.suffix in TEXT_SUFFIXES and path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
        )
    )
    if not files:
        raise DataError(
            f"no text files ({' '.join(sorted(TEXT_SUFFIXES))}) below {root}; name another folder: python prepare.py --from-folder FOLDER"
        )
    return Corpus("folder", files, root)


def text_hash(train: list[str], validation: list[str]) -> str:
    """SHA-256 over all documents with their lengths, so that moving a border between two documents changes it."""
    digest = hashlib.sha256()
    for part in (train, validation):
        digest.update(f"{len(part)}\n".encode())
        for text in part:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(f"{len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def read_shard(path: Path) -> list[str]:
    """The documents of one parquet shard. Raised: DataError when the file is damaged or has no text column."""
    import pyarrow  # only shards need it; the embedded corpus does not
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        texts = pyarrow.parquet.read_table(path, columns=["text"]).column("text").to_pylist() if "text" in names else None
    except (pyarrow.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)[:120]
        again = "delete it, and fetch it again: python prepare.py --shards N"
        raise DataError(f"{path} is damaged or half downloaded ({why}); {again}") from error
    if texts is None or not all(isinstance(text, str) for text in texts if text is not None):
        raise DataError(f"{path} has no column `text` that holds text (its columns: {', '.join(names)[:120]}); name other shards")
    return [text for text in texts if text]


def _kind_of_file(path: Path) -> str:
    if path.name.endswith(".txt.xz"):
        return "embedded"
    raise DataError(f"{path} is neither a folder nor a .txt.xz archive of documents; name a folder of text instead")


def _read_embedded(path: Path) -> list[str]:
    try:
        return lzma.decompress(path.read_bytes()).decode("utf-8").split(DOCUMENT_SEPARATOR)
    except (lzma.LZMAError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from the repository") from error


def _read_folder(files: tuple[Path, ...]) -> tuple[list[str], str]:
    """One document a file, and in words how many files are none: not UTF-8, empty, too large, exact copies."""
    documents: list[str] = []
    seen: set[bytes] = set()
    left_out: Counter[str] = Counter()
    for path in files:
        size = path.stat().st_size
        if not 0 < size <= MAX_FILE_BYTES:
            left_out[f"over {MAX_FILE_BYTES >> 20} MiB (split them)" if size else "empty"] += 1
            continue
        data = path.read_bytes()
        mark = hashlib.sha256(data).digest()
        if mark in seen:
            left_out["copies"] += 1
            continue
        seen.add(mark)
        try:
            documents.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            left_out["not UTF-8"] += 1
    return documents, ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
