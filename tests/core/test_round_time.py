"""Rounds of a stated length, and simulated links: how many steps clients take, and when their replies come."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from cases import tiny_data, tiny_task
from hypothesis import given
from hypothesis import strategies as st
from runs import StopAfter, fingerprint

import fewbytes as fb
from fewbytes.base.durations import parse_seconds
from fewbytes.core.links import Link, Links
from fewbytes.core.round_time import LONGEST, RoundTime
from fewbytes.experiments.plan import ROUND_TIMES, in_units, make_plan
from fewbytes.methods.parts.clustered import Clustered

ROUNDS = 4
TERMS = {"lr": 0.1, "batch": 4}
SIMULATED = {"speeds": "1,2,4,8", "links": "8kbps,80kbps", "round_time": "6s"}


def run(out, method=None, **settings):
    method = fb.FedNova(epochs=1, **TERMS) if method is None else method
    return fb.run(method, tiny_task(), **{"rounds": ROUNDS, "workers": 1, "out": out, "save_models": False} | settings)


def by_round(result: fb.Result) -> list[list[dict[str, int]]]:
    """The exchanges of each round."""
    columns = {name: values.tolist() for name, values in result.ledger.columns().items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [[row for row in rows if row["round"] == t] for t in range(1, ROUNDS + 1)]


# ---------------------------------------------------------------------------------------------------- links


@given(
    st.floats(1, 1e6), st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0, 1000), st.integers(0, 10**6),
    st.integers(1, 10**6),
)  # fmt: skip
def test_a_link_carries_all_bytes_in_the_time_without_outages(rate, up, out, start, first, more):
    link = Link(rate, out, up + out)

    def carried(end: float) -> float:
        """Bytes from the run's beginning, by the definition."""
        whole, within = divmod(end, link.every)
        return rate * (whole * up + min(within, up))

    once, twice = link.arrives(start, first), link.arrives(start, first + more)
    assert start <= once < twice
    assert carried(once) - carried(start) == pytest.approx(first, rel=1e-6, abs=1e-3 * rate)
    assert carried(link.arrives(once, more)) == pytest.approx(carried(twice), rel=1e-6, abs=1e-3 * rate)
    assert link._replace(out=0.0).arrives(start, first) == start + first / rate


def test_an_outage_is_waited_for():
    link = Link(10.0, out=4.0, every=10.0)  # there from 0 to 6, from 10 to 16, …
    assert [link.arrives(start, 10) for start in (0, 5, 5.5, 6, 9, 10)] == [1, 6, 10.5, 11, 11, 11]
    assert link.arrives(7, 0) == 7
    assert link.seconds(60) == 10


@pytest.mark.parametrize("wrong", ["", "10", "fast", "1Mbps,", "1Mbps-30s", "1Mbps-x/10m", "0Mbps", "-1Mbps"])
def test_links_are_rates_with_outages(wrong):
    with pytest.raises(fb.UserError, match=r"^links are rates"):
        Links.read(wrong)
    with pytest.raises(fb.UserError, match="must work at times"):
        Links.read("1Mbps-10m/10m")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("30s", 30), (" 10 m ", 600), ("1.5h", 5400), (2, 2)])
def test_lengths_of_time_are_read(text, seconds):
    assert parse_seconds(text) == seconds
    for wrong in ("", "m", "-1s", "0", "1.2.3", "inf", "1 week"):
        with pytest.raises(fb.UserError, match="cannot read the length of time"):
            parse_seconds(wrong)


def test_a_reply_comes_when_request_training_and_reply_are_over(tmp_path):
    result = run(tmp_path, fb.FedAvg(**TERMS), speeds="1,2,4,8", links="8kbps,80kbps")
    began = 0.0
    for row, exchanges in zip(result.rounds, by_round(result), strict=True):
        ends = [
            began + (each["bytes_down"] + each["bytes_up"]) / rate + seconds
            for each, rate, seconds in zip(exchanges, (1e3, 1e4, 1e3, 1e4), (1, 2, 4, 8), strict=True)
        ]
        assert [each["simulated_ms"] for each in exchanges] == pytest.approx([1000 * end for end in ends], abs=0.51)
        assert row["simulated_seconds"] == pytest.approx(max(ends), abs=1e-4)
        began = max(ends)
    assert pq.read_table(tmp_path / "ledger.parquet")["simulated_ms"].to_pylist()[-1] == round(1000 * ends[-1])
    assert all(each["steps"] == 0 for round in by_round(result) for each in round)  # nobody has asked for them


def test_a_stream_hears_first_whose_reply_comes_first(tmp_path):
    """All train equally fast; every other client has a slow link."""
    method = fb.FedBuff(**TERMS, concurrency=4, buffer=2)
    result = run(tmp_path / "run", method, speeds="1,1,1,1", links="1MB/s,500B/s")
    rounds = by_round(result)
    assert [sorted(each["client"] for each in exchanges) for exchanges in rounds[:2]] == [[0, 2], [0, 2]]
    assert {each["client"] for exchanges in rounds for each in exchanges} == {0, 1, 2, 3}
    times = [each["simulated_ms"] for exchanges in rounds for each in exchanges]
    assert times == sorted(times)
    slow = next(each for exchanges in rounds for each in exchanges if each["client"] == 1)
    assert slow["simulated_ms"] == pytest.approx(1000 + (slow["bytes_down"] + slow["bytes_up"]) / 0.5, abs=1)
    run(tmp_path / "again", method, speeds="1,1,1,1", links="1MB/s,500B/s", workers=3)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "again")


# ---------------------------------------------------------------------------------------------------- round times


def test_clients_take_the_steps_that_fit(tmp_path):
    result = run(tmp_path, **SIMULATED)
    first, *later = by_round(result)
    own = [each["steps"] for each in first]
    assert own == [site_steps(i) for i in range(4)]  # those of an epoch
    rates, before = (1e3, 1e4, 1e3, 1e4), first
    for exchanges in later:
        for each, last, rate, seconds, steps in zip(exchanges, before, rates, (1, 2, 4, 8), own, strict=True):
            moved = (last["bytes_down"] + last["bytes_up"]) / rate
            assert each["steps"] == max(1, math.floor((6 - moved) / (seconds / steps) + 1e-9))
        before = exchanges
    assert len({each["steps"] for each in before}) > 2
    seconds = [row["simulated_seconds"] for row in result.rounds]
    assert seconds[0] > 8  # as the slowest has taken an epoch
    second, *rest = (after - before for before, after in itertools.pairwise(seconds))
    assert max(rest) < 6.2 < second < 7  # as the first model is made at both ends, the first download takes no time
    assert result.rounds[-1]["measured"]["local steps"] == sum(each["steps"] for each in before) / 4


def site_steps(client: int) -> int:
    return fb.Site(tiny_task(), client, 1, "train").steps(fb.FedNova(epochs=1, **TERMS).local)


def test_a_round_time_is_the_same_with_any_workers_and_when_resumed(tmp_path):
    run(tmp_path / "whole", **SIMULATED)
    run(tmp_path / "three", **SIMULATED | {"workers": 3})
    for t in range(1, ROUNDS):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", **SIMULATED, watcher=StopAfter(t), resume=t > 1)
    run(tmp_path / "run", **SIMULATED, resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "three") == fingerprint(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "other", **SIMULATED, watcher=StopAfter(1))
    for other in ({"round_time": "7s"}, {"links": "9kbps"}):
        with pytest.raises(fb.UserError, match="another configuration"):
            run(tmp_path / "other", **SIMULATED | other, resume=True)


def test_a_time_too_short_for_a_step_is_noted(tmp_path):
    result = run(tmp_path, **SIMULATED | {"round_time": "0.3s"})
    assert {each["steps"] for each in by_round(result)[-1]} == {1}
    assert any("shorter than an exchange with one local step" in note for note in result.rounds[-1]["notes"])


def test_a_schedule_for_clients_that_come_and_go_works_too(tmp_path):
    data = replace(tiny_data(4), presence=((1, None), (1, 2), (3, None), (1, None)))
    task = fb.Task.on(data, tiny_task().problem.build)
    method = fb.FedNova(epochs=1, **TERMS)
    result = fb.run(method, task, rounds=ROUNDS, workers=1, **SIMULATED | {"round_time": "9s"})
    newcomer = [each["steps"] for exchanges in by_round(result) for each in exchanges if each["client"] == 2]
    assert newcomer[0] == site_steps(2)
    assert newcomer[1] != newcomer[0]


@given(st.integers(1, 1000), st.floats(1e-3, 1e3), st.floats(0, 1e3), st.floats(1e-2, 1e4))
def test_steps_fill_the_time_and_no_more(steps, training, moving, seconds):
    rounds = RoundTime(seconds)
    rounds.observe(0, steps, training, moving)
    taken, each = rounds.steps(0), training / steps
    assert taken == 1 or moving + taken * each <= seconds * (1 + 1e-6)
    assert taken <= LONGEST * steps
    assert moving + (taken + 1) * each > seconds * (1 - 1e-6) or taken == LONGEST * steps
    assert (0 in rounds.short) == (moving + each > seconds) or moving + each == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(
    "reported", [(0, 1.0, 1.0), (-3, 1.0, 1.0), (5, 0.0, 1.0), (5, math.nan, 1.0), (5, 1.0, math.inf), (5, -1.0, 0.0)]
)
def test_reports_that_cannot_be_change_nothing(reported):
    rounds = RoundTime(10.0)
    rounds.observe(0, 5, 1.0, 0.0)
    rounds.observe(0, *reported)
    assert rounds.steps(0) == 50
    rounds.observe(0, 10**18, 1e-9, 0.0)
    assert rounds.steps(0) == LONGEST * 5  # as its first exchange had 5
    assert RoundTime().steps(0) is None


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        (fb.FedAvg(**TERMS), SIMULATED, "fedavg gives clients that take more local steps more weight"),
        (fb.FedNova(**TERMS), {"round_time": "10s"}, "give speeds or links"),
        (fb.FedNova(**TERMS), {"round_time": "2 weeks"}, "round_time is a length of time"),
        (fb.FedNova(**TERMS), {"round_time": "1m", "engine": "flower-simulation"}, "use engine local"),
        (fb.FedNova(**TERMS), {"links": "1Mbps", "engine": "flower-simulation"}, "Flower's nodes are real"),
        (fb.FedNova(**TERMS), {"round_time": "2h"}, "raise round_timeout"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(method, settings, why, tmp_path):
    with pytest.raises(fb.UserError, match=why):
        run(tmp_path / "run", method, **settings)
    assert not (tmp_path / "run").exists()


def test_clusters_of_it_have_round_times_too(tmp_path):
    result = run(tmp_path, Clustered(fb.FedNova(epochs=1, **TERMS), clusters=2), **SIMULATED)
    last = {each["client"]: each["steps"] for each in by_round(result)[-1] if each["steps"]}
    assert len(last) == 4
    assert len(set(last.values())) > 1


@pytest.mark.parametrize("link", [1e3, 1e5, 1e8])
def test_a_plan_recommends_a_time_of_which_transfers_take_a_fifth_at_most(link):
    plan = make_plan(fb.FedNova(epochs=1, **TERMS), tiny_task(), 5, link, link, exchange_seconds=0.2)
    moving = plan.up / link + plan.down / link + 0.2
    assert plan.round_time >= max(plan.round_seconds, 5 * moving)
    shorter = [length for length in ROUND_TIMES if length < plan.round_time]
    assert not shorter or shorter[-1] < max(plan.round_seconds, 5 * moving)
    assert parse_seconds(in_units(plan.round_time)) == plan.round_time
    other = make_plan(fb.FedAvg(epochs=1, **TERMS), tiny_task(), 5, link, link)
    assert other.round_time is None  # a mean of models would be biased


def test_a_run_s_result_has_its_simulated_time(tmp_path):
    result = run(tmp_path, **SIMULATED)
    assert json.loads((tmp_path / "result.json").read_text())["simulated_seconds"] == pytest.approx(
        result.rounds[-1]["simulated_seconds"]
    )
