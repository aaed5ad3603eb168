"""The terminal: Textual's own Linux driver, but what stands there is not sent again, and a lone Esc is a key after 15 ms, not 100 to 200.

An Esc may be the key or the begin of a longer sequence; only the silence after it tells. Textual looks at that silence every 100 ms and
wants 100 ms of it. Here it is waited for exactly, and the lone Esc is then spelled out as terminals with the kitty protocol send it.
"""

from __future__ import annotations

import os
import select
import signal
from codecs import getincrementaldecoder
from typing import Any

from textual import constants, events
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from .picture import Picture

POLL_S = 0.1  # how long quitting may wait for this thread
SILENCE_S = constants.ESCAPE_DELAY if "ESCDELAY" in os.environ else 0.015  # a sequence comes in one piece, through ssh and tmux too
SPELLED = "[27u"  # what follows the Esc of a lone Esc: https://sw.kovidgoyal.net/kitty/keyboard-protocol/


class Terminal(LinuxDriver):
    """Reads keys and mouse from the terminal, and writes what changed to it; an app that has a `picture` may make it forget."""

    def __init__(self, app: Any, **how: Any) -> None:
        super().__init__(app, **how)
        self.picture: Picture = getattr(app, "picture", None) or Picture()

    def write(self, data: str) -> None:
        """Send what the terminal does not show yet."""
        if news := self.picture.news(data):
            super().write(news)

    def start_application_mode(self) -> None:
        """Take the terminal over; after every change of its size nothing is known to stand there."""
        super().start_application_mode()  # type: ignore[no-untyped-call]  # Textual gives it no types
        resized = signal.getsignal(signal.SIGWINCH)

        def forget(number: int, frame: Any) -> None:
            self.picture.forget()
            if callable(resized):
                resized(number, frame)

        signal.signal(signal.SIGWINCH, forget)

    def process_message(self, message: Message) -> None:
        """Pass on what was typed, or the new size where the terminal tells it in band."""
        if isinstance(message, events.Resize):
            self.picture.forget()
        super().process_message(message)

    def run_input_thread(self) -> None:
        """Read until the app closes. A terminal that ended sends nothing more: no busy loop is made of that."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        lone = False
        while not self.exit_event.is_set():
            if select.select([self.fileno], [], [], SILENCE_S if lone else POLL_S)[0]:
                data = os.read(self.fileno, 4096)
                if not data:
                    self.exit_event.wait()
                    return
                text = decode(data)  # nothing yet of a letter in two reads; the parser takes an empty text for the end
                for event in parser.feed(text) if text else ():
                    self.process_message(event)
                lone = data.endswith(b"\x1b") and not constants.DISABLE_KITTY_KEY
            elif lone:
                lone = False
                for event in parser.feed(SPELLED):
                    self.process_message(event)
            for event in parser.tick():
                self.process_message(event)
