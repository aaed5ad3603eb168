"""Upstream's bytes and our events, read whole, in pieces, broken, hostile."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.reading import parse_events, parse_log
from runner.records import Point
from tests.runner import upstream_bytes as upstream

WHOLE = (upstream.preamble() + "".join(upstream.progress(s) for s in range(12)) + upstream.summary()).encode()


def read_in_pieces(parse: Any, data: bytes, cuts: list[int]) -> tuple[list[Point], dict[str, Any], bool]:
    """As the daemon reads: what arrived since the consumed offset, at each cut, and the end at last."""
    points: dict[int, Point] = {}
    facts: dict[str, Any] = {}
    seen = False
    offset = 0
    for end in [*sorted(cuts), len(data), len(data)]:
        final = end == len(data)
        delta = parse(data[offset : max(end, offset)], final)
        assert 0 <= delta.consumed <= max(end, offset) - offset
        offset += delta.consumed
        points.update((p.step, p) for p in delta.points)
        facts.update(delta.facts)
        seen = seen or delta.summary_seen
    assert offset == len(data)
    return list(points.values()), facts, seen


def test_a_whole_run_of_upstream() -> None:
    delta = parse_log(WHOLE, final=True)
    assert delta.consumed == len(WHOLE)
    assert [p.step for p in delta.points] == list(range(12))
    assert delta.points[3] == Point(step=3, t=None, share=0.075, loss=9.823077, tok_s=1680000.0, dt_ms=312.0, mfu=39.8)
    assert delta.summary_seen
    assert not delta.fail_seen
    assert delta.facts["model_config"]["n_embd"] == 512
    expected = {
        "val_bpb": 0.9979,
        "training_s": 300.1,
        "total_s": 325.9,
        "peak_vram_mb": 45060.2,
        "mfu_reported": 39.8,
        "tokens_m": 499.6,
        "num_steps": 953,
        "params_m": 50.3,
        "depth": 8,
        "flops_per_token": 2.3456e8,
        "step": 11,
        "epoch": 1.0,
    }
    assert {k: delta.facts[k] for k in expected} == expected


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_any_cut_reads_the_same(cuts: list[int]) -> None:
    whole = parse_log(WHOLE, final=True)
    points, facts, seen = read_in_pieces(parse_log, WHOLE, cuts)
    assert (points, facts, seen) == (whole.points, whole.facts, True)


def test_progress_without_a_newline_is_seen_at_once() -> None:
    delta = parse_log(upstream.progress(7).encode(), final=False)
    assert [p.step for p in delta.points] == [7]
    half = upstream.progress(8).encode()[:-9]
    unfinished = parse_log(half, final=False)
    assert (unfinished.points, unfinished.consumed) == ([], 1)  # a line still being written waits; its leading \r does not


def test_fail_is_glued_to_the_progress_line() -> None:
    data = (upstream.progress(3) + "FAIL\n").encode()
    assert parse_log(data, final=False).fail_seen
    first = parse_log(upstream.progress(3).encode(), final=False)  # or it arrives with the next read
    assert parse_log(data[first.consumed :], final=False).fail_seen
    assert not parse_log(b"unit test: FAIL\n", final=True).fail_seen


def test_steps_without_a_finite_loss_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "NAN_FROM", 4)
    delta = parse_log("".join(upstream.progress(s) for s in range(9)).encode(), final=True)
    assert (delta.nonfinite_steps, delta.finite_step_seen) == (5, True)
    assert [p.loss for p in delta.points[4:]] == [None] * 5
    assert delta.facts["loss"] is None


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "NaN", "-"])
def test_no_number_of_a_summary_is_not_finite(text: str) -> None:
    delta = parse_log(f"---\nval_bpb:          {text}\nnum_steps:        953\ndepth:            8\n".encode(), final=True)
    assert delta.facts["val_bpb"] is None
    assert delta.facts["num_steps"] == 953


def test_the_last_summary_counts_and_a_bare_line_is_a_fact_but_no_end() -> None:
    delta = parse_log(b"---\nval_bpb: 1.5\ndepth: 8\nagain\n---\nval_bpb: 1.25\ndepth: 8\n", final=True)
    assert delta.facts["val_bpb"] == 1.25
    bare = parse_log(b"val_bpb: 0.300000\n", final=False)
    assert bare.facts == {"val_bpb": 0.3}
    assert not bare.summary_seen
    assert parse_log(b"  best val_bpb: 0.2\nnum_steps: 3\n", final=True).facts == {}


def test_a_block_cut_short_counts_and_is_read_again() -> None:
    data = b"---\nval_bpb: 0.9\nnum_st"
    delta = parse_log(data, final=False)
    assert (delta.summary_seen, delta.facts, delta.consumed) == (True, {"val_bpb": 0.9}, 0)
    assert parse_log(data + b"eps: 7\ndepth: 8\nrest\n", final=False).facts["num_steps"] == 7


def test_dashes_that_open_no_summary_do_not_stall() -> None:
    delta = parse_log(b"---\nhello\n" + upstream.progress(1).encode(), final=False)
    assert [p.step for p in delta.points] == [1]


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_make_the_reader_fall(data: bytes, final: bool) -> None:
    for parse in (parse_log, parse_events):
        delta = parse(data, final)
        assert 0 <= delta.consumed <= len(data)
        json.dumps([delta.facts, [p.loss for p in delta.points]], allow_nan=False)
        if final:
            assert delta.consumed == len(data)


def test_a_flood_without_a_line_end_is_cut() -> None:
    delta = parse_log(b"x" * (1 << 20), final=False)
    assert delta.consumed == 1 << 20


def test_escape_sequences_do_not_hide_a_line() -> None:
    line = upstream.progress(5).replace("step", "\x1b[32mstep\x1b[0m").encode()
    assert [p.step for p in parse_log(line, final=True).points] == [5]


@pytest.mark.parametrize("config", ["{'a': __import__('os')}", "{" * 5000, "{'n': 10**9}", "[1]", "{}"])
def test_a_hostile_config_is_no_config(config: str) -> None:
    assert "model_config" not in parse_log(f"Model config: {config}\n".encode(), final=True).facts


def test_many_points_are_thinned_but_never_the_last() -> None:
    line = upstream.progress(1).replace("00001", "{:05d}").replace("2.5%", "{:.1f}%")
    delta = parse_log("".join(line.format(i, i / 100) for i in range(5000)).encode(), final=True)
    assert 450 <= len(delta.points) <= 550
    assert delta.points[-1].step == 4999


def events(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


START = {
    "t": 1.0,
    "event": "start",
    "v": 1,
    "attributes": {"attention": "flash", "compile": "both"},
    "gpu_name": "Fake",
    "torch": "2.13.0",
    "flops_per_token": 1e8,
    "num_params": 1_440_000,
    "model_config": {"n_embd": 128},
    "data": "d41d8c",
    "evaluator": "v1",
    "seed": 42,
}
STEP = {
    "t": 2.0,
    "event": "step",
    "step": 3,
    "share": 0.5,
    "loss": 4.5,
    "dt_ms": 250.0,
    "tok_s": 8000,
    "mfu_percent": None,
    "epoch": 1,
    "remaining_s": 10,
}
SUMMARY = {
    "t": 3.0,
    "event": "summary",
    "val_bpb": 1.68,
    "training_seconds": 20.0,
    "total_seconds": 25.0,
    "peak_vram_mb": 0.0,
    "mfu_percent": None,
    "total_tokens_M": 0.16,
    "num_steps": 77,
    "num_params_M": 1.44,
    "depth": 2,
}


def test_events_of_our_trainer() -> None:
    data = events(START, {"event": "stage", "stage": "training"}, STEP, {"event": "note", "text": "no compiler\x1b[2J"}, SUMMARY)
    delta = parse_events(data, final=False)
    assert delta.consumed == len(data)
    assert delta.points == [Point(step=3, t=2.0, share=0.5, loss=4.5, tok_s=8000.0, dt_ms=250.0, mfu=None)]
    assert delta.stage == "training"
    assert delta.notes == ["no compiler"]
    assert delta.summary_seen
    expected = {"val_bpb": 1.68, "num_steps": 77, "torch": "2.13.0", "data_hash": "d41d8c", "params_m": 1.44, "mfu_reported": None}
    assert {k: delta.facts[k] for k in expected} == expected
    assert not {"gpu_name", "evaluator"} & set(delta.facts)  # the slot and the trainer folder say so, not the script
    assert parse_events(data, final=True).facts == delta.facts


@given(st.data())
def test_events_cut_anywhere_read_the_same(data: st.DataObject) -> None:
    whole = events(START, STEP, {**STEP, "step": 4}, SUMMARY)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=8))
    points, facts, seen = read_in_pieces(parse_events, whole, cuts)
    once = parse_events(whole, True)
    assert (points, facts, seen) == (once.points, once.facts, True)


def test_broken_and_non_finite_events_are_passed_over() -> None:
    rows = [
        b'{"event": "step", "step": 1, "loss": NaN}',
        b"not json",
        b"[1]",
        b'{"event": "step", "step": "x"}',
        b'{"event": "step", "step": 1e99}',
        b'{"event": "summary", "val_bpb": 1e999}',
        b'{"event": "error", "cause": "oom", "text": "too big"}',
        b'{"event": "st',
    ]
    delta = parse_events(b"\n".join(rows), final=False)
    assert [p.loss for p in delta.points] == [None]
    assert delta.nonfinite_steps == 1
    assert delta.facts["val_bpb"] is None
    assert delta.error == ("oom", "too big")
    assert parse_events(b'{"event": "step", "step": 1' + b"0" * 400 + b"}\n", final=False).points == []
