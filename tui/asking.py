"""What only the daemon can answer (check, set up, release, verify): the question is written, and its answer is told when it comes.

A request that was written is not done: the daemon may refuse it at once, or work on it for an hour; whatever page is shown then says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner import verbs
from runner.errors import OvernightError
from runner.lab import Lab
from runner.records import Request

from .lines import safe
from .words import number

if TYPE_CHECKING:
    from .app import ControlRoom
    from .snapshot import Snapshot

WHO = "tui"
VIEW = "asked"  # the view of snapshots that holds the open questions


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests that were written, by id, and what each is called."""

    labels: Mapping[int, str]


class Asking:
    """The open questions of this screen."""

    def __init__(self, room: ControlRoom) -> None:
        self.room = room
        self.open: dict[int, str] = {}

    def ask(self, label: str, verb: str, each: Mapping[str, dict[str, Any]]) -> None:
        """Write a request for each label; `label` names them all."""
        self.room.do(label, lambda lab: Asked({verbs.ask(lab, verb, args, who=WHO): name for name, args in each.items()}))

    def follow(self, asked: Asked) -> None:
        """They are written: say so, and listen."""
        state = self.room.snapshot.state
        names = ", ".join(list(asked.labels.values())[:4])
        alive = "" if state is None or state.daemon_alive else "; no daemon serves this lab, so nothing answers yet"
        self.room.say(f"asked the daemon: {names}{alive}")
        self.open |= asked.labels
        self.room.source.watch(VIEW, self._load)

    def _load(self, lab: Lab) -> tuple[Request, ...]:
        """In the reader's thread: the open questions as they stand."""
        return tuple(r for r in map(lab.store.request, list(self.open)) if r is not None)

    def hear(self, snapshot: Snapshot) -> None:
        """Tell the answers that have come."""
        found = snapshot.views.get(VIEW)
        answered = [r for r in found if r.id in self.open and r.state in ("done", "failed")] if isinstance(found, tuple) else []
        for request in answered:
            label = self.open.pop(request.id)
            if request.state == "failed":
                told = request.error or {}
                error = OvernightError(str(told.get("message") or "it failed."), next_step=str(told.get("next") or ""))
                self.room.complain(f"{label}: {error}")
            else:
                text, style = answer(label, request)
                self.room.say(safe(text, 400), style)
        if answered and not self.open:
            self.room.source.unwatch(VIEW)


def answer(label: str, request: Request) -> tuple[str, str]:
    """What the daemon answered, in a sentence, and how good that is."""
    result = request.result or {}
    if request.verb == "verify":
        bpb = f", recomputed {number(result['verified_bpb'], 6)}" if result.get("verified_bpb") is not None else ""
        verdict = result.get("verdict") if result.get("outcome") == "completed" else f"not recomputed ({result.get('outcome')})"
        return f"{result.get('run')} is {verdict}{bpb}: {result.get('why') or '-'}", "good" if verdict == "verified" else "warn"
    if request.verb == "hosts_check":
        told = [one for one in map(_host_words, result.get("hosts") or []) if one]
        return ("; ".join(text for text, _ in told) or f"{label}: no host", "good" if all(good for _, good in told) else "warn")
    return (str(result.get("text") or f"✓ {label}"), "good")


def _host_words(report: Mapping[str, Any]) -> tuple[str, bool]:
    """(how a host was found, whether it is fit)."""
    bad = [c for c in report.get("checks") or [] if c.get("ok") is False]
    if report.get("error") or bad:
        why = report.get("error") or f"{bad[0].get('name')}: {bad[0].get('text') or bad[0].get('value')}"
        return f"✕ {report.get('name')}: {why} {report.get('next') or ''}".rstrip(), False
    return f"✓ {report.get('name')} is fit for runs", True


def labelled(ids: Iterable[str], verb: str) -> dict[str, dict[str, Any]]:
    """A label and the arguments for each run."""
    return {f"{verb} {i}": {"run": i} for i in ids}
