"""What a search says and hears: trials asked for, what became of them, and the protocol between. See balanced.py for the search itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Constants = dict[str, Any]
Mend = Callable[[Constants], Constants]  # makes constants fit together (the device batch divides the total batch)
SIZES = ("pow2", "whole", "count")  # kinds of knobs that decide whether a model fits the memory


@dataclass(frozen=True, slots=True)
class Trial:
    """One run asked for: all constants, what they change (`knob`, None for a repeat of a base), its role (base, old, step)."""

    constants: Constants
    role: str
    knob: str | None = None
    budget_s: float | None = None
    confirm: bool = False  # on the target type; others run where it is cheaper


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a trial; `value` is None without a result, `predicted` marks a pruned run's forecast."""

    trial: Trial
    value: float | None
    outcome: str
    predicted: bool = False


class Strategy(Protocol):
    """Ask for a wave, tell its results, again and again; `incumbent` is what the strategy would hand over now."""

    incumbent: Constants

    def ask(self) -> list[Trial]:
        """The next wave; empty when there is nothing more to try."""

    def tell(self, results: Sequence[Told]) -> None:
        """Learn from a finished wave."""
