"""What travels to hosts must run there: Python 3.8 syntax, the standard library, and nothing of ours from elsewhere."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner import onhost

FILES = sorted(Path(onhost.__file__).parent.glob("*.py"))
NEWER = {"removeprefix", "removesuffix", "waitstatus_to_exitcode", "pidfd_open", "to_thread", "pairwise", "is_relative_to", "readlink"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_for_hosts_are_python_38_and_import_nothing_of_ours(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                assert name.name.split(".")[0] in {*sys.stdlib_module_names, "pynvml"}, name.name
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert str(node.module).split(".")[0] in sys.stdlib_module_names, node.module
        if isinstance(node, ast.Attribute):
            assert node.attr not in NEWER, f"{node.attr} is newer than Python 3.8"


def find_python(version: str) -> str | None:
    """An interpreter of that version which really starts (a pyenv shim may not)."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], capture_output=True, timeout=15, check=False).returncode == 0:
            return str(candidate)
    return None


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10"])
def test_a_supervisor_runs_on_older_pythons_where_there_are_any(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no python{version} on this machine")
    run_dir = tmp_path / "r1"
    (run_dir / "work").mkdir(parents=True)
    spec = {"v": 1, "run_id": "r1", "argv": ["/bin/sh", "-c", "echo hello"], "env": {}, "gpus": ["GPU-a"], "lock_dir": str(tmp_path / "l")}
    (run_dir / "spec.json").write_text(json.dumps(spec))
    code = f"import sys; sys.path.insert(0, {str(FILES[0].parents[1])!r}); from onhost import supervisor as m; sys.exit(m.main())"
    done = subprocess.run([python, "-I", "-c", code, str(run_dir), "--foreground"], capture_output=True, timeout=15, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert (run_dir / "out.log").read_text() == "hello\n"
