"""Edits of hosts.toml, part by part: a removal or a tightening never waits for what the same edit loosens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.lab import Lab
from runner.loosening import merged, to_toml
from runner.policy import Policy, load_policy
from runner.verbs import accept_policy
from tests.runner.labs import make_lab

TWO = """[policy]
max_runs = 50
max_budget_s = 600
[[host]]
name = "a"
kind = "ssh"
address = "10.0.0.1"
gpus = [0, 1]
max_runs = 2
min_free_disk_mib = 5000
env = {TOKEN = "hunter2", QUOTED = "a\\"b\\\\c\\u007f"}
[[host]]
name = "b"
kind = "ssh"
address = "10.0.0.2"
[peaks]
"RTX 9999" = 209.5e12
"""


def parsed(folder: Path, text: str) -> Policy:
    path = folder / "hosts.toml"
    path.write_text(text)
    return load_policy(path)


def test_each_part_of_an_edit_is_judged_by_itself(tmp_path: Path) -> None:
    old = parsed(tmp_path, TWO)
    edit = TWO.replace("max_runs = 50", "max_runs = 90").replace("max_budget_s = 600", "max_budget_s = 300")
    edit = edit.replace("gpus = [0, 1]", "gpus = [1]").replace("min_free_disk_mib = 5000", "min_free_disk_mib = 1\nprice_per_hour = 2.5")
    edit = edit.replace('name = "b"', 'name = "c"')
    found, waiting = merged(old, parsed(tmp_path, edit))
    assert waiting == ["[policy] max_runs: 50 → 90", "[[host]] c is new"]
    assert (found.limits.max_runs, found.limits.max_budget_s) == (50, 300)
    (host,) = found.hosts  # b is gone at once, c waits
    assert (host.name, host.gpus, host.min_free_disk_mib, host.price_per_hour) == ("a", [1], 1, 2.5)


@pytest.mark.parametrize(
    ("was", "now", "waits", "left"),
    [
        ("gpus = [0, 1]", "gpus = [1, 2]", True, {"gpus": [1]}),
        ("gpus = [0, 1]", 'gpus = "all"', True, {"gpus": [0, 1]}),
        ("gpus = [0, 1]", "gpus = [7]", True, {"gpus": [0, 1]}),  # a swap is no removal
        ("gpus = [0, 1]", "gpus = []", False, {"gpus": []}),
        ("max_runs = 2", "max_runs = 1", False, {"max_runs": 1}),
        ("max_runs = 2", "max_runs = 3", True, {"max_runs": 2}),
        ("max_runs = 2\n", "", True, {"max_runs": 2}),
        ("10.0.0.1", "10.0.0.9", True, {"address": "10.0.0.1"}),
        ("hunter2", "hunter3", True, {"min_free_disk_mib": 5000}),
        ("max_runs = 2", 'max_runs = 2\npython = "/tmp/x"', True, {"python": None}),
        ("max_runs = 2", 'max_runs = 2\nlabels = {rack = "7"}', False, {"labels": {"rack": "7"}}),
        ("min_free_disk_mib = 5000", "min_free_disk_mib = 0", False, {"min_free_disk_mib": 0}),
    ],
)
def test_what_of_a_host_waits(tmp_path: Path, was: str, now: str, waits: bool, left: dict[str, Any]) -> None:
    old = parsed(tmp_path, TWO)
    found, waiting = merged(
        old, parsed(tmp_path, TWO.replace(was, now, 1) if was != "max_runs = 2" else TWO.replace("max_runs = 2\n", now + "\n"))
    )
    host = found.host("a")
    assert bool(waiting) == waits and host is not None
    assert {key: getattr(host, key) for key in left} == left
    assert "hunter3" not in "; ".join(waiting)


def test_a_removal_takes_effect_while_the_rest_of_the_edit_waits(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy="max_runs = 5", hosts=TWO.split("[policy]")[1].split("600\n")[1])
    text = lab.hosts_file.read_text()
    edit = text.replace("max_runs = 5\n", "max_runs = 9\n").replace('[[host]]\nname = "b"\nkind = "ssh"\naddress = "10.0.0.2"\n', "")
    lab.hosts_file.write_text(edit)
    pending = lab.sync_policy() or ""
    assert "max_runs: 5 → 9" in pending and "b" not in pending.split("human:")[1].split(". Accept")[0].split()
    again = Lab(lab.path, lab.store).policy()  # as any other process reads it
    assert [h.name for h in again.hosts] == ["a"] and again.limits.max_runs == 5
    assert again.hosts[0].env == {"TOKEN": "hunter2", "QUOTED": 'a"b\\c\x7f'} and again.trainer == lab.policy().trainer
    written = lab.accepted_file.stat().st_mtime_ns
    assert lab.sync_policy() == pending and lab.accepted_file.stat().st_mtime_ns == written  # nothing to do again
    accept_policy(lab, who="cli")
    assert lab.policy().limits.max_runs == 9 and lab.sync_policy() is None
    lab.close()


def test_the_only_host_may_go_and_no_other_takes_its_place(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, hosts='[[host]]\nname = "here"\nkind = "local"\n')
    lab.hosts_file.write_text(lab.hosts_file.read_text().replace('name = "here"', 'name = "there"'))
    assert "there is new" in (lab.sync_policy() or "")
    assert lab.policy().hosts == []
    lab.close()


def test_a_range_that_only_the_waiting_part_makes_whole_stays_a_range(tmp_path: Path) -> None:
    old = parsed(tmp_path, "[policy]\nbudget_s = 300\nmax_budget_s = 600\n")
    new = parsed(tmp_path, "[policy]\nbudget_s = 5000\nmin_budget_s = 4000\nmax_budget_s = 6000\n")
    limits = merged(old, new)[0].limits
    assert limits.min_budget_s <= limits.budget_s <= limits.max_budget_s == 600


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    env=st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), TEXTS, max_size=3),
    command=st.lists(TEXTS, min_size=1, max_size=3),
)
def test_a_policy_written_out_reads_the_same(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str], command: list[str]) -> None:
    folder = tmp_path_factory.mktemp("p")
    first = parsed(folder, TWO + '[policy.promote]\nfrom = "H100"\nto = "H200"\ntop = 3\n')
    policy = dataclasses.replace(
        first,
        trainer=dataclasses.replace(first.trainer, command=command, holdout=Path("/data/held out.txt")),
        hosts=[dataclasses.replace(first.hosts[0], env=env)],
    )
    assert load_policy(folder / "hosts.toml", text=to_toml(policy), root=Path("/elsewhere")) == policy
