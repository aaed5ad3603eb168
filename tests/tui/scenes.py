"""Labs in known states for the screen's tests and pictures: real stores filled as the daemon fills them, at one fixed moment.

Nothing is drawn by hand: a scene is rows in a database, read by the screen's own reader (still.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

from runner.lab import Lab
from runner.records import Point, Sample
from tests.tui import rows
from tests.tui.rows import CONSTANTS, H100, H200, add_gpu, add_run, beat, curve, empty_lab, ended

__all__ = ["busy", "empty_lab", "host_down", "hostile"]
BATCHES, RATES = (2**17, 2**18, 2**19), (0.03, 0.04, 0.05)
STEP_LINE = (
    "step {step:05d} ({share:.1f}%) | loss: {loss:.6f} | lrm: 1.00 | dt: 323ms | tok/sec: 1,622,114 | mfu: 49.8% | epoch: 1 | "
    "remaining: {left:.0f}s"
)


def busy(folder: Path) -> Lab:
    """Sixteen GPUs on two hosts in the middle of a night: fourteen runs live, nine waiting, one crash, one refuted claim."""
    lab = empty_lab(folder, "alpha", "beta")
    with lab.store.transaction():
        for name in ("alpha", "beta"):
            facts = {"kind": "ssh", "state": "up", "since": rows.NOW - 7000, "checked_at": rows.NOW - 300, "disk_free_mib": 812_000}
            lab.store.upsert_host(name, paused=0, drain=0, **facts)
        base = _baseline(lab)
        _first_wave(lab, base)
        _verdicts(lab, base)
        live = [_live(lab, i) for i in range(14)]
        _second_wave(lab)
        _gpus(lab, live)
    _trail(lab)
    _log(lab, "r0005", 953, ended=True)
    _log(lab, live[5], 385)
    beat(lab)
    return lab


def _baseline(lab: Lab) -> str:
    """The script as it came, and two repeats that tell the noise."""
    base = ended(lab, 0.997900, at=6400, purpose="baseline", hypothesis="the script as it came", effective="base", agent="cli")
    curve(lab, base, 2.77)
    for n, val in enumerate((0.998900, 0.997100), 1):
        ended(lab, val, at=6000 - n, purpose="repeat", repeat_of=base, effective="base", seed=42 + n, hypothesis="noise of the baseline")
    return base


def _first_wave(lab: Lab, base: str) -> None:
    """Batch by rate, nine cells, one of which runs out of memory."""
    wave = lab.store.insert_wave(
        created_at=rows.NOW - 5600, kind="grid", title="batch and matrix rate", hypothesis="smaller batches make more steps", base_sha="x",
        base_run=base, factors={"TOTAL_BATCH_SIZE": list(BATCHES), "MATRIX_LR": list(RATES)}, repeats=1, budget_s=300.0, agent="mcp:claude",
    )  # fmt: skip
    for n, (batch, rate) in enumerate((b, r) for b in BATCHES for r in RATES):
        i, j = divmod(n, 3)
        val = None if n == 2 else 0.9812 + 0.0061 * i + 0.0022 * (j - 1) ** 2 + 0.0004 * i * j
        cell = {"TOTAL_BATCH_SIZE": batch, "MATRIX_LR": rate}
        run = ended(
            lab, val, at=5000 - 60 * n, wave_id=wave, cell=cell, overrides=cell, constants={**CONSTANTS, **cell}, base_run=base,
            parent=base, hypothesis=f"batch {batch}, rate {rate}",
            last_lines="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" if val is None else None,
        )  # fmt: skip
        if val is not None:
            curve(lab, run, 2.77 + (val - 0.9979) * 2.8)


def _verdicts(lab: Lab, base: str) -> None:
    """A kept and verified run, a discarded one, a claim that was refuted, a promotion."""
    kept = {"verdict": "keep", "verdict_why": "2.9 standard errors better than the baseline", "verdict_by": "mcp:claude"}
    lab.store.update_run("r0005", verdict_at=rows.NOW - 4000, trust="verified", verified_bpb=0.981202, **kept)
    dropped = {"verdict": "discard", "verdict_why": "worse at the higher rate", "verdict_by": "mcp:claude"}
    lab.store.update_run("r0006", verdict_at=rows.NOW - 3900, **dropped)
    why = "logits at a position change with later tokens"
    cheat = ended(lab, 0.412345, at=2500, hypothesis="evaluate on fewer tokens", parent=base, trust="refuted", trust_why=why)
    with mock.patch("time.time", lambda: rows.NOW - 2400):
        lab.store.raise_flag(cheat, "leak", "bad", "the printed val_bpb 0.412345 was recomputed as 1.003112")
    promoted = {"purpose": "promotion", "promoted_from": "r0005", "hypothesis": "does the small batch hold on an H200?"}
    ended(lab, 0.9790, at=1500, gpu=H200, host="beta", **promoted)


def _live(lab: Lab, i: int) -> str:
    """One of fourteen live runs: the first compiles, the last evaluates."""
    share, cell = min(1.0, 0.08 + 0.065 * i), {"WEIGHT_DECAY": round(0.05 * (i + 1), 2)}
    progress: dict[str, Any] = {
        "share": share, "step": int(953 * share), "loss": 3.4 - 0.5 * share, "tok_s": 1.62e6 + 7e3 * i, "remaining_s": 300 * (1 - share),
        "first_step_at": rows.NOW - 300 * share,
    }  # fmt: skip
    run = add_run(
        lab, phase="running", stage="compiling" if i == 0 else "evaluating" if i == 13 else "training", host="alpha" if i < 8 else "beta",
        engine="ssh", gpu_name=H100 if i < 12 else H200, flops_per_token=3.03e8, started_at=rows.NOW - 40 - 300 * share,
        created_at=rows.NOW - 900, wave_id="w2", cell=cell, overrides=cell, constants={**CONSTANTS, "TOTAL_BATCH_SIZE": 2**17, **cell},
        base_run="r0005", parent="r0005", last_output_at=rows.NOW - 1,
        hypothesis=f"weight decay {cell['WEIGHT_DECAY']} with the small batch",
        **(progress if i else {}),
    )  # fmt: skip
    if i:
        curve(lab, run, 2.66, share=share)
    return run


def _second_wave(lab: Lab) -> None:
    """The wave the live runs belong to, and its nine runs that wait."""
    decays = [round(0.05 * (i + 1), 2) for i in range(23)]
    lab.store.insert_wave(
        created_at=rows.NOW - 1200, kind="grid", title="weight decay", hypothesis="less decay with more steps", base_sha="x",
        base_run="r0005", factors={"WEIGHT_DECAY": decays}, repeats=1, budget_s=300.0, agent="mcp:claude",
    )  # fmt: skip
    for i, decay in enumerate(decays[14:]):
        add_run(
            lab, created_at=rows.NOW - 600 + i, wave_id="w2", cell={"WEIGHT_DECAY": decay}, overrides={"WEIGHT_DECAY": decay},
            base_run="r0005", parent="r0005", hypothesis="weight decay further up", gpu_type="H100" if i < 7 else "H200",
            priority=2.0 if i == 0 else 0.0,
        )  # fmt: skip


def _gpus(lab: Lab, live: list[str]) -> None:
    """Eight H100 on one host, four H100 and four H200 on the other; telemetry of one live run."""
    for i in range(8):
        add_gpu(lab, "alpha", i, H100, run_id=live[i])
        add_gpu(lab, "beta", i, H100 if i < 4 else H200, run_id=live[8 + i] if i < 6 else None)
    start = lab.store.run(live[5]).first_step_at or 0.0  # type: ignore[union-attr]
    watts = [655.0 + 10 * math.sin(s / 9) for s in range(121)]
    lab.store.add_samples(
        Sample("GPU-alpha-05", int(start + s), live[5], 99.0, 46000, w, 700.0, 55 + s / 40, 1755, 1980, 0, 1.6e6)
        for s, w in enumerate(watts)
    )


def _trail(lab: Lab) -> None:
    """Who did what."""
    trail = (
        ("cli", "submit", "r0001", "the script as it came"), ("mcp:claude", "submit_wave", "w1", "smaller batches make more steps"),
        ("mcp:claude", "decide", "r0005", "2.9 standard errors better than the baseline"),
        ("mcp:claude", "submit_wave", "w2", "less decay with more steps"),
    )  # fmt: skip
    for n, (who, verb, subject, why) in enumerate(trail):
        with mock.patch("time.time", lambda n=n: rows.NOW - 6400 + 1800 * n):
            lab.store.event(who, verb, subject, why)


def _log(lab: Lab, run: str, step: int, *, ended: bool = False) -> None:
    """The last progress lines as upstream prints them, and the summary of a run that ended."""
    lines = [
        STEP_LINE.format(step=i, share=i / 9.53, loss=3.4 - 0.5 * i / 953, left=300 * (1 - i / 953)) for i in range(step - 40, step + 1)
    ]
    if ended:
        lines += ["---", "val_bpb:          0.981200", "training_seconds: 300.1", "peak_vram_mb:     45060.2"]
    lab.run_dir(run).mkdir(parents=True, exist_ok=True)
    (lab.run_dir(run) / "out.log").write_text("compiling …\n" + "\n".join(lines) + "\n")


def host_down(folder: Path) -> Lab:
    """The same night with one host out of reach, a quarantined GPU and the queue paused."""
    lab = busy(folder)
    store = lab.store
    store.upsert_host("beta", state="down", since=rows.NOW - 340, error="beta does not answer on port 22 (timed out after 10 s).")
    for i in range(6):
        run = store.gpus()[8 + i].run_id
        if run:
            store.update_run(run, phase="unreachable", unreachable_since=rows.NOW - 340)
    store.upsert_gpu(
        "GPU-alpha-03", state="quarantined", reason="41 GiB still held by pid 8812 (python) of user mira", run_id=None, since=rows.NOW - 95
    )
    idle = next(g for g in store.gpus() if g.uuid == "GPU-alpha-06")
    store.update_run(str(idle.run_id), phase="ended", outcome="cancelled", cause_text="cancelled", ended_at=rows.NOW - 70)
    store.upsert_gpu(idle.uuid, state="free", run_id=None, since=rows.NOW - 70)
    store.set_setting("queue_paused", True)
    beat(lab)
    return lab


def hostile(folder: Path) -> Lab:
    """Everything that comes from outside is as bad as it can be."""
    lab = empty_lab(folder)
    bad = "[/x] [bold]\x1b[31mred\x1b]0;title\x07 \u202e宽字符 Ｗide \x9b2J [@click=app.quit]x[/] \x00\t|\r\n end"
    store = lab.store
    store.upsert_host(bad, kind="ssh", state="down", since=rows.NOW - 10, error=bad, paused=0, drain=0)
    wave = store.insert_wave(
        created_at=rows.NOW - 10,
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
