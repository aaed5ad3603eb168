"""The command line for tests: called in this process for speed, or as a program where the process is the point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner import cli


@dataclass(frozen=True)
class Said:
    """What a command came to: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        return json.loads(self.out)

    def is_one_sentence(self) -> bool:
        """Whether a person got one line on stderr, and nothing else."""
        return self.out == "" and self.err.startswith("overnight: ") and self.err.count("\n") == 1 and "Traceback" not in self.err


def overnight(capsys: pytest.CaptureFixture[str], *words: object) -> Said:
    """Run a command in this process."""
    capsys.readouterr()
    code = cli.main([str(w) for w in words])
    shown = capsys.readouterr()
    return Said(code, shown.out, shown.err)


def program(*words: object, cwd: Path, env: dict[str, str] | None = None, timeout_s: float = 60, **options: Any) -> Said:
    """Run a command as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "runner.cli", *[str(w) for w in words]],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output="stdout" not in options,
        text=True,
        timeout=timeout_s,
        **options,
    )
    return Said(done.returncode, done.stdout or "", done.stderr or "")


@contextmanager
def started(words: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends with the block, whatever happens in it: one left behind fails some other test, when it is collected."""
    process = subprocess.Popen([str(w) for w in words], **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):  # what is left in a pipe nobody reads any more
                    pipe.close()
