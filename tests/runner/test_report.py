"""The night as Markdown and SVG: every figure against a night small enough to count by hand, and nothing from outside as markup."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from runner import verbs
from runner.errors import LabError
from runner.plot import Bar, Dot, best_so_far, progress_svg, slots_svg, ticks
from runner.records import Submission, WaveRequest
from runner.report import alone_s, gather, markdown, phases, write_plot, write_report
from runner.research.results import import_results
from tests.runner.labs import finish, make_lab
from tests.tui import rows, scenes
from tests.tui.conftest import closed_stores  # noqa: F401 - the scenes' labs are closed here as well


def test_a_night_that_can_be_counted(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    for n, (val, uuid, start) in enumerate(((1.0, "a", 4000), (0.9, "a", 3000), (0.95, "b", 4000), (None, "b", 3000))):
        rows.ended(
            lab, val, at=start - 340, gpu_uuid=uuid, overrides={"LR": n} if n else {}, purpose="baseline" if n == 0 else "experiment"
        )
    night = gather(lab)
    assert (night.slots, night.busy_s, night.training_s) == (2, 4 * 340.0, 3 * 300.0)
    assert night.end - night.start == pytest.approx(1340.0)
    real, single = alone_s(night) or (0.0, 0.0)
    assert real == pytest.approx(1340.0)
    assert single == pytest.approx(4 * (340 + 60))
    text = markdown(night)
    assert "**4 runs** started, 4 runs ended: 3 completed, 1 crashed." in text
    assert "Best: **0.900000** (r0002)" in text
    assert "Busy share **50.7%**" in text  # 1,360 of 2 x 1,340 slot seconds
    assert "1.2 times as long" in text  # 1,600 s for 1,340 s
    assert "| crashed runs | 5.67 | 12.7% |" in text


def test_the_best_is_one_and_the_same_in_head_and_in_the_comparison(tmp_path: Path) -> None:
    """A lucky repeat of another script ended long before: the mean of its repeats is no better than the run on top of the board."""
    lab = scenes.empty_lab(tmp_path)
    lucky = rows.ended(lab, 0.80, at=3000, effective="lucky")
    rows.ended(lab, 1.10, at=2000, effective="lucky", repeat_of=lucky, seed=2)
    rows.ended(lab, 0.90, at=1000, overrides={"LR": 2})
    night = gather(lab)
    assert "Best: **0.900000** (r0003)" in markdown(night)
    assert alone_s(night) == pytest.approx((2340.0, 3 * 400.0))


def test_a_gpu_that_never_worked_was_idle_all_night(tmp_path: Path) -> None:
    """Four GPUs are there, one worked the whole time: a quarter was busy. A GPU that others use was not ours to fill."""
    lab = scenes.empty_lab(tmp_path)
    lab.store.upsert_host("alpha", kind="ssh", state="up", since=0.0, paused=0, drain=0)
    uuids = [rows.add_gpu(lab, "alpha", i, rows.H100) for i in range(5)]
    lab.store.upsert_gpu(uuids[4], state="foreign", reason="somebody else's process")
    rows.ended(lab, 0.9, at=0, gpu_uuid=uuids[2])
    night = gather(lab)
    assert (night.slots, night.busy_s) == (4, 340.0)
    text = markdown(night)
    assert "Busy share **25.0%**, training share **22.1%**" in text and "| idle slots | 17.00 | 75.0% |" in text
    assert sorted(night.lanes.values()) == ["alpha:00", "alpha:01", "alpha:02", "alpha:03"]


def test_a_simulated_clock_is_told_and_counted_in_its_own_seconds(tmp_path: Path) -> None:
    """Runs of 340 s that took 34 s: training is still 300 of 340, and an agent's minute is a minute of the same clock."""
    lab = scenes.empty_lab(tmp_path)
    for start in (100, 60):
        rows.ended(lab, start / 100, at=start - 34, gpu_uuid="a", started_at=rows.NOW - start)
    night = gather(lab)
    assert night.pace == pytest.approx(0.1)
    assert (night.busy_s, night.training_s, night.long_s) == pytest.approx((680.0, 600.0, 740.0))
    assert alone_s(night) == pytest.approx((740.0, 2 * 400.0))
    assert "simulated" in markdown(night) and "10 times as fast" in markdown(night)
    assert "around the training (start, compile, evaluation) | 1.33 |" in markdown(night)


def test_two_runs_recorded_on_one_gpu_at_once_make_it_busy_once(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    rows.ended(lab, 0.9, at=0, gpu_uuid="a", started_at=rows.NOW - 340)
    rows.ended(lab, None, at=100, gpu_uuid="a", started_at=rows.NOW - 400, outcome="lost")
    night = gather(lab)
    assert night.busy_s == pytest.approx(400.0) and night.long_s == pytest.approx(400.0)
    assert "Busy share **100.0%**" in markdown(night) and "| idle slots | 0.00 | 0.0% |" in markdown(night)


@pytest.mark.parametrize("seed", range(20))
def test_the_shares_add_up_on_any_night(tmp_path: Path, seed: int) -> None:
    """Against another way to count: the second-by-second occupation of each GPU."""
    rng, lab = random.Random(seed), scenes.empty_lab(tmp_path)
    gpus, speed = rng.randint(1, 6), rng.choice([1, 1, 10])
    lab.store.upsert_host("alpha", kind="ssh", state="up", since=0.0, paused=0, drain=0)
    uuids = [rows.add_gpu(lab, "alpha", i, rows.H100) for i in range(gpus)]
    occupied, trained, first, last = 0, 0.0, 10**9, 0
    for uuid in uuids if gpus == 1 else uuids[: rng.randint(1, gpus)]:
        clock = rng.randint(0, 50)
        for _ in range(rng.randint(1, 12)):
            clock += rng.randint(0, 40)
            begin, clock = clock, clock + rng.randint(20, 90)
            good = rng.random() < 0.7
            took = (clock - begin) * speed
            facts = {"wall_s": float(took), "training_s": 0.8 * took, "total_s": float(took), "started_at": rows.NOW - 5000 + begin}
            rows.ended(lab, 0.9 + rng.random() / 10 if good else None, at=5000 - clock, gpu_uuid=uuid, **facts)
            occupied, trained = occupied + took, trained + (0.8 * took if good else 0.0)
            first, last = min(first, begin), max(last, clock)
    night = gather(lab)
    assert (night.busy_s, night.training_s) == pytest.approx((occupied, trained))
    assert night.slot_s == pytest.approx(gpus * (last - first) * speed)
    shares = [float(line.split("|")[3].strip(" %")) for line in _table_of(markdown(night), "Where the GPU time went")]
    assert sum(shares) == pytest.approx(100.0, abs=0.1 * len(shares))
    best = min((r for r in night.runs if r.val_bpb is not None), key=lambda r: r.val_bpb or 9.0, default=None)
    if best is not None:
        before = [r for r in night.runs if r.ended_at <= best.ended_at]  # type: ignore[operator]
        assert alone_s(night) == pytest.approx(((best.ended_at - night.start) * speed, sum((r.wall_s or 0) + 60 for r in before)))  # type: ignore[operator]


def _table_of(text: str, title: str) -> list[str]:
    return [line for line in text.split(f"## {title}")[1].split("\n## ")[0].splitlines() if line.startswith("| ")][1:]


def test_phases_follow_what_is_varied(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    found = phases(gather(lab))
    assert ["MATRIX_LR", "TOTAL_BATCH_SIZE"] in [names for names, _ in found]
    assert ["WEIGHT_DECAY"] in [names for names, _ in found]
    assert sum(len(runs) for _, runs in found) == len(gather(lab).runs)
    wave = next(runs for names, runs in found if names == ["MATRIX_LR", "TOTAL_BATCH_SIZE"])
    assert {r.id for r in wave} >= {f"r{n:04d}" for n in range(4, 13)}


def test_a_baseline_run_again_is_no_success_of_what_was_varied_before_it(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    first = verbs.submit(lab, Submission(purpose="baseline", seeds=2), who="cli").run_ids
    wave = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [9, 10]}), who="cli").run_ids
    again = verbs.submit(lab, Submission(purpose="baseline", allow_duplicate=True), who="cli").run_ids
    for run_id, value in zip([*first, *wave, *again], (1.0, 0.99, 0.98, 0.985, 0.9), strict=True):
        finish(lab, run_id, value)
    rows = [line.strip("| ").split(" | ") for line in _table_of(markdown(gather(lab)), "What worked, and when")]
    told = [[cell.strip() for cell in row][1:6] for row in rows]
    assert told[-2:] == [["2", "the script itself", "0.990000", "-", first[1]], ["3", "DEPTH", "0.980000", "0.010000", wave[0]]]
    lab.close()


def test_a_refuted_claim_is_no_result(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    text = markdown(gather(lab))
    assert "0.412345" not in text and "r0013 (logits at a position change with later tokens)" in text
    assert "1 of 11 results were recomputed and agree" in text


def test_what_was_kept_is_told_with_its_commit_at_whatever_budget(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    first, other = rows.ended(lab, 0.9, at=3000), rows.ended(lab, 0.8, at=2000, overrides={"LR": 2}, budget_s=60.0)
    assert "## Kept" not in markdown(gather(lab))
    for run_id in (first, other):
        verbs.decide(lab, run_id, "keep", who="tui", why="wider <b>pays</b>", override=True)
    assert "None is a commit" in markdown(gather(lab))
    lab.store.set_setting("lineage", {other: "0123456789abcdef"})
    text = markdown(gather(lab))
    assert "commits of branch `overnight/night`" in text
    assert f"| {other} | 0.800000 | 60 s | wider &lt;b&gt;pays&lt;/b&gt; | tui | 0123456789ab |" in text
    assert f"| {first} | 0.900000 |" in text and "| tui | - |" in text


def test_files_are_written_and_pictures_are_xml(tmp_path: Path) -> None:
    lab = scenes.hostile(tmp_path / "x")
    path = write_report(lab, tmp_path / "out")
    text = path.read_text()
    assert not [c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    assert "<b" not in text and "[/x]" not in text.replace("\\[/x\\]", "")
    for name in ("progress.svg", "slots.svg"):
        root = ET.fromstring((tmp_path / "out" / name).read_text())
        assert root.tag.endswith("svg") and not root.findall(".//{*}script")
    write_plot(lab, lab.path / "deep" / "p.svg")
    assert (lab.path / "deep" / "p.svg").read_text() == (tmp_path / "out" / "progress.svg").read_text()


def test_an_empty_lab_and_a_folder_that_cannot_be_written_are_sentences(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path / "a")
    with pytest.raises(LabError, match="nothing to report"):
        write_report(lab, tmp_path / "out")
    rows.ended(lab, 1.0, at=10)
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot be written"):
        write_report(lab, tmp_path / "file" / "out")


def test_pictures_survive_any_number() -> None:
    nan, inf = float("nan"), float("inf")
    for values in ([], [nan], [inf, -inf], [1.0], [1.0, 1.0], [1e300, -1e300], [5e-4, 1e9]):
        ET.fromstring(progress_svg([Dot(float(i), v, i % 2 == 0, "<&>\x1b") for i, v in enumerate(values)], "<title & more>"))
    for bars in ([], [Bar("a", nan, 1.0, "completed", "x")], [Bar("a<", 0.0, 0.0, "?", "x")], [Bar("a", 0.0, 1.0, "<odd>", "&")]):
        ET.fromstring(slots_svg(bars, "t"))


def test_best_so_far_and_ticks() -> None:
    dots = [Dot(h, v, False, "") for h, v in ((0, 3.0), (2, 1.0), (1, 2.0), (3, 1.5))]
    assert [d.value for d in best_so_far(dots)] == [3.0, 2.0, 1.0]
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(1.0, 1.0) == [1.0]


def test_two_gpu_types_are_compared_by_rank_and_their_flips_are_named(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    values = {  # the best final rate of one type is not that of the other, as in the report on 16 GPUs
        "H100": {0.0: (1.000, 1.001), 0.03: (0.980, 0.981), 0.05: (0.990, 0.991)},
        "H200": {0.0: (0.995, 0.996), 0.03: (0.985, 0.986), 0.05: (0.975, 0.976)},
    }
    for gpu, by_frac in values.items():
        for frac, both in by_frac.items():
            for val in both:
                purpose = "repeat" if frac else "baseline"
                wish = Submission(overrides={"MATRIX_LR": 0.04 + frac}, purpose=purpose, allow_duplicate=True)
                (run_id,) = verbs.submit(lab, wish, who="cli").run_ids
                finish(lab, run_id, val, class_key=f"{gpu} · torch 2.11", gpu_name=gpu)
    import_results(lab, "val_bpb\tstatus\n0.9\tkeep\n", who="cli")  # history is no type of GPU
    baseline = next(r for r in lab.store.runs() if r.class_key == "imported")
    lab.store.update_run(baseline.id, effective_sha=lab.store.runs(limit=1)[0].effective_sha, purpose="baseline")
    text = markdown(gather(lab))
    assert "## GPU types" in text and "imported" not in text.split("## GPU types")[1].split("\n## ")[0]
    assert "**H200 and H100** at 20 s: 1 pair of sources in another order, 1 beyond the noise of both." in text
    assert "- r0011 against r0009: +0.010000 on H200, -0.010000 on H100 (clear)." in text
    assert "| r0009 | 2 | +1.005 % | r0003 | 1 | +1.999 % |" in text
    assert "0.985500" not in text.split("## GPU types")[1].split("##")[0]  # values of two types are not set side by side
    lab.close()
