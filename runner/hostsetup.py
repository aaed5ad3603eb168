"""`overnight hosts setup NAME`: the trainer, a venv with the torch build the host's driver can use, the data, and one measured GPU, all
below the host's workdir.

The steps are onhost/preparing.py, started like a run, so setting up goes on when the link or the daemon does not; asked again, it is
taken up.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import onhost
from runner.engines import staging
from runner.engines.local import LocalEngine
from runner.engines.ssh import SshEngine
from runner.errors import HostError, RequestError
from runner.launch import IMPORTS_TORCH
from runner.materialise import materialise
from runner.text import clean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.engines.base import Engine
    from runner.policy import HostPolicy, TrainerPolicy

LAB = "setup"
LIMIT_S = 3600.0
CONNECT_S = 25.0
LAST_BYTES = 64 << 10  # of what preparing data prints
# The oldest driver branch each CUDA major version runs on (NVIDIA, "CUDA Compatibility", minor version compatibility).
DRIVER_OF_CUDA13, DRIVER_OF_CUDA12 = 580, 525


async def setup(host: HostPolicy, engine: Engine | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Take the steps that make a host ready; {host, python, steps, notes, log}. Raises HostError with the step that failed. Whether the
    host is fit then is hostcare.check's to say.
    """
    if isinstance(engine, LocalEngine):
        return await prepare_here(host, engine, progress)
    if not isinstance(engine, SshEngine):
        raise RequestError(f"{host.name} is of kind {host.kind}, which needs no setup.", next_step="")
    progress("connecting")
    await connected(host, engine)
    for _ in range(100):  # the driver and the cards decide the plan: hear of them first
        if engine.telemetry.heard:
            break
        await asyncio.sleep(0.1)
    facts = await engine.inspect(python=None)
    sample = next(iter(engine.telemetry.samples()), {})
    facts["driver"] = sample.get("driver") or facts["driver"]  # a container may hide /proc/driver
    facts["gpu"] = sample.get("uuid")
    plan = make_plan(host, engine.trainer, facts, engine.info())
    for attempt in range(3):
        try:
            run_id = await begin(engine, plan)
            break
        except HostError as problem:  # cut off in the middle: begun or not, beginning again is harmless
            if attempt == 2:
                raise
            progress(f"again, after: {problem.message}")
            await connected(host, engine)
    return await follow(host, engine, run_id, progress)


async def prepare_here(host: HostPolicy, engine: LocalEngine, progress: Callable[[str], None]) -> dict[str, Any]:
    """This machine: the trainer and its python are in place already, so only the data is prepared, in the trainer's own folder."""
    trainer, info = engine.lab.policy().trainer, engine.info()
    python, said = str(info["python"]), b""
    done = {"host": host.name, "python": python, "notes": [], "log": []}
    if not trainer.data_command:
        return {**done, "steps": ["nothing to do: hosts.toml names no data_command"]}
    step = f"preparing data and tokenizer in {info['data_dir']}"
    progress(step)
    env = {**info["environment"], "OVERNIGHT_DATA": str(info["data_dir"]), "PYTHONUNBUFFERED": "1", **host.env}
    words = [word.replace("{python}", python) for word in trainer.data_command]
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    try:
        process = await asyncio.create_subprocess_exec(*words, cwd=trainer.folder, env=env, **pipes)
    except OSError as problem:
        raise HostError(f"Preparing the data failed: {words[0]}: {problem.strerror}.", next_step="See [trainer] data_command.") from problem
    assert process.stdout
    try:
        while piece := await process.stdout.read(1 << 16):
            said = (said + piece)[-LAST_BYTES:]
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    log = [line for line in clean(said.decode("utf-8", "replace")).splitlines() if line.strip()][-40:]
    if code:
        last = "\n".join(log[-12:])
        raise HostError(f"Preparing the data failed ({' '.join(words)} ended with {code}).", next_step=f"The last lines:\n{last}")
    return {**done, "steps": [step], "log": log}


async def connected(host: HostPolicy, engine: SshEngine) -> None:
    """Wait for the connection; raises the reason when it does not come."""
    engine.link.retry_now()
    deadline = asyncio.get_running_loop().time() + CONNECT_S
    while not engine.link.up:
        if asyncio.get_running_loop().time() > deadline:
            raise engine.link.error or HostError(f"{host.name} does not answer.")
        await asyncio.sleep(0.1)


def make_plan(host: HostPolicy, trainer: TrainerPolicy, facts: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """What preparing.py is to do on a host with that driver."""
    needs = requirements(trainer.folder)
    torch = next((need for need in needs if re.match(r"torch\b(?!-)", need)), None)
    build = torch_build(facts.get("driver"))
    index_url = f"{trainer.torch_index.rstrip('/')}/{build}" if trainer.torch_index and build != "default" else None
    if torch and build not in ("default", "cpu") and index_url is None and host.python is None:
        raise HostError(
            f"NVIDIA driver {facts.get('driver')} of {host.name} needs torch's {build} build, which pip's default index does not serve.",
            next_step="Name the index that has it ([trainer] torch_index), a python with torch ([[host]] python), or update the driver.",
        )
    measurable = facts.get("gpu") and (trainer.folder / "preflight.py").is_file()
    return {
        "workdir": info["workdir"],
        "python": host.python,
        "torch": torch,
        "torch_build": build,
        "index_url": index_url if torch else None,
        "requirements": [need for need in needs if need != torch],
        "data_command": trainer.data_command,
        "preflight": {"gpu": facts["gpu"], "lock_dir": info["lock_dir"]} if measurable else None,
    }


def torch_build(driver: str | None) -> str:
    """Which torch build suits a driver: `default` is what pip's index serves. Raises HostError for a driver too old for any."""
    if driver is None:
        return "cpu"
    branch = int(driver.split(".")[0])
    if branch >= DRIVER_OF_CUDA13:
        return "default"
    if branch >= DRIVER_OF_CUDA12:
        return "cu126"
    raise HostError(f"NVIDIA driver {driver} is too old for today's torch.", next_step=f"Install driver {DRIVER_OF_CUDA12} or later.")


def requirements(folder: Path) -> list[str]:
    """What a trainer needs: its pyproject's dependencies, its requirements.txt, or (where it says nothing and imports torch, as ours)
    Overnight's `trainer` extra.
    """
    project = folder / "pyproject.toml"
    if project.is_file():
        try:
            found = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("dependencies", [])
        except (OSError, tomllib.TOMLDecodeError) as problem:
            raise HostError(f"{project} cannot be read: {problem}.") from problem
        return [str(need) for need in found]
    listed = folder / "requirements.txt"
    if listed.is_file():
        lines = (line.split("#")[0].strip() for line in listed.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line and not line.startswith("-")]
    if not imports_torch(folder):
        return []
    try:
        needs = importlib.metadata.requires("overnight") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [need.split(";")[0].strip() for need in needs if re.search(r"extra == ['\"]trainer['\"]", need)]


def imports_torch(folder: Path) -> bool:
    """Whether a Python file of the trainer folder imports torch."""
    for path in sorted(folder.glob("*.py")):
        try:
            if IMPORTS_TORCH.search(path.read_text(encoding="utf-8", errors="replace")):
                return True
        except OSError:
            continue  # a link to nowhere: then it imports nothing
    return False


def needs_torch(folder: Path) -> bool:
    """Whether runs of a trainer need torch: its project says so, or one of its files imports it."""
    return any(re.match(r"torch\b(?!-)", need) for need in requirements(folder)) or imports_torch(folder)


async def begin(engine: SshEngine, plan: dict[str, Any]) -> str:
    """Start the steps on the host, or find the same ones still under way; the id they run under."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        await asyncio.to_thread(lay_out, engine, plan, stage)
        parcel = await asyncio.to_thread(staging.pack, stage, engine.hashes)
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode() + parcel.body).hexdigest()[:10]
        for attempt in range(1, 1000):
            run_id = f"setup-{digest}-{attempt}"
            state = await poll(engine, run_id)
            if state["phase"] not in ("ended", "refused", "lost", "absent"):
                return run_id
            if state["phase"] == "absent":
                break
        spec = {
            "v": 1,
            "run_id": run_id,
            "lab_id": LAB,
            "argv": command(engine),
            "cwd": "work",
            "env": {**engine.link.hello["environment"], **engine.host.env},
            "gpus": [],
            "lock_dir": engine.info()["lock_dir"],
            "time_limit_s": LIMIT_S,
            "grace_s": 10,
            "max_log_bytes": 16 << 20,
        }
        (stage / "spec.json").write_text(json.dumps(spec))
        parcel = await asyncio.to_thread(staging.pack, stage, engine.hashes)
        await engine.place(LAB, run_id, parcel)
    return run_id


def lay_out(engine: SshEngine, plan: dict[str, Any], stage: Path) -> None:
    """The folder that travels: the plan, and the trainer as a run would get it."""
    (stage / "work").mkdir()
    source = (engine.trainer.folder / engine.trainer.source).read_text(encoding="utf-8")
    materialise(engine.trainer, source, engine.budget_s, stage / "work" / "files")
    (stage / "work" / "plan.json").write_text(json.dumps(plan, sort_keys=True))


def command(engine: SshEngine) -> list[str]:
    """How preparing.py is started on the host."""
    home = engine.link.home
    code = f"import sys; sys.path.insert(0, {home!r}); from {onhost.__name__.rsplit('.', 1)[-1]} import preparing as m; sys.exit(m.main())"
    return [str(engine.link.hello["python"]), "-I", "-c", code, "plan.json"]


async def poll(engine: SshEngine, run_id: str) -> dict[str, Any]:
    """State of a setup."""
    value, _ = await engine.link.call("poll", lab=LAB, runs={run_id: [-1, -1]}, limit=0)
    return dict(value["runs"][run_id])


async def follow(host: HostPolicy, engine: SshEngine, run_id: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Show the steps as they come, through lost links, until the end."""
    log, out_s = b"", 0.0
    while True:
        try:
            state = await poll(engine, run_id)
            while piece := (await engine.link.call("read", lab=LAB, run=run_id, name="out.log", offset=len(log), limit=1 << 20))[1]:
                log += piece
            out_s = 0.0
        except HostError as problem:
            out_s += 1.0
            progress(f"out of contact, the setup goes on there: {problem.message}")
            if out_s > LIMIT_S:
                raise
            await asyncio.sleep(1.0)
            continue
        lines = log.decode("utf-8", "replace").splitlines()
        steps = [line for line in lines if line.startswith("STEP ")]
        if steps:
            progress(steps[-1][len("STEP ") :])
        if state["phase"] in ("ended", "refused", "lost"):
            break
        await asyncio.sleep(0.5)
    status = state.get("status") or {}
    failed = next((line[len("FAILED ") :] for line in lines if line.startswith("FAILED ")), None)
    if state["phase"] != "ended" or status.get("exit_code") != 0:
        last = "\n".join(line for line in lines[-12:] if not line.startswith("STEP "))
        why = failed or status.get("detail") or f"it ended with {status.get('exit_code') or status.get('reason') or state['phase']}"
        raise HostError(f"Setting up {host.name} failed: {why}.", next_step=f"Mend that and run it again. The last lines:\n{last}")
    await engine.refresh()
    notes = [line[len("NOTE ") :] for line in lines if line.startswith("NOTE ")]
    return {"host": host.name, "python": engine.run_python(), "steps": steps, "notes": notes, "log": lines[-40:]}
