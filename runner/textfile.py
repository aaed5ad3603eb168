"""Reading a text file that somebody named: a regular file, of a bounded size, in UTF-8. A FIFO or a device never blocks us."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from runner.errors import BadValue

MAX_TEXT_BYTES = 4 << 20


def read_text(path: Path, what: str, *, limit: int = MAX_TEXT_BYTES) -> str:
    """The text of a file. Raised: BadValue with a sentence, `what` naming the file's role ("The training script").

    FileNotFoundError is passed on: what an absent file means is the caller's to say.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadValue(f"{what} {path} cannot be read: {error.strerror or error}.", next_step="Check its permissions.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadValue(f"{what} {path} is not a regular file.", next_step="Name a text file.")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise BadValue(f"{what} {path} is larger than {limit >> 20} MiB.", next_step="Name a text file.")
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a mark that nobody sees
    except UnicodeDecodeError:
        raise BadValue(f"{what} {path} is not UTF-8 text.", next_step="Save it as UTF-8.") from None
