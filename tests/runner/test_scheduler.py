"""The scheduler: order, constraints, standbys, and reasons in words."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.scheduler import Placement, SlotView, Wish, matches_type, place

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def slot(n: int, name: str = H100, host: str = "a", **kw: object) -> SlotView:
    return replace(SlotView(host, f"{host}-{n}", name, usable=True), **kw)  # type: ignore[arg-type]


def wish(n: int, priority: float = 0.0, **kw: object) -> Wish:
    return Wish(f"r{n:04d}", (-priority, n), **kw)  # type: ignore[arg-type]


def ids(placements: list[Placement]) -> list[str]:
    return [p.run_id for p in placements]


def test_priority_first_then_first_come() -> None:
    plan = place([wish(1), wish(2), wish(3, priority=5)], [slot(0), slot(1)])
    assert ids(plan.placements) == ["r0003", "r0001"]
    assert plan.blocked == {"r0002": "waits for a free slot"}


def test_a_run_that_asks_for_nothing_leaves_the_scarce_type_alone() -> None:
    slots = [slot(0, H200), slot(1), slot(2)]
    plan = place([wish(1), wish(2, gpu_type="h200")], slots)
    assert {p.run_id: p.uuid for p in plan.placements} == {"r0001": "a-1", "r0002": "a-0"}


def test_type_and_host_constraints_and_the_reasons_they_give() -> None:
    slots = [slot(0), slot(0, H200, "b")]
    plan = place([wish(1, gpu_type="b200"), wish(2, host="c"), wish(3, gpu_type="h200", host="a"), wish(4, host="b")], slots)
    assert [(p.run_id, p.host) for p in plan.placements] == [("r0004", "b")]
    assert plan.impossible["r0001"] == f"no host has a GPU like 'b200' (there is: {H100}, {H200})"
    assert plan.impossible["r0002"] == "no host 'c' has a slot"
    assert "host 'a' has no GPU like 'h200'" in plan.impossible["r0003"]
    assert set(plan.blocked) == {"r0001", "r0002", "r0003"}


def test_no_slot_at_all_is_not_called_impossible() -> None:
    plan = place([wish(1, gpu_type="h100")], [])
    assert plan.impossible == {} and plan.blocked == {"r0001": "no host has a slot yet"}


def test_gpu_type_words() -> None:
    assert (
        matches_type("rtx 5090", "NVIDIA GeForce RTX 5090")
        and matches_type("h100", H100)
        and matches_type("A100-SXM4", "NVIDIA A100-SXM4-80GB")
    )
    assert not matches_type("h100", H200) and not matches_type("rtx 4090", "NVIDIA GeForce RTX 5090")


def test_one_standby_behind_the_gpu_that_ends_first() -> None:
    busy = [slot(0, usable=False, run_id="r0001", left_s=25.0), slot(1, usable=False, run_id="r0002", left_s=5.0)]
    plan = place([wish(3), wish(4), wish(5)], busy, handed_ahead=1)
    assert [(p.run_id, p.uuid, p.standby) for p in plan.placements] == [("r0003", "a-1", True), ("r0004", "a-0", True)]
    assert "r0005" in plan.blocked


def test_no_standby_long_before_the_end_on_this_machine_but_on_a_far_one() -> None:
    near, far = slot(0, usable=False, run_id="r0001", left_s=200.0), slot(1, usable=False, run_id="r0002", left_s=200.0, far=True)
    assert ids(place([wish(3)], [near]).placements) == []
    assert ids(place([wish(3), wish(4), wish(5)], [far], handed_ahead=2).placements) == ["r0003", "r0004"]
    assert place([wish(3)], [far], handed_ahead=0).placements == []


def test_one_waits_behind_each_far_gpu_before_a_second_does_behind_any() -> None:
    busy = [slot(n, usable=False, run_id=f"r{n:04d}", left_s=left, far=True) for n, left in enumerate((10.0, 200.0, 100.0, None))]
    plan = place([wish(n) for n in range(10, 16)], busy, handed_ahead=2)
    assert [p.uuid for p in plan.placements] == ["a-0", "a-2", "a-1", "a-3", "a-0", "a-2"]


def test_standbys_are_taken_back_for_a_free_slot_a_higher_priority_and_a_pause() -> None:
    held = slot(0, usable=False, run_id="r0001", left_s=20.0, waiting=(wish(2),))
    assert place([], [held, slot(1)]).withdraw == {"r0002": "a slot on a is free"}
    assert place([wish(3, priority=1)], [held]).withdraw == {"r0002": "r0003 has a higher priority"}
    assert place([wish(3)], [held]).withdraw == {}
    assert place([], [held], paused=True).withdraw == {"r0002": "the queue is paused"}
    assert place([], [replace(held, hold="it is draining")]).withdraw == {"r0002": "it is draining"}
    assert place([], [replace(held, waiting=(wish(2, hold="its agent x is paused"),))]).withdraw == {"r0002": "its agent x is paused"}


def test_paused_queue_and_held_hosts_place_nothing() -> None:
    assert place([wish(1)], [slot(0)], paused=True).placements == []
    plan = place([wish(1)], [slot(0, hold="it is paused")])
    assert plan.placements == [] and plan.blocked == {"r0001": "a: it is paused"} and plan.impossible == {}
    plan = place([wish(1, hold="its agent x is paused"), wish(2)], [slot(0)])
    assert ids(plan.placements) == ["r0002"] and plan.blocked["r0001"] == "its agent x is paused"
    plan = place([wish(1)], [slot(0, usable=False, why_not="quarantined: 40 GiB in use")])
    assert plan.blocked == {"r0001": f"{H100} on a: quarantined: 40 GiB in use"}


queues = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([None, "h100", "h200", "b200"]), st.sampled_from([None, "a", "b", "c"])), max_size=30
)
fleets = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([H100, H200]), st.booleans(), st.floats(0, 60)), max_size=12)


@settings(deadline=None)
@given(queues, fleets, st.integers(0, 4))
def test_no_slot_twice_no_run_twice_and_everyone_is_accounted_for(queue: list, fleet: list, ahead: int) -> None:
    wishes = [wish(n, p, gpu_type=t, host=h) for n, (p, t, h) in enumerate(queue)]
    slots = [
        slot(n, name, host, usable=free, run_id=None if free else f"busy{n}", left_s=None if free else left)
        for n, (host, name, free, left) in enumerate(fleet)
    ]
    plan = place(wishes, slots, handed_ahead=ahead)
    placed = ids(plan.placements)
    assert len(placed) == len(set(placed))
    assert set(placed) | set(plan.blocked) == {w.run_id for w in wishes} and not set(placed) & set(plan.blocked)
    by_uuid = {s.uuid: s for s in slots}
    direct = [p.uuid for p in plan.placements if not p.standby]
    assert len(direct) == len(set(direct)) and all(by_uuid[u].usable for u in direct)
    for p in plan.placements:
        w = next(w for w in wishes if w.run_id == p.run_id)
        assert w.host in (None, p.host) and (w.gpu_type is None or matches_type(w.gpu_type, by_uuid[p.uuid].name))
    standbys = [p.uuid for p in plan.placements if p.standby]
    assert all(standbys.count(u) <= ahead and not by_uuid[u].usable for u in standbys)
    # nobody overtakes: a blocked run never fits a free slot that a later one got
    order = {w.run_id: w.order for w in wishes}
    for w in wishes:
        if w.run_id in plan.blocked:
            for p in plan.placements:
                s = by_uuid[p.uuid]
                if order[p.run_id] > w.order and not p.standby:
                    assert w.host not in (None, s.host) or (w.gpu_type is not None and not matches_type(w.gpu_type, s.name))
