"""The ledger: what it tells of rows, also while more come."""

from __future__ import annotations

from fewbytes.core.ledger import BLOCK, Ledger, Row
from fewbytes.wire.value import Counted

NOTHING = Counted()


def filled(*rows: tuple[int, int, str]) -> Ledger:
    ledger = Ledger()
    for t, client, outcome in rows:
        ledger.add(Row(t, "train", client, 10, 7, NOTHING, NOTHING, outcome))
    return ledger


def test_refusals_in_a_row_are_those_of_the_last_rounds_without_a_break():
    ledger = filled(
        (1, 0, "rejected"), (1, 1, "answered"), (1, 2, "rejected"),
        (2, 0, "answered"), (2, 1, "late"), (2, 2, "rejected"),
        (3, 0, "rejected"), (3, 1, "answered"), (3, 2, "late"),
        (4, 0, "rejected"), (4, 0, "late"),
    )  # fmt: skip
    assert ledger.refused_in_a_row() == {0: 2, 2: 2}
    assert Ledger().refused_in_a_row() == {}


def test_a_round_taken_again_counts_as_it_ended():
    assert filled((1, 0, "rejected"), (1, 0, "answered")).refused_in_a_row() == {0: 0}
    assert filled((1, 0, "answered"), (1, 0, "rejected")).refused_in_a_row() == {0: 1}


def test_columns_stay_as_they_were_when_rows_come():
    ledger = filled((1, 0, "answered"), (2, 1, "late"))
    columns = ledger.columns(1)
    totals = ledger.totals()
    ledger.add(Row(3, "train", 0, 10, 7, NOTHING, NOTHING))
    assert columns["client"].tolist() == [1]
    assert totals["uplink_bytes"] == 14
    assert ledger.totals(2)["uplink_bytes"] == 7
    assert Ledger().totals() == dict.fromkeys(totals, 0)
    assert len(Ledger().columns()["round"]) == 0


def test_many_rows_are_kept_as_they_came_in_little_memory():
    ledger, rows = Ledger(), 2 * BLOCK + 3
    for i in range(rows):
        outcome = "late" if i == BLOCK else "answered"
        ledger.add(Row(1 + i // 1000, "train", i % 1000, 10**12 + i % 7, 5, Counted(3, 9), Counted(2, 1), outcome))
    assert len(ledger) == rows
    for start in (0, 5, BLOCK - 1, BLOCK, 2 * BLOCK, rows - 1, rows):
        columns = ledger.columns(start)
        assert columns["round"].tolist() == [1 + i // 1000 for i in range(start, rows)]
        assert columns["bytes_down"].tolist() == [10**12 + i % 7 for i in range(start, rows)]
        assert columns["outcome"].tolist() == [2 * (i == BLOCK) for i in range(start, rows)]
        assert ledger.totals(start)["uplink_bytes"] == 5 * (rows - start)
    assert sum(map(len, ledger._packed)) < 4 * rows
    again = Ledger.frombytes(ledger.tobytes(), ledger.handlers)
    assert again.tobytes() == ledger.tobytes()
    assert len(ledger.tobytes()) == 8 * len(Ledger.COLUMNS) * rows
    ledger.add(Row(99, "train", 0, 1, 1, NOTHING, NOTHING))
    again.add(Row(99, "train", 0, 1, 1, NOTHING, NOTHING))
    assert again.tobytes() == ledger.tobytes()
    assert again.tobytes(rows) == ledger.tobytes()[-8 * len(Ledger.COLUMNS) :]


def test_totals_are_the_sums_of_the_rows_however_they_came():
    ledger = filled((1, 0, "rejected"))
    ledger.add(Row(1, "train", 1, 100, 50, Counted(8, 9), Counted(4, 17)))
    assert ledger.totals() == {
        "uplink_bytes": 57, "downlink_bytes": 110, "uplink_nominal_bytes": 4 + 3, "downlink_nominal_bytes": 8 + 2,
        "uplink_value_bytes": 4, "downlink_value_bytes": 8,
    }  # fmt: skip
    again = Ledger.frombytes(ledger.tobytes(), ledger.handlers)
    for each in (ledger, again):
        each.add(Row(2, "train", 0, 1, 2, Counted(1, 1), Counted(1, 0), "rejected"))
    assert again.totals() == ledger.totals() == filled().totals() | {
        "uplink_bytes": 59, "downlink_bytes": 111, "uplink_nominal_bytes": 8, "downlink_nominal_bytes": 12,
        "uplink_value_bytes": 5, "downlink_value_bytes": 9,
    }  # fmt: skip
    assert again.refused_in_a_row() == ledger.refused_in_a_row() == {0: 2}
