"""Everything a person may do to runs, once, for every page that shows runs: keys, questions, forms, and the verb behind each.

A page that mixes this in says which runs are meant (`targets`) and what it knows of them (`facts_of`). The keys are RUN_BINDINGS;
the palette and the help read them too. What loses work asks first.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import SuspendNotSupported
from textual.binding import Binding, BindingType

from runner import sources, verbs
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Run, Submission, Submitted
from runner.text import plural

from .asking import WHO, labelled
from .lines import safe
from .widgets.dialogs import Confirm, Field, Form
from .words import number

if TYPE_CHECKING:
    from .app import ControlRoom

Facts = Mapping[str, Any]

RUN_BINDINGS: list[BindingType] = [
    Binding("x", "cancel", "cancel", tooltip="Ask the run to stop; its slot goes to the next one"),
    Binding("X", "cancel(True)", "kill", show=False, tooltip="Stop the run without the grace between TERM and KILL"),
    Binding("R", "requeue", "requeue", tooltip="Run an ended run's source again as a new run"),
    Binding("N", "repeat", "repeat", show=False, tooltip="Run the source again at new seeds: this measures the noise"),
    Binding("P", "promote", "promote", tooltip="Run the source on another GPU type or with another budget"),
    Binding("K", "decide('keep')", "keep", tooltip="Keep the run, with a reason"),
    Binding("D", "decide('discard')", "discard", tooltip="Discard the run, with a reason"),
    Binding("plus,equals_sign", "priority('up')", "up", key_display="+", show=False, tooltip="Move up in the queue"),
    Binding("minus", "priority('down')", "down", key_display="-", show=False, tooltip="Move down in the queue"),
    Binding("t", "priority('top')", "to the top", show=False, tooltip="Move to the top of the queue"),
    Binding("a", "approve", "approve", show=False, tooltip="Let a proposed run into the queue"),
    Binding("A", "decline", "decline", show=False, tooltip="Turn a proposed run down, with a reason"),
    Binding("C", "constants", "set constants", show=False, tooltip="Submit the source with other constants"),
    Binding("E", "edit", "edit", show=False, tooltip="Open a copy of the source in $EDITOR and submit it"),
    Binding("V", "verify", "verify", show=False, tooltip="Recompute the val_bpb from the checkpoint on its host"),
    Binding("w", "open_wave", "its wave", show=False, tooltip="Open the wave the run belongs to"),
    Binding("y", "copy", "copy id", show=False, tooltip="Copy the id (the terminal's clipboard)"),
    Binding("Y", "copy_command", "copy command", show=False, tooltip="Copy the command that submits this run again"),
]
RUN_ACTIONS = frozenset(b.action.split("(")[0] for b in RUN_BINDINGS if isinstance(b, Binding))


class RunDeeds:
    """What the keys of RUN_BINDINGS do. Mixed into pages."""

    if TYPE_CHECKING:

        @property
        def room(self) -> ControlRoom:
            """The app."""

    def targets(self) -> list[str]:
        """The runs the next key acts on."""
        return []

    def facts_of(self, run_id: str) -> Facts:
        """What the page knows of a run; empty when nothing."""
        return {}

    # what may be lost

    def action_cancel(self, force: bool = False) -> None:
        """Ask, then cancel."""
        ids = self.targets()
        verb = "Kill" if force else "Cancel"
        lines = [self._loss(i) for i in ids[:8]] + ([f"… and {len(ids) - 8} more"] if len(ids) > 8 else [])
        self._ask(
            f"{verb} {_named(ids)}?",
            lines,
            f"{verb.lower()} {_named(ids)}",
            lambda lab: verbs.cancel(lab, ids, who=WHO, why="by keyboard", force=force),
        )

    def _loss(self, run_id: str) -> str:
        facts = self.facts_of(run_id)
        where = f" on {safe(facts.get('host'), 30)} {safe(facts.get('gpu'), 30)}" if facts.get("host") else ""
        share = facts.get("share")
        if facts.get("phase") in ("queued", "proposed") or facts.get("stage") == "standby":
            return f"{run_id} waits; it will not be started."
        if share is not None:
            budget = facts.get("budget_s")
            return f"{run_id}{where} is {number(100 * share)}% through its {number(budget)} s: that training is lost."
        return f"{run_id}{where}: {safe(facts.get('phase'), 20) if facts else 'what it has done is lost'}."

    def action_decline(self) -> None:
        """Decline proposals with a reason the agent sees."""
        ids = self.targets()
        self.room.push_screen(
            Form(f"Decline {_named(ids)}", [Field("why", "Why? The agent is told.")]),
            lambda got: self._with(got, f"decline {_named(ids)}", lambda lab, g: verbs.decline(lab, ids, who=WHO, why=g["why"] or None)),
        )

    # what is decided

    def action_decide(self, verdict: str) -> None:
        """Keep or discard with a reason; a keep against the evidence needs `yes` in the second line."""
        ids = self.targets()
        fields = [Field("why", "Why?")]
        if verdict == "keep":
            fields.append(Field("override", "Against the evidence, if there is any? Type yes to keep all the same.", ""))

        def carry(lab: Lab, got: dict[str, str]) -> None:
            for run_id in ids:
                verbs.decide(
                    lab, run_id, verdict, who=WHO, why=got["why"] or None, override=got.get("override", "").lower() in ("y", "yes")
                )

        self.room.push_screen(
            Form(f"{verdict.capitalize()} {_named(ids)}", fields, notes=self._standing(ids)),
            lambda got: self._with(got, f"{verdict} {_named(ids)}", carry),
        )

    def _standing(self, ids: list[str]) -> list[str]:
        out = []
        for run_id in ids[:4]:
            facts = self.facts_of(run_id)
            if facts.get("val_bpb") is not None:
                out.append(f"{run_id}: val_bpb {number(facts['val_bpb'], 6)}, {safe(facts.get('trust') or 'claimed', 20)}")
        return out

    def action_approve(self) -> None:
        """Let proposals into the queue."""
        ids = self.targets()
        self.room.do(f"approve {_named(ids)}", lambda lab: verbs.approve(lab, ids, who=WHO))

    def action_priority(self, move: str) -> None:
        """Up, down or to the top of the queue."""
        ids = self.targets()
        self.room.do(f"move {_named(ids)} {move}", lambda lab: verbs.set_priority(lab, ids, who=WHO, move=move))

    # what makes new runs

    def action_requeue(self) -> None:
        """Run again what has ended."""
        ids = self.targets()
        self.room.do(f"requeue {_named(ids)}", lambda lab: _joined([verbs.requeue(lab, i, who=WHO) for i in ids]))

    def action_repeat(self) -> None:
        """Ask how often, then repeat at new seeds."""
        ids = self.targets()
        form = Form(
            f"Repeat {_named(ids)} at new seeds",
            [Field("n", "How many times each?", "3")],
            check=lambda g: _whole("The number of repeats", g["n"], 1, 64),
        )
        self.room.push_screen(
            form,
            lambda got: self._with(
                got, f"repeat {_named(ids)}", lambda lab, g: _joined([verbs.repeat(lab, i, int(g["n"]), who=WHO) for i in ids])
            ),
        )

    def action_promote(self) -> None:
        """Ask where to, then promote."""
        ids = self.targets()
        types = sorted({safe(g.get("name"), 40) for g in self.room.snapshot.gpus if g.get("name")})
        fields = [
            Field("gpu", "GPU type (a part of its name; empty: as before)"),
            Field("budget", "Budget in seconds (empty: as before)"),
            Field("seeds", "Seeds", "1"),
        ]

        def check(got: dict[str, str]) -> None:
            if not got["gpu"] and not got["budget"]:
                raise BadValue("A promotion changes something.", next_step="Give a GPU type, a budget, or both.")
            _whole("The number of seeds", got["seeds"], 1, 64)
            if got["budget"]:
                _positive("The budget", got["budget"])

        def carry(lab: Lab, got: dict[str, str]) -> Submitted:
            budget = float(got["budget"]) if got["budget"] else None
            return _joined(
                [verbs.promote(lab, i, who=WHO, gpu_type=got["gpu"] or None, budget_s=budget, seeds=int(got["seeds"])) for i in ids]
            )

        notes = [f"GPUs here: {', '.join(types)}"] if types else []
        self.room.push_screen(
            Form(f"Promote {_named(ids)}", fields, notes=notes, check=check), lambda got: self._with(got, f"promote {_named(ids)}", carry)
        )

    def action_constants(self) -> None:
        """Look up the run's constants, then ask for others: not every row on the screen has them."""
        run_id = self.targets()[0]
        self.room.do(f"read the constants of {run_id}", lambda lab: _run_of(lab, run_id).constants, then=lambda c: self._set(run_id, c))

    def _set(self, run_id: str, constants: Mapping[str, Any]) -> None:
        """A small form: NAME=value pairs over the run's own constants."""
        shown = "  ".join(f"{safe(k, 30)}={safe(v, 20)}" for k, v in list(constants.items())[:40])
        fields = [Field("set", "NAME=value, several with spaces"), Field("hypothesis", "What do you expect, and why?")]
        form = Form(f"Submit {run_id} with other constants", fields, notes=[shown] if shown else [], check=lambda g: _check_pairs(g["set"]))
        self.room.push_screen(
            form,
            lambda got: self._with(
                got,
                f"submit from {run_id}",
                lambda lab, g: verbs.submit(
                    lab, Submission(base=run_id, parent=run_id, overrides=pairs(g["set"]), hypothesis=g["hypothesis"] or None), who=WHO
                ),
            ),
        )

    def action_edit(self) -> None:
        """Fetch the source, then open the editor."""
        run_id = self.targets()[0]
        self.room.do(f"open the source of {run_id}", lambda lab: _source_of(lab, run_id), then=lambda text: self._edit(run_id, text))

    def _edit(self, run_id: str, source: str) -> None:
        """Suspend the screen for the editor; submit what came back when it differs. Until that is done, E opens it again."""
        text, drafts = self.room.drafts.get(run_id, source), self.room.drafts
        folder = tempfile.mkdtemp(prefix="overnight-")
        path = Path(folder) / "train.py"
        try:
            path.write_text(text, encoding="utf-8")
            with self.room.suspend():
                done = subprocess.run([*shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"), str(path)], check=False)
            edited = path.read_text(encoding="utf-8")
        except SuspendNotSupported:
            self.room.complain("An editor cannot be opened from this terminal.")
            return
        except (OSError, ValueError) as error:
            self.room.complain(f"The editor could not be started: {error}. Set $EDITOR.")
            return
        finally:
            path.unlink(missing_ok=True)
            os.rmdir(folder) if not os.listdir(folder) else None
        if done.returncode != 0 or edited == source:
            drafts.pop(run_id, None)
            self.room.say(
                "nothing changed, nothing submitted"
                if done.returncode == 0
                else f"the editor ended with {done.returncode}; nothing submitted"
            )
            return
        drafts[run_id] = edited
        try:
            sources.check(edited, "train.py")
        except BadValue as error:
            self.room.complain(f"{error} E opens your text again.")
            return
        changed = sources.changed_constants(source, edited)
        notes = [f"{safe(k, 30)}: {safe(a, 20)} → {safe(b, 20)}" for k, (a, b) in list(changed.items())[:6]]
        form = Form(f"Submit the edited {run_id}", [Field("hypothesis", "What do you expect, and why?")], notes=notes)

        def take(got: dict[str, str] | None) -> None:
            if got is None:
                self.room.say(f"not submitted; E on {run_id} opens your text again")
                return
            wanted = Submission(source=edited, parent=run_id, hypothesis=got["hypothesis"] or None)
            self.room.do(f"submit from {run_id}", lambda lab: verbs.submit(lab, wanted, who=WHO), then=lambda _: drafts.__delitem__(run_id))

        self.room.push_screen(form, take)

    def action_verify(self) -> None:
        """Ask the daemon to recompute the result."""
        ids = self.targets()
        self.room.asking.ask(f"verify {_named(ids)}", "verify", labelled(ids, "verify"))

    # what changes nothing

    def action_open_wave(self) -> None:
        """Open the wave of the run under the cursor."""
        wave = self.facts_of(self.targets()[0]).get("wave")
        if wave:
            self.room.open_wave(str(wave))
        else:
            self.room.say("this run belongs to no wave")

    def action_copy(self) -> None:
        """Copy the ids through the terminal."""
        self.room.copy(" ".join(self.targets()))

    def action_copy_command(self) -> None:
        """Copy a command line that submits the same again."""
        run_id = self.targets()[0]
        ended = self.facts_of(run_id).get("phase") == "ended"
        self.room.copy(f"overnight requeue {run_id}" if ended else f"overnight run --base {run_id} --allow-duplicate")

    # shared

    def _ask(self, title: str, lines: list[str], label: str, verb: Callable[[Lab], Any]) -> None:
        self.room.push_screen(Confirm(title, lines), lambda yes: self.room.do(label, verb) if yes else None)

    def _with(self, got: dict[str, str] | None, label: str, carry: Callable[[Lab, dict[str, str]], Any]) -> None:
        if got is not None:
            self.room.do(label, lambda lab: carry(lab, got))


def _named(ids: list[str]) -> str:
    return ids[0] if len(ids) == 1 else plural(len(ids), "run")


def _joined(done: list[Submitted]) -> Submitted:
    return Submitted([i for d in done for i in d.run_ids], None, list(dict.fromkeys(n for d in done for n in d.notes)))


def _run_of(lab: Lab, run_id: str) -> Run:
    run = lab.store.run(run_id)
    if run is None:
        raise BadValue(f"{run_id} is not in the lab any more.")
    return run


def _source_of(lab: Lab, run_id: str) -> str:
    return lab.source_text(_run_of(lab, run_id).source_sha)


def _whole(what: str, text: str, low: int, high: int) -> None:
    if not text.isdigit() or not low <= int(text) <= high:
        raise BadValue(f"{what} is {text!r}.", next_step=f"Allowed: {low} to {high}.")


def _positive(what: str, text: str) -> None:
    try:
        good = 0 < float(text) < 1e7
    except ValueError:
        good = False
    if not good:
        raise BadValue(f"{what} is {text!r}.", next_step="A number of seconds above 0.")


def pairs(text: str) -> dict[str, Any]:
    """`DEPTH=6 BATCH=2**17 NAME=text` as overrides; the values are read in the type the script has for them.

    Raised: BadValue when a word is no NAME=value.
    """
    out: dict[str, Any] = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise BadValue(f"{word!r} is not NAME=value.", next_step="For example DEPTH=6 MATRIX_LR=0.03.")
        out[name] = value
    return out


def _check_pairs(text: str) -> None:
    try:
        found = pairs(text)
    except ValueError as error:
        raise BadValue(f"{text!r} cannot be read: {error}.") from error
    if not found:
        raise BadValue("Nothing is set.", next_step="For example DEPTH=6 MATRIX_LR=0.03.")
