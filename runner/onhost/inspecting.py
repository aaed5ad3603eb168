"""What `overnight hosts check` asks of a machine: interpreters, torch, data, disk, lock holders.

Reads only; slow questions have a time limit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from typing import Any, Dict, List, Optional

from . import locks, rundirs

TORCH_LIMIT_S = 60.0
PREFLIGHT_MOST = 1 << 18  # a larger file is not preflight's
PREFLIGHT_KEYS = ("gpu_name", "driver", "torch", "matmul_flops", "peak_flops", "quick")
CHOICES = ("ATTENTION", "COMPILE", "DEVICE_TOKENS")
PROBE = """
import json, sys
facts = {"python": "%d.%d.%d" % sys.version_info[:3]}
try:
    import importlib, os, pkgutil, site
    user = site.getusersitepackages()
    found = {m.name for m in pkgutil.iter_modules()} | {m.name for m in pkgutil.iter_modules([user] if os.path.isdir(user) else [])}
    for name in [n for n in found if n.startswith("__editable__")]:
        found.update(k.split(".")[0] for k in getattr(importlib.import_module(name), "MAPPING", {}))
    facts["modules"] = sorted(found - set(getattr(sys, "stdlib_module_names", ())))[:5000]
except Exception:
    pass  # then nothing is said about a script's imports
try:
    import torch
    facts["torch"] = torch.__version__
    facts["torch_cuda"] = torch.version.cuda
    facts["cuda_available"] = torch.cuda.is_available()
    if facts["cuda_available"]:
        facts["capability"] = ["%d.%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        facts["arch_list"] = torch.cuda.get_arch_list()
        facts["bf16"] = torch.cuda.is_bf16_supported()
        q = torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
        from torch.nn.attention import SDPBackend, sdpa_kernel
        works = []
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
                torch.cuda.synchronize()
                works.append(name.replace("_ATTENTION", "").lower())
            except (RuntimeError, AttributeError):
                pass
        facts["attention"] = works
except Exception as problem:
    facts["torch_error"] = "%s: %s" % (type(problem).__name__, str(problem).strip().split("\\n")[-1][:300])
print(json.dumps(facts))
"""


def venv_python(workdir: str) -> Optional[str]:
    """The interpreter that `hosts setup` made, when it did."""
    path = os.path.join(workdir, "venv", "bin", "python")
    return path if os.access(path, os.X_OK) else None


def driver_version() -> Optional[str]:
    """The NVIDIA driver's version as the kernel tells it."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def inspect(workdir: str, args: Dict[str, Any]) -> Dict[str, Any]:
    """Everything at once: {python, torch…, data_files, disk_free_mib, lock holders of the given GPUs, now}."""
    python = str(args.get("python") or "")
    facts: Dict[str, Any] = {
        "now": time.time(),
        "driver": driver_version(),
        "disk_free_mib": rundirs.disk_free_mib(workdir),
        "tools": {name: shutil.which(name) for name in ("git", "gcc", "nvidia-smi", "uv")},
        "data_files": data_files(os.path.join(workdir, "data") if not args.get("data_dir") else str(args["data_dir"])),
        "lock_dir": str(args.get("lock_dir") or locks.default_dir()),
        "holders": {},
    }
    for uuid in args.get("gpus") or []:
        facts["holders"][uuid] = locks.holder(facts["lock_dir"], uuid)
    facts["run_python"] = probe(python, float(args.get("probe_limit_s") or TORCH_LIMIT_S)) if python else None
    return facts


def probe(python: str, limit_s: float) -> Dict[str, Any]:
    """What the interpreter of the runs can do; {"error": words} when it cannot even start."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError:
        return {"error": "%s does not exist" % python}
    except subprocess.TimeoutExpired:
        return {"error": "%s did not answer within %g s" % (python, limit_s)}
    except OSError as problem:
        return {"error": "%s: %s" % (python, problem.strerror)}
    try:
        return dict(json.loads(done.stdout.decode().strip().split("\n")[-1]))
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1][:300]
        return {"error": "%s ended with %d: %s" % (python, done.returncode, said)}


def preflights(data_dir: str) -> List[Dict[str, Any]]:
    """What the trainer's preflight measured here, the newest of each GPU model, driver and torch, newest first; [] when it never ran."""
    try:
        names = [name for name in os.listdir(data_dir) if name.startswith("preflight-") and name.endswith(".json")]
    except OSError:
        return []
    found = []
    for name in names:
        path = os.path.join(data_dir, name)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(PREFLIGHT_MOST + 1)
            one = json.loads(text, parse_constant=lambda _: None)
            choices = {key: one["choices"].get(key) for key in CHOICES if isinstance(one["choices"].get(key), (str, int))}
            kept = {key: one.get(key) for key in PREFLIGHT_KEYS if isinstance(one.get(key), (str, int, float))}
            found.append(dict(kept, choices=choices, at=round(os.path.getmtime(path))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # gone meanwhile, or not one of ours
    return sorted(found, key=lambda one: float(one["at"]), reverse=True)[:16]


def data_files(folder: str) -> Optional[List[str]]:
    """Names in the data folder (at most 50); None when there is none."""
    try:
        return sorted(os.listdir(folder))[:50]
    except OSError:
        return None
