"""Measures what this GPU really does, and writes down what train.py should use on it: attention backend, compile mode, device batch. Fixed.

    python preflight.py [--quick]      a few minutes, one with --quick; prints one JSON object and keeps it in the data folder for train.py
    python preflight.py --again        although this GPU was measured under this driver and torch before

Every choice is measured: attention by the kernel that really ran (switches can be ignored silently), compile modes and batch by tokens a
second. The matrix rate is what the control room holds the first runs on a machine against.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import train
from attention import NAMES, attend, prepare, why_not
from corpora import DataError, find_corpus
from device import NoBfloat16, choose_device, facts, first_line, preflight_file
from peaks import peak_flops
from prepare import LARGE, data_root
from settings import Plan

ATTENTION_SHAPE = (16, 4, 2048, 128)  # batch, heads, tokens, head dimension: a slice of the default model
MATRIX_SIZES = (4096, 8192)
MIN_GAIN = 1.03  # another backend or batch must be this much faster than the plain one to be chosen
LEAST_GAIN = 1.01  # of a doubled batch: two in a row below it, or one that is slower, and larger ones are not tried
MODE_TOKENS, MOST_TOKENS = 2**15, 2**18  # of one pass: what compile modes are compared at, and the largest that is tried
NEAR_MODE = 0.9  # a compile mode of this share of the best is tried with the attention that is chosen, too
SLOW_MODE = 0.6  # a compile mode below this share of the best is refused by name


@dataclass
class Measured:
    """One thing tried: its rate, or why it did not work."""

    rate: float | None
    unit: str
    why: str | None = None
    kernel: str | None = None


def milliseconds(work: Callable[[], Any], seconds: float) -> float:
    """Median time of `work` on the GPU, warmed up, over about `seconds`."""
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def matrix_rate(seconds: float) -> float:
    """FLOP/s of the fastest square bfloat16 product on random numbers (on zeros a GPU draws less power and clocks higher)."""
    best = 0.0
    for size in MATRIX_SIZES:
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        best = max(best, 2 * size**3 / (milliseconds(lambda a=a, b=b: a @ b, seconds) / 1e3))
    return best


def longest_kernel(work: Callable[[], Any]) -> str | None:
    """Name of the GPU kernel that took most of the time of `work`: which one was meant is another matter."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            torch.cuda.synchronize()
        events = sorted(seen.key_averages(), key=lambda event: event.self_device_time_total, reverse=True)
    except RuntimeError:  # a container may forbid the counters: the rate stands without the name
        return None
    return events[0].key[:120] if events else None


def attention_backends(seconds: float) -> dict[str, Measured]:
    """Forward and backward of causal attention by everything that ATTENTION can name, compiled and called as in the model."""
    batch, heads, length, dim = ATTENTION_SHAPE
    device = torch.device("cuda", 0)
    flops = 3.5 * 2 * batch * heads * length * length * dim  # 2 products forward, 5 backward, half of the square
    results: dict[str, Measured] = {}
    for name in NAMES:
        say(f"attention: {name}")
        try:
            if why := why_not(name, dim, device):
                results[name] = Measured(None, "FLOP/s", why=why)
                continue
            q, k, v = (torch.randn(batch, length, heads, dim, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            torch._dynamo.reset()
            prepare(name, length, device)
            compiled = torch.compile(attend, dynamic=False)

            def work(attend: Any = compiled, q: Any = q, k: Any = k, v: Any = v, name: str = name) -> None:
                attend(q, k, v, name).sum().backward()

            rate = flops / (milliseconds(work, seconds) / 1e3)
            results[name] = Measured(rate, "FLOP/s", kernel=longest_kernel(work))
        except Exception as error:  # noqa: BLE001 - a trial of what may not work here: whatever happens is its result
            results[name] = Measured(None, "FLOP/s", why=first_line(error))
    return results


@dataclass
class Fit:
    """The default model on this GPU under one compile mode and device batch."""

    tokens_per_s: float | None
    first_step_s: float | None
    peak_gib: float | None
    why: str | None = None


def try_training(mode: str, attention: str, device_tokens: int, seconds: float) -> Fit:
    """Train the default model on random tokens for about `seconds` after its first step."""
    device = torch.device("cuda", 0)
    preset, rows = train.PRESETS["cuda"], device_tokens // LARGE.seq_len
    depth, width, values = preset["DEPTH"], preset["DEPTH"] * train.ASPECT_RATIO, train.VALUE_EMBEDDINGS
    config = train.GPTConfig(LARGE.seq_len, LARGE.vocab_size, depth, width // preset["HEAD_DIM"], width, values, train.SOFTCAP)
    loss = train.LOSS or preset["LOSS"]
    plan = Plan(device, depth, width, config.n_head, LARGE.seq_len, device_tokens, rows, mode, attention, loss)
    say(f"compile mode {mode}, {device_tokens} tokens a pass")
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        with device:
            model = train.GPT(config, attention, torch.bfloat16)
            model.init_weights()
            tokens = torch.randint(0, config.vocab_size, (rows, LARGE.seq_len + 1))
        losses, optimizer = train.Losses(model, plan), train.MuonAdamW(model, compiled=mode in ("optimizer", "both"))

        def step() -> None:
            losses.mean(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step(1.0, 0.0)
            model.zero_grad(set_to_none=True)

        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        ms = milliseconds(step, seconds)
        return Fit(device_tokens / ms * 1e3, first, torch.cuda.max_memory_allocated() / 2**30)
    except torch.OutOfMemoryError:
        return Fit(None, None, None, why=f"{device_tokens} tokens at once do not fit in memory")
    except Exception as error:  # noqa: BLE001 - a compile mode that does not work here is a result
        return Fit(None, None, None, why=first_line(error))


def compile_modes(attention: str, seconds: float) -> dict[str, Fit]:
    return {mode: try_training(mode, attention, MODE_TOKENS, seconds) for mode in ("none", "optimizer", "model", "both")}


def device_batches(mode: str, attention: str, seconds: float) -> dict[int, Fit]:
    """Tokens a second from 8 rows up to the cliff; memory is the bound, and speed decides."""
    results: dict[int, Fit] = {}
    tokens, best_speed, flat = 8 * LARGE.seq_len, 0.0, 0
    while tokens <= MOST_TOKENS and flat < 2:
        results[tokens] = try_training(mode, attention, tokens, seconds)
        speed = results[tokens].tokens_per_s
        if speed is None:  # out of memory, or a kernel that cannot take so much
            break
        flat = 0 if speed > LEAST_GAIN * best_speed else 2 if speed < best_speed / LEAST_GAIN else flat + 1
        best_speed = max(best_speed, speed)
        tokens *= 2
    return results


def best(found: dict[Any, float], plain: Any) -> Any:
    """The fastest choice; the plain one unless another is clearly faster."""
    top = max(found, key=lambda name: found[name])
    return top if plain not in found or found[top] > MIN_GAIN * found[plain] else plain


def choose(attention: dict[str, Measured], modes: dict[str, Fit], batches: dict[int, Fit]) -> tuple[dict[str, Any], list[str]]:
    """The defaults for train.py, and in words what was refused and why."""
    rates = {name: m.rate for name, m in attention.items() if m.rate and m.why is None}
    speeds = {mode: fit.tokens_per_s for mode, fit in modes.items() if fit.tokens_per_s}
    fits = {tokens: fit.tokens_per_s for tokens, fit in batches.items() if fit.tokens_per_s}
    choices: dict[str, Any] = {"ATTENTION": best(rates, "default") if rates else None, "COMPILE": best(speeds, "both") if speeds else None}
    # the smallest batch that is as fast as the fastest: past the cliff larger is slower, and memory is worth having
    choices["DEVICE_TOKENS"] = min((t for t in fits if fits[t] * MIN_GAIN > max(fits.values())), default=None)
    refused = [f"compile mode {mode} runs, but at {speed:,.0f} of {max(speeds.values()):,.0f} tokens/s" for mode, speed in speeds.items()
               if speed < SLOW_MODE * max(speeds.values())]  # fmt: skip
    refused += [f"compile mode {mode} does not run: {fit.why}" for mode, fit in modes.items() if fit.why]
    refused += [f"attention by {name} {'is not taken' if m.rate else 'does not run'}: {m.why}"
                for name, m in attention.items() if m.why and not m.why.endswith("is not installed")]  # fmt: skip
    return choices, refused


Pairs = dict[tuple[str, str], Fit]  # (attention, compile mode) → the whole model with both


def attention_of_model(found: dict[str, Measured], mode: str, plain: float, seconds: float, pairs: Pairs | None = None) -> str:
    """Hold what is fastest alone against the default in the whole model, `plain` tokens/s: a package cuts a compiled model in pieces.

    What was tried is added to `pairs`.
    """
    while (name := choose(found, {}, {})[0]["ATTENTION"] or "default") != "default":
        fit = try_training(mode, name, MODE_TOKENS, seconds)
        if pairs is not None:
            pairs[name, mode] = fit
        if fit.tokens_per_s is None:
            found[name].why = f"it runs alone, but not in the model: {fit.why}"
        elif fit.tokens_per_s < plain:
            found[name].why = f"it is faster alone, but the model makes {fit.tokens_per_s:,.0f} tokens/s with it, {plain:,.0f} without"
        else:
            break
    return name


def mode_beside(name: str, mode: str, working: dict[str, float], pairs: Pairs, seconds: float) -> str:
    """The compile mode for an attention that is not the default one, with which the modes were compared: those nearly as fast are tried."""
    for other, speed in working.items():
        if other != mode and name != "default" and speed > NEAR_MODE * max(working.values()):
            pairs[name, other] = try_training(other, name, MODE_TOKENS, seconds)
    speeds = {m: fit.tokens_per_s for (n, m), fit in pairs.items() if n == name and fit.tokens_per_s}
    return str(best(speeds, mode)) if speeds else mode


def measure(quick: bool) -> dict[str, Any]:
    """Everything, as the object that is printed and kept."""
    device = choose_device()
    known = facts(device)
    if device.type == "cpu":
        return {"v": 1, "quick": quick, **known, "choices": {}, "refused": [], "note": "no GPU: train.py uses its CPU preset"}
    seconds = 0.2 if quick else 1.0
    say("matrix products")
    rate = matrix_rate(seconds)
    attention = attention_backends(seconds)
    modes = {} if quick else compile_modes("default", seconds)
    working = {mode: fit.tokens_per_s for mode, fit in modes.items() if fit.tokens_per_s}
    batches: dict[int, Fit] = {}
    pairs: Pairs = {}
    mode = best(working, "both") if working else None
    if mode is not None:
        name = attention_of_model(attention, mode, working[mode], seconds, pairs)
        mode = mode_beside(name, mode, working, pairs, seconds)
        batches = device_batches(mode, name, seconds)
    choices, refused = choose(attention, modes, batches)
    choices["COMPILE"] = mode
    peak = peak_flops(str(known["gpu_name"]))
    return {
        "v": 1, "quick": quick, **known, "matmul_flops": rate, "peak_flops": peak,
        "matrix_share_of_peak": None if peak is None else rate / peak,
        "attention": {name: vars(m) for name, m in attention.items()},
        "compile": {mode: vars(fit) for mode, fit in modes.items()},
        "pairs": {f"{name}, {mode}": vars(fit) for (name, mode), fit in pairs.items()},
        "device_batch": {str(t): vars(fit) for t, fit in batches.items()},
        "choices": choices, "refused": refused, "total_memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30,
    }  # fmt: skip


def kept(path: Path, quick: bool) -> dict[str, Any] | None:
    """An earlier result that serves: a whole one always, a quick one where only that was asked for."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        serves = isinstance(found["choices"], dict) and (quick or not found.get("quick", True))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if serves else None


def say(what: str) -> None:
    """What is being measured: a cold compilation takes half a minute and must not look like a hang."""
    print(f"measuring {what}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure this GPU and keep the best settings for train.py.")
    parser.add_argument("--quick", action="store_true", help="matrix rate and attention only, a fifth of the time each")
    parser.add_argument("--again", action="store_true", help="measure although a result for this GPU, driver and torch is kept")
    parser.add_argument("--data", type=Path, help="data folder (default: OVERNIGHT_DATA, else .data beside the corpus)")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    try:
        named = os.environ.get("OVERNIGHT_DATA")
        folder = arguments.data or (Path(named).expanduser() if named else data_root(find_corpus()))
        folder.mkdir(parents=True, exist_ok=True)
        path = preflight_file(folder, choose_device())
        found = None if arguments.again else kept(path, arguments.quick)
        if found is None:
            found = measure(arguments.quick)
            path.with_suffix(".part").write_text(json.dumps(found, indent=1), encoding="utf-8")
            os.replace(path.with_suffix(".part"), path)
    except torch.OutOfMemoryError:
        print("error: the GPU has no memory free for the measurement; end what else is on it", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write {error.filename}: {error.strerror}; name a writable folder with --data", file=sys.stderr)
        return 1
    except (DataError, NoBfloat16) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**found, "kept_in": str(path)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
