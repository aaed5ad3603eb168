"""Two trainers side by side: what is read from their output, the same rows for both, and data laid out as upstream reads it."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from runner import bench_trainer
from runner.errors import BadValue

from .conftest import TRAINER, words

PROGRESS = "\nstep {:05d} ({}%) | loss: 3.0 | lrm: 1.00 | dt: {}ms | tok/sec: 1 | mfu: 1% | epoch: 1 | remaining: 9s    "
BLOCK = """
common_bpb:       0.571053
packed_bpb:       0.487000
common_seconds:   0.80
---
val_bpb:          0.575447
training_seconds: 60.2
total_seconds:    75.6
peak_vram_mb:     23084.5
mfu_percent:      -
total_tokens_M:   102.0
num_steps:        778
num_params_M:     50.3
depth:            8
"""


def test_a_row_is_read_from_the_output_alone() -> None:
    log = "Estimated FLOPs per token: 2.768e+08\n" + "".join(PROGRESS.format(i, i, 400 if i < 10 else 78) for i in range(40)) + BLOCK
    row = bench_trainer.read_row("theirs", 60.0, log, "", 79.9, 0, 989.5e12)
    assert (row.val_bpb, row.common_bpb, row.packed_bpb, row.steps, row.step_ms) == (0.575447, 0.571053, 0.487, 778, 78)
    assert row.outside_s == pytest.approx(79.9 - 60.2 - 0.8) and row.dropped_percent is None
    tok_s = 102.0e6 / 778 / 0.078
    assert row.tok_s == pytest.approx(tok_s) and row.mfu_percent == pytest.approx(100 * 2.768e8 * tok_s / 989.5e12)
    ours = bench_trainer.read_row("ours", 60.0, log, '{"event":"summary","train_tokens_dropped_share":0.01}\nnot json\n', 79.9, 0, None)
    assert ours.dropped_percent == 1.0 and ours.mfu_percent is None


def test_a_run_that_crashed_is_a_row_of_dashes() -> None:
    row = bench_trainer.read_row("theirs", 60.0, "Traceback\nval_bpb: 0.1\nKeyError: 'no\x1b[31m'\n\n", "", 3.0, 1, None)
    assert row.val_bpb is None and row.exit_code == 1 and row.last_words is not None
    assert row.last_words.startswith("KeyError: 'no") and "\x1b" not in row.last_words
    line = bench_trainer.table([row]).splitlines()[-1]
    assert line.count("| - ") >= 9 and line.startswith("| theirs | 60 |")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the `trainer` extra (pyarrow)")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, first in (("shard_00000", 0), ("shard_00001", 20), ("shard_00007", 40)):
        table = pyarrow.table({"text": [words(i + 1, 300 + 20 * i) for i in range(first, first + 20)]})
        parquet.write_table(table, folder / f"{name}.parquet")
    return folder


FAKE_TRAINER = """
import torch
from prepare import TIME_BUDGET, evaluate_bpb
model = torch.nn.Module()
model.forward = lambda x, y, reduction: torch.full(y.shape, 2.0)
print("\\rstep 00000 (1.0%) | loss: 3.0 | lrm: 1.00 | dt: 5ms | tok/sec: 1 | mfu: 1% | epoch: 1 | remaining: 9s    ", end="")
print()
bpb = evaluate_bpb(model, None, 2)
print("---"); print(f"val_bpb: {bpb:.6f}"); print(f"training_seconds: {TIME_BUDGET}.0"); print("num_steps: 1"); print("total_tokens_M: 0.1")
"""
FAKE_PREPARE = """
TIME_BUDGET = 300
EVAL_TOKENS = 40 * 524288
def evaluate_bpb(model, tokenizer, batch_size):
    return EVAL_TOKENS / 1e7
if __name__ == "__main__":
    raise SystemExit("not now")
"""


@pytest.mark.torch
@pytest.mark.timeout(240)
def test_both_sides_are_scored_by_the_same_code_on_the_same_rows(shards: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "train.py").write_text(FAKE_TRAINER)
    (checkout / "prepare.py").write_text(FAKE_PREPARE)
    keep = tmp_path / "keep"
    keep.mkdir()
    _, theirs, common = bench_trainer.lay_out_data(sys.executable, shards, keep)
    row = bench_trainer.run_once(bench_trainer.Side("theirs", checkout, theirs), 7.0, sys.executable, common, None, keep)
    log = next(keep.glob("theirs-*/out.log")).read_text()
    assert row.exit_code == 0, log
    assert row.val_bpb == pytest.approx(8 * 524_288 / 1e7, abs=1e-6) and row.training_s == 7.0
    assert row.common_bpb is not None and row.packed_bpb is not None and row.common_bpb != row.packed_bpb
    import numpy as np

    rows, sizes = np.load(common / "common.npy"), np.load(common / "token_bytes.npy")
    whole = len(rows) - len(rows) % 2
    targets = sizes[rows[:whole, 1:].astype(np.int64)]
    two_nats_a_token = 2.0 * (targets > 0).sum() / (np.log(2) * targets.sum())
    assert row.common_bpb == pytest.approx(two_nats_a_token, abs=1e-5)
    assert (checkout / "prepare.py").read_text() == FAKE_PREPARE


@pytest.mark.torch
@pytest.mark.timeout(240)
def test_a_fork_of_ours_reads_the_same_text(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bench_trainer.OURS, "fork", ignore=shutil.ignore_patterns("__pycache__"))
    rows = bench_trainer.bench(Path("fork"), shards, [1.0], 1, Path("kept"))
    assert [(row.side, row.exit_code) for row in rows] == [("ours", 0), ("theirs", 0)], [row.last_words for row in rows]
    starts = [json.loads(path.read_text().splitlines()[0]) for path in Path("kept").glob("*/events.jsonl")]
    assert len(starts) == 2 and starts[0]["data"] == starts[1]["data"]


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_data_is_laid_out_as_upstream_reads_it(shards: Path, tmp_path: Path) -> None:
    _, theirs, common = bench_trainer.lay_out_data(sys.executable, shards, tmp_path)
    cache = Path(theirs["HOME"]) / ".cache" / "autoresearch"
    assert sorted(path.name for path in (cache / "data").iterdir()) == ["shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"]
    encoding = pickle.loads((cache / "tokenizer" / "tokenizer.pkl").read_bytes())
    import numpy as np
    import torch

    table = torch.load(cache / "tokenizer" / "token_bytes.pt")
    bos = encoding.encode_single_token("<|reserved_0|>")
    assert len(table) == encoding.n_vocab == bos + 1 and table[bos] == 0
    text = words(3, 50)
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids) == text and int(table[ids].sum()) == len(text.encode())
    packed = np.load(common / "packed.npy")
    assert (packed[:, 0] == bos).all()  # rows of documents' beginnings


def test_a_folder_without_shards_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("text")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadValue, match="holds no two files shard_"):
            bench_trainer.lay_out_data(sys.executable, folder, tmp_path / "keep")
    assert not (tmp_path / "keep").exists()


def test_a_folder_that_is_no_trainer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"no readable train\.py"):
        bench_trainer.run_once(bench_trainer.Side("theirs", tmp_path, {}), 1.0, sys.executable, None, None, tmp_path)
    (tmp_path / "train.py").write_text("print('no budget anywhere')")
    with pytest.raises(BadValue, match="TIME_BUDGET"):
        bench_trainer.run_once(bench_trainer.Side("theirs", tmp_path, {}), 1.0, sys.executable, None, None, tmp_path)


@pytest.mark.parametrize("budget", [0.0, -5.0, float("nan"), float("inf")])
def test_what_cannot_be_compared_is_told_before_anything_runs(tmp_path: Path, budget: float) -> None:
    with pytest.raises(BadValue, match=r"A budget of .* cannot be"):
        bench_trainer.bench(TRAINER, tmp_path, [60.0, budget], 1, tmp_path)
    with pytest.raises(BadValue, match=r"no readable train\.py"):
        bench_trainer.bench(tmp_path, tmp_path, [60.0], 1, tmp_path)  # nor is a look taken at the data
    assert not list(tmp_path.iterdir())


def test_the_trainers_folder_is_there() -> None:
    assert (TRAINER / "train.py").exists() and bench_trainer.OURS == TRAINER


@pytest.mark.torch
def test_upstreams_reading_order_stops_at_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the `trainer` extra (pyarrow)")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.syspath_prepend(str(TRAINER))
    import upstream

    try:
        parquet.write_table(pyarrow.table({"text": ["x"] * 300}), tmp_path / "a.parquet", row_group_size=200)
        assert upstream.reading_order(tmp_path / "a.parquet", 300) == [(0, 128), (128, 200), (200, 300)]
        assert upstream.reading_order(tmp_path / "a.parquet", 130) == [(0, 128), (128, 130)]
    finally:
        for name in ("upstream", "prepare", "corpora"):
            sys.modules.pop(name, None)
