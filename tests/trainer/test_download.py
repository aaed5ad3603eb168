"""Fetching shards from a real HTTP server that breaks off, ignores ranges, sends rubbish or is not there."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import TRAINER, Folder, words

pytest.importorskip("numpy")
pyarrow = pytest.importorskip("pyarrow", reason="needs the `trainer` extra (pyarrow)")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `break_after` bytes the first answer for a name ends, `ranges` says whether it can go on in the middle."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.break_after: dict[str, int] = {}
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, wanted = self.path.lstrip("/"), self.headers.get("Range")
        self.server.asked.append((name, wanted))
        if name not in self.server.files:
            self.send_error(404)
            return
        data, start = self.server.files[name], 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = self.server.break_after.pop(name, None)
        self.wfile.write(data[start : stop if stop is None else start + stop])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    for name, first in (("shard_00000", 0), ("shard_00001", 15), ("shard_06542", 30)):
        table = pyarrow.table({"text": [words(i + 1, 200) for i in range(first, first + 15)]})
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink)
        made.files[f"{name}.parquet"] = sink.getvalue().to_pybytes()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def download(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TRAINER))
    import download

    monkeypatch.setattr(download.time, "sleep", lambda _: None)
    yield download
    for name in ("download", "corpora"):
        sys.modules.pop(name, None)


def test_shards_are_fetched_once_and_a_broken_one_is_gone_on_with(download: ModuleType, server: Server, tmp_path: Path) -> None:
    server.break_after["shard_00001.parquet"] = 100
    paths = download.fetch_shards(tmp_path, 2, server.url)
    assert [path.name for path in paths] == ["shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"]
    assert all(path.read_bytes() == server.files[path.name] for path in paths)
    assert ("shard_00001.parquet", "bytes=100-") in server.asked
    server.asked.clear()
    download.fetch_shards(tmp_path, 2, server.url)
    assert server.asked == []
    paths[0].write_bytes(b"PAR1 half a shard")
    download.fetch_shards(tmp_path, 2, server.url)
    assert paths[0].read_bytes() == server.files["shard_00000.parquet"] and len(server.asked) == 1


def test_a_server_without_ranges_starts_again(download: ModuleType, server: Server, tmp_path: Path) -> None:
    server.ranges, server.break_after["shard_00000.parquet"] = False, 64
    path = download.fetch_shards(tmp_path, 1, server.url)[0]
    assert path.read_bytes() == server.files["shard_00000.parquet"]


@pytest.mark.parametrize("content", [b"<html>sign in</html>", b""])
def test_what_is_no_shard_is_refused(download: ModuleType, server: Server, tmp_path: Path, content: bytes) -> None:
    server.files["shard_00000.parquet"] = content
    with pytest.raises(download.DataError, match=r"no parquet file.*--from-folder"):
        download.fetch_shards(tmp_path, 1, server.url)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_sentence_names_the_way_out(folder: Folder, tmp_path: Path) -> None:
    folder.data = tmp_path / "data"
    broken = folder.run("prepare.py", "--shards", "1", OVERNIGHT_SHARDS_URL="http://127.0.0.1:9")
    assert broken.returncode == 1 and "--from-folder" in broken.stderr and broken.stderr.count("\n") == 1
    for count in ("0", "6543"):
        assert "ask for 1 to 6542" in folder.run("prepare.py", "--shards", count).stderr


def test_shards_become_a_corpus(folder: Folder, server: Server, tmp_path: Path) -> None:
    folder.data = tmp_path / "data"
    done = folder.run("prepare.py", "--shards", "2", OVERNIGHT_SHARDS_URL=server.url)
    assert done.returncode == 0, done.stderr
    assert "climbmix: 45 documents" in done.stdout and "OVERNIGHT_CORPUS=" in done.stdout
    shard = folder.data / "climbmix" / "shard_00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-200] + b"PAR1")  # looks whole, is not
    broken = folder.run("prepare.py", OVERNIGHT_CORPUS=str(shard.parent))
    assert broken.returncode == 1 and "damaged or half downloaded" in broken.stderr and broken.stderr.count("\n") == 1
