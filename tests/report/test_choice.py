"""Which method to take: the Pareto front, the recommendation, and what a page of many runs shows of both."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import tiny_task
from hypothesis import given
from hypothesis import strategies as st

import fewbytes as fb
from fewbytes.report import RunFolder, caveats, choices, read_runs, summary_table, write_report
from fewbytes.report.choice import CAVEAT, WITHIN, Point, front, recommended
from fewbytes.report.pieces import COLOURS, GREY


def dominates(a: Point, b: Point) -> bool:
    no_worse = a.nbytes <= b.nbytes and a.score >= b.score
    return no_worse and (a.nbytes < b.nbytes or a.score > b.score)


POINTS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 40).map(lambda n: n / 100)), min_size=1, max_size=15
).map(lambda found: [Point(f"m{i}", *each) for i, each in enumerate(found)])  # so few values that they are often equal


@given(POINTS)
def test_a_point_is_on_the_front_unless_another_dominates_it(points):
    best = front(points)
    assert {p for p in points if not any(dominates(q, p) for q in points)} == set(best)
    assert best == sorted(best, key=lambda p: p.nbytes)


@given(POINTS)
def test_the_recommendation_is_the_cheapest_near_the_best(points):
    taken, highest = recommended(points), max(p.score for p in points)
    near = [p for p in points if highest - p.score <= WITHIN + 1e-9]
    free = max((p.score for p in points if not p.nbytes), default=-1)
    assert taken in front(points)
    assert taken in near
    assert taken.nbytes == min(p.nbytes for p in near if not p.nbytes or p.score - free > WITHIN + 1e-9)


@given(POINTS, st.randoms())
def test_the_order_of_the_runs_does_not_matter(points, random):
    shuffled = random.sample(points, len(points))
    assert front(shuffled) == front(points)
    assert recommended(shuffled) == recommended(points)


def run(
    label: str,
    up: int,
    partition: int = 7,
    budget: int | None = None,
    down: int | None = None,
    tested: int | None = None,
    metric: str = "accuracy",
    parameters: dict[str, Any] | None = None,
    **scores: float | None,
) -> RunFolder:
    """A finished run of one round, on clients who hold `partition` samples, that knew what guessing scores, on `tested`
    samples of the server's."""
    down = up if down is None else down
    row = {"round": 1, "phase": "round", "scores": {metric: scores}, "uplink_bytes": up, "downlink_bytes": down}
    guessing = {"global": 0.1, "personalised": 0.4}
    result: dict[str, Any] = {"status": "done", "rounds": 9, "majority_class_accuracy": guessing}
    result |= {} if tested is None else {"test_samples": {"global": tested, "personalised": 10 * tested}}
    result |= {} if budget is None else {"budget": budget, "ended_by": "budget"}
    counts = {"classes": ["a"], "train": [[partition]], "test": [[1]]}
    return RunFolder(Path(label), label, [row], None, counts, result | {"parameters": parameters or {}}, "rounds = 9")


def chart(text: str, name: str) -> dict[str, Any]:
    """The views of a page's chart, each its traces and layout."""
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)
    assert found
    return dict(json.loads(found[1])[name])


def lines(*runs: RunFolder) -> dict[str, str]:
    return {choice.kind: str(choice) for choice in choices(runs)}


def test_the_reason_is_told_in_figures():
    cheap, dear = run("cheap", 12_300_000, personalised=0.931), run("dear", 38_000_000, personalised=0.934)
    told = lines(cheap, dear, run("far", 10_000, personalised=0.9))["personalised"]
    assert re.search(
        r"use cheap, personalised 93.1% with 24.6 MB in both directions: .*\(dear, 93.4% with 76.0 MB in", told
    )
    alone = lines(run("separate", 0, personalised=0.93), cheap)["personalised"]
    assert "use separate, personalised 93.0% with nothing sent" in alone
    alone = lines(run("best", 5, **{"global": 0.9}), run("x", 9, **{"global": 0.5}))["global"]
    assert re.search("use best, .*the most accurate, and none is cheaper", alone)


def test_the_choice_goes_by_the_bytes_of_both_directions(tmp_path):
    runs = [
        run("little up", 5_000_000, down=100_000_000, **{"global": 0.9}),
        run("both small", 20_000_000, down=20_000_000, **{"global": 0.9}),
    ]
    assert "use both small, global 90.0% with 40.0 MB in both directions: " in lines(*runs)["global"]
    text = write_report(runs, tmp_path / "report.html").read_text()
    traces, layout = chart(text, "choice")["global"]
    assert [trace["x"] for trace in traces if "meta" in trace] == [[105.0], [40.0]]
    assert layout["xaxis"]["title"] == "both directions, MB"
    hovers = [trace["customdata"][0] for trace in traces if "meta" in trace]
    assert hovers == [
        ["little up", "105 MB (5.00 up, 100 down)"],
        ["both small", "40.0 MB (20.0 up, 20.0 down)"],
    ]


def test_a_download_is_not_free_for_clients_that_send_nothing():
    receives = run("receives", 0, down=900, personalised=0.9)
    assert "use sends, " in lines(receives, run("sends", 400, personalised=0.9))["personalised"]


def test_what_was_not_trained_alike_is_said_with_it():
    one = run("one", 5, parameters={"epochs": 1, "lr": 0.1}, personalised=0.9)
    two = run("two", 5, parameters={"epochs": 5, "lr": 0.1, "rho": 3}, personalised=0.9)
    three = replace(run("three", 5, parameters={"epochs": 5, "lr": 0.1}, personalised=0.9), config="rounds = 4")
    assert three.result is not None
    three.result["rounds"] = 4
    assert caveats([one, run("like", 5, parameters={"epochs": 1, "lr": 0.1, "k": 2}, personalised=0.9)]) == [CAVEAT]
    assert caveats([one, two, three])[0].endswith("rounds 9 (one, two), 4 (three); epochs 1 (one), 5 (two, three).")


def test_who_trains_but_once_trains_as_long_as_the_others_in_all():
    many = run("many", 5, parameters={"epochs": 2}, personalised=0.9)
    once = run("once", 5, parameters={"epochs": 18}, personalised=0.9)
    assert once.result is not None
    once.result["rounds"] = 1
    assert caveats([many, once]) == [CAVEAT]
    once.result["parameters"]["epochs"] = 9
    assert caveats([many, once])[0].endswith("epochs 2 (many), 1 (once).")
    once.result["parameters"]["epochs"] = 3
    assert caveats([many, once])[0].endswith("epochs 2 (many), 0.333 (once).")


def test_bytes_are_worth_it_only_above_local_training():
    apart, near, best = (run(f"m{up}", up, personalised=a) for up, a in ((0, 0.9), (5, 0.908), (90, 0.915)))
    told = lines(apart, near, best)["personalised"]  # m5 is near the best, but not a percentage point above m0
    assert re.search("use m90, personalised 91.5% with 180 B in both directions: .*better than local training", told)
    assert "use m5, " in lines(near, best)["personalised"]  # nobody is known to do without


def test_a_model_made_by_local_training_is_not_bought():
    fused = run("fused", 70, personalised=0.89, **{"global": 0.9})
    once = run("once", 20, down=0, personalised=0.96, **{"global": 0.45})
    found = {choice.kind: choice for choice in choices([fused, once])}
    assert (found["global"].label, found["personalised"].label) == ("fused", None)
    assert re.search("none of these methods.*better than local training, .*96.0% in once", str(found["personalised"]))
    apart = run("separate", 0, personalised=0.94)
    told = lines(fused, once, apart)["personalised"]
    assert re.search("use separate, .*94.0% with nothing sent: once .*96.0% by local training", told)
    better = run("better", 50, personalised=0.98)
    assert "use better, personalised 98.0%" in lines(fused, once, apart, better)["personalised"]


def test_what_does_not_compare_is_not_compared():
    one, two = run("one", 10, **{"global": 0.9}), run("two", 20, personalised=0.9)
    assert not choices([one, two])  # models for all, and models for each
    assert not choices([one, run("three", 5, partition=8, **{"global": 0.8})])  # other data
    assert not choices([one])
    unmeasured = run("three", 5, **{"global": None}), run("four", 5, **{"global": float("nan")})
    assert not choices([one, *unmeasured])
    both = [run("a", 10, personalised=0.9, **{"global": 0.5}), run("b", 5, personalised=0.5, **{"global": 0.8})]
    assert {choice.kind: choice.label for choice in choices(both)} == {"personalised": "a", "global": "b"}


def test_none_ends_highest_among_runs_that_do_not_compare(tmp_path):
    def ends_highest(*runs: RunFolder) -> bool:
        return "ends highest" in write_report([*runs], tmp_path / "report.html").read_text()

    one = run("one", 10, micro=0.9)
    assert ends_highest(one, run("two", 20, micro=0.8))
    assert not ends_highest(one, run("two", 20, partition=8, micro=0.8))
    other = run("two", 20, micro=0.8)
    assert not ends_highest(one, replace(other, result={**(other.result or {}), "dataset": "other"}))
    assert not ends_highest(one, run("two", 20, metric="f1", micro=0.8))


def test_nothing_is_recommended_that_learnt_nothing_or_costs_too_much():
    told = lines(run("one", 10, **{"global": 0.1}), run("two", 20, **{"global": 0.05}))["global"]
    assert re.search("none of these methods.*guessing the majority class, 10.0%: try more rounds", told)
    over, within = run("over", 200, budget=100, **{"global": 0.9}), run("within", 90, budget=100, **{"global": 0.6})
    told = lines(over, within)["global"]
    assert "use within, global 60.0%" in told
    assert told.endswith("; over the budget and left out: 1.")
    assert "all exceed the budget" in lines(over, over)["global"]


def test_what_chance_may_score_is_no_better_than_guessing():
    def told(tested: int | None, *accuracy: float) -> str:
        runs = [run(f"m{i}", 10 * i, tested=tested, **{"global": value}) for i, value in enumerate(accuracy, 1)]
        return lines(*runs)["global"]

    assert "use m2, global 15.9% " in told(None, 0.1, 0.159)  # as before, if nobody knows on how many samples
    # 0.1 + 2 √(0.1 · 0.9 / 100) = 0.16
    chance = r"none of these methods.* 10.0% \(up to 16.0% by chance on 100 test samples\)"
    assert re.search(chance, told(100, 0.1, 0.159))
    assert "use m2, global 16.1% " in told(100, 0.1, 0.161)
    assert "use m2, global 15.9% " in told(1000, 0.1, 0.159)
    near = told(100, 0.155, 0.161)  # the cheaper one is near the best, and chance may score as much
    assert near.endswith("guessing.")
    assert "use m2, global 16.1% " in near


def test_metrics_that_guesses_have_a_value_of_are_compared_with_it():
    def told(metric: str, value: float) -> str:
        return lines(*(run(f"m{i}", i, tested=100, metric=metric, **{"global": value}) for i in (1, 2)))["global"]

    assert "guessing, 0.5 (up to 0.6 by chance on 100 test samples)" in told("auc", 0.59)
    assert "use m1, global 0.61 " in told("auc", 0.61)
    assert "predicting the mean, 0:" in told("r2", -0.1)
    assert "use m1, global 0.1 " in told("r2", 0.1)
    assert "use m1, global 0.9 " in told("mae", 0.9)  # what guessing has is not known
    assert "use m1, global 9.0% " in told("f1", 0.09)


def test_a_comparison_of_runs_that_have_learnt_nothing_recommends_none(tmp_path):
    for name in ("fedavg", "fedprox"):
        fb.run(fb.METHODS[name](lr=1e-9), tiny_task(seed=1), rounds=1, workers=1, out=tmp_path / name)
    runs = read_runs([tmp_path])
    held = json.loads((tmp_path / "fedavg" / "partition.json").read_text())["test"]
    tested = {"personalised": sum(map(sum, held)), "global": len(tiny_task().data.test)}
    assert [(run.result or {})["test_samples"] for run in runs] == [tested, tested]
    found = {choice.kind: choice for choice in choices(runs)}
    assert [found[kind].label for kind in ("personalised", "global")] == [None, None]
    assert f"by chance on {tested['global']} test samples)" in found["global"].reason
    caption = str(summary_table(runs).caption)
    assert caption.count("no better than guessing the majority class") == 1  # equal for both
    assert re.search(r"^fedavg global [\d.]+%, fedprox global [\d.]+%: no better than", caption, re.M)


def test_a_page_of_forty_runs(tmp_path):
    runs = [run(f"m{i}", 1000 * i, budget=35_000, **{"global": 0.5 + i / 100}) for i in range(40)]
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert "<h1>40 methods</h1>" in text
    assert str(choices(runs)[0]).split(":")[0] in text
    assert text.count("over the budget</span>") == 4
    traces, layout = chart(text, "choice")["global"]
    marks = [trace for trace in traces if "meta" in trace]
    assert len(marks) == 40
    assert {trace["text"][0] for trace in marks} == {f"m{i}" for i in range(40)}
    assert {trace["text"][0] for trace in marks if trace["first"]} == {f"m{i}" for i in range(36)}
    coloured = {trace["text"][0] for trace in marks if trace["marker"]["color"] != GREY}
    assert coloured == {"m34", *(f"m{i}" for i in range(len(COLOURS) - 1))}  # recommended, and others on the front
    assert [trace["text"][0] for trace in marks if trace["marker"]["symbol"] == "star"] == ["m34"]
    assert all(trace["x"][0] > 0 for trace in marks)  # on a logarithmic axis, nothing sent has a place, too
    assert layout["xaxis"]["ticktext"][0] == "0"
    assert not [
        trace for trace in traces if len({*trace["x"]}) == 1 < len(trace["x"])
    ]  # no line at a budget, of uplink


def test_a_short_logarithmic_axis_has_ticks_between_powers_of_ten(tmp_path):
    runs = [run("a", 20_000, **{"global": 0.5}), run("b", 400_000, **{"global": 0.6})]
    axis = chart(write_report(runs, tmp_path / "report.html").read_text(), "choice")["global"][1]["xaxis"]
    assert axis["type"] == "log"
    assert axis["ticktext"] == ["0", "0.05", "0.1", "0.2", "0.5"]


def test_a_page_states_bytes_in_the_unit_that_suits_them(tmp_path):
    heads = {}
    for up in (20_000, 20_000_000):
        page = write_report([run("a", up, **{"global": 0.5})], tmp_path / "report.html").read_text()
        heads[up] = re.findall(r"<th scope=\"col\">(\S+) both</th>", page)
        assert '<td class="strong" title="' + f'{2 * up:,} bytes">40.0</td>' in page
    assert heads == {20_000: ["kB"], 20_000_000: ["MB"]}


def test_all_marks_have_names_and_those_on_the_front_come_first(tmp_path):
    runs = [
        run("cheap", 1000, **{"global": 0.5}),
        run("best", 2000, **{"global": 0.9}),
        run("dear", 3000, **{"global": 0.7}),
    ]
    text = write_report(runs, tmp_path / "report.html").read_text()
    traces, _ = chart(text, "choice")["global"]
    marks = [trace for trace in traces if "meta" in trace]
    assert {trace["text"][0]: trace["first"] for trace in marks} == {"cheap": True, "best": True, "dear": False}
