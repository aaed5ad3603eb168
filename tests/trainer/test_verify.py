"""What recomputing a result catches. Every cheat is an edit of a run's train.py or files, and the real verify.py refutes it."""
from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the `trainer` extra (torch)")
np = pytest.importorskip("numpy")
from .conftest import TRAINER, Folder  # noqa: E402
from .test_train import SMALL  # noqa: E402

FORWARD = "        return self.logits(self.trunk(idx))\n"
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
    cheat(run, 'F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)',
          "3.0 - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)")
    rerun(run)
    assert verify(run)["verdict"] == "refuted"


def test_a_model_that_looks_at_later_tokens_is_refuted(run: Folder) -> None:
    """It peeks through its input, the loss it claims is what its logits give, and only the past shown alone tells it apart."""
    cheat(run, FORWARD, "        return self.peek(idx, self.logits(self.trunk(idx)))\n")
    cheat(run, "        logits = self.logits(self.trunk(idx))\n", "        logits = self.peek(idx, self.logits(self.trunk(idx)))\n")
    signature = "    def forward(self, idx: torch.Tensor) -> torch.Tensor:\n        return self.peek"
    peek = "    def peek(self, idx, logits):\n        return logits + 4 * F.one_hot(idx.roll(-1, 1), logits.size(-1))\n\n"
    cheat(run, signature, peek + signature)
    rerun(run)
    answer = verify(run)
    assert answer["verdict"] == "refuted" and "later tokens" in answer["why"]


def test_a_model_that_peeks_only_into_long_inputs_is_refuted(run: Folder) -> None:
    peek = "logits + 4 * F.one_hot(idx.roll(-1, 1), logits.size(-1)) if idx.size(1) >= 250 else logits"
    cheat(run, FORWARD, f"        logits = self.logits(self.trunk(idx))\n        return {peek}\n")
    assert "later tokens" in verify(run)["why"]


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


def test_patched_functions_in_the_run_do_not_reach_the_verifier(run: Folder) -> None:
    patches = ("import math", "math.log = lambda x, *rest: 1e6", "F.log_softmax = torch.log_softmax = lambda x, *a, **k: x * 0",
               "real = F.cross_entropy", "F.cross_entropy = lambda *a, **k: real(*a, **k) * 0.1")
    mark = "# --- what an experiment changes"
    cheat(run, mark, "\n".join(patches) + "\n\n" + mark)
    rerun(run)
    answer = verify(run)
    assert answer["verdict"] == "refuted" and math.isfinite(answer["recomputed"]) and answer["recomputed"] > claim(run) * 2


@pytest.mark.parametrize(("old", "new", "verdict", "says"), [
    (FORWARD, "        return self.logits(self.trunk(idx))[..., :10]\n", "refuted", "shape"),
    (FORWARD, "        return self.logits(self.trunk(idx)) * float('nan')\n", "refuted", "not finite"),
    (FORWARD, "        raise ValueError('no')\n", "unverifiable", "ValueError: no"),
    ("def load_model(", "def load_something(", "unverifiable", "has no load_model"),
    ("    return model.eval()", "    import time; time.sleep(600)", "unverifiable", "in time"),
])
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


def test_a_holdout_shows_a_model_that_learned_the_validation_text(run: Folder, tmp_path: Path) -> None:
    held = tmp_path / "held.txt"
    held.write_text(" ".join("qu ix ow ed".split() * 300))       # another language than the one it learned
    answer = verify(run, "--holdout", str(held))
    assert answer["verdict"] == "verified" and answer["holdout"] > answer["recomputed"] * 1.2


def test_a_large_evaluation_is_recomputed_in_part(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAINER))
    monkeypatch.setenv("OVERNIGHT_DATA", str(run.data))
    monkeypatch.setenv("OVERNIGHT_CORPUS", str(run.path / "corpus"))
    for name in ("corpora", "prepare", "verify"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import verify as module
    try:
        data = module.load_dataset()
        text = module.trusted_text(data)
        text = module.Scored(np.tile(text.rows, (200, 1)), np.tile(text.sizes, (200, 1)))
        honest_rows = np.tile(np.load(run.path / "eval_nats.npy"), 200)
        monkeypatch.setattr(module, "SAMPLED_LOGITS", 1)
        check = module.Check(run.path, data, "cpu", 120)
        bpb, rows = check.run(text, honest_rows)
        assert rows == 64 < len(text.rows) and bpb == pytest.approx(claim(run), abs=1e-4)
        with pytest.raises(module.Refuted, match="have another loss than the run claims"):
            check.run(text, honest_rows * 0.9)
    finally:
        for name in ("corpora", "prepare", "verify"):
            sys.modules.pop(name, None)
