"""Reading the logs and events of live runs by offset, and writing what they say once a second.

Points, facts and the offsets they came from are written in one transaction, so a kill at any moment loses and doubles nothing: what was
not committed is read again. For far hosts the bytes are mirrored into `lab/runs/ID/` at the same offsets.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from runner import reading
from runner.records import Stage

if TYPE_CHECKING:
    from runner.engines.base import Engine, State
    from runner.records import Point
    from runner.roster import Roster, Track

READ_EVERY_S = 0.5
CHUNK = 1 << 20
KEEP_SHARE = 0.001  # at most about a thousand points a run; a run of 300 steps keeps them all
PACE_S, PACE_STEPS = 5.0, 1000  # `tok_s` of a run is over so many seconds of steps, and so many steps at most
LOG, EVENTS = "out.log", "work/events.jsonl"

log = logging.getLogger("overnight.follow")


async def read_new(roster: Roster, engine: Engine, track: Track, state: State, *, final: bool = False) -> None:
    """Read what a run printed since the last look. `final`: to the end, the last line included even when it has no end."""
    now = time.monotonic()
    stepping = track.run.first_step_at is not None or "first_step_at" in track.facts
    if not final and stepping and now - track.read_at < READ_EVERY_S:
        return
    track.read_at = now
    if final or state.events_bytes is None or state.events_bytes > track.events_offset:
        await _read_events(roster, engine, track, final)
    if final or state.log_bytes is None or state.log_bytes > track.log_offset:
        await _read_log(roster, engine, track, final)


async def _read_log(roster: Roster, engine: Engine, track: Track, final: bool) -> None:
    async for chunk, last in _chunks(roster, engine, track, LOG, final):
        delta = reading.parse_log(chunk, last)
        track.log_offset += delta.consumed
        _keep_points(track, delta.points)
        track.facts.update(delta.facts)
        _pace(track, delta.points)
        track.facts["last_output_at"] = time.time()
        _note_delta(track, delta)
        if not delta.consumed:
            break
    _derive_stage(track)


async def _read_events(roster: Roster, engine: Engine, track: Track, final: bool) -> None:
    async for chunk, last in _chunks(roster, engine, track, EVENTS, final):
        delta = reading.parse_events(chunk, last)
        track.events_offset += delta.consumed
        _keep_points(track, delta.points)
        track.facts.update(delta.facts)
        _pace(track, delta.points)
        if delta.stage:
            track.facts["stage"] = delta.stage
        _note_delta(track, delta)
        track.error = delta.error or track.error
        for text in delta.notes:
            roster.store.raise_flag(track.run.id, "note", "info", text)
        if not delta.consumed:
            break


def _note_delta(track: Track, delta: reading.LogDelta | reading.EventsDelta) -> None:
    """Count lines without a finite loss since the last finite one, and note when the summary came."""
    if track.run.first_step_at is None and (delta.facts.get("step") or 0) >= 1:
        track.facts.setdefault("first_step_at", time.time())
    track.nonfinite = delta.nonfinite_steps + (0 if delta.finite_step_seen else track.nonfinite)
    if delta.summary_seen and track.summary_at is None:
        track.summary_at = time.monotonic()


async def _chunks(roster: Roster, engine: Engine, track: Track, name: str, final: bool) -> Any:
    """Pieces of a file from the track's offset on; each with whether it is the last of a finished file."""
    run = track.run
    mirror = roster.far(run.host or "")
    while True:
        offset = track.log_offset if name == LOG else track.events_offset
        chunk = await engine.read(run.id, run.host or "", name, offset, CHUNK)
        if not chunk:
            return
        if mirror:
            _mirror(roster, run.id, name, offset, chunk)
        yield chunk, final and len(chunk) < CHUNK
        if len(chunk) < CHUNK:
            return


def _mirror(roster: Roster, run_id: str, name: str, offset: int, chunk: bytes) -> None:
    """Write bytes of a far file where they belong here; writing them twice changes nothing."""
    path = roster.lab.run_dir(run_id) / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, chunk, offset)
    finally:
        os.close(fd)


def _keep_points(track: Track, points: list[Point]) -> None:
    for point in points:
        if point.share is None or point.share - track.kept_share >= KEEP_SHARE or point.share >= 1.0:
            track.points.append(point)
            if point.share is not None:
                track.kept_share = max(track.kept_share, point.share)


def _pace(track: Track, points: list[Point]) -> None:
    """Tokens a second over the last seconds of steps: a single step may be twice as long as its neighbours and say nothing."""
    pace = track.pace
    for point in points:
        if point.tok_s and point.dt_ms:
            pace.append((point.tok_s * point.dt_ms / 1000, point.dt_ms / 1000))
    seconds = sum(s for _, s in pace)
    while len(pace) > 1 and (seconds - pace[0][1] >= PACE_S or len(pace) > PACE_STEPS):
        seconds -= pace.popleft()[1]
    if points and pace:
        track.facts["tok_s"] = sum(tokens for tokens, _ in pace) / seconds


def _derive_stage(track: Track) -> None:
    """Stages of a script that writes no events: compiling until the first step, evaluating once its budget is used up."""
    facts, run = track.facts, track.run
    step = facts.get("step", run.step)
    if step is None:
        return
    share = facts.get("share", run.share)
    stage = facts.get("stage", run.stage)
    if stage in (None, Stage.COMPILING) and step >= 1:
        facts["stage"] = Stage.TRAINING
    if share is not None and share >= 1.0:
        facts["stage"] = Stage.EVALUATING


def flush(roster: Roster, tracks: list[Track] | None = None) -> None:
    """Write what was read of all (or the given) runs since the last flush, in one transaction."""
    dirty = [
        t
        for t in (tracks if tracks is not None else roster.tracks.values())
        if t.facts or t.points or t.log_offset != t.run.log_offset or t.events_offset != t.run.events_offset
    ]
    if not dirty:
        return
    with roster.writing():
        for track in dirty:
            write_track(roster, track)
    for track in dirty:
        track.points, track.facts = [], {}


def write_track(roster: Roster, track: Track) -> None:
    """Points, facts and offsets of one run, inside the caller's transaction; the caller empties the track after the commit."""
    if track.points:
        roster.store.add_points(track.run.id, track.points)
    roster.update(track, **track.facts, log_offset=track.log_offset, events_offset=track.events_offset)
