"""`overnight hosts setup` on the host: a venv, the trainer's packages, the trainer's files, its data. Runs under the supervisor, so a
lost link does not stop it, and may be repeated: what is done already is found done.

    python -I -c '…preparing.main()' plan.json      in a folder that holds the trainer's files in files/

Plan: {workdir, python or null, requirements, torch, index_url or null, data_command or null, preflight: {gpu, lock_dir} or null}. Prints
`STEP n/m words` lines. Writes
only below workdir.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Optional

from . import locks, procs

STEPS = 5
PREFLIGHT_LIMIT_S = 900


class StepError(Exception):
    """Raised when a step failed; the text is the sentence people see."""


def say(number: int, words: str) -> None:
    """One line of progress."""
    print("STEP %d/%d %s" % (number, STEPS, words), flush=True)


def run(command: List[str], why: str, **more: Any) -> None:
    """A command whose output goes to the log; raises StepError with what it is for."""
    print("+ " + " ".join(command), flush=True)
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, **more).returncode
    except OSError as problem:
        raise StepError("%s failed: %s" % (why, problem)) from problem
    if code:
        raise StepError("%s failed (%s ended with %d); the lines above say why" % (why, os.path.basename(command[0]), code))


def make_venv(workdir: str) -> str:
    """The venv's interpreter, made when absent."""
    venv = os.path.join(workdir, "venv")
    python = os.path.join(venv, "bin", "python")
    if os.path.exists(python) and works(python, "import pip"):
        return python
    uv = shutil.which("uv")
    if uv:
        run([uv, "venv", "--seed", "--python", sys.executable, venv], "making the venv")
    else:
        run([sys.executable, "-m", "venv", "--clear", venv], "making the venv (on Debian it needs the package python3-venv)")
    return python


def works(python: str, code: str) -> bool:
    """Whether a line of Python runs there."""
    done = subprocess.run(
        [python, "-I", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def install(python: str, plan: Dict[str, Any]) -> None:
    """The torch build that suits the driver, then what else the trainer needs."""
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    if plan.get("torch"):
        index = ["--index-url", plan["index_url"]] if plan.get("index_url") else []
        run([*pip, *index, plan["torch"]], "installing %s" % plan["torch"])
    if plan.get("requirements"):
        run([*pip, *plan["requirements"]], "installing the trainer's packages")


def copy_trainer(source: str, target: str) -> None:
    """Put the trainer's files in place; large ones are links into shared/ and stay links."""
    stage = target + ".new"
    shutil.rmtree(stage, ignore_errors=True)
    shutil.copytree(source, stage, symlinks=True)
    old = target + ".old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.isdir(target):
        os.rename(target, old)
    os.rename(stage, target)
    shutil.rmtree(old, ignore_errors=True)


def prepare_data(python: str, plan: Dict[str, Any], trainer: str) -> None:
    """Run the trainer's data command."""
    workdir = plan["workdir"]
    env = dict(os.environ, OVERNIGHT_DATA=os.path.join(workdir, "data"), PYTHONUNBUFFERED="1")
    os.makedirs(env["OVERNIGHT_DATA"], mode=0o700, exist_ok=True)
    command = [word.replace("{python}", python) for word in plan["data_command"]]
    run(command, "preparing the data", cwd=trainer, env=env)


def preflight(python: str, plan: Dict[str, Any], trainer: str) -> None:
    """Let the trainer measure one GPU, under that GPU's lock. Not having it is a pity and no failure."""
    wish = plan["preflight"]
    env = dict(os.environ, OVERNIGHT_DATA=os.path.join(plan["workdir"], "data"), CUDA_VISIBLE_DEVICES=wish["gpu"], PYTHONUNBUFFERED="1")
    try:
        lock = locks.GpuLocks(wish["lock_dir"], [wish["gpu"]])
        if not lock.try_take():
            print("NOTE %s is busy, so it was not measured; run the setup again when it is free" % wish["gpu"], flush=True)
            return
        lock.write_notes(**locks.who("setup", "preflight"))
        run([python, "preflight.py", "--quick"], "measuring the GPU", cwd=trainer, env=env, timeout=PREFLIGHT_LIMIT_S)
        lock.write_notes(boot_id=procs.boot_id())
        lock.release()
    except (StepError, OSError, subprocess.TimeoutExpired) as problem:
        print("NOTE %s" % problem, flush=True)


def main(argv: Optional[List[str]] = None) -> int:
    """All steps; 0 when the host is ready."""
    words = sys.argv[1:] if argv is None else argv
    with open(words[0], encoding="utf-8") as file:
        plan = json.load(file)
    workdir = plan["workdir"]
    trainer = os.path.join(workdir, "trainer")
    only_one = os.open(os.path.join(workdir, "setup.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(only_one, fcntl.LOCK_EX)  # two labs may set up the same workdir: one after the other
    try:
        if plan.get("python"):
            python = plan["python"]
            say(1, "using %s; nothing is installed into it" % python)
        else:
            say(1, "making the venv %s/venv" % workdir)
            python = make_venv(workdir)
            say(2, "installing %s" % ", ".join(filter(None, [plan.get("torch"), *plan.get("requirements", [])])))
            install(python, plan)
        say(3, "copying the trainer")
        copy_trainer(os.path.abspath("files"), trainer)
        if plan.get("data_command"):
            say(4, "preparing data and tokenizer in %s/data" % workdir)
            prepare_data(python, plan, trainer)
        if plan.get("preflight"):
            say(5, "measuring %s" % plan["preflight"]["gpu"])
            preflight(python, plan, trainer)
        say(STEPS, "ready")
    except (StepError, OSError) as problem:
        print("FAILED %s" % problem, flush=True)
        return 1
    return 0
