"""Papers' tables: the grids hold together; cells are run once, gone on with, and told beside the paper's figures."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import save_file
from torch import nn

import fewbytes as fb
from fewbytes.analysis.probe import probe
from fewbytes.analysis.settings import Probing
from fewbytes.base.errors import UserError
from fewbytes.base.files import lock
from fewbytes.cli.app import main
from fewbytes.experiments.settings import make_experiment, make_method
from fewbytes.experiments.tasks import find
from fewbytes.models import build_model
from fewbytes.models.build import ModelBuilder
from fewbytes.report.folder import Direction, RunFolder
from fewbytes.report.reading import read_run
from fewbytes.reproduce import TABLES, Scale, Table, read_table, reproduce, reproduce_all, running
from fewbytes.reproduce.figures import Best, Locals, Mean, Probes, Stored, Total, Traffic
from fewbytes.reproduce.found import CellRuns
from fewbytes.reproduce.grid import Cell, Claim, Printed, printed
from fewbytes.reproduce.reproduction import Reproduction, page
from fewbytes.reproduce.verdict import Order, judged, order

TINY = """\
title = "Tiny"
unit = "accuracy, %"
seeds = [1, 2, 3]
rows = ["Separate", "FedAvg"]
columns = ["alpha 0.3", "alpha 1.0", "elsewhere"]
notes = ["Small.", { paper = "Large." }]
rules = [
    { dataset = "digits", clients = 3, rounds = 4, part = 0.2, model = "mlp" },
    { parameters = { epochs = 1, lr = 0.1, batch = 20 } },
    { rows = ["Separate"], method = "separate" },
    { rows = ["FedAvg"], method = "fedavg" },
    { columns = ["alpha 0.3"], alpha = 0.3 },
    { columns = ["alpha 1.0"], alpha = 1.0 },
    { figure = { show = "best", accuracy = "personalised", curve = "personalised" } },
    { columns = ["elsewhere"], dataset = "no-such-data", figure = { show = "final", accuracy = "global" } },
]

[[printed]]
columns = ["alpha *"]
[printed.rows]
"Separate" = "60.0±1.5 60.0±1.5"
"""
"""Two columns of the digits, and one of data that nobody has."""


@pytest.fixture(autouse=True)
def tiny(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("tables") / "table-1.toml"
    path.write_text(TINY)
    monkeypatch.setitem(TABLES, "tiny/table-1", path)
    return path


def table(name: str, scale: Scale) -> Table:
    return read_table(TABLES[name], scale)


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_settings_of_every_cell_are_understood(name: str, scale: Scale) -> None:
    made = table(name, scale)
    assert len({(cell.row, cell.column) for cell in made.cells}) == len(made.cells)
    assert not {*",*?["} & {*"".join((*made.rows, *made.columns))}  # they are chosen by lists of patterns
    names: dict[str, Any] = {}
    for cell in made.cells:
        experiment = make_experiment({**cell.settings, "seed": 1})
        make_method(experiment.method, experiment.parameters)
        assert names.setdefault(cell.run, cell.settings) == cell.settings
    for claim in made.claims:
        assert judged(claim, _as_printed(made)).word in ("seen", "not run"), (
            claim.text
        )  # the paper's own figures bear it
    assert any(cell.printed for cell in made.cells) or "figure" in name or (name, scale) == ("fedktl/table-5", "small")


class Given(CellRuns):
    """A cell whose figures are given."""

    counted: dict[int, float] = {}  # noqa: RUF012


def given(row: str, column: str, theirs: float | None, *values: float, of: int = 1) -> CellRuns:
    cell = Cell(row, column, {}, Best(accuracy="global"), None if theirs is None else Printed(theirs))
    made = Given(cell, {}, of)
    object.__setattr__(made, "counted", dict(enumerate(values, 1)))
    return made


def _as_printed(made: Table) -> list[CellRuns]:
    return [given(c.row, c.column, c.printed.mean, *[c.printed.mean] * 2) for c in made.cells if c.printed]


def test_the_papers_order_is_seen_where_differences_by_seed_bear_it() -> None:
    lower, upper = given("a", "x", 50, 40, 60, 80), given("b", "x", 60, 42, 61, 83)  # far apart by seed, near by row
    assert order([lower, upper]) == Order(as_there=1)
    assert order([given("a", "x", 70, 40, 60, 80), upper]) == Order(otherwise=1)
    assert order([lower, given("b", "x", 60, 42, 58, 81)]) == Order(close=1)
    assert order([lower, given("b", "y", 60, 42, 61, 83)]) == Order()  # another column
    assert order([lower, given("b", "x", None, 42, 61, 83)]) == Order()  # the paper prints none
    assert order([lower, given("b", "x", 50, 42, 61, 83)]) == Order()  # the paper does not tell them apart
    assert order([lower, upper]).sentence(3).startswith("The paper's order of rows is seen: of 1 pairs")
    several = [lower, upper, given("c", "x", 70, 30, 30, 30)]
    assert re.search("order of rows .*in part: of 3 .*1 agree, 2 are reversed, 0 are", order(several).sentence(3))
    assert "cannot be determined" in order([given("a", "x", 1, 5), given("b", "x", 2, 5)]).sentence(1)


def test_the_columns_of_a_table_of_one_row_have_an_order_too() -> None:
    found = [given("a", "x", 50, 40, 41), given("a", "y", 60, 45, 46), given("a", "z", 70, 30, 31)]
    assert order(found) == Order(as_there=1, otherwise=2, of="columns")
    assert re.search("order of columns .*in part: of 3 ", order(found).sentence(2))


def test_a_claim_holds_where_every_comparison_does() -> None:
    claim = Claim(text="b is above the others", above=("b",), below=("*",), why="Too few rounds.")
    found = [given("a", "x", 50, 40, 60), given("b", "x", 60, 45, 66), given("c", "x", 60, 39, 50)]
    assert judged(claim, found).sentence == "b is above the others: seen."
    assert judged(claim, [*found, given("d", "x", 1, 44, 67)]).word == "seen in 2 of 3 comparisons, 1 too close to tell"
    none = judged(claim, [found[1], given("d", "x", 1, 50, 67), given("e", "x", 1, 44, 67)])
    assert none.word == "not seen in any of 2 comparisons, 1 too close to tell"
    assert judged(claim, [found[1], given("d", "x", 1, 50, 67)]).sentence.endswith("not seen. Too few rounds.")
    assert judged(claim, [found[1]]).sentence == "b is above the others: not run."
    thrice = Claim(text="b is thrice", above=("b",), below=("a",), times=3)
    assert judged(thrice, [given("a", "x", 1, 10, 10), given("b", "x", 3, 31, 31)]).word == "seen"
    assert judged(thrice, [given("a", "x", 1, 10, 10), given("b", "x", 3, 29, 29)]).word == "not seen"


def test_a_claim_says_what_it_has_not_compared() -> None:
    claim = Claim(text="b is above the others", above=("b",), below=("*",), why="Too few rounds.")
    above, not_run = given("b", "x", 60, 45, 66), given("c", "x", 60)
    begun = judged(claim, [above, given("a", "x", 50, 40, 60), not_run])
    assert begun.sentence.endswith(": so far seen, 1 comparison not run.")
    assert judged(claim, [given("b", "x", 60, 45), given("a", "x", 50, 40)]).word == "seen, by one seed"
    begun = judged(claim, [given("b", "x", 60, 45, of=2), given("a", "x", 50, 40, of=2)])
    assert begun.word == "so far seen, by one seed"
    told = order([above, given("a", "x", 50, 40, 60), not_run]).sentence(2)
    assert re.search("seen so far: of 1 .*1 agree, 0 are reversed, .*; 1 more are not run", told)


def test_all_tables_are_run_and_told_in_one_document(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A table that fails keeps none of the others from being run; the same command goes on."""
    for name in [name for name in TABLES if name != "tiny/table-1"]:
        monkeypatch.delitem(TABLES, name)
    claim = """
[[claims]]
text = "FedAvg is above training alone"
above = ["FedAvg"]
below = ["Separate"]
columns = ["alpha 0.3"]
"""
    rounds = tiny.read_text().replace("rounds = 4", "rounds = 1").replace("seeds = [1, 2, 3]", "seeds = [1]")
    tiny.write_text(rounds + claim)
    broken = tiny.with_name("table-2.toml")
    broken.write_text(rounds.replace('"digits"', '"no-such-data"'))
    monkeypatch.setitem(TABLES, "tiny/table-2", broken)
    path, failed = reproduce_all("small", tmp_path)
    assert [each.partition(":")[0] for each in failed] == ["tiny/table-2"]
    text = path.read_text()
    made = reproduce("tiny/table-1", out=tmp_path)
    ours, other = (made.at(row, "alpha 0.3") for row in ("FedAvg", "Separate"))
    assert ours
    assert other
    word = f"{'seen' if ours.values[1] > other.values[1] else 'not seen'}, by one seed"
    assert f"| {word}. |" in next(line for line in text.splitlines() if line.startswith("| FedAvg is above"))
    assert "| `fewbytes reproduce tiny/table-1` | alpha 0.3: Separate " in text
    assert "## Tiny" in text
    assert "- tiny/table-2: data set 'no-such-data' not found\n" in text  # and no word of where it was looked for
    assert "`fewbytes reproduce tiny/table-1`: 4 runs, 0 minutes one after another." in text
    assert f"FedAvg is above training alone: {word}." in (tmp_path / "tiny-small" / "table-1.html").read_text()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/result.json")}
    monkeypatch.setattr(sys, "argv", ["fewbytes", "reproduce", "--all", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 1
    assert "1 of the tables failed" in told.err.replace("\n", " ")
    assert "document: " in told.out
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/result.json")}
    with pytest.raises(UserError, match="belong to one table"):
        reproduce_all("small", tmp_path, rows=["FedAvg"])


def test_the_small_scale_shows_rows_and_columns_of_the_papers() -> None:
    for name in TABLES:
        small, paper = table(name, "small"), table(name, "paper")
        there = {c.replace("GB", "MB") for c in paper.columns}
        assert small.rows == [row for row in paper.rows if row in small.rows]
        assert set(small.columns) <= there | ({"CIFAR-10 s=4"} if name == "genefl/figure-6" else set())
        assert set(small.seeds) <= set(paper.seeds)


def test_tables_share_the_runs_they_have_in_common() -> None:
    purin = {c.run for c in table("fedpurin/table-1", "paper").cells if c.row == "FedPURIN"}
    ablated = {c.run for c in table("fedpurin/table-2", "paper").cells if c.row == "exact gradient"}
    swept = {c.run for c in table("fedpurin/figure-4", "paper").cells if c.row == "tau 0.5 (exact)"}
    assert purin == ablated > swept
    measured = {c.row: c.run for c in table("fedpurin/table-3", "paper").cells if c.column.startswith("CIFAR-10 ")}
    assert {measured["FedPURIN"], measured["FedPURIN values only"]} < purin
    assert measured["FedPURIN (float16 gradients)"] not in purin
    assert {c.run for c in table("fedpurin/figure-5", "paper").cells} < purin
    known, new = ({c.run for c in table(f"genefl/table-{n}", "paper").cells} for n in (1, 3))
    assert new < known
    for figure, of in ((3, new), (5, known), (6, known)):
        assert {c.run for c in table(f"genefl/figure-{figure}", "paper").cells} < of
    ablated = [c for c in table("genefl/table-5", "paper").cells if c.row == "GENE-FL"]
    assert {c.run for c in ablated} < new
    clustered = {c.run for c in table("genefl/table-7", "paper").cells if c.row == "K=4"}
    assert clustered < new


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_fusefl_s_tables_share_the_runs_they_have_in_common(scale: Scale) -> None:
    def runs(number: int, rows: set[str], column: str) -> set[str]:
        cells = table(f"fusefl/table-{number}", scale).cells
        return {cell.run for cell in cells if cell.row in rows and cell.column == column}

    rows = {"Ensemble", "FuseFL K=2", "FuseFL K=4"}
    main = runs(2, rows, "CIFAR-10 0.1")
    assert len(main) == 3
    assert main == runs(12, rows, "CIFAR-10 0.1")
    assert not main & runs(7, rows, "CIFAR-10 1 backdoored 0.1")
    if scale == "paper":
        every = rows | {"FuseFL K=8"}
        main = runs(2, every, "CIFAR-10 0.5")
        assert len(main) == 4
        assert main == runs(5, every, "CIFAR-10 M=5") == runs(12, every, "CIFAR-10 0.5")
        assert not main & runs(7, every, "CIFAR-10 1 backdoored 0.5")
        mixed = {"FuseFL K=4 mixed", "FuseFL K=4 average mixed"}
        assert runs(3, mixed, "CIFAR-10 0.5") == runs(10, mixed, "CIFAR-10 M=5")


@pytest.mark.parametrize("number", [2, 3, 5, 7, 10, 11, 12, 14])
def test_all_rows_of_fusefl_s_small_tables_have_the_same_clients(number: int) -> None:
    dealt: dict[str, set[Any]] = {}
    for cell in table(f"fusefl/table-{number}", "small").cells:
        keys = ("dataset", "part", "public", "partition", "alpha", "clients", "backdoor")
        dealt.setdefault(cell.column, set()).add(tuple(cell.settings.get(key) for key in keys))
    assert {len(each) for each in dealt.values()} == {1}


def test_fusefl_s_mixed_clients_are_together_as_large_as_equal_ones() -> None:
    for scale, width in (("small", 8), ("paper", 32)):
        cells = {c.row: c for c in table("fusefl/table-3", scale).cells if c.column == "CIFAR-10 0.1"}  # type: ignore[arg-type]
        sizes = []
        for row in ("FuseFL K=4", "FuseFL K=4 mixed"):
            build = ModelBuilder(cells[row].settings["model"], (3, 32, 32), 10)
            sizes.append(sum(p.numel() for client in range(5) for p in build(client).parameters()))
        one = sum(p.numel() for p in build_model(f"resnet18:width={width}", (3, 32, 32), 10).parameters())
        assert sizes == [5 * one, 5 * one]


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_all_rows_of_genefl_s_tables_are_trained_alike_in_as_many_clusters(scale: Scale) -> None:
    terms = ("fraction", "epochs", "lr", "batch", "momentum")
    for number in (1, 2, 3, 4):
        cells = table(f"genefl/table-{number}", scale).cells
        methods = [make_experiment({**cell.settings, "seed": 1}).build_method() for cell in cells]
        found = {(method.clusters, method.vectors, *(method.parameters[term] for term in terms)) for method in methods}
        assert found == {(4, 5, 0.2, 10, 0.01, 64, 0.9) if scale == "paper" else (2, 5, 0.25, 5, 0.01, 64, 0.9)}


def test_rows_and_columns_may_be_of_one_scale_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TINY.replace('rows = ["Separate", ', 'rows = ["Separate", { paper = "Only there" }, '))
    with pytest.raises(UserError, match="method of Only there"):
        read_table(path, "paper")
    assert read_table(path, "small").rows == ["Separate", "FedAvg"]


def test_a_table_is_run_told_and_not_run_again(tmp_path: Path) -> None:
    told: list[str] = []
    made = reproduce("tiny/table-1", out=tmp_path, seeds=["1", "2"], tell=told.append)
    runs = [line for line in told if line.startswith("run ")]
    assert len(runs) == 8
    assert any(line.startswith("left out: data set 'no-such-data'") for line in told)
    assert made.columns == ["alpha 0.3", "alpha 1.0"]
    for found in made.found:
        bests = []
        for seed in (1, 2):
            task = find(make_experiment({**found.cell.settings, "seed": seed})).task
            method = make_method(found.cell.settings["method"], found.cell.settings["parameters"])
            result = fb.run(method, task, rounds=4, save_models=False)
            bests.append(100 * result.summary["score"]["all"]["personalised"]["best"])
        assert found.ours == Printed(fmean(bests), stdev(bests))
    first = made.found[0]
    assert first.ours
    text = (tmp_path / "tiny-small" / "table-1.md").read_text()
    assert (
        f"| Separate | {first.ours.mean:.2f} ± {first.ours.deviation:.2f} (60.00 ± 1.50, {first.ours.mean - 60:+.2f}) |"
        in text
    )
    assert "- Small." in text
    assert "seeds 1, 2; ± is" in text
    assert "not available here: no-such-data." in text
    listed = json.loads((tmp_path / "tiny-small" / "table-1.json").read_text())
    assert listed[0]["values"] == {str(seed): value for seed, value in first.values.items()}
    page = (tmp_path / "tiny-small" / "table-1.html").read_text()
    assert "60.00 ± 1.50" in page
    assert 'id="curves-1"' in page
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/result.json")}
    told.clear()
    again = reproduce("tiny/table-1", out=tmp_path, seeds=[1, 2], tell=told.append)
    assert not [line for line in told if line.startswith("run ")]
    assert again.as_json() == made.as_json()
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/result.json")}
    more = reproduce("tiny/table-1", out=tmp_path, rows=["Sep*"], columns=["*1.0"], seeds=[3])
    assert [more.text(found).partition(" [")[2] for found in more.found] == [
        "2 of 3 seeds]", "", "2 of 3 seeds]", "2 of 3 seeds]",
    ]  # fmt: skip


def test_what_a_table_is_called_is_text_in_its_page(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    cell = Cell(
        hostile,
        f"{hostile}!",
        {"method": "fedavg", "dataset": "digits"},
        Best(accuracy="personalised", curve="personalised"),
        Printed(1.0),
    )
    row = {
        "round": 1,
        "phase": "round",
        "scores": {"accuracy": {"personalised": 0.5}},
        "uplink_bytes": 1,
        "downlink_bytes": 1,
    }
    run = RunFolder(tmp_path, hostile, [row], None, None, {"status": "done"}, "")
    table = Table(hostile, hostile, [cell], [], (1,))
    text = page(Reproduction(table, [CellRuns(cell, {1: run})], 1, [hostile], tmp_path / "t", [hostile], [hostile]))
    assert hostile not in text
    for place in ("h1>{}<", 'th scope="row">{}<', 'th scope="col">{}!<', "h2>{}!<", "</i>{}<", 'class="note">{}<'):
        assert place.format("&lt;script&gt;alert(1)&lt;/script&gt;") in text


def test_only_data_of_the_cells_asked_for_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    load = running.load_dataset
    monkeypatch.setattr(running, "load_dataset", lambda name: asked.append(name) or load(name))
    made = reproduce("tiny/table-1", columns=["alpha 0.3"], rows=["Separate"], seeds=[1], out=tmp_path, until=1)
    assert asked == ["digits"]
    assert made.columns == ["alpha 0.3", "alpha 1.0"]
    assert not any("no-such-data" in note for note in made.notes)


def test_cells_whose_generator_is_not_there_are_left_out(tiny: Path, tmp_path: Path) -> None:
    there = '{ rows = ["FedAvg"], method = "fedavg" }'
    assert there in TINY
    ktl = '{ rows = ["FedAvg"], method = "fedktl", parameters = { generator = "absent.pkl" } }'
    tiny.write_text(TINY.replace(there, ktl))
    told: list[str] = []
    made = reproduce("tiny/table-1", columns=["alpha 0.3"], seeds=[1], out=tmp_path, tell=told.append)
    assert made.rows == ["Separate"]
    assert any(line.startswith("left out: ") and "absent.pkl" in line for line in told)
    assert made.notes[-1].endswith(": absent.pkl.")


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_tables_about_fedktl_s_own_settings_share_its_default_run(scale: Scale) -> None:
    column = {"small": "practical cifar10 trained", "paper": "practical flowers102 trained"}[scale]
    default = {c.run for c in table("fedktl/table-1", scale).cells if (c.row, c.column) == ("FedKTL", column)}
    runs = {
        (number, cell.row if number == 11 else cell.column): cell.run
        for number in (10, 11, 12, 13, 14, 15, 16)
        for cell in table(f"fedktl/table-{number}", scale).cells
    }
    shared = {runs[key] for key in (
        (10, "no noise"), (11, "K = C"), (12, "mu 50"), (13, "lambda 1"), (14, "rate 0.01"), (15, "epochs 100"),
        (16, "batch 100"),
    )}  # fmt: skip
    assert shared == default
    assert len(set(runs.values())) == len(runs) - 6  # all others are runs of their own


def test_a_table_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    only = {"columns": ["alpha 0.3"], "seeds": [1]}
    part = reproduce("tiny/table-1", out=tmp_path / "a", until=2, **only)  # type: ignore[arg-type]
    assert [found.unfinished for found in part.found] == [{1: 2}, {}, {1: 2}, {}]
    assert part.text(part.found[0]).endswith(" [after 2 rounds]")
    told: list[str] = []
    reproduce("tiny/table-1", out=tmp_path / "a", until=2, tell=told.append, **only)  # type: ignore[arg-type]
    assert not told
    whole = reproduce("tiny/table-1", out=tmp_path / "a", until=4, **only)  # type: ignore[arg-type]
    fresh = reproduce("tiny/table-1", out=tmp_path / "b", **only)  # type: ignore[arg-type]
    assert [found.values for found in whole.found] == [found.values for found in fresh.found]
    assert not any(found.unfinished for found in whole.found)


def test_an_interrupted_cell_leaves_the_table_of_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fewbytes.experiments.display import Display

    scored = Display.scored

    def interrupt(self: Display, row: dict[str, Any]) -> None:
        scored(self, row)
        if row["round"] == 3 and (tmp_path / "tiny-small").glob("separate*/result.json"):
            raise KeyboardInterrupt

    only: dict[str, Any] = {"columns": ["alpha 0.3"], "seeds": [1], "out": tmp_path}
    monkeypatch.setattr(Display, "scored", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reproduce("tiny/table-1", **only)
    text = (tmp_path / "tiny-small" / "table-1.md").read_text()
    assert "after 3 rounds] (60.00 ± 1.50, " in text
    assert "| FedAvg | - | - |" in text
    monkeypatch.setattr(Display, "scored", scored)
    assert all(found.ours for found in reproduce("tiny/table-1", **only).found if found.cell.column == "alpha 0.3")


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    for asked, words in (
        ({"name": "fedpurin/table1"}, "did you mean 'fedpurin/table-1'"),
        ({"scale": "large"}, "small or paper"),
        ({"rows": ["fedavg"]}, "did you mean 'FedAvg'"),
        ({"columns": ["beta"]}, "the table has no column 'beta'"),
        ({"seeds": ["one"]}, "seeds are numbers"),
        ({"until": 0}, "until is a round"),
        ({"columns": ["elsewhere"]}, "no-such-data"),
        ({"parameters": {"fedavgg.lr": "1"}}, "did you mean 'fedavg'"),
        ({"parameters": {"fedavg.rate": "1"}}, "a parameter 'rate'"),
        ({"parameters": {"rate": "1"}}, "a parameter 'rate'"),
        ({"parameters": {"lr": "-1"}}, "lr must be"),
        ({"device": "abacus"}, "neither cpu nor cuda"),
    ):
        with pytest.raises(UserError, match=words):
            reproduce(**{"name": "tiny/table-1", "out": tmp_path, **asked})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_given_parameters_make_other_runs_and_another_table(tmp_path: Path) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "rows": ["FedAvg"], "seeds": [1], "out": tmp_path}
    plain = reproduce("tiny/table-1", **only)
    text = plain.path.with_suffix(".md").read_text()
    other = reproduce("tiny/table-1", parameters={"fedavg.lr": "0.01", "separate.lr": "1"}, **only)
    runs = [next(found.runs[1] for found in made.found if found.runs) for made in (plain, other)]
    assert runs[0].path != runs[1].path
    assert runs[1].fact("parameters")["lr"] == 0.01
    assert other.path.name == "table-1-fedavg-lr-0_01-separate-lr-1"
    assert "- Given: fedavg.lr=0.01, separate.lr=1." in other.path.with_suffix(".md").read_text()
    assert plain.path.with_suffix(".md").read_text() == text
    told: list[str] = []
    reproduce("tiny/table-1", parameters={"lr": "0.1", "epochs": "1"}, tell=told.append, **only)  # as the cells have it
    assert not told


def test_a_part_of_a_table_leaves_the_rest_of_it(tmp_path: Path) -> None:
    only: dict[str, Any] = {"seeds": [1], "out": tmp_path}
    reproduce("tiny/table-1", rows=["Separate"], **only)
    first = (tmp_path / "tiny-small" / "table-1.md").read_text()
    assert "| FedAvg | - | - |" in first
    made = reproduce("tiny/table-1", rows=["FedAvg"], columns=["alpha 1.0"], **only)
    second = (tmp_path / "tiny-small" / "table-1.md").read_text()
    assert next(line for line in first.splitlines() if "Separate" in line) in second
    assert "| FedAvg | - | - |" not in second
    assert [column.header for column in made.table().columns] == ["", "alpha 1.0"]
    assert made.table().row_count == 1


def test_runs_that_are_done_are_not_averaged_with_those_that_have_begun(tmp_path: Path) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "rows": ["FedAvg"], "out": tmp_path}

    def text() -> str:
        made = reproduce("tiny/table-1", until=1, seeds=[1], **only)
        return made.text(made.chosen()[0])

    reproduce("tiny/table-1", until=3, seeds=[2], **only)
    assert text().endswith("[after 1 to 3 rounds]")
    done = reproduce("tiny/table-1", seeds=[2], **only).chosen()[0]
    assert text() == f"{done.values[2]:.2f} [1 of 2 seeds]"
    assert [found.cell.column for found in reproduce("tiny/table-1", seeds=[2], **only).chosen()] == ["alpha 0.3"]


def test_a_run_that_is_done_needs_no_checkpoint_and_one_that_is_not_says_so(tmp_path: Path) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "seeds": [1], "out": tmp_path}
    reproduce("tiny/table-1", rows=["FedAvg"], **only)
    assert not list(tmp_path.glob("*/*/checkpoint"))
    part = reproduce("tiny/table-1", until=2, **only)
    folder = part.at("Separate", "alpha 0.3").runs[1].path  # type: ignore[union-attr]
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(UserError, match="checkpoint: remove"):
        reproduce("tiny/table-1", **only)
    shutil.rmtree(folder)
    whole = reproduce("tiny/table-1", **only)
    assert whole.chosen()[0].ours


@pytest.mark.parametrize("damage", ["result.json", "rounds.jsonl", "ledger.parquet"])
def test_a_damaged_run_is_told_before_others_begin_and_does_not_hide_them(tmp_path: Path, damage: str) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "seeds": [1], "out": tmp_path}
    folder = next(found.runs[1].path for found in reproduce("tiny/table-1", rows=["Separate"], **only).chosen())
    (folder / damage).write_text("{}")
    told: list[str] = []
    with pytest.raises(UserError, match="remove that run's folder"):
        reproduce("tiny/table-1", tell=told.append, **only)
    assert not told
    made = reproduce("tiny/table-1", rows=["FedAvg"], tell=told.append, **only)
    assert made.chosen()[0].ours
    assert f"Left out: {folder / damage}" in told[-1]
    text = (tmp_path / "tiny-small" / "table-1.md").read_text()
    assert "| Separate | - (60.00 ± 1.50) |" in text
    assert told[-1] in text
    shutil.rmtree(folder)
    assert all(found.ours for found in reproduce("tiny/table-1", **only).chosen())


def test_the_table_is_written_after_every_run(tmp_path: Path) -> None:
    lines: list[str] = []

    def look(told: str) -> None:
        if told.startswith("run 2 of 2"):
            lines.extend((tmp_path / "tiny-small" / "table-1.md").read_text().splitlines())

    reproduce("tiny/table-1", columns=["alpha 0.3"], seeds=[1], out=tmp_path, tell=look)
    assert "| FedAvg | - | - |" in lines
    assert not any(line.startswith("| Separate | - (60.00") for line in lines)


def test_a_place_where_no_run_can_be_is_told_before_any_data_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/deeper"):
        with pytest.raises(UserError, match="runs can be stored"):
            reproduce("tiny/table-1", out=tmp_path / name)


def test_a_run_that_another_process_has_just_begun_is_left_alone(tmp_path: Path) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "rows": ["FedAvg"], "seeds": [1], "out": tmp_path}
    part = reproduce("tiny/table-1", until=1, **only)
    folder = part.chosen()[0].runs[1].path
    for checkpoint in (folder / "checkpoint").glob("round-*.state"):
        checkpoint.unlink()
    with lock(folder / "checkpoint" / "lock"), pytest.raises(UserError, match="another process"):  # type: ignore[union-attr]
        reproduce("tiny/table-1", **only)
    assert (folder / "config.toml").exists()
    assert all(found.ours for found in reproduce("tiny/table-1", **only).found if found.runs)  # begun anew


def test_the_command_line_runs_a_part_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def ended(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["fewbytes", "reproduce", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    code, out, _ = ended("--json")
    assert (code, json.loads(out)["tiny/table-1"]) == (0, {"title": "Tiny", "runs": 18})
    chosen = ["--rows", "FedAvg,Separate", "--columns", "alpha 1.0", "--seeds", "2", "--set", "separate.epochs=1"]
    code, out, errors = ended("tiny/table-1", *chosen)
    assert code == 0, errors
    assert "60.00 ± 1.50" in out
    assert "2 of 2: FedAvg, alpha 1.0, seed 2" in " ".join(errors.split())
    assert (tmp_path / "runs" / "reproduce" / "tiny-small").is_dir()
    for wrong in (
        ["tiny/table-2"],
        ["tiny/table-1", "--rows", "Fed Avg"],
        ["tiny/table-1", "--set", "lr"],
        ["--scale", "big"],
    ):
        code, out, errors = ended(*wrong)
        assert (code, out) == (2, "")
        assert errors.startswith("fewbytes: ")


def test_a_folder_with_a_run_of_other_settings_is_left_alone(tmp_path: Path) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "rows": ["FedAvg"], "seeds": [1], "out": tmp_path}
    folder = next(found.runs[1].path for found in reproduce("tiny/table-1", **only).found if found.runs)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(UserError, match=r"other settings \(parameters\)"):
        reproduce("tiny/table-1", **only)
    assert "lr = 0.2" in config.read_text()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Short runs of FedPURIN and FedCAC with beta 3, as Table 3's are at the small scale."""
    runs = {}
    for name in ("fedpurin", "fedcac"):
        task = find(make_experiment({"method": name, "clients": 3, "part": 0.2, "model": "mlp", "seed": 1})).task
        method = make_method(name, {"epochs": 1, "lr": 0.1, "batch": 20, "beta": 3})
        folder = tmp_path_factory.mktemp("runs") / name
        fb.run(method, task, rounds=6, out=folder, save_models=False)
        runs[name] = read_run(folder)
    return runs


def test_figures_of_traffic_count_the_rounds_they_name(measured: dict[str, RunFolder]) -> None:
    run = measured["fedpurin"]
    ledger = pq.read_table(run.path / "ledger.parquet").to_pandas()
    late = ledger[ledger["round"].between(4, 6)]
    up = late["value_bytes_up"] + (late["mask_bits_up"] + 7) // 8

    def shown(way: Direction, first: int, **fields: Any) -> float | None:
        return Traffic(way=way, first=first, **fields)(run)

    assert shown("uplink", 4) == pytest.approx(up.mean() / 2**20)
    assert shown("uplink", 4, last=6, count="sent") == pytest.approx(late["bytes_up"].mean() / 1e6)
    assert shown("uplink", 4, clients="all") == pytest.approx(up.sum() / 3 / 2**20)
    assert shown("uplink", 4, clients="all", summed=True) == pytest.approx(up.sum() / 2**20)
    assert shown("uplink", 4, count="value", unit=4) == pytest.approx(late["value_bytes_up"].mean() / 4)
    last = ledger[ledger["round"] >= 6]  # the last round and the download after it
    assert shown("downlink", 6, count="sent") == pytest.approx(last["bytes_down"].sum() / 6 / 1e6)
    assert shown("downlink", 5, late=1, count="sent") == shown("downlink", 6, count="sent")
    assert shown("uplink", 9) is None
    assert Total(way="uplink", count="sent")(run) == pytest.approx(ledger["bytes_up"].sum() / 1e6)


def test_table_3_reads_fedcacs_bytes_as_the_paper_counts_them(measured: dict[str, RunFolder]) -> None:
    learnt = sum(p.numel() for p in build_model("mlp", (1, 8, 8), 10).parameters())
    cells = {
        c.column: c.figure for c in table("fedpurin/table-3", "small").cells
        if c.row == "FedCAC" and c.column.startswith("CIFAR-10 ")
    }  # fmt: skip
    figures = {column: 2**20 * (figure(measured["fedcac"]) or 0) for column, figure in cells.items()}
    assert figures["CIFAR-10 up before beta"] == pytest.approx(4 * learnt + learnt / 8, abs=1)
    assert figures["CIFAR-10 up after beta"] == pytest.approx(4 * learnt + learnt / 8, abs=1)
    assert figures["CIFAR-10 down before beta"] == pytest.approx(4 * learnt)
    assert figures["CIFAR-10 down after beta"] == pytest.approx(2 * learnt, rel=0.01)


def test_printed_figures_are_read() -> None:
    assert printed("95.65±1.19 - 3") == [Printed(95.65, 1.19), None, Printed(3.0)]


def test_accuracies_are_of_the_rounds_they_name(tmp_path: Path) -> None:
    shares = [0.1, 0.5, 0.3, 0.7, 0.6]
    rounds = [
        {
            "round": t,
            "phase": "round",
            "scores": {"accuracy": {"cohort": share}},
            "pooled": {"accuracy": {"combined": share / 2}},
        }
        for t, share in enumerate(shares, 1)
    ]
    run = RunFolder(tmp_path, "genefl", rounds, None, None, {"arrival": 4}, "")
    assert Mean(accuracy="cohort", last=2)(run) == pytest.approx(40)
    assert Mean(accuracy="cohort", last=9, who="newcomers")(run) == pytest.approx(65)
    assert Best(accuracy="cohort")(run) == pytest.approx(70)
    assert Best(accuracy="combined", pooled=True)(run) == pytest.approx(35)
    assert Best(accuracy="sparse", pooled=True)(run) is None


def test_the_size_of_a_stored_model_is_with_its_buffers_or_without(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "fedavg", [], None, None, None, "")
    assert Stored()(run) is None
    (tmp_path / "models").mkdir()
    save_file(nn.BatchNorm2d(64).state_dict(), tmp_path / "models" / "global.safetensors")
    assert Stored(buffers=False)(run) == pytest.approx(4 * 128 / 2**20)
    assert Stored()(run) == pytest.approx(4 * 257 / 2**20)


def test_what_a_figure_needs_besides_is_measured_once_a_run_is_done(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text("""\
title = "Members"
unit = "hundredths"
seeds = [1]
rows = ["ensemble"]
columns = ["own 1", "test 1", "linear fc1"]
rules = [
    { method = "ensemble", dataset = "digits", clients = 2, part = 0.2, model = "mlp", save_models = true },
    { parameters = { epochs = 2, lr = 0.05, batch = 20 } },
    { columns = ["own 1"], figure = { show = "local", client = 1, samples = "own" } },
    { columns = ["test 1"], figure = { show = "local", client = 1, samples = "test" } },
    { columns = ["linear *"], figure = { show = "probe", client = 1, point = "fc1", points = ["fc1"] } },
    { columns = ["linear *"], figure = { what = "linear_accuracy", epochs = 1, linear_epochs = 2 } },
]
""")
    told: list[str] = []

    def values() -> list[float | None]:
        told.clear()
        made = reproduce("tiny/table-1", out=tmp_path, tell=told.append)
        return [found.values.get(1) for found in made.found]

    first = values()
    assert [line.split()[0] for line in told] == ["run", "measuring", "probing"]
    run = next(tmp_path.glob("tiny-small/*/probe.json")).parent
    local, probed = (json.loads((run / f"{name}.json").read_text()) for name in ("local", "probe"))
    assert first == [100 * local[1]["own"], 100 * local[1]["test"], 100 * probed["points"][0]["linear_accuracy"]]
    assert (probed["model"], probed["epochs"], probed["linear_epochs"]) == ("client 1", 1, 2)
    assert (values(), told) == (first, [])
    (run / "probe.json").unlink()  # stopped as it was probed
    assert values() == first
    assert [line.split()[0] for line in told] == ["probing"]
    probe(run, 0, how=Probing(epochs=1, linear_epochs=1))  # somebody else, otherwise
    assert values() == first


def test_figures_of_what_was_not_measured_are_not_there(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "ensemble", [], None, None, None, "")
    assert Locals(client=0, samples="own")(run) is None
    probes = Probes(point="fc1", what="information_y", points=("fc1",), epochs=1, linear_epochs=1)
    assert probes(run) is None


def test_later_rules_win_and_those_of_another_table_come_first(tiny: Path) -> None:
    other = tiny.with_stem("table-2")
    other.write_text("""\
like = "table-1"
title = "Other"
unit = { small = "accuracy, %", paper = "accuracy of all, %" }
seeds = { small = [1], paper = [1, 2, 3] }
rows = ["one", "two"]
columns = ["alpha 0.3", { paper = "alpha 2.0" }]
rules = [
    { method = "fedpurin", parameters = { tau = 0.3 } },
    { methods = ["fedper"], parameters = { epochs = 7 } },
    { scale = "paper", rows = ["two"], method = "fedper" },
    { rows = ["one"], parameters = { tau = 0.4 }, figure = { accuracy = "sparse" } },
    { rows = ["two"], figure = { show = "traffic", way = "uplink" } },
]

[[printed]]
[printed.rows]
"two" = "- 2"
""")
    small, paper = read_table(other, "small"), read_table(other, "paper")
    assert (small.unit, paper.unit, small.seeds, paper.seeds) == (
        "accuracy, %", "accuracy of all, %", [1], [1, 2, 3],
    )  # fmt: skip
    assert (small.columns, paper.columns) == (["alpha 0.3"], ["alpha 0.3", "alpha 2.0"])
    one, two = small.cells
    assert one.settings["parameters"] == {"epochs": 1, "lr": 0.1, "batch": 20, "tau": 0.4}
    assert one.settings["alpha"] == 0.3
    assert one.figure == Best(accuracy="sparse", curve="personalised")
    assert two.figure == Traffic(way="uplink")
    assert [cell.settings["method"] for cell in paper.cells] == ["fedpurin", "fedpurin", "fedper", "fedper"]
    assert [cell.settings["parameters"]["epochs"] for cell in paper.cells] == [1, 1, 7, 7]
    assert [cell.printed for cell in paper.cells] == [None, None, None, Printed(2.0)]


@pytest.mark.parametrize(
    ("there", "instead", "words"),
    [
        ('title = "Tiny"', 'titel = "Tiny"', "unknown field `titel`"),
        ("seeds = [1, 2, 3]", 'seeds = "1"', r"`\$.seeds`"),
        ("part = 0.2", "prat = 0.2", "rule 1: .*'prat' .did you mean 'part'"),
        ('{ rows = ["FedAvg"]', '{ rows = ["FedAvgg"]', "rule 4: .*'FedAvgg' .did you mean 'FedAvg'"),
        ('rows = ["Separate"], method', 'rows = "Separate", method', "rule 3: Expected `array`"),
        ('show = "best"', 'show = "bets"', "Separate, alpha 0.3: .*'bets'"),
        ('curve = "personalised"', 'curves = "x"', "the figure of .* unknown field `curves`"),
        ('method = "fedavg"', 'method = "fedavgg"', "rule 4: .*'fedavgg' .did you mean 'fedavg'"),
        ("{ parameters", '{ methods = ["fedpr"], parameters', "rule 2: .*'fedpr' .did you mean 'fedper'"),
        (', method = "fedavg"', "", "method of FedAvg, alpha 0.3"),
        ("60.0±1.5 60.0±1.5", "60.0", "printed, Separate: 1 figures for 2 columns"),
        ("60.0±1.5 60.0±1.5", "60.0 x", "printed, Separate: .*convert"),
        ('"Separate" = "60', '"Seperate" = "60', "printed: .* 'Seperate' .did you mean 'Separate'"),
        ('title = "Tiny"', 'title = "Tiny"\nlike = "table-9"', "table-9.toml .*No such file"),
        ('title = "Tiny"', 'title = "Tiny"\nlike = "table-1"', "like table-1"),
        ('title = "Tiny"', "title = ", "the table .*table-1.toml: "),
    ],
)
def test_a_wrong_table_is_told_in_one_line(tiny: Path, tmp_path: Path, there: str, instead: str, words: str) -> None:
    assert there in TINY
    tiny.write_text(TINY.replace(there, instead, 1))
    with pytest.raises(UserError, match=words) as told:
        reproduce("tiny/table-1", out=tmp_path)
    assert str(tiny) in str(told.value)
    assert "\n" not in str(told.value)
