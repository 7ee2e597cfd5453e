"""Runs with several seeds: means and deviations, paired differences, and the advice that goes by them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_choice import run

from fewbytes.core.intervals import paired
from fewbytes.report import RunFolder, caveats, choices, read_runs, summary_table, write_report
from fewbytes.report.differences import differences
from fewbytes.report.repeats import difference, repeated, seeds_of


def repeats(label: str, nbytes: int, scores: list[float], **more) -> list[RunFolder]:
    """Runs of a method with seeds 1, 2, …, each with these personalised scores, and clients of the seed's."""
    found = []
    for seed, score in enumerate(scores, 1):
        one = run(label, nbytes, partition=seed, personalised=score, **more)
        result = {**one.result, "seed": seed, "method": label}
        found.append(replace(one, path=one.path / str(seed), label=f"{label} (seed={seed})", result=result))
    return found


def test_runs_are_grouped_by_everything_but_the_seed():
    runs = [*repeats("a", 5, [0.5, 0.6, 0.7]), *repeats("b", 9, [0.9, 0.8])]
    groups = repeated(runs)
    assert [(group.label, len(group.runs)) for group in groups] == [("a", 3), ("b", 2)]
    assert seeds_of(groups) == [1, 2, 3]
    assert groups[0].finals("personalised") == {1: 0.5, 2: 0.6, 3: 0.7}
    assert groups[0].written([0.5, 0.6, 0.7]) == "60.0% ± 10.0"
    assert groups[0].written([0.5]) == "50.0%"
    other = repeats("a", 5, [0.1, 0.2], parameters={"lr": 3})
    other = [replace(each, path=each.path / "other") for each in other]
    assert [group.label for group in repeated([*runs[:3], *other])] == ["a (lr=None)", "a (lr=3)"]
    twice = [*runs[:1], replace(runs[0], path=runs[0].path / "again")]
    assert [len(group.runs) for group in repeated(twice)] == [1, 1]
    assert seeds_of(repeated(twice)) == []


def test_differences_are_paired_by_seed():
    one, other = repeated([*repeats("a", 5, [0.1, 0.5, 0.9]), *repeats("b", 5, [0.15, 0.56, 0.94])])
    found = difference(one, other, "personalised")
    assert found is not None
    assert found.mean == pytest.approx(-0.05)
    assert found.apart  # far less than the deviation, and equal for every seed
    assert found.written(percent=True) == "-5.0 (-7.5 to -2.5)"
    error = repeated([*repeats("a", 5, [1.0, 2.0], metric="rmse"), *repeats("b", 5, [3.0, 4.0], metric="rmse")])
    assert difference(*error, "personalised").mean == 2  # an error: lower is better


def test_paired_intervals_are_students():
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed: pip install 'fewbytes[clusters]'")
    for n in (2, 3, 5, 31, 32, 60):
        values = [math.sin(7 * i) for i in range(n)]
        mean = sum(values) / n
        expected = stats.t.interval(0.95, n - 1, loc=mean, scale=stats.sem(values))
        assert paired(values) == pytest.approx(tuple(expected), rel=2e-3)
    assert all(math.isnan(bound) for bound in paired([0.3]))
    assert paired([0.25, 0.25]) == (0.25, 0.25)


def test_the_advice_takes_the_cheapest_that_cannot_be_told_apart_from_the_best(tmp_path):
    best, noisy = repeats("best", 900, [0.90, 0.91, 0.92]), repeats("noisy", 90, [0.85, 0.92, 0.88])
    clear = repeats("clear", 9, [0.86, 0.87, 0.88])
    runs = [*best, *noisy, *clear]
    (choice,) = choices(runs)
    assert choice.label == "noisy"
    assert "cannot be told apart from the most accurate (best, 91.0% with" in choice.reason
    assert "difference -2.7 (" in choice.reason
    assert "no cheaper method comes within a percentage point or could be as good by chance" in choice.reason
    (found,) = differences(runs)
    assert [(row.label, row.verdict) for row in found.rows] == [
        ("best", "best"), ("noisy", "cannot be told apart"), ("clear", "worse"),
    ]  # fmt: skip
    assert (
        found.sentence == "By personalised accuracy, noisy cannot be told apart from best, the best, over seeds 1, 2, 3"
    )
    assert "3 seeds (1, 2, 3)" in caveats(runs)[-1]
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert page.count("cannot be told apart</td>") == 1
    assert "91.0% ± 1.0" in page


def test_two_seeds_tell_nothing_apart():
    runs = [*repeats("best", 900, [0.90, 0.91]), *repeats("cheap", 9, [0.80, 0.87])]
    (choice,) = choices(runs)
    assert choice.label == "best"  # the interval of the difference includes 0, as of two seeds nearly any does
    assert "too few to tell methods apart" in caveats(runs)[-1]
    assert [row.verdict for row in differences(runs)[0].rows] == ["best", "too few seeds"]


def test_a_method_that_may_equal_local_training_by_chance_is_not_worth_its_bytes():
    runs = [*repeats("separate", 0, [0.80, 0.86, 0.83]), *repeats("fedper", 9, [0.86, 0.85, 0.84])]
    (choice,) = choices(runs)
    assert choice.label == "separate"
    assert "use separate" in choice.advice


def test_a_single_method_states_its_seeds_beside_its_score(tmp_path):
    page = write_report(repeats("a", 5, [0.5, 0.6, 0.7]), tmp_path / "report.html").read_text()
    assert "ends at 60.0% ± 10.0 personalised accuracy" in page
    assert "The score is the mean ± standard deviation over seeds 1, 2, 3." in page
    assert "better than guessing the majority class, 40.0%" in page


def test_methods_that_lack_a_seed_say_so():
    runs = [*repeats("a", 5, [0.5, 0.6, 0.7]), *repeats("b", 9, [0.9, 0.8])]
    table = summary_table(runs)
    labels = list(table.columns[0].cells)
    assert [str(label) for label in labels[:2]] == ["a", "b (2 of 3 seeds)"]
    assert "mean ± standard deviation over seeds 1, 2, 3" in str(table.caption)


def test_what_holds_for_many_runs_is_printed_once(tmp_path):
    runs = [each for i in range(5) for each in repeats(f"m{i}", i, [0.1, 0.1, 0.1])]
    dp = {"dp": "epsilon=8, delta=1e-5, clip=1"}
    private = [replace(each, result=each.result | dp) for each in [*runs, *repeats("last", 9, [0.1])]]
    caption = str(summary_table(private).caption).splitlines()
    assert [line.partition(" covers ")[0] for line in caption if " covers " in line] == [
        "note: m0, m1, m2 and 3 more: dp (epsilon=8, delta=1e-5, clip=1)"
    ]
    assert [line.partition("; try")[0] for line in caption if "no better" in line] == [
        "m0 personalised 10.0% ± 0.0, m1 personalised 10.0% ± 0.0, m2 personalised 10.0% ± 0.0 and 3 more: no better "
        "than guessing the majority class, 40.0%"
    ]
    assert write_report(private, tmp_path / "report.html").read_text().count(" covers the models ") == 1
    noted = [replace(runs[0], rounds=[runs[0].rounds[0] | {"notes": {"was late": "1"}}]), *runs[1:]]
    notes = [line for line in str(summary_table(noted).caption).splitlines() if line.startswith("note: ")]
    assert notes == ["note: m0 (seed=1): in 1 of 1 rounds was late (the last time 1)"]  # of one seed alone
    assert not [line for line in str(summary_table(private[:1]).caption).splitlines() if line.startswith("note: m0")]


def test_runs_of_one_seed_stay_as_they_were(tmp_path):
    runs = [run("a", 5, personalised=0.5), run("b", 9, personalised=0.7)]
    assert [group.label for group in repeated(runs)] == ["a", "b"]
    assert differences(runs) == []
    assert "Differences over seeds" not in write_report(runs, tmp_path / "report.html").read_text()
    with pytest.raises(Exception, match="there is no run folder"):
        read_runs([tmp_path / "none"])
