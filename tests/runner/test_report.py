"""The night as Markdown and SVG: every figure against a night small enough to count by hand, and nothing from outside as markup."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from runner.errors import LabError
from runner.plot import Bar, Dot, best_so_far, progress_svg, slots_svg, ticks
from runner.report import alone_s, gather, markdown, phases, write_plot, write_report
from tests.tui import rows, scenes
from tests.tui.conftest import closed_stores  # noqa: F401 - the scenes' labs are closed here as well


def test_a_night_that_can_be_counted(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    for n, (val, uuid, start) in enumerate(((1.0, "a", 4000), (0.9, "a", 3000), (0.95, "b", 4000), (None, "b", 3000))):
        rows.ended(
            lab, val, at=start - 340, gpu_uuid=uuid, overrides={"LR": n} if n else {}, purpose="baseline" if n == 0 else "experiment"
        )
    night = gather(lab)
    assert (night.slots, night.busy_s, night.training_s) == (2, 4 * 340.0, 4 * 300.0)
    assert night.end - night.start == pytest.approx(1340.0)
    real, single = alone_s(night) or (0.0, 0.0)
    assert real == pytest.approx(1340.0)
    assert single == pytest.approx(4 * (340 + 60))
    text = markdown(night)
    assert "**4 runs** started, 4 runs ended: 3 completed, 1 crashed." in text
    assert "Best: **0.900000** (r0002)" in text
    assert "Busy share **50.7%**" in text  # 1,360 of 2 x 1,340 slot seconds
    assert "1.2 times as long" in text  # 1,600 s for 1,340 s
    assert "| crashed runs | 0.09 | 12.7% |" in text


def test_phases_follow_what_is_varied(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    found = phases(gather(lab))
    assert ["MATRIX_LR", "TOTAL_BATCH_SIZE"] in [names for names, _ in found]
    assert ["WEIGHT_DECAY"] in [names for names, _ in found]
    assert sum(len(runs) for _, runs in found) == len(gather(lab).runs)
    wave = next(runs for names, runs in found if names == ["MATRIX_LR", "TOTAL_BATCH_SIZE"])
    assert {r.id for r in wave} >= {f"r{n:04d}" for n in range(4, 13)}


def test_a_refuted_claim_is_no_result(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    text = markdown(gather(lab))
    assert "0.412345" not in text and "r0013 (logits at a position change with later tokens)" in text
    assert "1 of 11 results were recomputed and agree" in text


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
