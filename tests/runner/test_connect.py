"""`overnight connect`: what is printed can be used as it is, and what is written leaves everything else in place."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runner import connect as connecting
from runner.connect import NAME, SKILL, connect, server_command
from runner.errors import BadValue, OvernightError, UnknownName

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LAB = Path("/somewhere/my lab")


def test_the_command_is_absolute_and_isolated() -> None:
    command = server_command(Path("lab"))
    assert Path(command[0]).is_absolute() and command[1] == "-I"
    assert Path(command[command.index("--lab") + 1]).is_absolute()


def test_the_printed_line_for_claude_is_the_command_a_shell_would_run(tmp_path: Path) -> None:
    text = connect("claude", LAB, home=tmp_path)
    line = next(line for line in text.splitlines() if line.startswith("  claude mcp add") and "--transport" not in line)
    assert shlex.split(line)[shlex.split(line).index("--") + 1 :] == server_command(LAB)
    assert "mcp.token" in text and not list(tmp_path.iterdir()), "printing writes nothing"


def test_an_unknown_client_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="codex"):
        connect("codexx", LAB)


def test_codex_is_merged_once_and_parses(tmp_path: Path) -> None:
    path = tmp_path / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text('model = "o5"\n[mcp_servers.other]\ncommand = "x"\n')
    assert "Added" in connect("codex", LAB, write=True, home=tmp_path)
    assert "already" in connect("codex", LAB, write=True, home=tmp_path)
    parsed = tomllib.loads(path.read_text())
    assert parsed["model"] == "o5" and parsed["mcp_servers"]["other"]["command"] == "x"
    assert [parsed["mcp_servers"][NAME]["command"], *parsed["mcp_servers"][NAME]["args"]] == server_command(LAB)
    with pytest.raises(BadValue, match="another entry"):
        connect("codex", Path("/another"), write=True, home=tmp_path)


@pytest.mark.parametrize(
    ("client", "where", "key"), [("cursor", "home/.cursor/mcp.json", "mcpServers"), ("vscode", "proj/.vscode/mcp.json", "servers")]
)
def test_json_clients_are_merged_once(tmp_path: Path, client: str, where: str, key: str) -> None:
    home, folder, path = tmp_path / "home", tmp_path / "proj", tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({key: {"other": {"command": "x"}}, "more": 1}))
    connect(client, LAB, write=True, home=home, folder=folder)
    assert "already" in connect(client, LAB, write=True, home=home, folder=folder)
    found = json.loads(path.read_text())
    assert found["more"] == 1 and found[key]["other"] == {"command": "x"}
    assert [found[key][NAME]["command"], *found[key][NAME]["args"]] == server_command(LAB)
    with pytest.raises(BadValue, match="another server"):
        connect(client, Path("/another"), write=True, home=home, folder=folder)


def test_a_file_that_is_not_json_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / ".cursor" / "mcp.json"
    path.parent.mkdir()
    path.write_text("{ // a comment\n}")
    with pytest.raises(BadValue, match="not plain JSON"):
        connect("cursor", LAB, write=True, home=tmp_path)
    assert path.read_text() == "{ // a comment\n}"


def test_claude_gets_its_own_command_and_the_skill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    fake = tools / "claude"
    fake.write_text(
        f'#!{sys.executable}\nimport sys, json, os\njson.dump(sys.argv[1:], open(os.environ["HOME"] + "/argv", "w"))\nprint("Added")\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    told = connect("claude", LAB, write=True, home=tmp_path)
    assert "Added" in told and (tmp_path / ".claude/skills/overnight/SKILL.md").read_text() == SKILL
    arguments = json.loads((tmp_path / "argv").read_text())
    assert arguments[arguments.index("--") + 1 :] == server_command(LAB)
    (tmp_path / ".claude/skills/overnight/SKILL.md").write_text("mine")
    assert "left as it is" in connect("claude", LAB, write=True, home=tmp_path)
    (tmp_path / "argv").unlink()
    command, *rest = server_command(LAB)
    (tmp_path / ".claude.json").write_text(json.dumps({"mcpServers": {NAME: {"command": command, "args": rest}}}))
    assert "already" in connect("claude", LAB, write=True, home=tmp_path) and not (tmp_path / "argv").exists()
    connect("claude", Path("/another"), write=True, home=tmp_path)
    assert (tmp_path / "argv").exists(), "another lab's entry is for Claude's own command to refuse"


def test_a_missing_client_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OvernightError, match="not on the PATH"):
        connect("claude", LAB, write=True, home=tmp_path)


def test_the_skill_names_only_tools_that_exist() -> None:
    served = connecting.__file__.replace("runner/connect.py", "mcp_server/tools.py")
    known = set(re.findall(r"LabTool\.make\((\w+)", Path(served).read_text()))
    program = Path(connecting.__file__).parent.parent / "program.md"
    for text in (SKILL, program.read_text()):
        for name in re.findall(r"`([a-z]+_[a-z_]+)(?=[(`])", text):
            assert name in known | {"start_research", "val_bpb"}, name


def test_the_repositorys_own_mcp_json_starts_the_command() -> None:
    root = Path(connecting.__file__).parent.parent
    entry = json.loads((root / ".mcp.json").read_text())["mcpServers"][NAME]
    command = root / entry["command"]
    if not command.exists():
        pytest.skip(f"{command} is made by `make`; this checkout has another environment")
    done = subprocess.run([command, *entry["args"], "--help"], cwd=root, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0 and "MCP" in done.stdout


def test_a_labs_path_is_written_down_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plain = str(tmp_path / "lab")
    for named in ("lab", "./lab/", "~/lab", f"{tmp_path}//lab/", "sub/../lab"):
        assert connecting.server_command(Path(named))[-2] == plain, named
        assert plain in connect("cursor", Path(named), home=tmp_path), named
