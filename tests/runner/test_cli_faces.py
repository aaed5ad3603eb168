"""Commands that open a face: the screen where there is no terminal, and how to connect an agent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner import verbs
from runner.lab import Lab
from runner.records import Submission
from tests.runner.commands import overnight, program
from tests.runner.labs import finish, make_lab


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("words", [[], ["--once"], ["--readonly"]], ids=["bare", "once", "readonly"])
def test_without_a_terminal_the_lab_is_printed_once(lab: Lab, tmp_path: Path, words: list[str]) -> None:
    said = program("--lab", lab.path, *words, cwd=tmp_path, env={"TERM": "dumb"})
    assert said.code == 0 and str(lab.path) in said.out and "\x1b" not in said.out, said


CLIENTS = [("claude", "claude mcp add"), ("codex", "[mcp_servers.overnight]"), ("cursor", "mcpServers"), ("vscode", "servers")]


@pytest.mark.parametrize(("client", "named"), CLIENTS)
def test_connect_prints_absolute_paths_and_the_lab(lab: Lab, capsys: pytest.CaptureFixture[str], client: str, named: str) -> None:
    said = overnight(capsys, "--lab", lab.path, "connect", client)
    assert said.code == 0 and named in said.out and str(lab.path) in said.out and sys.executable in said.out
    assert overnight(capsys, "--lab", lab.path, "connect", client, "--json").object["text"].strip() == said.out.strip()


def test_an_unknown_client_is_refused_with_the_known_ones(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    said = overnight(capsys, "--lab", lab.path, "connect", "claud")
    assert (said.code, said.is_one_sentence()) == (2, True) and "claude" in said.err


def test_a_face_whose_packages_are_missing_says_what_to_install(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("textual", "tui")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    said = overnight(capsys, "--lab", lab.path)
    assert said.code == 1 and said.is_one_sentence() and "textual" in said.err and "pip install" in said.err


def test_report_and_plot_are_files_that_are_named(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overnight(capsys, "--lab", lab.path, "report").code == 1
    finish(lab, verbs.submit(lab, Submission(), who="cli").run_ids[0], 1.25)
    answer = overnight(capsys, "--lab", lab.path, "report", "--out", tmp_path / "night", "--json").object
    assert Path(answer["report"]).is_relative_to(tmp_path / "night") and "1.250000" in Path(answer["report"]).read_text()
    assert overnight(capsys, "--lab", lab.path, "plot", "--out", tmp_path / "p.svg").code == 0
    assert (tmp_path / "p.svg").read_text().lstrip().startswith(("<svg", "<?xml"))


def test_bench_trainer_names_the_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = overnight(capsys, "bench", "trainer", "--against", tmp_path / "none", "--shards", tmp_path)
    assert (said.code, said.is_one_sentence()) == (2, True) and str(tmp_path / "none") in said.err
