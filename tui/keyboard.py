"""The terminal's input: Textual's own Linux driver, but a lone Esc is a key after 25 ms instead of 100 to 200.

An Esc may be the key or the begin of a longer sequence; only the silence after it tells. Textual looks at that silence every 100 ms and
wants 100 ms of it. Here it is waited for exactly, and the lone Esc is then spelled out as terminals with the kitty protocol send it.
"""

from __future__ import annotations

import os
import select
from codecs import getincrementaldecoder

from textual import constants
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

POLL_S = 0.1  # how long quitting may wait for this thread
SILENCE_S = constants.ESCAPE_DELAY if "ESCDELAY" in os.environ else 0.025  # a sequence comes in one piece, through ssh and tmux too
SPELLED = "[27u"  # what follows the Esc of a lone Esc: https://sw.kovidgoyal.net/kitty/keyboard-protocol/


class Keyboard(LinuxDriver):
    """Reads keys and mouse from the terminal."""

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
                for event in parser.feed(decode(data)):
                    self.process_message(event)
                lone = data.endswith(b"\x1b") and not constants.DISABLE_KITTY_KEY
            elif lone:
                lone = False
                for event in parser.feed(SPELLED):
                    self.process_message(event)
            for event in parser.tick():
                self.process_message(event)
