"""Boxes over a page: a question before something is lost, a form, a line to type, and the page of keys.

A question's default is Cancel: only `y` confirms, Enter and everything else does not, and keys that arrive in the first 300 ms
(a held key) are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Static

from runner.errors import OvernightError

from ..lines import Line
from .view import Lines, OnePicture, Worded

DEAF_S = 0.3
BOX_WIDE, BOX_MOST = 84, 96  # columns, and percent of the screen where that has fewer


def drawn(widget: Widget, text: str) -> Content:
    """Text of a box: never markup, and in the characters the terminal has."""
    spelled = getattr(widget.app, "spelled", str)
    return Content(spelled(text))


def inside(width: int) -> int:
    """Columns for text in a box that scrolls, on a screen of this width: frame, padding and scroll bar take five."""
    return min(BOX_WIDE, width * BOX_MOST // 100) - 5


class Box(Vertical):
    """The frame of every box."""

    DEFAULT_CSS = (
        f"Box {{ width: {BOX_WIDE}; max-width: {BOX_MOST}%; }}"
        + """
    Box { height: auto; max-height: 92%; border: round $accent; background: $surface; padding: 0 1;
          border-title-color: $accent; border-title-style: bold; }
    Box Static { width: 100%; height: auto; }
    Box .quiet { color: $text-muted; }
    Box .wrong { color: $text-error; }
    Box Input { background: $foreground 10%; margin: 0 0 1 0; }
    Box Lines, Box Lines:focus { height: auto; border: none; background: $surface; }
    """
    )

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def on_mount(self) -> None:
        """Show the name."""
        self.border_title = drawn(self, self.title)


class Confirm(ModalScreen[bool], OnePicture):
    """Asks before something is lost; `True` only after `y`."""

    DEFAULT_CSS = """
    Confirm { align: center middle; background: $background 40%; }
    Confirm Box { border: round $error; border-title-color: $text-error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q,enter", "answer(False)", "cancel"),
    ]

    def __init__(self, title: str, sentences: list[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.question, self.sentences = title, sentences
        self._clock, self._opened = clock, clock()

    def compose(self) -> ComposeResult:
        """The question, what it means, and how to answer."""
        with Box(self.question):
            for sentence in self.sentences:
                yield Static(drawn(self, sentence))
            yield Static(drawn(self, "\n[y] yes      [n] Esc Enter: cancel (the default)"), classes="quiet")

    def on_mount(self) -> None:
        """The deaf time starts when the box is on the screen."""
        self._opened = self._clock()

    def action_answer(self, yes: bool) -> None:
        """Answer, unless the key was on its way before the box was there."""
        if self._clock() - self._opened >= DEAF_S:
            self.dismiss(yes)


@dataclass(frozen=True, slots=True)
class Field:
    """One line of a form."""

    name: str
    label: str
    value: str = ""


class Form(ModalScreen[dict[str, str] | None], OnePicture):
    """Lines to type; Enter on the last sends, Esc leaves. `check` refuses with a sentence that stays in the box."""

    DEFAULT_CSS = "Form { align: center middle; background: $background 40%; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "cancel")]

    def __init__(
        self, title: str, fields: list[Field], *, notes: list[str] | None = None, check: Callable[[dict[str, str]], object] | None = None
    ) -> None:
        super().__init__()
        self.heading, self.fields, self.notes, self.check = title, fields, notes or [], check

    def compose(self) -> ComposeResult:
        """A label and an input for each field."""
        with Box(self.heading):
            for note in self.notes:
                yield Static(drawn(self, note), classes="quiet")
            for field in self.fields:
                yield Static(drawn(self, field.label))
                yield Input(field.value, id=f"field-{field.name}", select_on_focus=False, compact=True)
            yield Static("", classes="wrong", id="wrong")
            enter = "Enter sends" if len(self.fields) == 1 else "Enter next line, in the last one sends"
            yield Static(drawn(self, f"{enter} · Esc cancels"), classes="quiet")

    def on_mount(self) -> None:
        """Start in the first line."""
        self.query(Input).first().focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """On to the next line, or send."""
        event.stop()
        inputs = list(self.query(Input))
        at = inputs.index(event.input)
        if at + 1 < len(inputs):
            inputs[at + 1].focus()
            return
        values = {f.name: self.query_one(f"#field-{f.name}", Input).value.strip() for f in self.fields}
        try:
            if self.check is not None:
                self.check(values)
        except OvernightError as error:
            self.query_one("#wrong", Static).update(drawn(self, str(error)))
            return
        self.dismiss(values)

    def action_leave(self) -> None:
        """Nothing was asked."""
        self.dismiss(None)


class KeysPage(Worded, ModalScreen[None]):
    """Every key that works here, made from the bindings themselves."""

    DEFAULT_CSS = "KeysPage { layout: vertical; align: center middle; background: $background 40%; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "leave", "close")]

    def __init__(self, title: str, lines: list[Line]) -> None:
        super().__init__()
        self.heading, self.lines = title, lines

    def compose(self) -> ComposeResult:
        """A scrolling list."""
        with Box(self.heading):
            yield Lines(id="keys")

    def on_mount(self) -> None:
        """Fill the list and give it the keys."""
        pane = self.query_one("#keys", Lines)
        pane.styles.height = min(len(self.lines), max(5, self.app.size.height - 4))
        pane.focus()
        pane.show(self.lines)

    def action_leave(self) -> None:
        """Back to the page."""
        self.dismiss(None)


class FilterLine(Input):
    """The `/` line at the bottom of a page: filters while typed, Enter keeps, Esc clears."""

    DEFAULT_CSS = """
    FilterLine { display: none; padding: 0 1; background: $foreground 10%; }
    FilterLine.-open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "drop", "clear the filter", show=False)]

    def __init__(self, changed: Callable[[str], None], closed: Callable[[], None]) -> None:
        super().__init__(
            placeholder="filter: words  gpu:h200  wave:w3  val<0.99  flag:any  DEPTH=12  -outcome:crashed", id="filter", compact=True
        )
        self.when_typed, self.when_closed = changed, closed

    def open(self, text: str) -> None:
        """Show the line with the filter in force."""
        self.value = text
        self.add_class("-open")
        self.focus()
        self.cursor_position = len(text)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while typing."""
        event.stop()
        if self.has_class("-open"):
            self.when_typed(self.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        event.stop()
        self.remove_class("-open")
        self.when_closed()

    def action_drop(self) -> None:
        """Clear it and leave."""
        self.value = ""
        self.when_typed("")
        self.remove_class("-open")
        self.when_closed()

    def on_blur(self, event: events.Blur) -> None:
        """Leaving the line keeps what was typed."""
        self.remove_class("-open")
