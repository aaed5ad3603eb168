"""The terminal's input: bytes on a pipe, keys out."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

import pytest
from textual import constants, events
from textual.message import Message

from runner.lab import Lab
from tests.tui.still import Still
from tui import terminal
from tui.app import ControlRoom
from tui.terminal import Terminal

LONG_S = 3600.0


class Typed(Terminal):
    """The driver's reading thread alone, on a pipe."""

    def __init__(self) -> None:
        self.fileno, self.end = os.pipe()
        self.exit_event, self._debug = threading.Event(), False
        self.got: queue.Queue[str] = queue.Queue()
        self.thread = threading.Thread(target=self.run_input_thread, daemon=True)

    def process_message(self, message: Message) -> None:
        if isinstance(message, events.Key):
            self.got.put(message.key)

    def type(self, data: bytes) -> None:
        os.write(self.end, data)

    def key(self) -> str:
        return self.got.get(timeout=10)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Typed]:
    monkeypatch.setattr(constants, "ESCAPE_DELAY", LONG_S)  # what Textual waits for; ours does not wait with it
    driver = Typed()
    yield driver
    driver.exit_event.set()
    driver.thread.join(10)
    assert not driver.thread.is_alive()
    os.close(driver.fileno)
    if driver.end >= 0:
        os.close(driver.end)


def test_a_lone_esc_is_a_key_after_its_own_short_silence(typed: Typed) -> None:
    typed.thread.start()
    typed.type(b"\x1b")
    assert typed.key() == "escape"
    typed.type(b"j\x1b")
    assert (typed.key(), typed.key()) == ("j", "escape")
    typed.type(b"\x1b\x1b")
    assert (typed.key(), typed.key()) == ("escape", "escape")
    typed.type(b"\xe2\x82")  # half a character
    time.sleep(0.05)  # that it is read by itself; were it not, nothing would be tested, and nothing fail
    typed.type(b"\xac")
    assert typed.key() == "euro_sign"


def test_a_sequence_is_one_key_whole_or_in_pieces(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SILENCE_S", LONG_S)
    typed.thread.start()
    typed.type(b"\x1b[A\x1b[5~")
    assert (typed.key(), typed.key()) == ("up", "pageup")
    typed.type(b"\x1b")
    typed.type(b"[B")
    assert typed.key() == "down"


def test_without_the_kitty_keys_esc_is_what_textual_makes_of_it(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DISABLE_KITTY_KEY", True)
    monkeypatch.setattr(constants, "ESCAPE_DELAY", 0.001)
    typed.thread.start()
    typed.type(b"\x1b")
    assert typed.key() == "escape"


def test_a_terminal_that_ended_is_no_busy_loop(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = os.read
    monkeypatch.setattr(terminal.os, "read", lambda fd, size: reads.append(fd) or read(fd, size))
    typed.thread.start()
    typed.type(b"j")
    assert typed.key() == "j"
    os.close(typed.end)
    typed.end = -1
    typed.thread.join(0.3)
    assert typed.thread.is_alive(), "the driver joins it when it closes"
    assert len(reads) == 2


def test_the_room_reads_its_keys_with_it(lab: Lab) -> None:
    assert ControlRoom(Still(lab), lab.path).driver_class is Terminal
