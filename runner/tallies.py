"""How many runs came to what, and what they cost: counted again only when a run has ended, because ten thousand of them have before."""

from __future__ import annotations

from dataclasses import dataclass

from runner.lab import Lab


@dataclass(frozen=True, slots=True)
class Ended:
    """All runs that are over; `wall_s` is what they held slots for, in seconds."""

    by_outcome: dict[str, int]
    wall_s: float

    @property
    def count(self) -> int:
        """How many they are."""
        return sum(self.by_outcome.values())


def ended(lab: Lab) -> Ended:
    """The runs that are over."""

    def count() -> Ended:
        rows = lab.store.tally("outcome, count(*), total(wall_s)", "phase = 'ended' GROUP BY outcome")
        return Ended({str(outcome): n for outcome, n, _ in rows}, sum(seconds for *_, seconds in rows))

    return lab.memo.get(("ended",), lab.store.changes("ended"), count, keep=not lab.store.writing)


def phases(lab: Lab) -> dict[str, int]:
    """How many runs are in each phase that is not the end, and how many have ended."""
    found = {str(phase): n for phase, n in lab.store.tally("phase, count(*)", "phase != 'ended' GROUP BY phase")}
    return {**found, "ended": ended(lab).count}
