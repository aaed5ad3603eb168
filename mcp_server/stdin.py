"""Half characters in a client's messages: JSON may escape one half of a pair alone, as in a text that was cut inside an emoji.

The SDK drops such a line of stdin without an answer, and the client would wait for ever. Here the half becomes U+FFFD.
"""

from __future__ import annotations

import os
import re
import threading

ESCAPE = re.compile(rb"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL)
CHUNK = 1 << 16
LONE = 5  # bytes of the escape of one half, without its backslash


def whole_characters(line: bytes) -> bytes:
    """A line of JSON whose escaped halves without their other half are replacement characters; all else stays as it is."""
    if b"\\ud" not in line and b"\\uD" not in line:
        return line
    return ESCAPE.sub(lambda m: rb"\ufffd" if len(m[1]) == LONE and m[1][:1] == b"u" else m[0], line)


def mend_stdin() -> None:
    """Put a thread between the client and whoever reads stdin from now on; call it once, before anything was read."""
    client, (end, start) = os.dup(0), os.pipe()
    os.dup2(end, 0)
    os.close(end)
    threading.Thread(target=_pass_on, args=(client, start), name="stdin", daemon=True).start()


def _pass_on(client: int, start: int) -> None:
    begun = b""  # of a line whose end has not come yet
    try:
        while chunk := os.read(client, CHUNK):
            lines, end, rest = chunk.rpartition(b"\n")
            if end:
                _write(start, whole_characters(begun + lines + end))
                begun = b""
            begun += rest
        _write(start, begun)
    except OSError:  # nobody reads any more: the server is ending
        pass
    finally:
        os.close(start)


def _write(pipe: int, text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(pipe, rest) :]
