"""The one way panes reach the screen: rows that are redrawn only in the columns that changed.

Textual's tables repaint themselves whole on any change (34 kB a second over ssh at 1 Hz); a pane here compares each visible row with
what it drew last and marks the differing columns dirty. Subclasses give `count` and `line_at`, and call `changed()`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ..lines import STYLES, Line, cells, changed_columns, crop
from ..plain import ascii_only


class OnePicture(Screen[Any]):
    """A screen that is painted for the first time when it is laid out and filled, where Textual would show it empty before."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._unpainted = ExitStack()

    def on_mount(self) -> None:
        """Paint nothing from here on."""
        self._unpainted.enter_context(self.app.batch_update())

    def on_resize(self, event: events.Resize) -> None:
        """There is a layout, or another one."""
        self.call_after_refresh(self._fill_and_paint)

    def _fill_and_paint(self) -> None:
        self.laid_out()
        self._unpainted.close()
        self.refresh()
        self.call_after_refresh(self.laid_out)  # once more: filling may have moved the panes

    def laid_out(self) -> None:
        """What a screen draws once its panes have their sizes."""

    def on_unmount(self) -> None:
        """One that was closed before it was seen keeps nothing else from being painted."""
        self._unpainted.close()


class Worded(OnePicture):
    """A screen that knows how each style word looks, for all its panes: were it each pane, every move of the focus would style it anew."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"view--{s}" for s in (*STYLES, "cursor-focus")}
    DEFAULT_CSS = """
    Worded > .view--good { color: $text-success; }
    Worded > .view--warn { color: $text-warning; }
    Worded > .view--bad { color: $text-error; text-style: bold; }
    Worded > .view--muted { color: $foreground 58%; }
    Worded > .view--accent { color: $text-accent; }
    Worded > .view--strong { text-style: bold; }
    Worded > .view--head { color: $foreground 58%; text-style: italic; }
    Worded > .view--title { color: $text-accent; text-style: bold; }
    Worded > .view--key { color: $text-accent; text-style: bold; }
    Worded > .view--bar { color: $success; }
    Worded > .view--track { color: $foreground 22%; }
    Worded > .view--own { color: $text-accent; text-style: bold; }
    Worded > .view--best { color: $text-success; }
    Worded > .view--parent { color: $text-primary; }
    Worded > .view--mark { color: $text-warning; text-style: bold; }
    Worded > .view--cursor { background: $foreground 10%; }
    Worded > .view--cursor-focus { background: $primary-muted; text-style: bold; }
    """


class View(ScrollView, can_focus=True):
    """A focusable pane of rows; `fixed` rows at the top do not scroll."""

    DEFAULT_CSS = """
    View {
        background: $background; color: $foreground; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; overflow-x: hidden;
        border-top: solid $foreground 22%; border-title-color: $text-muted; border-title-style: none;
        scrollbar-color: $foreground 30%; scrollbar-background: $background; scrollbar-background-hover: $background;
        &:focus { border-top: solid $accent; border-title-color: $accent; border-title-style: bold; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll_down", "down", show=False),
        Binding("k,up", "scroll_up", "up", show=False),
        Binding("g,home", "scroll_home", "top", show=False),
        Binding("G,end", "scroll_end", "bottom", show=False),
        Binding("ctrl+d,pagedown", "page_down", "page down", show=False),
        Binding("ctrl+u,pageup", "page_up", "page up", show=False),
    ]
    fixed = 0

    def __init__(self, *, id: str | None = None, title: str = "", classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._drawn: dict[int, Line] = {}
        self._styles_by_word: dict[str, Style] = {}
        self._named: tuple[str, str] = (title, "")
        self._ascii = False
        self._entitled: tuple[str, str, int, bool] | None = None

    # what subclasses give

    @property
    def count(self) -> int:
        """Rows there are, the fixed ones left out."""
        return 0

    def line_at(self, index: int, width: int) -> Line:
        """The row `index`; the fixed rows are -fixed..-1."""
        return Line()

    # drawing

    @property
    def rows_high(self) -> int:
        """Scrolling rows that fit."""
        return max(0, self.scrollable_content_region.height - self.fixed)

    def caption(self, title: str, right: str = "") -> None:
        """Name the pane, with a note at the right end of the line where there is room; the texts are never markup."""
        self._named = (title, right)
        self._entitle()

    def _entitle(self) -> None:
        """Set the title only when it differs: a title repaints the border. A subtitle of Textual would want a bottom border."""
        title, right = self._named
        wanted = (title, right, self.size.width, self.has_focus)
        if wanted == self._entitled:
            return
        self._entitled = wanted
        title = crop(title, max(1, self.size.width - 2))
        spare = self.size.width - 2 - cells(title) - cells(right)
        if title and right and spare >= 2:
            line = "$accent" if self.has_focus else "$foreground 22%"
            self.border_title = Content.assemble(self._drawable(title), (self._drawable("─") * spare, line), self._drawable(right))
        else:
            self.border_title = Content(self._drawable(title)) if title else None

    def _drawable(self, text: str) -> str:
        """The text in the characters that the terminal has."""
        return ascii_only(text) if self._ascii else text

    def _row_of(self, y: int) -> Line:
        width = self.scrollable_content_region.width
        index = y - self.fixed if y < self.fixed else y - self.fixed + round(self.scroll_y)
        if index >= self.count or width <= 0:
            return Line()
        return self.line_at(index, width).fitted(width)

    def render_line(self, y: int) -> Strip:
        """Draw one row and remember it."""
        line = self._row_of(y)
        self._drawn[y] = line
        base = self._base()
        if line.style:
            base += self._style(line.style)
        segments = [Segment(self._drawable(text), base + self._style(style) if style else base) for text, style in line.spans]
        return Strip(segments, line.width).extend_cell_length(self.size.width, base)

    def _base(self) -> Style:
        """The pane's own style; working it out for every row costs more than drawing the row."""
        found = self._styles_by_word.get("")
        if found is None:
            found = self._styles_by_word[""] = self.rich_style
        return found

    def _style(self, word: str) -> Style:
        found = self._styles_by_word.get(word)
        if found is None:  # several words: one style upon the other
            found = sum((self._themed(w) for w in word.split()), Style())
            self._styles_by_word[word] = found
        return found

    def _themed(self, word: str) -> Style:
        """A style word in the colours of the theme; a share of the foreground is blended here, for a row is drawn without layers."""
        if word == "cursor" and self.has_focus:
            word = "cursor-focus"
        styles, base = self.screen.get_component_styles(f"view--{word}"), self.background_colors[1]
        rich = styles.partial_rich_style
        if word.startswith("cursor"):
            if self.app.native_ansi_color:  # without colours of our own, and with none at all, the row must still be seen
                return Style(reverse=self.has_focus, underline=not self.has_focus, bold=rich.bold)
            return Style(bgcolor=base.blend(styles.background, styles.background.a).rich_color, bold=rich.bold)
        ansi = styles.color.ansi is not None
        color = rich.color if ansi or not styles.has_rule("color") else base.blend(styles.color, styles.color.a).rich_color
        return Style(color=color, bold=rich.bold, italic=rich.italic)

    def notify_style_update(self) -> None:
        """A theme or the focus changed: what was drawn and the cached styles are void."""
        self._styles_by_word.clear()
        self._drawn.clear()
        super().notify_style_update()

    def changed(self) -> None:
        """Repaint what differs from the screen, and nothing else."""
        wanted = Size(self.scrollable_content_region.width, self.count + self.fixed)
        if wanted.height != self.virtual_size.height:
            self.virtual_size = wanted
            self.refresh()
            return
        width = self.scrollable_content_region.width
        dirty = []
        for y in range(self.scrollable_content_region.height):
            columns = changed_columns(self._drawn.get(y), self._row_of(y), width)
            if columns is not None:
                dirty.append(Region(columns[0], y, columns[1] - columns[0], 1))
        if dirty:
            self.refresh(*dirty)

    def on_resize(self, event: events.Resize) -> None:
        """Draw all again: every row is cut to the width."""
        self._drawn.clear()
        self.virtual_size = Size(self.scrollable_content_region.width, self.count + self.fixed)
        self._entitle()

    def on_mount(self) -> None:
        """Show the name, in the characters the terminal has."""
        self._ascii = bool(getattr(self.app, "ascii_only", False))
        self._entitle()

    def on_focus(self) -> None:
        """The line of the title takes the colour of the focus."""
        self._entitle()

    def on_blur(self) -> None:
        """And loses it."""
        self._entitle()


class Lines(View):
    """A pane whose rows were made elsewhere: `show(lines)`."""

    def __init__(self, *, id: str | None = None, title: str = "", classes: str | None = None) -> None:
        super().__init__(id=id, title=title, classes=classes)
        self.lines: list[Line] = []

    @property
    def count(self) -> int:
        """Rows shown."""
        return len(self.lines)

    def line_at(self, index: int, width: int) -> Line:
        """The row as given."""
        return self.lines[index]

    def show(self, lines: list[Line]) -> None:
        """Replace the rows; only differences are drawn."""
        self.lines = lines
        self.changed()


class Strips(Lines, can_focus=False):
    """Rows without a border that take no focus: header and alerts."""

    DEFAULT_CSS = """
    Strips { border: none; height: 1; overflow: hidden hidden; }
    """


def message_line(text: str, width: int, style: str = "muted") -> Line:
    """One centred row: what an empty or failed pane says."""
    text = crop(text, width)
    return Line((" " * max(0, (width - len(text)) // 2), ""), (text, style))
