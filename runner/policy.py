"""hosts.toml, parsed once into frozen records: trainer contract, limits, hosts.

An error names the file, the line, the key and the allowed values. Secrets (`env` of a host) stay in these records and never reach spec
files of other
hosts, tools, logs or reports: `public()` is what may be shown.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner import hostrules
from runner.errors import BadValue, PolicyError, UnknownName
from runner.health import RUN_KINDS
from runner.research.rules import rule_of
from runner.textfile import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_SIMULATED = 64
HOST_KINDS = ("local", "ssh", "fake")
KINDS_NOT_YET = ("slurm", "skypilot")
MAX_BUDGET_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class TrainerPolicy:
    """Where the training script lives and how a run is made of it."""

    folder: Path
    command: list[str] = field(default_factory=lambda: ["{python}", "train.py"])
    editable: list[str] = field(default_factory=lambda: ["train.py"])
    source: str = "train.py"
    budget: str | None = None
    data_command: list[str] | None = None
    metric: str = "val_bpb"
    lower_is_better: bool = True
    shims: list[str] = field(default_factory=list)
    program: str = "program.md"
    torch_index: str | None = None
    holdout: Path | None = None  # text that reaches a host for verifications alone


@dataclass(frozen=True, slots=True)
class Limits:
    """The human's limits. `max_*` of None mean no limit."""

    budget_s: float = 300.0
    min_budget_s: float = 1.0
    max_budget_s: float = 86400.0
    max_runs: int | None = None
    max_gpu_hours: float | None = None
    max_wall_hours: float | None = None
    max_runs_per_agent: int | None = None
    max_queue: int = 2000
    approval: str = "auto"
    retry_lost: int = 1
    handed_ahead: int = 1
    wall_factor: float = 2.0
    wall_extra_s: float = 300.0
    grace_s: float = 10.0
    hung_after_summary_s: float = 30.0
    min_free_disk_mib: int = 1024
    max_log_mib: int = 64
    keep_checkpoints: int = 5
    pruning: str = "off"
    kill_on_flags: list[str] = field(default_factory=list)
    promote: dict[str, Any] | None = None
    tag: str = "night"


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """One machine as the human wrote it down."""

    name: str
    kind: str = "local"
    address: str | None = None
    port: int | None = None
    user: str | None = None
    identity: str | None = None
    jump: list[str] = field(default_factory=list)
    workdir: str | None = None
    python: str | None = None
    gpus: str | list[Any] = "all"
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict, repr=False)
    max_runs: int | None = None
    min_free_disk_mib: int | None = None
    price_per_hour: float | None = None
    types: dict[str, int] = field(default_factory=dict)
    surface: str | None = None
    speed: float = 1.0
    crash_share: float | None = None

    def public(self) -> dict[str, Any]:
        """What may be shown of the host: everything but the values of `env`."""
        shown = dataclasses.asdict(self)
        shown["env"] = sorted(self.env)
        return shown


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything hosts.toml says, with defaults filled in."""

    trainer: TrainerPolicy
    limits: Limits
    hosts: list[HostPolicy]
    peaks: dict[str, float]
    path: Path

    def host(self, name: str) -> HostPolicy | None:
        """The host of that name, or None."""
        return next((h for h in self.hosts if h.name == name), None)


def load_policy(path: Path, *, text: str | None = None, root: Path | None = None, files: bool = False) -> Policy:
    """Parse hosts.toml; `root` is the folder its relative paths start from (default: the file's own). With `files`, the key files it
    names must be there.

    Raised: PolicyError with file, line, key and allowed values when anything in it cannot be used.
    """
    if text is None:
        text = policy_text(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{path} is not valid TOML: {error}.", next_step="Correct that line.") from None
    return _Reader(path, text, files).policy(raw, root or path.parent)


def policy_text(path: Path) -> str:
    """The text of a hosts.toml. Raised: PolicyError when it cannot be read."""
    try:
        return read_text(path, "The policy")
    except FileNotFoundError:
        raise PolicyError(f"{path} does not exist.", next_step="Write one with `overnight init`.") from None
    except BadValue as error:
        raise PolicyError(error.message, next_step=error.next_step) from None


def usual_budget(folder: Path) -> str | None:
    """Where upstream and our trainer keep the time budget, when this folder does too; None: its runs end when the script does."""
    try:
        text = read_text(folder / "prepare.py", "The file")
    except (FileNotFoundError, BadValue):
        return None
    return "prepare.py:TIME_BUDGET" if re.search(r"^TIME_BUDGET\s*(:[^=\n]+)?=", text, re.MULTILINE) else None


def default_policy(root: Path) -> Policy:
    """The policy of a folder without hosts.toml: this machine, and the trainer in `trainer/` or here."""
    folder = root / "trainer" if (root / "trainer" / "train.py").is_file() else root
    trainer = TrainerPolicy(folder=folder.resolve(), budget=usual_budget(folder))
    return Policy(trainer, Limits(), [HostPolicy("local")], {}, root / "hosts.toml")


class _Reader:
    """Checks one parsed file; knows the text, so that an error can name the line."""

    def __init__(self, path: Path, text: str, files: bool) -> None:
        self.path, self.files = path, files
        self.lines = text.splitlines()

    def fail(self, section: str, key: str, why: str, allowed: str) -> PolicyError:
        line = self.line_of(section, key)
        at = f" line {line}" if line else ""
        what = f"[{section}] {key}" if section else key
        return PolicyError(f"{self.path}{at}: {what} {why}.", next_step=f"Allowed: {allowed}{'' if allowed.endswith('?') else '.'}")

    def line_of(self, section: str, key: str) -> int | None:
        """The line of a key: the first match below its section's header, counting repeats for `host #N`; the header's where it is not."""
        name, _, nth = section.partition(" #")
        seen, wanted, inside, header = 0, int(nth or 1), name == "", None
        for number, line in enumerate(self.lines, 1):
            bare = line.strip()
            if bare.startswith("["):
                head = bare.strip("[] \t").split("]")[0]
                seen += head == name
                inside = head == name and seen == wanted
                header = number if inside else header
            if inside and re.match(rf'\s*"?{re.escape(key)}"?\s*=', line):
                return number
            if bare.startswith("[") and bare.strip("[] ").split("]")[0] == key:
                return number
        return header

    def policy(self, raw: dict[str, Any], root: Path) -> Policy:
        self.known_keys("", raw, ("trainer", "policy", "host", "peaks"))
        for section in ("trainer", "policy", "peaks"):
            if not isinstance(raw.get(section, {}), dict):
                raise self.fail("", section, "must be a table", f"[{section}]")
        trainer = self.trainer(raw.get("trainer", {}), root)
        limits = self.limits(raw.get("policy", {}))
        entries = raw.get("host", [{"name": "local"}])
        if not isinstance(entries, list) or not all(isinstance(h, dict) for h in entries):
            raise self.fail("", "host", "must be a list of tables", "[[host]]")
        hosts = [self.host(entry, n, root) for n, entry in enumerate(entries, 1)]
        names = [h.name for h in hosts]
        for name in names:
            if names.count(name) > 1:
                raise self.fail(
                    f"host #{len(names) - names[::-1].index(name)}", "name", f"{name!r} is used twice", "one name for each host"
                )
        peaks: dict[str, Any] = raw.get("peaks", {})
        for gpu, value in peaks.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e11 <= value <= 1e17:
                raise self.fail("peaks", gpu, f"is {value!r}", "FLOP/s between 1e11 and 1e17, for example 209.5e12")
        return Policy(trainer, limits, hosts, {k: float(v) for k, v in peaks.items()}, self.path)

    def known_keys(self, section: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                near = UnknownName("key", key, known).next_step
                raise self.fail(section, key, "is not a key Overnight knows", ", ".join(known) + (f". {near}" if near else ""))

    def read(self, section: str, table: dict[str, Any], record: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
        """The table's values, each checked against the type the record declares for it."""
        declared = {f.name: str(f.type) for f in dataclasses.fields(record) if f.name not in skip}
        self.known_keys(section, table, (*declared, *skip))
        return {key: self.typed(section, key, table[key], declared[key]) for key in declared if key in table}

    def typed(self, section: str, key: str, value: Any, declared: str) -> Any:
        """The value, when it is of the declared type (a whole number also serves as a float)."""
        kinds: dict[str, tuple[type, ...]] = {
            "str": (str,),
            "bool": (bool,),
            "int": (int,),
            "float": (int, float),
            "list": (list,),
            "dict": (dict,),
        }
        names = [re.split(r"[\[ ]", part.strip())[0] for part in declared.split("|")]
        allowed = tuple(kind for name in names if name in kinds for kind in kinds[name])
        if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, allowed):
            words = {
                "str": "text",
                "bool": "true or false",
                "int": "a whole number",
                "float": "a number",
                "list": "a list",
                "dict": "a table",
            }
            raise self.fail(section, key, f"is {value!r}", " or ".join(words[n] for n in names if n in words))
        if "list[str]" in declared and isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise self.fail(section, key, f"is {value!r}", "a list of texts")
        if "dict[str, str]" in declared and isinstance(value, dict) and not all(isinstance(item, str) for item in value.values()):
            raise self.fail(section, key, "holds a value that is not text", "a table of texts")
        return float(value) if isinstance(value, int) and names[0] == "float" else value

    def trainer(self, table: dict[str, Any], root: Path) -> TrainerPolicy:
        values = self.read("trainer", table, TrainerPolicy, skip=("folder", "holdout"))
        folder = self.typed("trainer", "folder", table.get("folder", "."), "str")
        values["folder"] = (root / folder).resolve()
        if "holdout" in table:
            values["holdout"] = (root / Path(self.typed("trainer", "holdout", table["holdout"], "str")).expanduser()).resolve()
            if values["holdout"].is_relative_to(values["folder"]):
                raise self.fail("trainer", "holdout", "lies in the trainer folder, which every run gets", "a file outside of it")
        if "budget" not in table:
            values["budget"] = usual_budget(values["folder"])
        elif not table["budget"]:
            values["budget"] = None  # the script has no time budget: its runs end when it does
        trainer = TrainerPolicy(**values)
        for key in ("source", "program"):
            self.inside("trainer", key, getattr(trainer, key))
        for name in trainer.editable:
            self.inside("trainer", "editable", name)
        if not trainer.command:
            raise self.fail("trainer", "command", "is empty", 'a list such as ["{python}", "train.py"]')
        if trainer.metric != "val_bpb" or not trainer.lower_is_better:
            key = "metric" if trainer.metric != "val_bpb" else "lower_is_better"
            value = json.dumps(getattr(trainer, key))
            allowed = '"val_bpb", lowest first: a script prints its number under that name, negated if need be'
            raise self.fail("trainer", key, f"is {value}", allowed)
        if trainer.budget is not None and not re.fullmatch(r"[\w./-]+:[A-Za-z_]\w*", trainer.budget):
            raise self.fail("trainer", "budget", f"is {trainer.budget!r}", '"FILE:NAME", for example "prepare.py:TIME_BUDGET"')
        return trainer

    def inside(self, section: str, key: str, name: str) -> None:
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise self.fail(section, key, f"names {name!r}, which is outside the trainer folder", "a path inside it")

    def limits(self, table: dict[str, Any]) -> Limits:
        limits = Limits(**self.read("policy", table, Limits))
        if limits.min_budget_s > limits.max_budget_s:
            raise self.fail("policy", "min_budget_s", f"is {limits.min_budget_s:g}", f"at most max_budget_s, {limits.max_budget_s:g}")
        for key, low, high in (
            ("min_budget_s", 0.1, MAX_BUDGET_S),
            ("max_budget_s", 0.1, MAX_BUDGET_S),
            ("budget_s", limits.min_budget_s, limits.max_budget_s),
            ("retry_lost", 0, 1),
            ("handed_ahead", 0, 4),
            ("wall_factor", 1, 100),
            ("wall_extra_s", 0, 86400),
            ("grace_s", 0.1, 600),
            ("hung_after_summary_s", 1, 3600),
            ("min_free_disk_mib", 0, 1 << 30),
            ("max_log_mib", 1, 4096),
            ("keep_checkpoints", 0, 10000),
            ("max_queue", 1, 100000),
            ("max_runs", 1, 10**9),
            ("max_gpu_hours", 0, 1e9),
            ("max_wall_hours", 0, 1e9),
            ("max_runs_per_agent", 1, 10**9),
        ):
            value = getattr(limits, key)
            if value is not None and not low <= value <= high:
                raise self.fail("policy", key, f"is {value}", f"{low:g} to {high:g}")
        for key, words in (("approval", ("auto", "ask")), ("pruning", ("off", "cautious", "eager"))):
            if getattr(limits, key) not in words:
                raise self.fail("policy", key, f"is {getattr(limits, key)!r}", ", ".join(words))
        rule_of(limits.promote)
        for kind in limits.kill_on_flags:
            if kind not in RUN_KINDS:
                raise self.fail("policy", "kill_on_flags", f"names {kind!r}", ", ".join(RUN_KINDS))
        if not NAME_FORM.fullmatch(limits.tag):
            raise self.fail("policy", "tag", f"is {limits.tag!r}", "letters, digits, dot, dash and underscore")
        return limits

    def host(self, table: dict[str, Any], number: int, root: Path) -> HostPolicy:
        section = f"host #{number}"
        if "name" not in table:
            raise self.fail(section, "name", "is missing", "a short name for the host")
        if isinstance(table.get("jump"), str):
            table = {**table, "jump": [table["jump"]]}
        host = HostPolicy(**self.read(section, table, HostPolicy))
        if host.kind == "local" and host.python and "/" in host.python:  # as people name a venv: beside hosts.toml, or from ~
            host = dataclasses.replace(host, python=os.path.normpath(root / Path(host.python).expanduser()))
        if host.kind == "fake" and host.surface not in (None, "builtin"):  # beside hosts.toml as well
            host = dataclasses.replace(host, surface=os.path.normpath(root / Path(str(host.surface)).expanduser()))
        if not NAME_FORM.fullmatch(host.name):
            raise self.fail(section, "name", f"is {host.name!r}", "letters, digits, dot, dash and underscore, at most 63")
        if host.kind in KINDS_NOT_YET:
            raise self.fail(section, "kind", f"{host.kind!r} is not supported yet", ", ".join(HOST_KINDS))
        if host.kind not in HOST_KINDS:
            raise self.fail(section, "kind", f"is {host.kind!r}", ", ".join(HOST_KINDS))
        found = list(hostrules.complaints(host, table)) or (list(hostrules.missing_files(host)) if self.files else [])
        if found:
            raise self.fail(section, *found[0])
        for key, low, high in (
            ("port", 1, 65535),
            ("max_runs", 1, 64),
            ("speed", 0.01, 1e6),
            ("crash_share", 0, 1),
            ("min_free_disk_mib", 0, 1 << 30),
            ("price_per_hour", 0, 1e6),
        ):
            value = getattr(host, key)
            if value is not None and not low <= value <= high:
                raise self.fail(section, key, f"is {value}", f"{low:g} to {high:g}")
        if "types" in table:
            counts = list(host.types.values())
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts) or not 1 <= sum(counts) <= MAX_SIMULATED:
                raise self.fail(section, "types", f"is {host.types!r}", f"GPU types with counts, 1 to {MAX_SIMULATED} GPUs in all")
        return host
