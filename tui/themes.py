"""Our two themes, for a dark room and for paper. State is never told by colour alone, so every theme of Textual works as well."""

from __future__ import annotations

from textual.theme import Theme

THEMES = [
    Theme(
        name="overnight",
        primary="#5c8fd6",
        secondary="#8a7fd0",
        accent="#e0a458",
        foreground="#d6dae0",
        background="#11151c",
        surface="#181e28",
        panel="#1f2733",
        success="#7fb685",
        warning="#e5c07b",
        error="#e06c75",
        dark=True,
    ),
    Theme(
        name="daylight",
        primary="#2f5fa8",
        secondary="#5d4fa8",
        accent="#a85f00",
        foreground="#22262c",
        background="#fbfaf7",
        surface="#f0eee8",
        panel="#e6e3da",
        success="#2f7a3b",
        warning="#8f6400",
        error="#b3261e",
        dark=False,
    ),
]
