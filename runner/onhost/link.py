"""The far end of a connection: requests in on stdin, answers and GPU samples out on stdout; ends when the connection does. Runs are not
its children.

A frame is one line of JSON, followed by as many raw bytes as its `bytes` says. Requests: {id, op, args, bytes}. Answers: {id, value,
bytes} or {id, error}. Unasked: {hello: …} first, and {sample: line}.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, Optional, Tuple

from . import files, inspecting, locks, placing, procs, rundirs

WORKERS = 3
Answer = Tuple[Any, bytes]


class Link:
    """One connection's far end. Requests are worked on by a few threads, so that a slow one does not hold up the others."""

    def __init__(self, workdir: str) -> None:
        self.workdir = workdir
        self.out = sys.stdout.buffer
        self.out_lock = threading.Lock()
        self.work: "queue.Queue[Optional[Tuple[Dict[str, Any], bytes]]]" = queue.Queue()
        self.ops: Dict[str, Callable[[Dict[str, Any], bytes], Answer]] = {
            "poll": self.poll,
            "read": self.read,
            "place": self.place,
            "start": self.start,
            "blob": lambda a, body: (placing.blob(self.workdir, a["sha"], int(a["offset"]), int(a["total"]), body), b""),
            "stop": self.stop,
            "forget": self.forget,
            "list": lambda a, _: (placing.list_runs(self.workdir, a["lab"]), b""),
            "inspect": lambda a, _: (inspecting.inspect(self.workdir, a), b""),
        }

    def send(self, frame: Dict[str, Any], body: bytes = b"") -> None:
        """Write one frame whole."""
        if body:
            frame["bytes"] = len(body)
        with self.out_lock:
            self.out.write(json.dumps(frame).encode() + b"\n" + body)
            self.out.flush()

    def serve(self) -> None:
        """Until stdin closes."""
        self.send({"hello": self.hello()})
        threading.Thread(target=self.sample, daemon=True).start()
        for _ in range(WORKERS):
            threading.Thread(target=self.toil, daemon=True).start()
        source = sys.stdin.buffer
        while True:
            line = source.readline()
            if not line:
                return
            request = json.loads(line.decode())
            length = int(request.get("bytes") or 0)
            body = source.read(length) if length else b""
            if len(body) < length:
                return  # the connection broke in the middle: nothing of it is acted upon
            self.work.put((request, body))

    def toil(self) -> None:
        """Answer requests, one after the other."""
        while True:
            item = self.work.get()
            if item is None:
                return
            request, body = item
            try:
                value, answer_body = self.ops[request["op"]](request.get("args") or {}, body)
                self.send({"id": request["id"], "value": value}, answer_body)
            except BrokenPipeError:
                os._exit(0)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the asking side must hear of it
                self.send({"id": request["id"], "error": "%s" % problem, "kind": type(problem).__name__})

    def hello(self) -> Dict[str, Any]:
        """Who and what this machine is."""
        return {
            "v": 1,
            "boot_id": procs.boot_id(),
            "hostname": socket.gethostname(),
            "user": procs.user_name(os.getuid()),
            "home": os.path.expanduser("~"),
            "python": sys.executable,
            "python_version": rundirs.python_version(),
            "kernel": platform.release(),
            "cpu_cores": len(os.sched_getaffinity(0)),
            "workdir": self.workdir,
            "lock_dir": locks.default_dir(),
            "environment": rundirs.inherited(os.environ),
            "venv_python": inspecting.venv_python(self.workdir),
            "disk_free_mib": rundirs.disk_free_mib(self.workdir),
            "now": time.time(),
        }

    def sample(self) -> None:
        """Relay the sampler's lines; start it again when it ends."""
        while True:
            command = rundirs.launch_command(sys.executable, "sampler")
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    self.send({"sample": json.loads(line.decode())})
                except BrokenPipeError:
                    os._exit(0)
            process.wait()
            time.sleep(5)

    # -- requests -------------------------------------------------------------------------------------------------------------------------

    def poll(self, args: Dict[str, Any], _: bytes) -> Answer:
        states, body = placing.poll(self.workdir, args["lab"], args["runs"], int(args["limit"]))
        return {
            "runs": states,
            "boot_id": procs.boot_id(),
            "disk_free_mib": rundirs.disk_free_mib(self.workdir),
            "now": time.time(),
            "venv_python": inspecting.venv_python(self.workdir),
            "preflights": inspecting.preflights(os.path.join(self.workdir, "data")),
        }, body

    def read(self, args: Dict[str, Any], _: bytes) -> Answer:
        path = placing.run_dir(self.workdir, args["lab"], args["run"])
        return None, rundirs.read(path, args["name"], int(args["offset"]), min(int(args["limit"]), 8 << 20))

    def place(self, args: Dict[str, Any], body: bytes) -> Answer:
        answer = placing.place(self.workdir, args["lab"], args["run"], args["files"], body)
        if answer.get("placed"):
            answer["started"] = rundirs.start(placing.run_dir(self.workdir, args["lab"], args["run"]), sys.executable)
        return answer, b""

    def start(self, args: Dict[str, Any], _: bytes) -> Answer:
        return rundirs.start(placing.run_dir(self.workdir, args["lab"], args["run"]), sys.executable), b""

    def stop(self, args: Dict[str, Any], _: bytes) -> Answer:
        rundirs.stop(placing.run_dir(self.workdir, args["lab"], args["run"]), str(args["reason"]), bool(args["force"]))
        return None, b""

    def forget(self, args: Dict[str, Any], _: bytes) -> Answer:
        path = placing.run_dir(self.workdir, args["lab"], args["run"])
        deadline = time.monotonic() + 3
        while True:
            try:
                rundirs.forget(path)
                return None, b""
            except PermissionError:  # its last word is out, its supervisor a moment from its end
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)


def succeed(workdir: str, lab: str) -> None:
    """End the link the same lab had before: cut off without a word, it may sit there for a quarter of an hour, and must not act late."""
    folder = os.path.join(workdir, "labs", placing.checked(lab))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    dir_fd = files.open_dir(folder)
    try:
        before = files.read_object(dir_fd, "link.json") or {}
        if before.get("boot_id") == procs.boot_id():
            procs.send(int(before.get("pid") or 0), before.get("ticks"), signal.SIGKILL)
        me = {"pid": os.getpid(), "ticks": procs.start_ticks(os.getpid()), "boot_id": procs.boot_id()}
        files.write_whole(dir_fd, "link.json", json.dumps(me).encode())
    except OSError:
        pass  # a full disk: then two links answer for a while, as they may
    finally:
        os.close(dir_fd)


def main(workdir: str, lab: str, lock_dir: str = "") -> int:
    """Serve one connection. Our own environment is the login's, but for the folder of GPU locks when hosts.toml names one: what runs get
    of it is chosen by the asking side.
    """
    if lock_dir:
        os.environ["OVERNIGHT_LOCK_DIR"] = lock_dir
    os.makedirs(workdir, mode=0o700, exist_ok=True)
    if os.stat(workdir).st_uid != os.geteuid():
        sys.stdout.write(json.dumps({"refused": "%s belongs to another user" % workdir}) + "\n")
        return 1
    os.umask(0o077)
    os.chdir(workdir)
    try:
        succeed(workdir, lab)
        Link(workdir).serve()
    except (BrokenPipeError, ValueError):
        pass  # the connection is gone
    os._exit(0)  # worker threads may be in the middle of something that no longer has a listener
