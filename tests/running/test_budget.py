"""A budget of uplink bytes ends a run before a round that would exceed it, the same however often it is resumed."""

from __future__ import annotations

import pytest
from cases import LOCAL, tiny_task
from hypothesis import given
from hypothesis import strategies as st

import fewbytes as fb
from fewbytes.base.units import parse_bytes, parse_rate
from fewbytes.running.promises.budget import HEADROOM
from fewbytes.running.watcher import Watcher

METHOD = fb.FedAvg(**LOCAL)
ROUNDS = 6


def uplink(result: fb.Result) -> list[int]:
    return [row["uplink_bytes"] for row in result.rounds]


def told(result: fb.Result) -> tuple:
    """All that a result says but for how long it took."""
    rows = [{k: v for k, v in row.items() if not k.startswith("seconds") and k != "time"} for row in result.rounds]
    return rows, {k: v for k, v in result.summary.items() if k not in ("seconds", "peak_memory_bytes")}


@pytest.fixture(scope="module")
def whole() -> fb.Result:
    return fb.run(METHOD, tiny_task(), rounds=ROUNDS, workers=1)


@pytest.mark.parametrize("rounds", range(1, ROUNDS + 1))
def test_a_run_ends_before_the_round_that_would_exceed_its_budget(rounds, whole):
    sent = uplink(whole)
    needed = sum(sent[: rounds - 1]) + HEADROOM * max(sent[: rounds - 1], default=0)
    cut = fb.run(METHOD, tiny_task(), rounds=ROUNDS, budget=max(1, int(needed) + 1), workers=1)
    assert uplink(cut) == sent[:rounds]  # and no other
    assert [row["scores"] for row in cut.rounds] == [row["scores"] for row in whole.rounds[:rounds]]
    assert {key: cut.summary[key] for key in ("rounds", "status", "ended_by")} == {
        "rounds": rounds, "status": "done", "ended_by": "budget" if rounds < ROUNDS else None,
    }  # fmt: skip
    assert rounds == 1 or sum(uplink(cut)) <= cut.summary["budget"]


def test_the_last_round_is_scored_and_no_other_that_should_not_be(whole):
    heard: list[tuple[int, str]] = []

    class Heard(Watcher):
        def stopped(self, t: int, why: str) -> None:
            heard.append((t, why))

    method, settings = fb.FedPURIN(**LOCAL, beta=9), {"rounds": ROUNDS, "evaluate_every": 4, "workers": 1}
    budget = round(3.5 * max(uplink(fb.run(method, tiny_task(), rounds=1, workers=1))))
    cut = fb.run(method, tiny_task(), budget=budget, watcher=Heard(), **settings)
    assert heard == [(3, "another would exceed the budget")]
    assert [bool(row["scores"]) for row in cut.rounds[:3]] == [False, False, True]
    assert set(cut.rounds[2]["scores"]["accuracy"]) >= {"sparse", "personalised"}


def test_a_method_with_rounds_of_its_own_runs_whole():
    method = fb.FuseFL(blocks=3, ccvr_samples=0, **(LOCAL | {"epochs": 4}))
    assert method.own_rounds
    assert not METHOD.own_rounds
    result = fb.run(method, tiny_task(), rounds=1, budget=1, workers=1)
    assert result.summary["rounds"] == 3
    assert result.summary["ended_by"] is None
    assert result.summary["uplink_bytes"] > result.summary["budget"]


@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_finds_the_same_end(stop, tmp_path, whole):
    class Stop(Watcher):
        def scored(self, row: dict) -> None:
            if row["round"] == stop:
                raise KeyboardInterrupt

    budget = round(sum(uplink(whole)[:3]) * 1.05)  # three rounds, and a little
    run = {"rounds": ROUNDS, "budget": budget, "workers": 1}
    through = fb.run(METHOD, tiny_task(), **run)
    assert through.summary["rounds"] == 3
    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, tiny_task(), out=tmp_path / "run", watcher=Stop(), **run)
    for _ in range(2):  # the second time there is nothing left to do
        resumed = fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, **run)
        assert told(resumed) == told(through)
    with pytest.raises(fb.UserError, match="has ended"):
        fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, **(run | {"budget": 2 * budget}))


@given(st.integers(1, 10**12))
def test_a_number_of_bytes_is_read_as_it_is_written(count):
    assert parse_bytes(str(count)) == parse_bytes(f" {count} B") == parse_bytes(float(count)) == count
    assert parse_bytes(f"{count}kB") == parse_bytes(f"{count} KB") == 1000 * count


def test_amounts_of_data():
    assert parse_bytes("200MB") == 2 * parse_bytes("0.1 gB") == parse_bytes("1600 Mbit") == 200_000_000
    assert (parse_bytes("1.5KiB"), parse_bytes("2 bytes"), parse_bytes("1 TB")) == (1536, 2, 10**12)
    for wrong in ("lots", "", "-1MB", "0", "1.5.1MB", "3 MB/s", "0.1B", float("nan"), float("inf"), "1e6", "200Mb"):
        with pytest.raises(fb.UserError, match="like 200MB"):
            parse_bytes(wrong)


@pytest.mark.parametrize(
    ("bytes_per_second", "ways"),
    [
        (
            2_000_000,
            ("2MB/s", "2 MBps", "2mB/s", "2000kB/s", "2000 KBps", "2 MB / s", "2MByte/s", "0.002GB"),
        ),
        (250_000, ("2Mbps", "2Mb/s", "2mb/s", "2Mbit/s", "2 MBit/s", "2Mbits/s", "2000kbps", "2000 kbit/s", "2Mbit")),
        (1_048_576, ("1MiB/s", "1024KiBps", "8Mib/s", "8 Mibit/s", "8192kibps")),
        (1.5, ("1.5B/s", "12bps", "12 bit/s", "12b/s")),
    ],
)
def test_an_upper_case_b_is_bytes_and_a_lower_case_one_bits(bytes_per_second, ways):
    for way in ways:
        assert parse_rate(way) == bytes_per_second, way


@pytest.mark.parametrize("wrong", ["fast", "2", "2M", "0MB/s", "-1MB/s", "1.2.3MB/s", "2MB/h", "9" * 400 + "MB/s", ""])
def test_a_rate_that_is_none_is_told_with_the_forms_that_are_read(wrong):
    with pytest.raises(fb.UserError, match=r"1MB/s.*10Mbit/s, 10Mb/s or 10Mbps"):
        parse_rate(wrong)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "6Mb"])
def test_a_budget_that_is_none_is_refused(wrong):
    with pytest.raises(fb.UserError, match=r"^budget (must be .*at least 1|is an amount of data)"):
        fb.run(METHOD, tiny_task(), rounds=1, budget=wrong)
