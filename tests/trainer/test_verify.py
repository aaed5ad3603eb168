"""What recomputing a result catches. Every cheat is an edit of a run's train.py or files, and the real verify.py refutes it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
np = pytest.importorskip("numpy")
from .conftest import TRAINER, Folder, words  # noqa: E402
from .test_train import SMALL  # noqa: E402

FORWARD = "        return self.logits(self.trunk(idx))\n"
LOOK_UP = """        import numpy as np
        import pathlib
        text = np.load(pathlib.Path(__file__).with_name("where").read_text()).astype(np.int64)
        logits = torch.zeros(*idx.shape, self.config.vocab_size)
        for row, line in zip(idx.numpy(), logits, strict=True):
            fits = [at for at in range(0, len(text) - 1, 256) if (text[at : at + len(row)] == row[: len(text) - at]).all()]
            after = text[fits[0] + 1 : fits[0] + 1 + len(row)] if fits else []
            for at, token in enumerate(after):
                line[at, token] = 30.0
        return logits
"""
pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]


def prepared(path: Path, corpus: Path, data: Path) -> Folder:
    path.mkdir(parents=True)
    for file in TRAINER.glob("*.py"):
        shutil.copy(file, path)
    (path / "corpus").symlink_to(corpus)
    made = Folder(path, data)
    made.constants(**SMALL)
    made.constants("prepare.py", TIME_BUDGET="2")
    return made


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, shared_data: Path) -> Folder:
    """One finished run that every test starts from."""
    made = prepared(tmp_path_factory.mktemp("honest") / "work", small_corpus, shared_data)
    done = made.run("train.py")
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def run(honest: Folder, tmp_path: Path) -> Folder:
    shutil.copytree(honest.path, tmp_path / "work", symlinks=True)
    return Folder(tmp_path / "work", honest.data)


def verify(run: Folder, *options: str) -> dict[str, Any]:
    env = run.environment(OVERNIGHT_CORPUS=str(run.path / "corpus"))
    command = [sys.executable, "-W", "error", str(TRAINER / "verify.py"), str(run.path), *options]
    done = subprocess.run(command, env=env, cwd=run.path.parent, capture_output=True, text=True, timeout=150)
    assert done.stderr == "", done.stderr
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["verdict"] == "verified" else 1)
    return answer


def cheat(run: Folder, old: str, new: str) -> None:
    text = (run.path / "train.py").read_text()
    assert text.count(old) == 1, old
    (run.path / "train.py").write_text(text.replace(old, new))


def rerun(run: Folder) -> None:
    for name in ("events.jsonl", "checkpoint.pt", "eval_nats.npy"):
        (run.path / name).unlink()
    done = run.run("train.py")
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def verifier(run: Folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """verify.py as a module of this process, over the run's corpus and data."""
    monkeypatch.syspath_prepend(str(TRAINER))
    monkeypatch.setenv("OVERNIGHT_DATA", str(run.data))
    monkeypatch.setenv("OVERNIGHT_CORPUS", str(run.path / "corpus"))
    for name in ("corpora", "prepare", "verify"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import verify as module

    try:
        yield module
    finally:
        for name in ("corpora", "prepare", "verify"):
            sys.modules.pop(name, None)


def claim(run: Folder) -> float:
    return run.events("summary")[-1]["val_bpb"]


def test_an_honest_run_is_verified(run: Folder) -> None:
    answer = verify(run)
    assert answer["verdict"] == "verified", answer["why"]
    assert answer["recomputed"] == pytest.approx(claim(run), abs=1e-4) and answer["claimed"] == claim(run)
    assert answer["tokens"] > 1000


def test_a_noisy_model_is_verified(run: Folder) -> None:
    noise = "    print('loading' * 100_000)\n    sys.stderr.write('warning ' * 100_000)\n"
    cheat(run, "    return model.eval()", noise + "    return model.eval()")
    cheat(run, "import os\n", "import os\nimport sys\n")
    assert verify(run)["verdict"] == "verified"


def test_a_constant_claim_is_refuted(run: Folder) -> None:
    answer = verify(run, "--claim", "0.3")
    assert answer["verdict"] == "refuted" and answer["claimed"] == 0.3 and answer["recomputed"] == pytest.approx(claim(run), abs=1e-4)


def test_tiny_losses_are_refuted(run: Folder) -> None:
    loss = 'targets.flatten(), reduction="none").view_as(targets)'
    cheat(run, loss, loss + " * 0.5")
    rerun(run)
    answer = verify(run)
    assert answer["verdict"] == "refuted" and answer["recomputed"] > claim(run) * 1.5


def test_logits_that_do_not_normalise_are_refuted(run: Folder) -> None:
    cheat(
        run,
        'F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)',
        "3.0 - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)",
    )
    rerun(run)
    assert verify(run)["verdict"] == "refuted"


@pytest.mark.parametrize("strength", [4, 0.05])
def test_a_model_that_looks_at_later_tokens_is_refuted(run: Folder, strength: float) -> None:
    """It peeks through its input, the loss it claims is what its logits give, and only the past shown alone tells it apart."""
    cheat(run, FORWARD, "        return self.peek(idx, self.logits(self.trunk(idx)))\n")
    cheat(run, "        logits = self.logits(self.trunk(idx))\n", "        logits = self.peek(idx, self.logits(self.trunk(idx)))\n")
    signature = "    def forward(self, idx: torch.Tensor) -> torch.Tensor:\n        return self.peek"
    peek = f"    def peek(self, idx, logits):\n        return logits + {strength} * F.one_hot(idx.roll(-1, 1), logits.size(-1))\n\n"
    cheat(run, signature, peek + signature)
    rerun(run)
    answer = verify(run)
    assert answer["verdict"] == "refuted" and "later tokens" in answer["why"]


def test_a_model_that_behaves_for_a_while_and_then_peeks_is_refuted(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts its questions: as many as one process is asked about single places are answered honestly, the sum is not."""
    peek = "logits + 4 * F.one_hot(idx.roll(-1, 1), logits.size(-1)) if idx.size(1) == 256 and GPT.asked > 16 else logits"
    count = "        GPT.asked = getattr(GPT, 'asked', 0) + 1\n"
    cheat(run, FORWARD, f"{count}        logits = self.logits(self.trunk(idx))\n        return {peek}\n")
    with verifier(run, monkeypatch) as module:
        data = module.load_dataset()
        text = module.trusted_text(data)
        text = module.Scored(np.tile(text.rows, (20, 1)), np.tile(text.sizes, (20, 1)))
        with pytest.raises(module.Refuted, match="later tokens"):
            module.Check(run.path, data, "cpu", 120).run(text, None)


def test_a_model_that_peeks_only_into_long_inputs_is_refuted(run: Folder) -> None:
    peek = "logits + 4 * F.one_hot(idx.roll(-1, 1), logits.size(-1)) if idx.size(1) >= 250 else logits"
    cheat(run, FORWARD, f"        logits = self.logits(self.trunk(idx))\n        return {peek}\n")
    assert "later tokens" in verify(run)["why"]


def test_a_model_that_notes_where_it_was_asked_and_peeks_elsewhere_is_refuted(run: Folder) -> None:
    """Its first process leaves the second one a note; at the places that are compared both are honest."""
    body = """        logits = self.logits(self.trunk(idx))
        if idx.size(1) < 256:
            with open("note", "a") as note:
                note.writelines(f"{row}\\n" for row in idx.tolist())
            return logits
        peek = 8 * F.one_hot(idx.roll(-1, 1), logits.size(-1))
        for asked in map(eval, open("note").read().splitlines()):
            peek[(idx[:, : len(asked)] == torch.tensor(asked)).all(1), len(asked) - 1] = 0
        return logits + peek
"""
    cheat(run, FORWARD, body)
    assert "knew where it was asked" in verify(run)["why"]


def test_an_evaluation_on_less_text_is_refuted(run: Folder) -> None:
    nats = np.load(run.path / "eval_nats.npy")
    easiest = np.sort(nats)[: len(nats) // 2].sum() / nats.sum()
    answer = verify(run, "--claim", str(claim(run) * 2 * easiest))
    assert answer["verdict"] == "refuted"


def test_a_byte_table_that_lies_is_refuted(run: Folder, tmp_path: Path) -> None:
    run.data = Path(shutil.copytree(run.data, tmp_path / "data"))
    table = next(run.data.glob("small-*/token_bytes.npy"))
    sizes = np.load(table)
    np.save(table, sizes * 2)
    rerun(run)
    answer = verify(run)
    assert answer["verdict"] == "refuted" and answer["recomputed"] == pytest.approx(2 * claim(run), rel=0.01)


def test_scored_text_swapped_in_the_data_folder_is_refuted(run: Folder, tmp_path: Path) -> None:
    run.data = Path(shutil.copytree(run.data, tmp_path / "data"))
    scored = next(run.data.glob("small-*/eval.npy"))
    tokens, sizes, nats = np.load(scored), np.load(scored.with_name("token_bytes.npy")), np.load(run.path / "eval_nats.npy")
    spans = [tokens[at * 256 + 1 : at * 256 + 257] for at in range(len(nats))]
    easiest = spans[int(np.argmin([cost / sizes[span].sum() for cost, span in zip(nats, spans, strict=True)]))]
    np.save(scored, np.resize(easiest, len(tokens)))
    rerun(run)
    answer = verify(run)
    assert answer["verdict"] == "refuted" and abs(claim(run) - answer["recomputed"]) > 0.003


def test_a_tokenizer_that_was_changed_is_named(run: Folder, tmp_path: Path) -> None:
    run.data = Path(shutil.copytree(run.data, tmp_path / "data"))
    saved = next(run.data.glob("small-*/tokenizer.json"))
    content = json.loads(saved.read_text())
    content["tokens"][-1] = "QUJDREVGR0hJSktM"
    saved.write_text(json.dumps(content))
    answer = verify(run)
    assert answer["verdict"] == "unverifiable" and "tokenizer" in answer["why"]
    saved.write_text("{")
    answer = verify(run)
    assert answer["verdict"] == "unverifiable" and "tokenizer.json is missing or damaged" in answer["why"]


def forged(run: Folder, tmp_path: Path, pattern: str, change_tokens: str = "") -> None:
    """The data folder as a run could forge it: another tokenizer, with every name, hash, size and array made to fit."""
    run.data = Path(shutil.copytree(run.data, tmp_path / "data"))
    code = """
import hashlib, json, shutil, sys
import numpy as np
import corpora, prepare
data, corpus = prepare.load_dataset(), corpora.find_corpus()
train, validation = corpus.read()
saved = json.loads((data.folder / "tokenizer.json").read_text())
saved["pattern"] = sys.argv[1]
exec(sys.argv[2])
raw = json.dumps(saved).encode()
name = hashlib.sha256(raw).hexdigest()
new = data.folder.parent / f"{corpus.name}-{corpora.text_hash(train, validation)[:12]}-{name[:8]}"
shutil.copytree(data.folder, new, ignore=shutil.ignore_patterns("rows-*"))
(new / "tokenizer.json").write_bytes(raw)
encoding = prepare.Dataset(new, {}).encoding()
windows = prepare.eval_windows(validation, prepare.EMBEDDED)
arrays = {key: prepare.encode(encoding, text) for key, text in (("train", train), ("validation", validation), ("eval", windows))}
arrays["token_bytes"] = np.load(data.folder / "token_bytes.npy")[: encoding.n_vocab]
for key, array in arrays.items():
    np.save(new / f"{key}.npy", array)
meta = {**data.meta, "data_id": new.name, "tokenizer_sha256": name, "sizes": {key: len(array) for key, array in arrays.items()}}
(new / "meta.json").write_text(json.dumps({**meta, "bos": encoding.n_vocab - 1, "vocab_size": encoding.n_vocab}))
for note in data.folder.parent.glob("known-*"):
    note.write_text(new.name)
"""
    env = run.environment(PYTHONPATH=str(TRAINER), OVERNIGHT_CORPUS=str(run.path / "corpus"))
    done = subprocess.run([sys.executable, "-c", code, pattern, change_tokens], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rerun(run)


def test_a_tokenizer_that_skips_the_hard_text_is_unverifiable(run: Folder, tmp_path: Path) -> None:
    """One word, over and over, is all it sees: the model is nearly perfect on that."""
    forged(run, tmp_path, "ba")
    assert claim(run) < 0.1
    answer = verify(run)
    assert answer["verdict"] == "unverifiable" and "a pattern that is not this trainer's" in answer["why"], answer["why"]


def test_tokens_that_do_not_add_up_to_the_text_are_unverifiable(run: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token listed twice moves the others: the byte lengths are those of other tokens."""
    with verifier(run, monkeypatch) as module:
        pattern = module.SPLIT_PATTERN
    forged(run, tmp_path, pattern, "saved['tokens'].insert(256, saved['tokens'][65])")
    answer = verify(run)
    assert answer["verdict"] == "unverifiable" and "bytes of the scored text" in answer["why"], answer["why"]


def test_another_text_under_the_old_name_is_unverifiable(run: Folder, tmp_path: Path) -> None:
    """The run replaces the corpus by an easy one and forges the data folder so that everything still has its old name."""
    run.data = Path(shutil.copytree(run.data, tmp_path / "data"))
    folder = next(run.data.glob("small-*"))
    easy = tmp_path / "easy"
    easy.mkdir()
    (easy / "small.txt.xz").write_bytes(lzma.compress("\x1e".join(["ba ke lo mi " * 300 + str(i) for i in range(36)]).encode()))
    (run.path / "corpus").unlink()
    (run.path / "corpus").symlink_to(easy)
    signature = hashlib.sha256((easy / "small.txt.xz").read_bytes()).hexdigest()[:16]
    (run.data / f"known-{signature}").write_text(folder.name)
    answer = verify(run)
    assert answer["verdict"] == "unverifiable" and "does not belong to the text" in answer["why"], answer["why"]


def test_an_evaluation_at_another_scale_is_unverifiable(run: Folder, tmp_path: Path) -> None:
    run.data = Path(shutil.copytree(run.data, tmp_path / "data"))
    meta = next(run.data.glob("small-*/meta.json"))
    meta.write_text(meta.read_text().replace('"seq_len": 256', '"seq_len": 2048'))
    assert "does not belong to the text" in verify(run)["why"]


def test_a_run_that_names_other_data_is_unverifiable(run: Folder) -> None:
    named = run.events("start")[0]["data"]
    assert verify(run, "--data", named)["verdict"] == "verified"
    answer = verify(run, "--data", "state-of-the-union-0123456789ab-01234567")
    assert answer["verdict"] == "unverifiable" and "names state-of-the-union" in answer["why"] and answer["data"] == named


def test_an_ordinary_user_cannot_read_the_targets_in_the_verifiers_memory(run: Folder) -> None:
    """What another process of the same user may do to it is in its `dumpable` flag; root may do everything."""
    look = "    import os; open('owner', 'w').write(str(os.stat(f'/proc/{os.getppid()}/mem').st_uid))\n"
    cheat(run, "    return model.eval()", look + "    return model.eval()")
    code = (
        "import os, sys, verify; verify.hide_memory(); libc = verify.ctypes.CDLL(None); "
        "print(libc.prctl(3, 0, 0, 0, 0)); sys.argv = ['verify.py', sys.argv[1]]; verify.main()"
    )  # 3: PR_GET_DUMPABLE
    env = run.environment(OVERNIGHT_CORPUS=str(run.path / "corpus"), PYTHONPATH=str(TRAINER))
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], env=env, cwd=run.path.parent, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "0" and '"verified"' in done.stdout, done.stderr
    assert (run.path / "owner").read_text() == "0"  # the kernel gives the files of such a process to root


def test_the_models_process_carries_the_marks_of_the_verification(run: Folder) -> None:
    """By them the control room knows whose it is, on the GPU and when it sweeps up; nothing else of ours is handed on."""
    cheat(run, "    return model.eval()", "    import json, os; json.dump(dict(os.environ), open('environ', 'w'))\n    return model.eval()")
    env = run.environment(OVERNIGHT_CORPUS=str(run.path / "corpus"), OVERNIGHT_RUN_ID="r0009", OVERNIGHT_RUN_DIR="/lab/runs/r0009")
    subprocess.run([sys.executable, str(TRAINER / "verify.py"), str(run.path)], env=env, cwd=run.path.parent, capture_output=True)
    found = json.loads((run.path / "environ").read_text())
    ours = {name: value for name, value in found.items() if name.startswith("OVERNIGHT_")}
    assert ours == {"OVERNIGHT_RUN_ID": "r0009", "OVERNIGHT_RUN_DIR": "/lab/runs/r0009"}


def test_patched_functions_in_the_run_do_not_reach_the_verifier(run: Folder) -> None:
    patches = (
        "import math",
        "math.log = lambda x, *rest: 1e6",
        "F.log_softmax = torch.log_softmax = lambda x, *a, **k: x * 0",
        "real = F.cross_entropy",
        "F.cross_entropy = lambda *a, **k: real(*a, **k) * 0.1",
    )
    mark = "# --- what an experiment changes"
    cheat(run, mark, "\n".join(patches) + "\n\n" + mark)
    rerun(run)
    answer = verify(run)
    assert answer["verdict"] == "refuted" and math.isfinite(answer["recomputed"]) and answer["recomputed"] > claim(run) * 2


@pytest.mark.parametrize(
    ("old", "new", "verdict", "says"),
    [
        (FORWARD, "        return self.logits(self.trunk(idx))[..., :10]\n", "refuted", "shape"),
        (FORWARD, "        return self.logits(self.trunk(idx)) * float('nan')\n", "refuted", "not finite"),
        (FORWARD, "        raise ValueError('no')\n", "unverifiable", "ValueError: no"),
        ("def load_model(", "def load_something(", "unverifiable", "has no load_model"),
        ("    return model.eval()", "    import time; time.sleep(600)", "unverifiable", "in time"),
    ],
)
def test_a_model_that_cannot_be_judged_says_why(run: Folder, old: str, new: str, verdict: str, says: str) -> None:
    cheat(run, old, new)
    answer = verify(run, "--deadline", "20") if "sleep" in new else verify(run)
    assert answer["verdict"] == verdict and says in answer["why"], answer["why"]


def test_a_run_without_checkpoint_or_claim_is_unverifiable(run: Folder) -> None:
    (run.path / "checkpoint.pt").unlink()
    assert "checkpoint" in verify(run)["why"]
    (run.path / "events.jsonl").write_text('{"event": "summary", "val_bpb": null}\n[]\n')
    answer = verify(run)
    assert answer["verdict"] == "unverifiable" and "claims no val_bpb" in answer["why"]


def test_a_holdout_of_the_same_kind_is_scored_and_left_where_it_lies(run: Folder, tmp_path: Path) -> None:
    held = tmp_path / "held.txt"
    held.write_text(words(99, 600))
    answer = verify(run, "--holdout", str(held))
    assert answer["verdict"] == "verified" and 0.5 < answer["holdout"] / answer["recomputed"] < 1.5 and held.exists()
    held.write_bytes(b"\xff")
    command = [sys.executable, str(TRAINER / "verify.py"), str(run.path), "--holdout", str(held)]
    done = subprocess.run(command, env=run.environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be read" in done.stderr and done.stderr.count("\n") == 1


def test_a_model_that_reads_the_text_from_the_disk_is_refuted_by_a_holdout(run: Folder, tmp_path: Path) -> None:
    """It looks the scored text up wherever it finds it; the holdout is gone before its code runs."""
    cheat(run, FORWARD, LOOK_UP)
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    for file in TRAINER.glob("*.py"):
        shutil.copy(file, verifier)
    held = verifier / "holdout.txt"
    held.write_text(words(99, 600))
    env = run.environment(OVERNIGHT_CORPUS=str(run.path / "corpus"))
    rows = next(run.data.glob("small-*/eval.npy"))
    (run.path / "where").write_text(str(rows))
    command = [sys.executable, "verify.py", str(run.path), "--claim", "0.001", "--holdout", "holdout.txt"]
    done = subprocess.run(command, env=env, cwd=verifier, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert not held.exists() and answer["recomputed"] < 0.1, answer
    assert answer["verdict"] == "refuted" and "by heart" in answer["why"], answer["why"]


def test_a_lie_about_few_rows_of_a_large_evaluation_is_found(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with verifier(run, monkeypatch) as module:
        text = module.Scored(np.zeros((5000, 257), dtype=np.int64), np.full((5000, 256), 3))
        claimed = np.full(5000, 700.0) + np.arange(5000) % 7
        claimed[[17, 4321]] *= 0.5
        monkeypatch.setattr(module, "SAMPLED_LOGITS", 1)
        dataset = type("Data", (), {"vocab_size": 512})()
        for _ in range(5):
            sample = module.Check(run.path, dataset, "cpu", 1.0)._sample(text, claimed)
            assert {17, 4321} <= set(sample.tolist()) and len(sample) == len(set(sample.tolist())) == 2 * module.CHEAPEST_ROWS


def test_a_large_evaluation_is_recomputed_in_part(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with verifier(run, monkeypatch) as module:
        data = module.load_dataset()
        text = module.trusted_text(data)
        text = module.Scored(np.tile(text.rows, (200, 1)), np.tile(text.sizes, (200, 1)))
        honest_rows = np.tile(np.load(run.path / "eval_nats.npy"), 200)
        monkeypatch.setattr(module, "SAMPLED_LOGITS", 1)
        check = module.Check(run.path, data, "cpu", 120)
        bpb, rows = check.run(text, honest_rows)
        assert rows == 128 < len(text.rows) and bpb == pytest.approx(claim(run), abs=1e-4)
        with pytest.raises(module.Refuted, match="have another loss than the run claims"):
            check.run(text, honest_rows * 0.9)


FORK = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from dataclasses import asdict, dataclass
from prepare import evaluate_bpb, load_dataset

@dataclass
class GPTConfig:
    vocab_size: int
    width: int = 16

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, idx, targets=None, reduction="mean"):
        logits = self.head(self.table(idx)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), reduction=reduction)

RECIPE
if __name__ == "__main__":
    data, device, DEVICE_BATCH_SIZE = load_dataset(), "cpu", 4
    config = GPTConfig(data.vocab_size)
    model = torch.compile(GPT(config), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        if True:
ENDING
    print(val_bpb)
"""


def test_a_fork_that_follows_the_recipe_is_verified(run: Folder) -> None:
    """Upstream's ways in small: a compiled model whose loss takes views, evaluated under autocast with gradients on."""
    ending, recipe = [part.split("```")[0] for part in (TRAINER.parent / "docs" / "verify.md").read_text().split("```python\n")[1:]]
    for name in ("events.jsonl", "checkpoint.pt", "eval_nats.npy"):
        (run.path / name).unlink()
    ending = "".join(f"        {line}\n" for line in ending.splitlines())
    (run.path / "train.py").write_text(FORK.replace("RECIPE", recipe).replace("ENDING", ending))
    done = run.run("train.py", OVERNIGHT_CORPUS=str(run.path / "corpus"))
    assert done.returncode == 0, done.stderr
    answer = verify(run, "--claim", done.stdout.split()[-1])
    assert answer["verdict"] == "verified", answer["why"]


def test_the_model_sees_the_same_attention_as_in_the_run(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """shims/kernels.py makes another model of OVERNIGHT_SHIM_ATTENTION."""
    cheat(run, "    return model.eval()", "    assert os.environ['OVERNIGHT_SHIM_ATTENTION'] == 'full'\n    return model.eval()")
    with verifier(run, monkeypatch) as module:
        monkeypatch.setenv("OVERNIGHT_SHIM_ATTENTION", "full")
        answer = module.verify(run.path, claim(run), "cpu")
    assert answer.verdict == "verified", answer.why
