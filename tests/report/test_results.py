"""Results for papers: frames, tables, figures, and time over links."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from cases import tiny_task

import fewbytes as fb
from fewbytes.base import extras
from fewbytes.base.errors import UserError
from fewbytes.core.links import Link
from fewbytes.report import read_run, read_runs, summary_table, write_report
from fewbytes.report.curves import curve
from fewbytes.report.figures import write_pdf, write_svg
from fewbytes.report.paper import write_csv, write_latex
from fewbytes.report.repeats import repeated
from fewbytes.report.target import target_rows, target_table
from fewbytes.report.times import Goal, reached, seconds_so_far

SEEDS = (1, 2, 3)
LINK = Goal.read("1kB/s", "4kB/s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with three seeds each."""
    folder = tmp_path_factory.mktemp("results")
    for seed in SEEDS:
        for method in (fb.FedAvg(lr=0.2), fb.Separate(lr=0.2)):
            fb.run(method, tiny_task(seed=seed), rounds=3, workers=1, out=folder / f"{method.method_name}-{seed}")
    return folder


def test_a_loaded_result_is_the_one_that_was_left(folder):
    task = tiny_task(seed=7)
    result = fb.run(fb.FedAvg(), task, rounds=2, workers=1, out=folder.parent / "loaded")
    loaded = fb.Result.load(folder.parent / "loaded", build=task.problem.first_model)
    assert (loaded.summary, loaded.rounds) == (result.summary, result.rounds)
    assert loaded.ledger.tobytes() == result.ledger.tobytes()
    assert loaded.ledger.handlers == result.ledger.handlers
    mine, theirs = result.global_model.state_dict(), loaded.global_model.state_dict()
    assert all((mine[name] == theirs[name]).all() for name in mine)
    assert fb.Result.load(folder.parent / "loaded").global_model is None  # the module is not named in the file
    assert len(repr(loaded)) < 250
    assert "fedavg, 2 rounds" in repr(loaded)
    html = loaded._repr_html_()
    assert loaded.summary["uplink_bytes"] < 1e6  # kilobytes, then
    assert " kB up, " in html
    assert " kB up, " in repr(loaded)
    assert html.count("<svg") == html.count("<polyline") == 1
    assert "<script" not in html


def test_a_report_states_why_a_run_failed(tmp_path):
    with pytest.raises(fb.FewbytesError, match="not all finite"):
        fb.run(fb.FedAvg(lr=1e38), tiny_task(), rounds=1, workers=1, out=tmp_path / "run")
    runs = read_runs([tmp_path / "run"])
    assert runs[0].status == "failed"
    assert "not all finite" in write_report(runs, tmp_path / "report.html").read_text()
    assert "note: fedavg failed: round 1" in str(summary_table(runs).caption)


def test_a_name_in_a_result_is_no_html(folder, tmp_path):
    result = fb.Result.load(folder / "fedavg-1")
    result.summary["method"] = "<script>alert(1)</script>"
    assert "<script" not in result._repr_html_()


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda run: (run / "result.json").unlink(), "no result.json yet"),
        (lambda run: (run / "result.json").write_text("[]"), "it has no score"),
        (lambda run: (run / "rounds.jsonl").write_text("{"), "rounds.jsonl cannot be read"),
        (lambda run: (run / "ledger.parquet").write_bytes(b"PAR1"), "ledger.parquet is damaged"),
        (lambda run: (run / "config.toml").unlink(), "is not a run folder"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_one_line(tmp_path, damage, error):
    fb.run(fb.FedAvg(), tiny_task(seed=1), rounds=1, workers=1, out=tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(UserError, match=error) as raised:
        fb.Result.load(tmp_path / "run")
    assert "\n" not in str(raised.value)


def test_the_frame_has_a_row_per_score_with_bytes_so_far(folder):
    frame = fb.results(folder)
    assert list(frame["method"].unique()) == ["fedavg", "separate"]
    one = frame[(frame["method"] == "fedavg") & (frame["seed"] == 2) & (frame["kind"] == "global")]
    rows = read_run(folder / "fedavg-2").rounds
    assert list(one["round"]) == [1, 2, 3]
    assert list(one["value"]) == [row["scores"]["accuracy"]["global"] for row in rows]
    assert list(one["bytes_up"]) == [sum(row["uplink_bytes"] for row in rows[: t + 1]) for t in range(3)]
    assert list(one["bytes_down"]) == [sum(row["downlink_bytes"] for row in rows[: t + 1]) for t in range(3)]
    assert one["seconds"].is_monotonic_increasing
    assert len(fb.results([folder / "fedavg-1", folder / "fedavg-2"])["run"].unique()) == 2


@pytest.mark.parametrize("missing", ["pandas", "matplotlib"])
def test_what_is_missing_names_its_extra(folder, tmp_path, monkeypatch, missing):
    monkeypatch.setattr(extras, "is_installed", lambda name: name != missing)
    with pytest.raises(UserError, match=rf"needs {missing}: pip install 'fewbytes\[results\]'"):
        fb.results(folder) if missing == "pandas" else write_svg(repeated(read_runs([folder])), tmp_path, Goal())


def test_seconds_are_those_of_training_and_of_the_slowest_link(folder):
    run = read_run(folder / "fedavg-1")
    assert run.ledger is not None
    moved: dict[int, dict[int, float]] = {}
    for row in run.ledger.to_pylist():
        seconds = Link(1000.0).seconds(row["bytes_up"]) + Link(4000.0).seconds(row["bytes_down"])
        of_round = moved.setdefault(row["round"], {})
        of_round[row["client"]] = of_round.get(row["client"], 0.0) + seconds
    now, wanted = 0.0, []
    for row in run.rounds:
        now += row["seconds"] - row["seconds_scoring"] + max(moved[row["round"]].values())
        wanted.append(now)
    assert seconds_so_far(run, LINK) == pytest.approx(wanted)
    assert seconds_so_far(run, Goal())[-1] < wanted[-1]


def test_links_that_a_run_simulated_are_not_counted_twice(tmp_path):
    fb.run(fb.FedAvg(), tiny_task(seed=1), rounds=2, workers=1, links="1kB/s", speeds="1,2,1,1", out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert seconds_so_far(run, LINK) == pytest.approx([row["simulated_seconds"] for row in run.rounds])


def test_the_way_to_a_target_ends_with_the_first_round_that_has_it(folder):
    run = read_run(folder / "fedavg-1")
    scores = [row["scores"]["accuracy"]["global"] for row in run.rounds]
    best = scores.index(max(scores))
    found = reached(run, Goal.read("1kB/s", "4kB/s", f"global>={max(scores)}"))
    assert found is not None
    assert found.round == best + 1
    assert found.up == sum(row["uplink_bytes"] for row in run.rounds[: best + 1])
    assert found.seconds == pytest.approx(seconds_so_far(run, LINK)[best])
    assert reached(run, Goal.read(target="1.01")) is None
    rows = target_rows(repeated(read_runs([folder])), Goal.read(target="global>=0"))
    assert [(row.label, len(row.reached), row.cells("kB")[-1]) for row in rows] == [
        ("fedavg", 3, ""), ("separate", 0, "not measured"),
    ]  # fmt: skip


def test_few_bytes_are_in_units_that_suit_them(folder, tmp_path):
    runs, goal = read_runs([folder]), Goal.read(target="global>=0")
    fedavg, _ = target_rows(repeated(runs), goal)
    both = fedavg.spread("both")
    assert both is not None
    heads = [str(column.header) for column in target_table(repeated(runs), goal).columns]
    assert heads[3:6] == ["B up", "B down", "B both"]
    assert fedavg.cells("B")[3].startswith(f"{both.mean:,.0f}")
    text = write_report(runs, tmp_path / "r.html", goal).read_text()
    assert '<th scope="col">B both</th>' in text
    found = re.search('id="charts">(.*?)</script>', text, re.DOTALL)
    assert found
    charts = json.loads(found[1])
    [bar], layout = charts["target-both"]["all"]
    assert bar["x"] == pytest.approx([both.mean / 1e3])
    axes = [layout["xaxis"], charts["scores-both"]["global"][1]["xaxis"], charts["choice"]["personalised"][1]["xaxis"]]
    axes += [charts["rounds-uplink"]["all"][1]["yaxis"], charts["clients-uplink"]["all"][1]["xaxis"]]
    assert all("kB" in axis["title"] for axis in axes)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"target": "high"}, "--reach takes a score"),
        ({"target": "nan"}, "--reach takes a score"),
        ({"target": "patience=3"}, "--reach takes a score"),
        ({"link": "fast"}, "links are rates"),
        ({"downlink": "1Mbps"}, "add --link RATE"),
    ],
)
def test_goals_that_cannot_be_read_are_one_line(given, error):
    with pytest.raises(UserError, match=error):
        Goal.read(**given)


def test_tables_have_means_and_deviations(folder, tmp_path):
    groups = repeated(read_runs([folder]))
    goal = Goal.read("1kB/s", None, "global>=0.1")
    write_csv(groups, tmp_path / "t" / "table.csv", goal)
    rows = list(csv.DictReader((tmp_path / "t" / "table.csv").read_text().splitlines()))
    [row] = [row for row in rows if (row["method"], row["kind"]) == ("fedavg", "global")]
    finals = fb.results(folder).query("method == 'fedavg' and kind == 'global' and round == 3")["value"]
    assert float(row["final"]) == pytest.approx(finals.mean(), rel=1e-5)
    assert float(row["final_deviation"]) == pytest.approx(finals.std(), rel=1e-5, abs=1e-9)
    assert (row["seeds"], row["target_reached"]) == ("3", "3/3")
    write_latex(groups, tmp_path / "table.tex", goal)
    text = (tmp_path / "table.tex").read_text()
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len({line.count("&") for line in lines}) == 1  # each row has a cell for each column
    assert rf"${100 * finals.mean():.1f} \pm {100 * finals.std():.1f}$" in text
    assert r"& accuracy, global, \% &" in text
    numbers = re.findall(r"\$([\d.]+) \\pm ([\d.]+)\$", text)
    assert len(numbers) > 4
    assert all(len(a.partition(".")[2]) == len(b.partition(".")[2]) for a, b in numbers)  # as many decimals


def test_names_in_a_table_are_no_latex(tmp_path):
    fb.run(fb.FedAvg(), tiny_task(seed=1), rounds=1, workers=1, out=tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps(result | {"method": r"a_b&\input{x}%"}))
    write_latex(repeated(read_runs([tmp_path / "run"])), tmp_path / "table.tex", Goal())
    assert r"a\_b\&\textbackslash{}input\{x\}\%" in (tmp_path / "table.tex").read_text()


def test_figures_are_the_same_each_time_and_load_nothing(folder, tmp_path):
    groups = repeated(read_runs([folder]))
    goal = Goal.read("1kB/s", None, "global>=0.1")
    paths = write_svg(groups, tmp_path / "one", goal)
    assert [path.name for path in paths][:2] == ["accuracy-global-over-rounds.svg", "accuracy-global-over-mb.svg"]
    assert {"accuracy-personalised-final.svg", "target-mb.svg", "target-seconds.svg"} <= {path.name for path in paths}
    write_svg(groups, tmp_path / "two", goal)
    for path in paths:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        assert not re.search(r"href=\"(?!#)", path.read_text())
    assert write_pdf(groups, tmp_path / "all.pdf", goal).read_bytes().startswith(b"%PDF")


def test_a_page_draws_the_mean_above_its_band(folder, tmp_path):
    groups = repeated(read_runs([folder]))
    text = write_report(read_runs([folder]), tmp_path / "r.html", LINK).read_text()
    found = re.search('id="charts">(.*?)</script>', text, re.DOTALL)
    assert found
    traces, _ = json.loads(found[1])["scores-seconds"]["personalised"]
    bands = [trace for trace in traces if trace.get("fill") == "toself"]
    lines = [trace for trace in traces if "fill" not in trace]
    points = curve(groups[0], "accuracy", "personalised", "seconds", LINK)
    assert len(bands) == len(lines) == 2
    assert lines[0]["y"] == pytest.approx([point.value for point in points])
    assert lines[0]["x"] == pytest.approx([point.x for point in points])
    top = [point.value + (point.deviation or 0.0) for point in points]
    assert bands[0]["y"][: len(points)] == pytest.approx(top)
    assert "1kB/s up, 4kB/s down" in text
