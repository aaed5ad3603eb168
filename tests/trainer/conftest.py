"""Trainer tests run its files the way a run does: copied into a folder, as scripts of their own process, on a corpus of a few kilobytes."""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TRAINER = Path(__file__).parents[2] / "trainer"


@dataclass
class Folder:
    """A run's working directory with the trainer's files in it."""

    path: Path
    data: Path

    def constants(self, name: str = "train.py", **values: str) -> None:
        """Rewrite module-level constants as the control room does: the text after `NAME = ` up to a comment."""
        text = (self.path / name).read_text()
        for constant, value in values.items():
            text, count = re.subn(rf"(?m)^{constant} = [^#\n]*", f"{constant} = {value} ", text)
            assert count == 1, f"{name} has no constant {constant}"
        (self.path / name).write_text(text)

    def environment(self, **env: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OVERNIGHT_")}
        return {**clean, "OVERNIGHT_DATA": str(self.data), "OMP_NUM_THREADS": "1", **env}

    def run(self, *argv: str, timeout_s: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", *argv]
        return subprocess.run(command, cwd=self.path, capture_output=True, text=True, timeout=timeout_s, env=self.environment(**env))

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-W", "error", *argv]
        return subprocess.Popen(command, cwd=self.path, env=self.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]
        return [line for line in lines if name in (None, line["event"])]


def wait_for(state: Callable[[], bool], deadline_s: float) -> None:
    """Wait until `state()` holds; fail at the deadline."""
    until = time.monotonic() + deadline_s
    while not state():
        assert time.monotonic() < until, "the state did not come before the deadline"
        time.sleep(0.02)


def words(seed: int, count: int) -> str:
    """Text of a small made-up language: a Markov chain over syllables, so that a model can learn something from it."""
    syllables, state, out = ["ba", "ke", "lo", "mi", "nu", "ra", "so", "ti", "vu", "za"], seed, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        at = (state >> 16) % 10
        out.append(syllables[at] + syllables[(at * 3 + 1) % 10] + ("." if at == 7 else ""))
    return " ".join(out)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 documents, 3 of them validation, in the embedded format."""
    folder = tmp_path_factory.mktemp("text") / "corpus"
    folder.mkdir()
    documents = [words(i + 1, 200 + 40 * i) for i in range(36)]
    (folder / "small.txt.xz").write_bytes(lzma.compress("\x1e".join(documents).encode()))
    return folder


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def folder(tmp_path: Path, small_corpus: Path, shared_data: Path) -> Folder:
    work = tmp_path / "work"
    work.mkdir()
    for path in TRAINER.glob("*.py"):
        shutil.copy(path, work)
    (work / "corpus").symlink_to(small_corpus)
    made = Folder(work, shared_data)
    made.constants("prepare.py", TIME_BUDGET="1")
    return made
