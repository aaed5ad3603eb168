"""Fetches the parquet shards that karpathy/autoresearch trains on: resumable, checked, with a progress line. Fixed; standard library only.

`python prepare.py --shards N` calls it. A shard half fetched is gone on with, a damaged one is fetched again, a whole one is left.
"""

from __future__ import annotations

import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from corpora import DataError

BASE_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
LAST_SHARD = 6542  # validation, as upstream pins it
CHUNK_BYTES = 1 << 20
ATTEMPTS = 4
STALL_S = 30  # a connection that gives nothing for so long is given up
PARQUET_MARK = b"PAR1"  # first and last four bytes of a whole file


def shard_names(count: int) -> list[str]:
    """The first `count` training shards and the validation shard."""
    if not 1 <= count <= LAST_SHARD:
        raise DataError(f"--shards {count}: there are {LAST_SHARD} training shards; ask for 1 to {LAST_SHARD}")
    return [f"shard_{i:05d}.parquet" for i in (*range(count), LAST_SHARD)]


def is_whole(path: Path) -> bool:
    """Whether the file begins and ends as a parquet file does."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
            file.seek(-4, os.SEEK_END)
            return head == PARQUET_MARK == file.read(4)
    except OSError:
        return False


def fetch_shards(folder: Path, count: int, base_url: str | None = None) -> list[Path]:
    """All shards in `folder`, fetched where they are missing. Raised: DataError, with the command that needs no network."""
    base = base_url or os.environ.get("OVERNIGHT_SHARDS_URL") or BASE_URL
    names = shard_names(count)
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, 1):
        path = folder / name
        if path.exists() and not is_whole(path):
            path.unlink()
        if not path.exists():
            _fetch(f"{base}/{name}", path, f"shard {number} of {len(names)}")
    return [folder / name for name in names]


def _fetch(url: str, path: Path, label: str) -> None:
    part = path.with_suffix(".part")
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(min(2**attempt, 10))
        try:
            _fetch_rest(url, part, label)
        except urllib.error.HTTPError as error:
            reason = f"the server answers {error.code} {error.reason}"
            error.close()
            if error.code == 416:  # what we have is not the head of what there is
                part.unlink(missing_ok=True)
            elif error.code in (401, 403, 404):
                break
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        else:
            if is_whole(part):
                os.replace(part, path)
                return
            reason = "what came is no parquet file"
            part.unlink(missing_ok=True)
    way_out = "run the same command later, or take text you have: python prepare.py --from-folder FOLDER"
    raise DataError(f"cannot fetch {url} ({reason}); {way_out}")


def _fetch_rest(url: str, part: Path, label: str) -> None:
    """Append what is missing of `url` to `part`; a server that ignores ranges makes it start again."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=STALL_S) as answer:
        resumed = answer.status == 206
        have = have if resumed else 0
        total = have + int(answer.headers.get("Content-Length") or 0)
        with open(part, "ab" if resumed else "wb") as file:
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                have += len(chunk)
                _progress(label, have, total)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if have < total:
        raise ConnectionError(f"the connection ended {total - have:,} bytes early")


def _progress(label: str, have: int, total: int) -> None:
    if sys.stderr.isatty():
        bar = "█" * (30 * have // total) if total else ""
        print(f"\r{label} |{bar:<30}| {have / 1e6:,.0f} of {total / 1e6:,.0f} MB", end="", file=sys.stderr, flush=True)
