"""The cells of tables: what tells rows apart survives a narrow column, and what a verb noted reads as words."""

from __future__ import annotations

from runner.records import Event
from runner.states import event_words
from tui.tables import QUEUE, event_rows, short_names, wave_columns
from tui.widgets.gpus import COLUMNS
from tui.widgets.table import Column, fit_columns

CELL = {"TOTAL_BATCH_SIZE": 2**17, "MATRIX_LR": 0.03, "DEPTH": 6}


def column(columns: list[Column], key: str) -> Column:
    return next(c for c in columns if c.key == key)


def test_a_narrow_column_shortens_names_before_values() -> None:
    row = {"cell": CELL, "hypothesis": "smaller batches"}
    assert column(QUEUE, "what").fitting(row, 80)[0].startswith("TOTAL_BATCH_SIZE=2**17, MATRIX_LR=0.03, DEPTH=6 · smaller")
    assert column(QUEUE, "what").fitting(row, 34)[0].startswith("TBS=2**17, ML=0.03, DEPTH=6")


def test_short_names_stay_apart() -> None:
    assert short_names(["MATRIX_LR", "MUON_LR", "DEPTH"]) == {"MATRIX_LR": "MaLR".upper(), "MUON_LR": "MULR", "DEPTH": "DEPTH"}
    assert len(set(short_names(["A_B", "A_C", "AA_BB", "_X_"]).values())) == 4


def test_the_factors_of_a_wave_are_columns_that_sort_by_level() -> None:
    columns = wave_columns({"TOTAL_BATCH_SIZE": [2**19, 2**17], "MODE": ["b", "a"]})
    batch = column(columns, "factor0")
    assert batch.fitting({"cell": CELL}, batch.width)[0].strip() == "2**17"
    assert batch.order is not None and batch.order({"cell": CELL}) == 1
    assert batch.order({"cell": {}}) is None


def test_a_detail_is_read_as_words() -> None:
    runs = [f"r{i:04d}" for i in range(22, 46)]
    event = Event(1, 0.0, "cli", "submit_wave", "w3", None, {"runs": runs, "seeds": [1, 2]})
    assert event_rows([event], 1.0)[0]["why"] == "runs r0022 … r0045 (24), seeds 1, 2"


def test_a_reason_does_not_hide_what_was_done() -> None:
    def told(verb: str, why: str | None, detail: dict[str, object] | None) -> str | None:
        return event_words(Event(1, 0.0, "tui", verb, "r0008", why, detail))

    assert told("decide", "within the noise", {"verdict": "discard", "override": False}) == "verdict discard: within the noise"
    assert told("decide", "good", {"verdict": "keep", "override": True}) == "verdict keep, override: good"
    assert told("promote", None, {"of": "r0008"}) == "of r0008" and told("promote", "try it", {"of": "r0008"}) == "of r0008: try it"
    assert told("priority", None, {"priority": None, "move": "up"}) == "move up"
    assert told("submit", "smaller", {"overrides": {"DEPTH": 6}, "budget_s": 300.0}) == "smaller"
    assert told("submit", None, {"overrides": {"DEPTH": 6, "LR": 0.1}}) == "overrides DEPTH=6 LR=0.1"
    assert told("ended", "completed", None) == "completed" and told("pause_host", None, None) is None


def test_a_host_with_a_long_name_is_whole_where_there_is_room_and_keeps_its_index_where_not() -> None:
    gpu = {"host": "simulated", "index": 12, "uuid": "u", "state": "free"}
    for width, shown in ((118, "simulated:12"), (78, "simul…:12")):
        wide = next(w for c, w in fit_columns(COLUMNS, width) if c.key == "gpu")
        assert column(COLUMNS, "gpu").fitting(gpu, wide)[0].strip() == shown
