"""A training script that can bear witness: what it printed, when it had a GPU, and whether anybody else had it at the same time.

It writes each line to a file of its own before printing it, and keeps a lock of its own per GPU (not Overnight's), which children inherit.
"""

import fcntl
import os
import sys
import time

SEED = 42
LINES = 20
LINE_S = 0.05
CHILD = False
FILL = False


def journal(*words):
    fd = os.open(os.environ["WITNESS"] + "/journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, (" ".join(words) + "\n").encode())
    os.close(fd)


def say(fd, text):
    os.write(fd, text.encode())
    os.write(1, text.encode())


def main():
    run, gpu = os.environ["OVERNIGHT_RUN_ID"], os.environ["CUDA_VISIBLE_DEVICES"]
    lock = os.open(os.environ["WITNESS"] + "/" + gpu + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        journal("DOUBLE", run, gpu)
    journal("start", run, gpu)
    if CHILD and os.fork() == 0:
        os.setsid()
        time.sleep(600)
    printed = os.open(os.environ["WITNESS"] + "/printed-" + run, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if FILL:
        with open("big", "wb") as file:
            while True:
                file.write(b"x" * 65536)
    for i in range(LINES):
        say(printed, f"\rstep {i:05d} ({100 * (i + 1) / LINES:.1f}%) | loss: {9 - i / LINES:.6f} | seed {SEED} run {run} " + "x" * (i % 61))
        time.sleep(LINE_S)
    say(printed, f"\n---\nval_bpb:          {1 + (SEED % 97) / 1000:.6f}\ntraining_seconds: {LINES * LINE_S:.1f}\n")
    say(printed, f"total_seconds:    {LINES * LINE_S + 0.1:.1f}\nnum_steps:        {LINES}\n")
    journal("end", run, gpu)
    sys.exit(0)


if __name__ == "__main__":
    main()
