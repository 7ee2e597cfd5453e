"""Papers' tables: the grids hold together; cells are run once, gone on with, and told beside the paper's figures."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

import fewbytes as fb
from fewbytes.errors import UserError
from fewbytes.experiment import make_experiment, make_method
from fewbytes.report.folder import read_run
from fewbytes.reproduce import TABLES, Table, reproduce
from fewbytes.reproduce.grid import Cell, Printed, best, final, printed, traffic, values

DIGITS: dict[str, Any] = {
    "dataset": "digits", "clients": 3, "rounds": 4, "part": 0.2, "model": "mlp",
    "parameters": {"epochs": 1, "lr": 0.1, "batch": 20},
}  # fmt: skip


def tiny(scale: str = "small") -> Table:
    """Two rows and two columns of the digits, and a column of data that nobody has."""
    cells = [
        Cell(row, f"alpha {alpha}", {**DIGITS, "method": name, "alpha": alpha}, best("personalised"), theirs,
             "personalised")
        for row, name, theirs in (("Separate", "separate", Printed(60.0, 1.5)), ("FedAvg", "fedavg", None))
        for alpha in (0.3, 1.0)
    ]  # fmt: skip
    lacking = {**DIGITS, "method": "fedavg", "dataset": "no-such-data"}
    return Table("Tiny", "accuracy, %", [*cells, Cell("FedAvg", "elsewhere", lacking, final("global"))], ("Small.",))


@pytest.fixture(autouse=True)
def with_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "tiny/table-1", tiny)


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_cell_of_a_grid_can_be_run(name: str, scale: str) -> None:
    table = TABLES[name](scale)  # type: ignore[arg-type]
    assert len({(cell.row, cell.column) for cell in table.cells}) == len(table.cells)
    names: dict[str, Any] = {}
    for cell in table.cells:
        experiment = make_experiment({**cell.settings, "seed": 1})
        make_method(experiment.method, experiment.parameters)
        assert names.setdefault(cell.run, cell.settings) == cell.settings
    assert any(cell.printed for cell in table.cells) or "figure" in name


def test_small_and_paper_scale_show_the_same_rows() -> None:
    for make in TABLES.values():
        small, paper = make("small"), make("paper")
        assert small.rows == paper.rows
        assert set(small.columns) <= {c.replace("GB", "MB") for c in paper.columns}


def test_tables_share_the_runs_they_have_in_common() -> None:
    purin = {c.run for c in TABLES["fedpurin/table-1"]("paper").cells if c.row == "FedPURIN"}
    ablated = {c.run for c in TABLES["fedpurin/table-2"]("paper").cells if c.row == "exact gradient, no Hessian"}
    swept = {c.run for c in TABLES["fedpurin/figure-4"]("paper").cells if c.row == "tau 0.5"}
    assert purin == ablated > swept
    measured = {c.row: c.run for c in TABLES["fedpurin/table-3"]("paper").cells if c.column.startswith("CIFAR-10 ")}
    assert {measured["FedPURIN"], measured["FedPURIN, values only"]} < purin
    assert measured["FedPURIN, float16 gradients"] not in purin
    known, new = ({c.run for c in TABLES[f"genefl/table-{n}"]("paper").cells} for n in (1, 3))
    assert new < known


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
            task = make_experiment({**found.cell.settings, "seed": seed}).task()
            method = make_method(found.cell.settings["method"], found.cell.settings["parameters"])
            result = fb.run(method, task, rounds=4, save_models=False)
            bests.append(100 * result.summary["accuracy"]["all"]["personalised"]["best"])
        assert found.ours == Printed(fmean(bests), stdev(bests))
    first = made.found[0]
    text = (tmp_path / "tiny-small" / "table-1.md").read_text()
    assert f"| Separate | {first.text()} (60.00 ± 1.50) |" in text
    assert "- Small." in text
    assert "- Left out: data set 'no-such-data'" in text
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


def test_a_table_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    only = {"columns": ["alpha 0.3"], "seeds": [1]}
    part = reproduce("tiny/table-1", out=tmp_path / "a", until=2, **only)  # type: ignore[arg-type]
    assert [found.rounds for found in part.found] == [2, 2]
    assert part.found[0].text().endswith("[2 rounds]")
    reproduce("tiny/table-1", out=tmp_path / "a", until=2, **only)  # type: ignore[arg-type]
    whole = reproduce("tiny/table-1", out=tmp_path / "a", **only)  # type: ignore[arg-type]
    fresh = reproduce("tiny/table-1", out=tmp_path / "b", **only)  # type: ignore[arg-type]
    assert [found.values for found in whole.found] == [found.values for found in fresh.found]
    assert [found.rounds for found in whole.found] == [None, None]


def test_an_interrupted_cell_leaves_the_table_of_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fewbytes.display import Display

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
    assert "[3 rounds] (60.00 ± 1.50)" in text
    assert "| FedAvg | - |" in text
    monkeypatch.setattr(Display, "scored", scored)
    assert all(found.ours for found in reproduce("tiny/table-1", **only).found)


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
        ({"parameters": {"fedavg.rate": "1"}}, "no parameter 'rate'"),
    ):
        with pytest.raises(UserError, match=words):
            reproduce(**{"name": "tiny/table-1", "out": tmp_path, **asked})  # type: ignore[arg-type]


def test_given_parameters_make_other_runs(tmp_path: Path) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "rows": ["FedAvg"], "seeds": [1], "out": tmp_path}
    plain = reproduce("tiny/table-1", **only)
    other = reproduce("tiny/table-1", parameters={"fedavg.lr": "0.01", "separate.lr": "1"}, **only)
    assert plain.found[0].runs[1].path != other.found[0].runs[1].path
    assert read_run(other.found[0].runs[1].path).fact("parameters")["lr"] == 0.01


def test_a_folder_with_a_run_of_other_settings_is_left_alone(tmp_path: Path) -> None:
    only: dict[str, Any] = {"columns": ["alpha 0.3"], "rows": ["FedAvg"], "seeds": [1], "out": tmp_path}
    folder = reproduce("tiny/table-1", **only).found[0].runs[1].path
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(UserError, match=r"other settings \(parameters\)"):
        reproduce("tiny/table-1", **only)
    assert "lr = 0.2" in config.read_text()


def test_figures_of_traffic_count_the_rounds_they_name(tmp_path: Path) -> None:
    task = make_experiment({**DIGITS, "method": "fedpurin", "seed": 1}).task()
    method = make_method("fedpurin", {**DIGITS["parameters"], "beta": 2})
    ledger = fb.run(method, task, rounds=4, out=tmp_path / "run").ledger.columns()
    run = read_run(tmp_path / "run")
    late = (ledger["round"] >= 3) & (ledger["round"] <= 4)
    up = ledger["value_bytes_up"] + (ledger["mask_bits_up"] + 7) // 8
    assert traffic("uplink", 3)(run) == pytest.approx(up[ledger["round"] >= 3].sum() / 2**20 / (2 * 3 + 3))
    assert traffic("uplink", 3, 4)(run) == pytest.approx(up[late].mean() / 2**20)
    assert traffic("uplink", 3, 4, sent=True)(run) == pytest.approx(ledger["bytes_up"][late].mean() / 1e6)
    assert traffic("uplink", 3, 4, clients="all")(run) == pytest.approx(up[late].sum() / 2 / 2**20)
    assert values("uplink", 3, 4)(run) == pytest.approx(ledger["value_bytes_up"][late].mean() / 2**20)
    assert traffic("uplink", 9)(run) is None


def test_printed_figures_are_read() -> None:
    assert printed("95.65±1.19 - 3") == [Printed(95.65, 1.19), None, Printed(3.0)]
