"""Commands that open a face: the screen where there is no terminal, and how to connect an agent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.lab import Lab
from tests.runner.commands import overnight, program
from tests.runner.labs import make_lab


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
