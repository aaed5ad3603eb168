"""A lab on real ssh hosts with the real daemon, and the three sentences that must be true after anything: every run is accounted for
exactly once, no GPU was double-booked, and each log equals what its run printed, byte for byte.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from runner import daemonctl, verbs
from runner.records import Run, Submission
from tests.runner.daemons import ended, kill_daemon, until
from tests.runner.engines.sshrig import Net, SshHost
from tests.runner.labs import make_lab

SCRIPT = (Path(__file__).parent / "scripts" / "witness_train.py").read_text()


class FarLab:
    """A lab whose GPUs are those of the net's hosts."""

    def __init__(self, net: Net, folder: Path, *, policy: str = "", host: str = "", name: str = "") -> None:
        self.net, self.folder = net, folder
        self.witness = {h.name: net.folder / f"witness-{h.name}" for h in net.hosts}
        for path in self.witness.values():
            path.mkdir(exist_ok=True)
        hosts = "".join(self.host_toml(h, host) for h in net.hosts)
        base = "min_free_disk_mib = 1\nmin_budget_s = 0.1\ngrace_s = 0.5\nwall_extra_s = 600\n"
        self.lab = make_lab(folder, policy=base + policy, hosts=hosts, script=SCRIPT)
        self.ids: list[str] = []

    def host_toml(self, host: SshHost, more: str) -> str:
        """A `[[host]]` of hosts.toml."""
        policy = host.policy()
        return (
            f'[[host]]\nname = "{host.name}"\nkind = "ssh"\naddress = "{host.address}"\nuser = "root"\nidentity = "{self.net.key}"\n'
            f'workdir = "{host.work}"\npython = "{policy.python}"\nenv = {{ WITNESS = "{self.witness[host.name]}" }}\n{more}\n'
        )

    def daemon(self) -> None:
        """Start the daemon when none is there."""
        os.environ["OVERNIGHT_SSH_CONFIG"] = str(self.net.config)
        daemonctl.ensure_daemon(self.lab)

    def kill_daemon(self) -> None:
        """kill -9 of the daemon."""
        kill_daemon(self.lab)

    def close(self) -> None:
        """End the daemon."""
        daemonctl.stop_daemon(self.lab)
        self.lab.close()

    def submit(self, host: str | None = None, **overrides: Any) -> str:
        """One run, on a host of its own choice or on any."""
        overrides = {"SEED": len(self.ids) + 1, **overrides}
        done = verbs.submit(self.lab, Submission(overrides=overrides, budget_s=20, host=host, allow_duplicate=True), who="cli")
        self.ids += done.run_ids
        return done.run_ids[0]

    def cancel(self, run_id: str) -> None:
        """Ask for the end of a run."""
        verbs.cancel(self.lab, [run_id], who="cli")

    def run(self, run_id: str) -> Run:
        """A row."""
        found = self.lab.store.run(run_id)
        assert found
        return found

    def runs(self) -> list[Run]:
        """All rows, retries included."""
        return list(self.lab.store.runs("1 = 1"))

    async def all_ended(self, deadline_s: float = 60) -> list[Run]:
        """Wait until nothing is left to do."""

        def waiting() -> bool:
            return all(run.ended for run in self.runs())

        try:
            await until(waiting, deadline_s)
        except AssertionError:
            left = [(r.id, r.phase, r.stage, r.host, r.cause_text) for r in self.runs() if not r.ended]
            note = self.lab.store.daemon()
            raise AssertionError(f"not ended: {left}; daemon: {note.note if note else None}") from None
        return self.runs()

    async def ended(self, *ids: str, deadline_s: float = 40) -> list[Run]:
        """Wait until these runs have ended."""
        return await ended(self.lab, *ids, deadline_s=deadline_s)

    def journal(self) -> list[list[str]]:
        """What the witnesses wrote, on all hosts."""
        lines: list[list[str]] = []
        for path in self.witness.values():
            if (path / "journal").exists():
                lines += [line.split() for line in (path / "journal").read_text().splitlines()]
        return lines

    def far_dir(self, run: Run) -> Path:
        """A run's directory on its host."""
        host = next(h for h in self.net.hosts if h.name == run.host)
        return host.run_dir(str(self.lab.store.meta("lab_id")), run.id)

    def verify(self) -> Counter[str]:
        """The three sentences; how many runs had which outcome."""
        runs = {run.id: run for run in self.runs()}
        starts: Counter[str] = Counter()
        finished: Counter[str] = Counter()
        for word, run_id, *rest in self.journal():
            assert word != "DOUBLE", f"{run_id} and another run had {rest} at once"
            starts[run_id] += word == "start"
            finished[run_id] += word == "end"
        assert set(self.ids) <= set(runs)
        for run in runs.values():
            assert run.ended and run.outcome, f"{run.id} is {run.phase}"
            assert starts[run.id] <= 1, f"{run.id} was started {starts[run.id]} times"
            if run.outcome == "completed":
                assert starts[run.id] == finished[run.id] == 1, f"{run.id} completed without a witness"
                assert run.val_bpb is not None
            if run.started_at is not None:
                self.verify_log(run)
            if run.outcome == "lost" and run.retry_of is None and run.wanted == "run":
                retries = [other.id for other in runs.values() if other.retry_of == run.id]
                assert len(retries) == 1, f"{run.id} was lost and has the retries {retries}"
        strays = set(starts) - set(runs)
        assert not strays, f"runs that nobody asked for: {strays}"
        return Counter(str(run.outcome) for run in runs.values())

    def verify_log(self, run: Run) -> None:
        """The mirrored log is what the run printed (a killed run may have been between the two writes), and the host's log while it
        is there.
        """
        here, printed_file = self.lab.run_dir(run.id) / "out.log", self.witness[str(run.host)] / f"printed-{run.id}"
        mirrored = here.read_bytes() if here.exists() else b""
        printed = printed_file.read_bytes() if printed_file.exists() else b""
        assert printed.startswith(mirrored), f"{run.id}: the log is not what it printed"
        if run.outcome == "completed":
            assert printed == mirrored, f"{run.id}: {len(printed) - len(mirrored)} bytes of its output are missing"
        if (self.far_dir(run) / "out.log").exists():  # folders of ended runs go after a while
            on_host = (self.far_dir(run) / "out.log").read_bytes()
            assert mirrored == on_host, f"{run.id}: {len(mirrored)} bytes here, {len(on_host)} on {run.host}"

    def random_supervisor(self, rng: random.Random, leader: bool) -> int | None:
        """The pid (as this machine numbers it) of some live supervisor or leader on some host."""
        found = []
        for host in self.net.hosts:
            for pid in host.pids():
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if (b"train.py" in words) if leader else (b"supervisor" in words):
                    found.append(pid)
        return rng.choice(found) if found else None
