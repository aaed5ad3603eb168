"""Labs in known states for the screen's tests and pictures: real stores filled as the daemon fills them, at one fixed moment.

Nothing is drawn by hand: a scene is rows in a database, and `snapshot_of` reads them through the screen's own reader, at NOW.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from runner.lab import Lab, open_lab
from runner.records import Point, Sample
from tui.snapshot import Deliver, Loader, Reader, Snapshot

NOW = 1_790_000_000.0
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
CLASS_H100 = "H100 80GB HBM3 · torch 2.13.0+cu130 · driver 580.95 · eval 3f9a1c2b7d · data 91be02aa4c"
CLASS_H200 = "H200 · torch 2.13.0+cu130 · driver 580.95 · eval 3f9a1c2b7d · data 91be02aa4c"
CONSTANTS = {"DEPTH": 8, "TOTAL_BATCH_SIZE": 2**19, "MATRIX_LR": 0.04, "WEIGHT_DECAY": 0.2, "WARMDOWN_RATIO": 0.5, "SEED": 42}
SCRIPT = '"""A script."""\nDEPTH = 8\nTOTAL_BATCH_SIZE = 2**19\nMATRIX_LR = 0.04\nWEIGHT_DECAY = 0.2\nWARMDOWN_RATIO = 0.5\nSEED = 42\n'


def empty_lab(folder: Path) -> Lab:
    """A lab nothing was done in."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = folder / "trainer"
    trainer.mkdir(exist_ok=True)
    (trainer / "train.py").write_text(SCRIPT)
    (trainer / "prepare.py").write_text("TIME_BUDGET = 300\n")
    (folder / "hosts.toml").write_text('[trainer]\nfolder = "trainer"\n[policy]\nbudget_s = 300\n')
    return open_lab(folder / "lab", create=True)


def beat(lab: Lab, age_s: float = 0.5) -> None:
    """A daemon that gave a sign of life `age_s` before NOW."""
    with mock.patch("time.time", lambda: NOW - age_s):
        lab.store.beat(pid=4711, boot_id="boot", started_at=NOW - 7200, version="0.1.0", note=None)


def add_run(lab: Lab, **columns: Any) -> str:
    """A run as verbs insert it; observed columns may be given as well."""
    source = lab.keep_source(columns.pop("text", SCRIPT))
    wanted: dict[str, Any] = {
        "created_at": NOW - 3000,
        "purpose": "experiment",
        "source_sha": source,
        "effective_sha": columns.pop("effective", f"e{random.random()}"),
        "overrides": {},
        "constants": dict(CONSTANTS),
        "budget_s": 300.0,
        "seed": 42,
        "priority": 0.0,
        "agent": "mcp:claude",
        "wanted": "run",
        "approval": "none",
        "phase": "queued",
        "log_offset": 0,
        "events_offset": 0,
    }
    return lab.store.insert_run(**{**wanted, **columns})


def ended(lab: Lab, val_bpb: float | None, *, at: float, gpu: str = H100, **columns: Any) -> str:
    """A run that ended `at` seconds before NOW."""
    good = (
        {"outcome": "completed", "trust": "claimed", "val_bpb": val_bpb, "exit_code": 0}
        if val_bpb is not None
        else {"outcome": "crashed", "cause": "oom", "exit_code": 1}
    )
    observed = {
        "phase": "ended",
        "started_at": NOW - at - 340,
        "ended_at": NOW - at,
        "wall_s": 340.0,
        "training_s": 300.0,
        "total_s": 331.0,
        "gpu_name": gpu,
        "host": "alpha",
        "engine": "ssh",
        "class_key": CLASS_H100 if gpu == H100 else CLASS_H200,
        "peak_vram_mb": 45060.0,
        "flops_per_token": 3.03e8,
        "tokens_m": 499.6,
        "num_steps": 953,
        "params_m": 50.3,
        "depth": 8,
        "mfu_reported": 39.8,
        "share": 1.0,
        "step": 953,
        **good,
    }
    return add_run(lab, **{**observed, **columns})


def curve(lab: Lab, run_id: str, end: float, share: float = 1.0, steps: int = 200, nan_at: float | None = None) -> None:
    """Points of a loss that falls like a power of the step."""
    rng = random.Random(run_id)
    points = []
    for i in range(1, int(steps * share) + 1):
        s = i / steps
        loss = end + 6.5 * math.exp(-s * 14) + 0.5 * (1 - s) ** 2 + rng.gauss(0, 0.008)
        points.append(
            Point(
                i * 5,
                s * 300,
                s,
                None if nan_at is not None and s > nan_at else loss,
                1.62e6 + rng.gauss(0, 9e3),
                323.0,
                40.2 + rng.gauss(0, 0.4),
            )
        )
    lab.store.add_points(run_id, points)


def add_gpu(lab: Lab, host: str, index: int, name: str, **columns: Any) -> str:
    """A GPU with a sample one second old."""
    rng = random.Random(f"{host}{index}")
    uuid = f"GPU-{host}-{index:02d}"
    busy = columns.get("run_id") is not None
    total = 81559 if name == H100 else 143771
    sample = {
        "at": NOW - 1,
        "uuid": uuid,
        "index": index,
        "name": name,
        "util_pct": rng.choice([98, 99, 100]) if busy else 0,
        "mem_used_mib": 46210 + index * 37 if busy else 4,
        "mem_total_mib": total,
        "power_w": 640 + rng.randint(-20, 40) if busy else 71,
        "power_limit_w": 700,
        "temp_c": 58 + rng.randint(0, 8) if busy else 31,
        "sm_mhz": 1755,
        "sm_max_mhz": 1980,
        "throttle": 0x4 if busy and index % 5 == 1 else 0,
        "source": "nvml",
    }
    sample.update(columns.pop("sample", {}))
    state = columns.pop("state", "busy" if busy else "free")
    values = {"host": host, "idx": index, "name": name, "mem_total_mib": total, "since": NOW - 130, "telemetry": sample, **columns}
    lab.store.upsert_gpu(uuid, state=state, **values)
    return uuid


def busy(folder: Path) -> Lab:
    """Sixteen GPUs on two hosts in the middle of a night: fourteen runs live, nine waiting, one crash, one refuted claim."""
    random.seed(7)
    lab = empty_lab(folder)
    store = lab.store
    with store.transaction():
        for name in ("alpha", "beta"):
            store.upsert_host(
                name, kind="ssh", state="up", since=NOW - 7000, paused=0, drain=0, checked_at=NOW - 300, disk_free_mib=812_000
            )
        base = ended(lab, 0.997900, at=6400, purpose="baseline", hypothesis="the script as it came", effective="base", agent="cli")
        curve(lab, base, 2.77)
        for n, val in enumerate((0.998900, 0.997100), 1):
            ended(
                lab, val, at=6000 - n, purpose="repeat", repeat_of=base, effective="base", seed=42 + n, hypothesis="noise of the baseline"
            )
        wave = store.insert_wave(
            created_at=NOW - 5600,
            kind="grid",
            title="batch and matrix rate",
            hypothesis="smaller batches make more steps",
            base_sha="x",
            base_run=base,
            factors={"TOTAL_BATCH_SIZE": [2**17, 2**18, 2**19], "MATRIX_LR": [0.03, 0.04, 0.05]},
            repeats=1,
            budget_s=300.0,
            agent="mcp:claude",
        )
        for i, batch in enumerate((2**17, 2**18, 2**19)):
            for j, rate in enumerate((0.03, 0.04, 0.05)):
                val = None if (i, j) == (0, 2) else 0.9812 + 0.0061 * i + 0.0022 * (j - 1) ** 2 + 0.0004 * i * j
                cell = {"TOTAL_BATCH_SIZE": batch, "MATRIX_LR": rate}
                run = ended(
                    lab,
                    val,
                    at=5000 - 60 * (3 * i + j),
                    wave_id=wave,
                    cell=cell,
                    overrides=cell,
                    constants={**CONSTANTS, **cell},
                    base_run=base,
                    parent=base,
                    hypothesis=f"batch {batch}, rate {rate}",
                    last_lines="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" if val is None else None,
                )
                if val is not None:
                    curve(lab, run, 2.77 + (val - 0.9979) * 2.8)
        store.update_run(
            "r0005",
            verdict="keep",
            verdict_why="2.9 standard errors better than the baseline",
            verdict_by="mcp:claude",
            verdict_at=NOW - 4000,
            trust="verified",
            verified_bpb=0.981202,
        )
        store.update_run("r0006", verdict="discard", verdict_why="worse at the higher rate", verdict_by="mcp:claude", verdict_at=NOW - 3900)
        cheat = ended(
            lab,
            0.412345,
            at=2500,
            hypothesis="evaluate on fewer tokens",
            parent=base,
            trust="refuted",
            trust_why="logits at a position change with later tokens",
        )
        with mock.patch("time.time", lambda: NOW - 2400):
            store.raise_flag(cheat, "leak", "bad", "the printed val_bpb 0.412345 was recomputed as 1.003112")
        ended(
            lab,
            0.9790,
            at=1500,
            gpu=H200,
            purpose="promotion",
            promoted_from="r0005",
            hypothesis="does the small batch hold on an H200?",
            host="beta",
        )
        live = []
        for i in range(14):
            share = 0.08 + 0.065 * i
            cell = {"WEIGHT_DECAY": round(0.05 * (i + 1), 2)}
            stage = "compiling" if i == 0 else "evaluating" if i == 13 else "training"
            gpu = H100 if i < 12 else H200
            run = add_run(
                lab,
                phase="running",
                stage=stage,
                host="alpha" if i < 8 else "beta",
                engine="ssh",
                gpu_name=gpu,
                share=None if i == 0 else min(1.0, share),
                step=None if i == 0 else int(953 * share),
                loss=None if i == 0 else 3.4 - 0.5 * share,
                tok_s=None if i == 0 else 1.62e6 + 7e3 * i,
                flops_per_token=3.03e8,
                remaining_s=None if i == 0 else 300 * (1 - min(1.0, share)),
                started_at=NOW - 40 - 300 * share,
                first_step_at=NOW - 300 * share,
                created_at=NOW - 900,
                wave_id="w2",
                cell=cell,
                overrides=cell,
                constants={**CONSTANTS, **cell},
                base_run="r0005",
                parent="r0005",
                last_output_at=NOW - 1,
                hypothesis=f"weight decay {cell['WEIGHT_DECAY']} with the small batch",
            )
            live.append(run)
            if i:
                curve(lab, run, 2.66, share=min(1.0, share))
        store.insert_wave(
            created_at=NOW - 1200,
            kind="grid",
            title="weight decay",
            hypothesis="less decay with more steps",
            base_sha="x",
            base_run="r0005",
            factors={"WEIGHT_DECAY": [round(0.05 * (i + 1), 2) for i in range(22)]},
            repeats=1,
            budget_s=300.0,
            agent="mcp:claude",
        )
        for i in range(8):
            add_gpu(lab, "alpha", i, H100, run_id=live[i])
        for i in range(4):
            add_gpu(lab, "beta", i, H100, run_id=live[8 + i])
        for i in range(4, 8):
            add_gpu(lab, "beta", i, H200, run_id=live[8 + i] if i < 6 else None)
        for i in range(9):
            add_run(
                lab,
                created_at=NOW - 600 + i,
                wave_id="w2",
                cell={"WEIGHT_DECAY": round(0.05 * (i + 15), 2)},
                overrides={"WEIGHT_DECAY": round(0.05 * (i + 15), 2)},
                base_run="r0005",
                parent="r0005",
                hypothesis="weight decay further up",
                gpu_type="H100" if i < 7 else "H200",
                priority=2.0 if i == 0 else 0.0,
            )
        store.add_samples(
            Sample(
                "GPU-alpha-05",
                int(NOW - 200 + s),
                live[5],
                99.0,
                46000,
                655.0 + 10 * math.sin(s / 9),
                700.0,
                55 + s / 40,
                1755,
                1980,
                0,
                1.6e6,
            )
            for s in range(200)
        )
    for n, (who, verb, subject, why) in enumerate(
        (
            ("cli", "submit", "r0001", "the script as it came"),
            ("mcp:claude", "submit_wave", "w1", "smaller batches make more steps"),
            ("mcp:claude", "decide", "r0005", "2.9 standard errors better than the baseline"),
            ("mcp:claude", "submit_wave", "w2", "less decay with more steps"),
        )
    ):
        with mock.patch("time.time", lambda n=n: NOW - 6400 + 1800 * n):
            store.event(who, verb, subject, why)
    log = "step 00953 (100.0%) | loss: 3.114205 | lrm: 0.02 | dt: 323ms | tok/sec: 1,622,114 | mfu: 49.8% | epoch: 1 | remaining: 0s\n"
    for run in ("r0005", live[5]):
        folder_of = lab.run_dir(run)
        folder_of.mkdir(parents=True, exist_ok=True)
        (folder_of / "out.log").write_text(
            "compiling …\n"
            + "".join(log.replace("00953", f"{i:05d}").replace("(100.0%)", f"({i / 9.53:.1f}%)") for i in range(900, 954))
            + "---\nval_bpb: 0.981200\n"
        )
    beat(lab)
    return lab


def host_down(folder: Path) -> Lab:
    """The same night with one host out of reach, a quarantined GPU and the queue paused."""
    lab = busy(folder)
    store = lab.store
    store.upsert_host("beta", state="down", since=NOW - 340, error="beta does not answer on port 22 (timed out after 10 s).")
    for i in range(6):
        run = store.gpus()[8 + i].run_id
        store.upsert_gpu(f"GPU-beta-{i:02d}", state="lost", reason="its host is down")
        if run:
            store.update_run(run, phase="unreachable", unreachable_since=NOW - 340)
    store.upsert_gpu(
        "GPU-alpha-03", state="quarantined", reason="41 GiB still held by pid 8812 (python) of user mira", run_id=None, since=NOW - 95
    )
    store.set_setting("queue_paused", True)
    beat(lab)
    return lab


def hostile(folder: Path) -> Lab:
    """Everything that comes from outside is as bad as it can be."""
    lab = empty_lab(folder)
    bad = "[/x] [bold]\x1b[31mred\x1b]0;title\x07 \u202e宽字符 Ｗide \x9b2J [@click=app.quit]x[/] \x00\t|\r\n end"
    store = lab.store
    store.upsert_host(bad, kind="ssh", state="down", since=NOW - 10, error=bad, paused=0, drain=0)
    wave = store.insert_wave(
        created_at=NOW - 10,
        kind="grid",
        title=bad,
        hypothesis=bad,
        base_sha="x",
        base_run=None,
        factors={bad: [bad, 1e9, None, 0.0]},
        repeats=1,
        budget_s=300.0,
        agent=bad,
    )
    values = [0.5, 5e-4, 1e9, -0.0, None]
    for i, val in enumerate(values):
        run = ended(
            lab,
            val,
            at=100 + i,
            hypothesis=bad,
            agent=bad,
            wave_id=wave,
            cell={bad: bad},
            overrides={bad: bad},
            constants={bad: bad, "X": 1e9},
            cause=bad,
            cause_text=bad,
            last_lines=bad,
            verdict="keep",
            verdict_why=bad,
            trust_why=bad if i == 1 else None,
            params_m=1e9,
            num_steps=0,
            parent=bad,
            attributes={bad: bad},
            class_key=bad,
            host=bad,
            gpu_name=bad,
        )
        store.add_points(run, [Point(s, 1.0 * s, s / 9, None if s % 3 else 1e9, None, -0.0, None) for s in range(10)])
        lab.run_dir(run).mkdir(parents=True, exist_ok=True)
        (lab.run_dir(run) / "out.log").write_bytes(bad.encode() * 30 + b"\xff\xfe\x1b[?1049h\x1b[2J\x1b]52;c;eA==\x07" + b"x" * 5000)
        store.raise_flag(run, bad, "bad", bad)
        store.event(bad, bad, run, bad, {bad: bad})
    add_run(lab, hypothesis=bad, gpu_type=bad, overrides={bad: bad}, agent=bad)
    live = add_run(
        lab, phase="running", stage=bad, loss=1e9, share=7.0, remaining_s=-5.0, tok_s=1e30, host=bad, gpu_name=bad, hypothesis=bad
    )
    add_gpu(
        lab,
        bad,
        0,
        bad,
        run_id=live,
        sample={"power_w": None, "util_pct": None, "mem_used_mib": None, "temp_c": None, "throttle": None, "error": bad},
    )
    add_gpu(lab, bad, 1, bad, state="quarantined", reason=bad, sample={"mem_total_mib": None, "power_limit_w": None})
    lab.store.set_meta("policy_pending", bad)
    beat(lab)
    return lab


def snapshot_of(lab: Lab, views: dict[str, Loader] | None = None, at: float = NOW) -> Snapshot:
    """The lab as the screen's reader sees it at the moment `at`."""
    reader = Reader(lab.path)
    for name, load in (views or {}).items():
        reader.watch(name, load)
    with mock.patch("time.time", lambda: at):
        snapshot = reader.take()
    reader._close()
    return snapshot


class Still:
    """A source that shows one lab at one moment: it reads when poked, at NOW, in the caller's thread."""

    def __init__(self, lab: Lab, at: float = NOW) -> None:
        self.at = at
        self._reader = Reader(lab.path)
        self._deliver: Deliver | None = None

    def start(self, deliver: Deliver) -> None:
        """Deliver the first snapshot."""
        self._deliver = deliver
        self.poke()

    def stop(self) -> None:
        """Close the lab."""
        self._deliver = None
        self._reader._close()

    def poke(self) -> None:
        """Read again."""
        if self._deliver is not None:
            self._reader._version = None
            with mock.patch("time.time", lambda: self.at):
                snapshot = self._reader.take()
            for uuid, past in self._reader._history.items():
                if len(past) < 2:  # a screen that just opened has no history; pictures show one
                    past.extendleft(_past(uuid, past[-1] if past else None))
            self._deliver(replace(snapshot, history={u: tuple(p) for u, p in self._reader._history.items()}))

    def watch(self, name: str, load: Loader) -> None:
        """Read it as well."""
        self._reader._views[name] = load
        self.poke()

    def unwatch(self, name: str) -> None:
        """No longer."""
        self._reader._views.pop(name, None)

    def choose(self, class_key: str | None, budget_s: float | None) -> None:
        """Rank another class."""
        self._reader.class_key, self._reader.budget_s = class_key, budget_s
        self.poke()


def _past(uuid: str, last: float | None) -> list[float | None]:
    rng = random.Random(uuid)
    return [None if last is None or last == 0 else last * (1 - 0.08 * rng.random()) for _ in range(60)]


def clock(at: float = NOW) -> Callable[[], float]:
    """A clock that stands still."""
    return lambda: at


def now() -> float:
    """The real clock, for scenes that run."""
    return time.time()
