"""Data: nothing is lost in packing, the scored text is fixed by bytes, preparing twice or at once is safe, and damage is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tiktoken", reason="needs the `trainer` extra (tiktoken)")
np = pytest.importorskip("numpy")
from .conftest import TRAINER, Folder, words  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def prepare():
    """The module as its siblings import it: by its plain name."""
    sys.path.insert(0, str(TRAINER))
    try:
        import prepare

        yield prepare
    finally:
        sys.path.remove(str(TRAINER))
        for name in ("prepare", "corpora"):
            sys.modules.pop(name, None)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60), seq_len=st.sampled_from([4, 16, 64]))
def test_packing_loses_only_what_fills_no_row(prepare, lengths: list[int], seq_len: int) -> None:
    bos = 0
    tokens = np.concatenate([np.concatenate([[bos], np.arange(n) % 50 + 1 + 100 * i]) for i, n in enumerate(lengths)]).astype(np.uint16)
    rows = prepare.pack_rows(tokens, seq_len, bos)
    assert rows.shape[1] == seq_len + 1 and (rows[:, 0] == bos).all()
    text = tokens[tokens != bos]
    kept = rows[rows != bos]
    assert len(text) - len(kept) < seq_len  # less than one row is left over
    counts = np.bincount(text, minlength=65536) - np.bincount(kept, minlength=65536)
    assert (counts >= 0).all() and counts.sum() == len(text) - len(kept)  # nothing invented, nothing twice
    if len(rows):
        assert np.count_nonzero(rows == bos) < rows.size / 2 or max(lengths) < 4


def test_rows_hold_consecutive_text(prepare) -> None:
    tokens = np.concatenate([[0], np.arange(1, 30)]).astype(np.uint16)
    rows = prepare.pack_rows(tokens, 8, 0)
    assert rows.tolist() == [[0, *range(1, 9)], [0, *range(9, 17)], [0, *range(17, 25)]]


def test_scored_text_is_the_same_for_every_vocabulary(prepare) -> None:
    documents = [words(i, 900) + " naïve – ∑ 日本 " for i in range(5)]
    scale = prepare.Scale(seq_len=64, vocab_size=300, window_bytes=128, eval_bytes=4096)
    windows = prepare.eval_windows(documents, scale)
    assert len(windows) == 32 and all(124 <= len(window.encode()) <= 136 for window in windows)
    whole = "\n\n".join(documents).encode()
    places = [whole.index(window.encode()) for window in windows]
    assert places == sorted(places) and places[0] == 0 and places[-1] > len(whole) * 0.9  # evenly over all of it, not its head
    gaps = np.diff(places)
    assert gaps.max() - gaps.min() <= 6


def test_eval_rows_score_each_token_once(prepare, folder: Folder, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_DATA", str(folder.data))
    data = prepare.load_dataset(str(small_corpus))
    rows, tokens = data.eval_rows(), data.array("eval")
    assert rows[:, 1:].reshape(-1)[: len(tokens) - 1].tolist() == tokens[1:].tolist()
    sizes = data.token_bytes()
    assert sizes[data.bos] == 0 and int(sizes[tokens].sum()) == data.meta["eval_bytes"]
    text = data.encoding().decode([t for t in tokens.tolist() if t != data.bos])
    assert len(text.encode()) == data.meta["eval_bytes"]


def test_validation_never_enters_training(prepare, folder: Folder, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_DATA", str(folder.data))
    data = prepare.load_dataset(str(small_corpus))
    train, validation = prepare.find_corpus(str(small_corpus)).read()
    assert len(train) == 33 and len(validation) == 3 and validation[0] == words(6, 400)
    decoded = data.encoding().decode([t for t in data.array("train").tolist() if t != data.bos])
    assert decoded == "".join(train)


def test_two_processes_prepare_the_same_data_at_once(folder: Folder, tmp_path: Path) -> None:
    folder.data = tmp_path / "fresh"
    argv = [sys.executable, "-W", "error", "prepare.py"]
    env = {"OVERNIGHT_DATA": str(folder.data), "PATH": "/usr/bin:/bin"}
    both = [subprocess.Popen(argv, cwd=folder.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("learning" in out for out, _ in outputs) == 1  # one worked, the other waited
    assert len({out.splitlines()[-1] for out, _ in outputs}) == 1
    assert sorted(path.name[:5] for path in folder.data.iterdir()) == [".lock", "known", "small"]
    again = folder.run("prepare.py")
    assert again.returncode == 0 and "learning" not in again.stdout


def test_a_copied_corpus_finds_the_prepared_data(folder: Folder, small_corpus: Path, tmp_path: Path) -> None:
    first = folder.run("prepare.py")
    copy = tmp_path / "elsewhere" / "corpus"
    copy.mkdir(parents=True)
    (copy / "small.txt.xz").write_bytes((small_corpus / "small.txt.xz").read_bytes())
    second = folder.run("prepare.py", OVERNIGHT_CORPUS=str(copy))
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1] and "learning" not in second.stdout


def test_a_folder_of_text_becomes_a_corpus(folder: Folder, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    (texts / ".hidden").mkdir()
    for i in range(14):
        (texts / "sub" / f"{i:02d}.md").write_text(words(i, 300))
    (texts / "copy.md").write_text(words(3, 300))  # an exact copy counts once
    (texts / "binary.txt").write_bytes(b"\xff\xfe\x00broken")
    (texts / ".hidden" / "secret.md").write_text("not for training")
    folder.data = tmp_path / "data"
    done = folder.run("prepare.py", "--from-folder", str(texts))
    assert done.returncode == 0, done.stderr
    assert "left out 1 copies, 1 not UTF-8" in done.stdout
    meta = json.loads(next(folder.data.glob("texts-*/meta.json")).read_text())
    assert meta["documents"] == [13, 1]
    (texts / "sub" / "00.md").write_text(words(99, 300))  # changed text is other data
    assert folder.run("prepare.py", "--from-folder", str(texts)).returncode == 0
    assert len(list(folder.data.glob("texts-*"))) == 2


def test_names_that_are_no_utf8_and_endless_blanks_do_not_stop_a_folder(folder: Folder, tmp_path: Path) -> None:
    texts = tmp_path / os.fsdecode(b"caf\xe9")
    texts.mkdir()
    for i in range(14):
        (texts / f"{i:02d}.txt").write_text(words(i, 300))
    (texts / os.fsdecode(b"na\xefve.txt")).write_text(words(77, 300))
    (texts / "padding.txt").write_text("begin" + " " * 1_000_000 + "end")  # the tokenizers' regular expression runs out of stack
    folder.data = tmp_path / "data"
    done = folder.run("prepare.py", "--from-folder", str(texts))
    assert done.returncode == 0, done.stderr
    assert "left out 1 with over 500,000 blanks in a row" in done.stdout
    assert json.loads(next(folder.data.glob("*/meta.json")).read_text())["documents"] == [14, 1]


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("body", ["a text", "another"], "no column `text` that holds text (its columns: body)"),
        ("text", [1, 2], "no column `text` that holds text"),
        ("text", [b"a text", b"another"], "no column `text` that holds text"),
        ("text", ["a text", None], "is damaged or half downloaded ('utf-8' codec"),
    ],
)
def test_a_shard_without_text_is_one_sentence(folder: Folder, tmp_path: Path, column: str, values: list, says: str) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for i in range(2):
        parquet.write_table(pa.table({column: values}), tmp_path / f"shard_{i:05d}.parquet", compression="none", use_dictionary=False)
    if None in values:  # one byte flips on the disk
        path = tmp_path / "shard_00000.parquet"
        path.write_bytes(path.read_bytes().replace(b"a text", b"a \xffext"))
    broken = folder.run("prepare.py", "--from-folder", str(tmp_path))
    assert broken.returncode == 1 and says in broken.stderr and broken.stderr.count("\n") == 1, broken.stderr


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "train.npy").write_bytes(b"\x93NUMPY"), "damaged"),
        (lambda d: (d / "eval.npy").unlink(), "missing"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text().replace("Yg==", "Yw==")), "or damaged"),
        (
            lambda d: (d / "meta.json").write_text((d / "meta.json").read_text().replace('"vocab_size": ', '"vocab_size": 9')),
            "does not fit its vocabulary",
        ),
    ],
)
def test_damaged_data_is_one_sentence(folder: Folder, tmp_path: Path, damage, says: str) -> None:
    folder.data = tmp_path / "data"
    assert folder.run("prepare.py").returncode == 0
    damage(next(folder.data.glob("small-*")))
    broken = folder.run("prepare.py")
    assert broken.returncode == 1 and says in broken.stderr and "delete" in broken.stderr and broken.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: None, "no text at"),
        (lambda p: p.mkdir(), "no text files"),
        (lambda p: (p.mkdir(), (p / "one.txt.xz").write_bytes(b"not xz")), "is damaged"),
        (lambda p: (p.mkdir(), (p / "a.md").write_text("alone")), "at least 12"),
        (lambda p: (p.mkdir(), (p / "a.md").write_bytes(b"\xff"), (p / "b.md").write_bytes(b"")), "(left out: 1 empty, 1 not UTF-8)"),
        (lambda p: p.write_text("a file"), "neither a folder nor"),
        (lambda p: (p.mkdir(), (p / "one.txt.xz").mkdir()), "one.txt.xz: Is a directory; mend it, or name other text in OVERNIGHT_CORPUS"),
    ],
)
def test_no_usable_text_is_one_sentence(folder: Folder, tmp_path: Path, make, says: str) -> None:
    make(tmp_path / "texts")
    broken = folder.run("prepare.py", OVERNIGHT_CORPUS=str(tmp_path / "texts"))
    assert broken.returncode == 1 and says in broken.stderr and broken.stderr.count("\n") == 1


def test_an_unwritable_data_folder_is_one_sentence(folder: Folder) -> None:
    broken = folder.run("prepare.py", OVERNIGHT_DATA="/proc/nowhere")
    assert broken.returncode == 1 and "OVERNIGHT_DATA" in broken.stderr and broken.stderr.count("\n") == 1


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"format": 1}', b"{", b"\xff"])
def test_data_without_its_description_is_prepared_anew(folder: Folder, tmp_path: Path, text: bytes) -> None:
    folder.data = tmp_path / "data"
    assert folder.run("prepare.py").returncode == 0
    for damaged in (next(folder.data.glob("small-*")) / "meta.json", next(folder.data.glob("known-*"))):
        damaged.write_bytes(text)
        again = folder.run("prepare.py")
        assert again.returncode == 0 and "learning" in again.stdout, again.stderr


def test_a_package_that_is_missing_is_one_sentence(folder: Folder, tmp_path: Path) -> None:
    folder.data = tmp_path / "data"
    (folder.path / "rustbpe.py").write_text("raise ModuleNotFoundError('No module named rustbpe', name='rustbpe')\n")
    broken = folder.run("prepare.py")
    assert broken.returncode == 1 and "pip install rustbpe" in broken.stderr and broken.stderr.count("\n") == 1


def test_rows_that_cannot_be_kept_serve_the_run(prepare, folder: Folder, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_DATA", str(folder.data))
    data = prepare.load_dataset(str(small_corpus))
    kept = np.array(data.train_rows(48))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "_save", full)
    (data.folder / "rows-48.npy").unlink()
    assert np.array_equal(data.train_rows(48), kept)
    monkeypatch.setattr(prepare, "_locked", full)
    assert np.array_equal(data.train_rows(48), kept)


def test_what_a_killed_prepare_left_goes_with_the_next(
    prepare, small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"  # where nothing was prepared before
    left, rows = data / ".old-0123456789ab-01234567.4194305", ".rows-64.4194305.npy"
    (left / "inner").mkdir(parents=True)
    foreign = data / ".git.1"  # a data folder is the user's: only what has our name goes
    foreign.mkdir()
    monkeypatch.setenv("OVERNIGHT_DATA", str(data))
    dataset = prepare.load_dataset(str(small_corpus))
    assert not left.exists() and foreign.exists()
    (dataset.folder / rows).write_bytes(b"half")
    dataset.train_rows(64)
    assert not (dataset.folder / rows).exists() and (dataset.folder / "rows-64.npy").exists()


def test_one_long_document_says_what_to_do(folder: Folder, tmp_path: Path) -> None:
    play = tmp_path / "play"
    play.mkdir()
    (play / "input.txt").write_text("a line of a play\n" * 1000)
    refused = folder.run("prepare.py", "--from-folder", str(play))
    assert refused.returncode == 1 and "split a long one" in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr


@pytest.mark.parametrize("shards", [None, 1])
def test_shards_are_fetched_where_the_corpus_is_not_there_yet(folder: Folder, tmp_path: Path, shards: int | None) -> None:
    place = tmp_path / "climbmix"
    if shards:  # one alone is refused with the words "prepare.py --shards 2": that command has to work
        place.mkdir()
        (place / "shard_00000.parquet").write_bytes(b"PAR1")
    tried = folder.run("prepare.py", "--shards", "9999", OVERNIGHT_CORPUS=str(place))
    assert tried.returncode == 1 and "--shards 9999: there are" in tried.stderr, tried.stderr
