"""Verification as a run of its own: the trainer's verify.py decides, its verdict becomes the trust of the run it is about."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runner import queries, upkeep, verbs, verifying
from runner.errors import PolicyError, Refused
from runner.lab import Lab
from runner.policy import load_policy
from runner.records import Run, Submission
from runner.verifying import verdict_in
from tests.runner.daemons import ended, fake_lab, local_lab, serving, until
from tests.runner.labs import finish, make_lab

pytestmark = pytest.mark.timeout(240)

# What trainer/verify.py promises: one JSON object on stdout, exit code 1 unless verified. This one compares with a file of ours.
VERIFIER = """
import json, sys
work, claim = sys.argv[1], float(sys.argv[sys.argv.index("--claim") + 1])
print("loading", work)
try:
    true = float(open(work + "/checkpoint.pt").read())
except OSError:
    print(json.dumps({"verdict": "unverifiable", "why": "no checkpoint", "recomputed": None}))
    sys.exit(1)
ok = abs(true - claim) < 0.003
print(json.dumps({"verdict": "verified" if ok else "refuted", "why": f"claimed {claim}, recomputed {true}", "recomputed": true}))
sys.exit(0 if ok else 1)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    made = local_lab(tmp_path)
    (made.policy().trainer.folder / "verify.py").write_text(VERIFIER)
    yield made
    made.close()


def get(lab: Lab, run_id: str) -> Run:
    run = lab.store.run(run_id)
    assert run is not None
    return run


async def result_of(lab: Lab, run_id: str, checkpoint: str | None) -> tuple[Run, dict[str, object]]:
    """Run once, leave a checkpoint, ask for verification; the run and the answer."""
    (run,) = await ended(lab, run_id)
    if checkpoint is not None:
        (lab.run_dir(run.id) / "work" / "checkpoint.pt").write_text(checkpoint)
    request = verbs.ask(lab, "verify", {"run": run.id}, who="tui")
    answer = await until(lambda: (r := verbs.answer(lab, request)).state in ("done", "failed") and r)
    return get(lab, run.id), answer.result or answer.error


def submit(lab: Lab, tag: str) -> str:
    return verbs.submit(lab, Submission(overrides={"TAG": tag}, budget_s=20), who="cli").run_ids[0]


async def test_verified_refuted_and_unverifiable(lab: Lab) -> None:
    async with serving(lab):
        run, answer = await result_of(lab, submit(lab, "a"), "0.9978")
        assert (run.trust, run.verified_bpb, answer["verdict"]) == ("verified", 0.9978, "verified")
        check = get(lab, str(answer["by"]))
        assert (check.purpose, check.outcome, check.base_run, check.val_bpb) == ("verify", "completed", run.id, None)
        run, _ = await result_of(lab, submit(lab, "b"), "1.2")
        assert (run.trust, run.verified_bpb) == ("refuted", 1.2) and "recomputed 1.2" in (run.trust_why or "")
        run, _ = await result_of(lab, submit(lab, "c"), None)
        assert (run.trust, run.verified_bpb, run.trust_why) == ("unverifiable", None, "no checkpoint")


async def test_a_true_number_from_too_much_training_stays_held(lab: Lab) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, "a"))
        lab.store.update_run(run.id, training_s=200.0, wall_s=210.0)  # of a budget of 20 s, by its own word
        run, _ = await result_of(lab, run.id, "0.9979")
        assert run.trust == "verified" and (run.trust_why or "").startswith("held: it trained for 200.0 s, of a budget of 20 s")
        assert [u["id"] for u in queries.leaderboard(lab)["unranked"]] == [run.id]


async def test_a_holdout_reaches_a_host_for_the_verification_alone(lab: Lab, tmp_path: Path) -> None:
    held = tmp_path / "held.txt"
    held.write_text("nobody has seen this")
    text = lab.hosts_file.read_text().replace('folder = "trainer"\n', f'folder = "trainer"\nholdout = "{held}"\n')
    lab.hosts_file.write_text(text)
    lab.accept(text)
    told = "import os, sys\nprint('given', sys.argv[2:], os.path.exists('holdout.txt') and open('holdout.txt').read())\n"
    (lab.policy().trainer.folder / "verify.py").write_text(told + VERIFIER)
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, "a"))
        assert not (lab.run_dir(run.id) / "work" / "holdout.txt").exists()
        lab.store.update_run(run.id, data_hash="text-1")
        run, answer = await result_of(lab, run.id, "0.9979")
        log = (lab.run_dir(str(answer["by"])) / "out.log").read_text()
        assert "'--data', 'text-1'" in log and "'--holdout', 'holdout.txt'" in log and "nobody has seen this" in log


def test_a_holdout_in_the_trainer_folder_is_refused(lab: Lab) -> None:
    text = lab.hosts_file.read_text().replace('folder = "trainer"\n', 'folder = "trainer"\nholdout = "trainer/held.txt"\n')
    with pytest.raises(PolicyError, match="which every run gets"):
        load_policy(lab.hosts_file, text=text)


async def test_a_person_goes_first_and_we_go_last(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "QUIET_S", 0.5)
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, "a"))
        verbs.pause_queue(lab, True, who="tui")
        waiting = submit(lab, "b")
        verbs.ask(lab, "verify", {"run": run.id, "why": "it is the new best"}, who="daemon")
        late = (await until(lambda: lab.store.runs("purpose = 'verify'")))[0]
        assert late.priority < get(lab, waiting).priority
        verbs.pause_queue(lab, False, who="tui")
        await ended(lab, waiting, late.id)
        assert (get(lab, waiting).started_at or 0) < (get(lab, late.id).started_at or 0)


async def test_who_asks_for_a_check_that_waits_already_gets_that_one_sooner(lab: Lab) -> None:
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, "a"))
        verbs.pause_queue(lab, True, who="tui")
        verbs.ask(lab, "verify", {"run": run.id, "why": "it is the new best"}, who="daemon")
        late = (await until(lambda: lab.store.runs("purpose = 'verify'")))[0]
        verbs.ask(lab, "verify", {"run": run.id}, who="cli")
        await until(lambda: get(lab, late.id).priority == verifying.FIRST)
        verbs.pause_queue(lab, False, who="tui")
        (check,) = await ended(lab, late.id)
        assert check.agent == "cli" and len(lab.store.runs("purpose = 'verify'")) == 1


async def test_what_cannot_be_verified_says_why(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 400\n")
    async with serving(lab):
        run_id = verbs.submit(lab, Submission(budget_s=300), who="cli").run_ids[0]
        run, answer = await result_of(lab, run_id, None)
        assert run.trust == "unverifiable" and "simulat" in str(answer["message"])
        request = verbs.ask(lab, "verify", {"run": "r9999"}, who="tui")
        await until(lambda: verbs.answer(lab, request).state == "failed")
    assert not lab.store.runs("purpose = 'verify'")
    lab.close()


def test_to_ask_in_vain_neither_makes_a_doubt_nor_settles_one(tmp_path: Path) -> None:
    with closing(make_lab(tmp_path)) as lab:  # its trainer has no verify.py
        request = verbs.answer(lab, verbs.ask(lab, "verify", {"run": "r0001"}, who="cli"))
        cases = {None: None, "it beats the best": "it beats the best", "held: it ran for 1.0 s": "held: it ran for 1.0 s"}
        for n, (doubt, stays) in enumerate(cases.items()):
            (run_id,) = verbs.submit(lab, Submission(overrides={"DEPTH": 2 + n}), who="cli").run_ids
            finish(lab, run_id, 0.9, trust="unverifiable", trust_why=doubt, wall_s=1.0 if doubt and "held" in doubt else 20.0)
            lab.store.set_setting(upkeep.SETTING, [run_id])
            lab.store.update_run(run_id, host=lab.policy().hosts[0].name)
            run = lab.store.run(run_id)
            assert run is not None
            with pytest.raises(Refused, match=r"no verify\.py"):
                verifying.queue_check(lab, run, request)
            after = lab.store.run(run_id)
            assert after is not None and (after.trust, after.trust_why) == ("unverifiable", stays)
        lab.store.update_run(run_id, wall_s=20.0, trust="claimed", trust_why="held: it beats the best")  # that waited for what cannot come
        with pytest.raises(Refused):
            verifying.queue_check(lab, lab.store.run(run_id), request)  # type: ignore[arg-type]
        assert lab.store.run(run_id).trust_why == "it beats the best"  # type: ignore[union-attr]


def test_a_check_nobody_asked_for_waits_for_quiet_and_not_for_ever() -> None:
    now = time.time()
    assert verifying.turn(now, 1.0) == (verifying.LAST, "it waits for a quiet moment")
    assert verifying.turn(now, verifying.QUIET_S) == (verifying.LAST, None)
    assert verifying.turn(now - verifying.PATIENCE_S - 1, 0.0) == (verifying.FIRST, None)


def test_only_a_whole_verdict_counts() -> None:
    assert verdict_in('x\n{"verdict": "verified", "why": "ok"}\n') == {"verdict": "verified", "why": "ok"}
    assert verdict_in('{"verdict": "verified"') is None and verdict_in('{"verdict": "great"}') is None and verdict_in("") is None
