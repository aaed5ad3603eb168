"""Prints, byte for byte, what upstream's training script prints; needs no GPU and no torch.

    python upstream_bytes.py            the whole run at once; constants below are what a test overrides, as in a real script

Progress lines are led by a carriage return and never end in a newline; FAIL is glued to the last of them.
"""

import os
import sys
import time

TOTAL_BATCH_SIZE = 2**19
MATRIX_LR = 0.04
DEPTH = 8
SEED = 42
STEPS = 40
STEP_SECONDS = 0.0  # real seconds a step takes
BUDGET = 300  # what the printed shares and remaining seconds refer to
VAL_BPB = 0.997900
NAN_FROM = None  # step from which the loss is NaN
FAIL_AT = None  # step at which upstream's fast-fail exits
FOREVER = False  # go on printing the last step
GATE = None  # a file without which step 20 does not end


def preamble() -> str:
    config = {
        "sequence_len": 2048,
        "vocab_size": 8192,
        "n_layer": DEPTH,
        "n_head": 4,
        "n_kv_head": 4,
        "n_embd": 512,
        "window_pattern": "SSSL",
    }
    rows = {
        "wte": 4194304,
        "value_embeds": 16777216,
        "lm_head": 4194304,
        "transformer_matrices": 25165824,
        "scalars": 16,
        "total": 50331664,
    }
    return (
        f"Vocab size: 8,192\nModel config: {config}\nParameter counts:\n"
        + "".join(f"  {key:24s}: {value:,}\n" for key, value in rows.items())
        + f"Estimated FLOPs per token: {2.3456e8:e}\nTime budget: {BUDGET}s\nGradient accumulation steps: 2\n"
    )


def loss_at(step: int) -> float:
    return float("nan") if NAN_FROM is not None and step >= NAN_FROM else 9.0 / (1 + 0.1 * step) + 2.9


def progress(step: int) -> str:
    done = min(step / STEPS, 1.0)
    return (
        f"\rstep {step:05d} ({100 * done:.1f}%) | loss: {loss_at(step):.6f} | lrm: {1.0:.2f} | dt: {312:.0f}ms | "
        f"tok/sec: {1680000:,} | mfu: {39.8:.1f}% | epoch: 1 | remaining: {BUDGET * (1 - done):.0f}s    "
    )


def summary() -> str:
    rows = (
        ("val_bpb", f"{VAL_BPB:.6f}"),
        ("training_seconds", f"{BUDGET + 0.1:.1f}"),
        ("total_seconds", f"{BUDGET + 25.9:.1f}"),
        ("peak_vram_mb", f"{45060.2:.1f}"),
        ("mfu_percent", f"{39.8:.2f}"),
        ("total_tokens_M", f"{499.6:.1f}"),
        ("num_steps", f"{953}"),
        ("num_params_M", f"{50.3:.1f}"),
        ("depth", f"{DEPTH}"),
    )
    return "\n---\n" + "".join(f"{key + ':':<17} {value}\n" for key, value in rows)


def main() -> None:
    sys.stdout.write(preamble())
    step = 0
    while step < STEPS or FOREVER:
        sys.stdout.write(progress(min(step, STEPS)))
        sys.stdout.flush()
        if FAIL_AT is not None and step >= FAIL_AT:
            print("FAIL")
            raise SystemExit(1)
        time.sleep(STEP_SECONDS)
        while GATE and step == 20 and not os.path.exists(GATE):
            time.sleep(0.05)
        step += 1
    sys.stdout.write(summary())


if __name__ == "__main__":
    main()
