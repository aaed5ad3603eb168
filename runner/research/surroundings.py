"""What a script finds around it: modules on the hosts where it may run, as their last check saw them, and the trainer's fixed files.

A script that imports what no host has is refused before a slot is spent on it. A fixed file that changed since the last submission is
said, since results from then on may be a class of their own. Hosts that were never checked are not judged.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterator

from runner import sources
from runner.errors import BadValue
from runner.lab import Lab
from runner.policy import TrainerPolicy

MODULES, FIXED = "modules", "fixed_files"  # settings of the lab (FORMAT.md section 2)


@functools.lru_cache(maxsize=16)
def imports_of(text: str) -> tuple[str, ...]:
    """Top-level modules a script cannot start without: imported at module level, not within `try` or `if`."""
    found: dict[str, None] = {}
    for node in sources.parse(text).body:
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found[node.module.split(".")[0]] = None
    return tuple(name for name in found if name not in sys.stdlib_module_names)


def _beside(trainer: TrainerPolicy) -> set[str]:
    """Modules and packages that travel with the script."""
    travelling = {path.stem for path in trainer.folder.glob("*.py")}
    travelling |= {path.name for path in trainer.folder.iterdir() if path.is_dir()} if trainer.folder.is_dir() else set()
    return travelling | {shim.rpartition("/")[2].removesuffix(".py") for shim in trainer.shims}


def check(lab: Lab, text: str, host: str | None) -> list[str]:
    """Both checks of a submission, as notes. Raised: BadValue when the script cannot start anywhere."""
    return check_imports(lab, text, host) + changed_files(lab)


def check_imports(lab: Lab, text: str, host: str | None) -> list[str]:
    """Notes about hosts that lack a module the script imports. Raised: BadValue when every host where it may run lacks one."""
    policy, known = lab.policy(), lab.store.setting(MODULES, {})
    hosts = [h.name for h in policy.hosts if h.kind != "fake" and host in (None, h.name)]
    if not hosts or not any(name in known for name in hosts) or any(h.kind == "fake" for h in policy.hosts if host in (None, h.name)):
        return []
    wanted = [name for name in imports_of(text) if name not in _beside(policy.trainer)]
    notes = []
    for module in wanted:
        without = [name for name in hosts if name in known and module not in known[name]]
        if len(without) == len(hosts):
            raise BadValue(
                f"The script imports {module}, which the interpreter of {' and '.join(without)} does not have.",
                next_step=f"Nothing was queued. Do without it, or install it there and run `overnight hosts check {without[0]}`.",
            )
        if without:
            notes.append(f"{module} is missing on {', '.join(without)}: a run there would fail at its import; name another host.")
    return notes


def changed_files(lab: Lab) -> list[str]:
    """A note when fixed files of the trainer changed since the last submission; what they are now is remembered."""
    trainer, before = lab.policy().trainer, lab.store.setting(FIXED, None)
    now = dict(_fixed(trainer))
    if now == before:
        return []
    lab.store.set_setting(FIXED, now)
    if before is None:
        return []
    changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
    return [
        f"{', '.join(changed)} changed since the last submission: if results depend on it, they are no longer comparable with earlier ones."
    ]


def _fixed(trainer: TrainerPolicy) -> Iterator[tuple[str, str]]:
    for path in sorted(trainer.folder.glob("*.py")):
        if path.name not in trainer.editable and path.name != trainer.source:
            try:
                yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError:
                continue  # gone or unreadable: the run's own copy will say so
