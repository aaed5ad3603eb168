"""A training script without training: prints upstream's bytes (karpathy/autoresearch train.py) and goes wrong on request.

Overrides of the constants below choose what happens; it needs nothing but the standard library.
"""

import os
import signal
import subprocess
import sys
import time

from prepare import TIME_BUDGET

SEED = 42
MODE = "ok"
STEPS = 10
STEP_S = 0.03
VAL_BPB = 0.9979
CLAIM_S = 0.0
TAG = ""


def progress(step, loss):
    share = (step + 1) / STEPS
    print(
        f"\rstep {step:05d} ({100 * share:.1f}%) | loss: {loss:.6f} | lrm: 1.00 | dt: {1000 * STEP_S:.0f}ms | tok/sec: 1,680,000 | "
        f"mfu: 39.8% | epoch: 1 | remaining: {max(TIME_BUDGET * (1 - share), 0):.0f}s    ",
        end="",
        flush=True,
    )


def summary(began):
    took = CLAIM_S or time.time() - began
    print("---")
    print(f"val_bpb:          {VAL_BPB:.6f}")
    print(f"training_seconds: {took:.1f}")
    print(f"total_seconds:    {took + 0.1:.1f}")
    print("peak_vram_mb:     45060.2")
    print("mfu_percent:      39.80")
    print("total_tokens_M:   499.6")
    print(f"num_steps:        {STEPS}")
    print("num_params_M:     50.3")
    print("depth:            8", flush=True)


def main():
    began = time.time()
    if MODE == "ignore_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("Vocab size: 8,192")
    print("Model config: {'sequence_len': 2048, 'vocab_size': 8192, 'n_layer': 8, 'n_embd': 512}")
    print("Estimated FLOPs per token: 2.100000e+08")
    print(f"Time budget: {TIME_BUDGET}s", flush=True)
    print("where:", os.getcwd(), "budget", TIME_BUDGET, "tag", TAG, flush=True)
    if MODE == "crash_before_step":
        print("Using Flash Attention 3", flush=True)
        time.sleep(0.2)
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    step = 0
    while step < STEPS or MODE in ("nan", "long", "ignore_term"):
        progress(min(step, STEPS - 1) if MODE != "nan" else step, float("nan") if MODE == "nan" else 9.0 - 5.0 * min(step / STEPS, 1.0))
        time.sleep(STEP_S)
        step += 1
        if MODE == "fail" and step == STEPS // 2:
            print("FAIL")
            sys.exit(1)
    print()
    if MODE == "no_summary":
        print("done")
        return
    if MODE == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    summary(began)
    if MODE == "hang":
        time.sleep(600)


if __name__ == "__main__":
    main()
