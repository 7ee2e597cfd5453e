"""Tables: what columns become, what is learnt of them, at sites of their own, and what is refused in one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import fewbytes

import fewbytes as fb
from fewbytes.data import Partition, Schema, federate, load_dataset, table
from fewbytes.data.tables import read_table
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

PATIENTS = {
    "age": [30, 50, 70, 50],
    "sex": ["f", "m", "f", "m"],
    "smoker": [True, False, False, True],
    "target": ["ill", "well", "ill", "well"],
}


def patients(**more) -> dict[str, list]:
    return PATIENTS | more


NAMES = [f"Ada {i}" for i in range(60)]
HOURS = [f"{i / 4}" for i in range(60)]


def write(path: Path, columns: dict[str, list]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(columns).to_csv(path, index=False)
    return path


def test_numbers_are_standardised_and_text_becomes_indicators():
    data = table(PATIENTS, test=PATIENTS)
    assert data.classes == ("ill", "well")
    assert data.schema is not None
    assert data.schema.features == ("age", "smoker", "sex=f", "sex=m")
    x, y = data.train.load()
    assert x[:, 0].tolist() == pytest.approx([-math.sqrt(2), 0, math.sqrt(2), 0])
    assert x[:, 1].tolist() == [1, -1, -1, 1]
    assert x[:, 2:].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]
    assert y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("make", [pandas.DataFrame, pa.table, dict])
def test_frames_and_files_give_the_same(make, tmp_path):
    write(tmp_path / "train.csv", PATIENTS)
    pq.write_table(pa.table(PATIENTS), tmp_path / "test.parquet")
    read, made = load_dataset(str(tmp_path)), table(make(PATIENTS), test=make(PATIENTS))
    for split in ("train", "test"):
        for here, there in zip(getattr(read, split).load(), getattr(made, split).load(), strict=True):
            assert torch.equal(here, there)
    assert (read.classes, read.schema) == (made.classes, made.schema)


def test_what_is_learnt_follows_from_the_target():
    marks = [i % 2 for i in range(60)]
    numbers = [i * 1.5 for i in range(60)]
    columns = {
        "x": numbers,
        "marks": marks,
        "stage": [i % 3 for i in range(60)],
        "cost": numbers,
        "days": [i // 2 for i in range(60)],
    }
    assert table(columns, "stage").classes == ("0", "1", "2")
    assert table(columns, ["marks", "stage"]).learns == "numbers"
    several = table(
        {"x": numbers, "cough": marks, "fever": [0] * 60},
        ["cough", "fever"],
        test={"x": [0.0], "cough": [1], "fever": [1]},
    )
    assert (several.learns, several.classes, several.groups) == (
        "labels",
        ("cough", "fever"),
        ("cough", "fever", "none"),
    )
    assert several.test.targets.tolist() == [[1, 1]]
    for target in ("cost", "days"):
        learnt = table(columns, target)
        assert learnt.learns == "numbers"
        assert float(learnt.train.targets.mean()) == pytest.approx(0, abs=1e-6)
        assert float(learnt.train.targets.std(correction=0)) == pytest.approx(1)
        assert learnt.groups is not None
        assert len(learnt.groups) == 10
        assert torch.bincount(torch.cat([learnt.train.labels, learnt.test.labels])).tolist() == [6] * 10


def test_a_schema_makes_other_tables_the_same_numbers():
    first = table(PATIENTS)
    two = {"sex": ["m", "m"], "target": ["well", "ill"], "age": [50, 70], "smoker": [True, True], "name": ["a", "b"]}
    other = table(two, schema=first.schema, test=PATIENTS)
    assert other.train.load()[0].tolist()[0] == [0, 1, 0, 1]
    assert first.schema is not None
    assert Schema.read(first.schema.text()) == first.schema


def test_missing_values_are_refused_dropped_or_filled_in():
    columns = patients(age=[30, None, 70, 50], sex=["f", "m", None, "m"])
    with pytest.raises(
        fb.UserError,
        match=r"'age', row 2 .*missing",
    ):
        table(columns)
    dropped = table(columns, schema=Schema(missing="drop"), test=PATIENTS)
    assert len(dropped.train) == 2
    filled = table(columns, schema=Schema(missing="mean"), test=PATIENTS).train.load()[0]
    assert filled[1, 0] == 0
    assert filled[2, 2:].tolist() == [0, 0]
    with pytest.raises(fb.UserError, match=r"'target', row 1 .*missing='drop'$"):
        table(patients(target=[None, "ill", "ill", "well"]), schema=Schema(missing="mean"))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (patients(age=["30", "forty", "70", "50"]), "'age', row 2 .*'forty' is not a number"),
        (patients(age=[30, 50, math.inf, 50]), "'age', row 3 .*inf"),
        (patients(sex=["f", "x", "m", "x"]), r"'sex', row 2 .* 1 more: 'x' .*\(it has f, m\)"),
        ({key: PATIENTS[key] for key in ("age", "smoker", "target")}, "'sex'.*age, smoker, target"),
        ({key: [] for key in PATIENTS}, "no row"),
    ],
)  # fmt: skip
def test_what_a_tables_schema_does_not_allow_is_one_line(columns, says):
    with pytest.raises(fb.UserError, match=says) as error:
        table(columns, schema=table(PATIENTS).schema)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("columns", "target", "says"),
    [
        ({"x": [1.5], "y": [2]}, (), "columns x, y: .*target='COLUMN'"),
        ({"x": [1.5], "y": [2]}, "z", "no column 'z'"),
        ({"y": [2]}, "y", "no column beside"),
        ({"x": [[1]], "y": [2]}, "y", "'x' has list<.*>"),
        ({"x": [None], "y": [2]}, "y", "'x' has no value"),
        ({"x": [1], "y": ["a"], "z": [0]}, ["y", "z"], "'y' is text"),
        ({"x": [f"x {i}" for i in range(1001)], "y": [0] * 1001}, "y", "1001 different texts"),
        ({"x": NAMES, "y": [0] * 60}, "y", r"'x' has 60 different texts .*text x\)"),
        ({"x": [0.5] * 60, "y": NAMES}, "y", "'y' has 60 different texts"),
        (
            {"x": [*HOURS[:6], "oops", *HOURS[7:]], "y": [0] * 60},
            "y",
            "'x', row 7 .*'oops' .*59",
        ),
        ({"x": [0.5] * 60, "y": [*HOURS[:-1], "??"]}, "y", r"'y', row 60 .*'\?\?'"),
        ({"x": [1.5, 2], "y": [0, 1]}, ["y", "y"], "twice"),
        (
            {f"column{i}": [1, 2] for i in range(9)},
            "colum3",
            r"did you mean 'column3'\?\).*column4 and 4 more",
        ),
        (3, "y", "pandas"),
    ],
)
def test_what_is_no_table_to_learn_from_is_one_line(columns, target, says):
    with pytest.raises(fb.UserError, match=says):
        table(columns, target)


def test_a_few_texts_among_few_whole_numbers_are_categories():
    """As a count that ends in `3+` is."""
    schema = table({"children": ["0", "1", "2"] * 19 + ["3+"] * 3, "y": [0, 1] * 30}, "y").schema
    assert schema is not None
    assert schema.categories == {"children": ("0", "1", "2", "3+")}


def scikit_learns(name: str, **how: bool) -> pandas.DataFrame:
    """A table that scikit-learn ships."""
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(as_frame=True, **how).frame


def gapminder() -> pandas.DataFrame:
    """1,704 rows of countries and years, as plotly ships them."""
    import plotly.data

    return plotly.data.gapminder().drop(columns=["country", "iso_alpha", "iso_num"])


@pytest.mark.parametrize(
    ("load", "target", "rounds", "better"),
    [(lambda: scikit_learns("diabetes", scaled=False), "target", 10, 0.7), (gapminder, "lifeExp", 10, 0.5)],
    ids=["diabetes", "gapminder"],
)
def test_numbers_of_real_tables_are_learnt(load, target, rounds, better, tmp_path):
    """Better than the mean, whose mean absolute error is about 0.85 standard deviations; from the command line, too."""
    frame = load()
    data = federate(table(frame, target), Partition(clients=4, alpha=1.0))
    task = fb.Task.on(
        data,
        lambda: torch.nn.Sequential(torch.nn.Linear(data.test.shape[0], 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)),
    )
    result = fb.run(fb.FedAvg(epochs=3, lr=0.05, batch=20), task, rounds=rounds, evaluate_every=rounds)
    assert result.summary["score"]["final"] < better
    frame.to_csv(tmp_path / "table.csv", index=False)
    done = fewbytes(
        "run", "fedavg", "--dataset", tmp_path / "table.csv", "--target", target, "--clients", "4", "--alpha", "1",
        "--rounds", str(rounds), "--set", "epochs=3", "--set", "lr=0.05", "--set", "batch=20", "--json",
        "--out", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    score = json.loads(done.stdout)["score"]
    assert (score["metric"], score["final"] < better) == ("mae", True)


@pytest.mark.parametrize(("name", "least"), [("wine", 0.85), ("breast_cancer", 0.9)])
def test_classes_of_real_tables_are_learnt(name, least):
    data = federate(table(scikit_learns(name)), Partition(clients=3, alpha=1.0))
    task = fb.Task.on(data, lambda: torch.nn.Linear(data.test.shape[0], len(data.classes)))
    result = fb.run(fb.FedAvg(epochs=2, lr=0.1, batch=20), task, rounds=3, evaluate_every=3)
    assert result.summary["score"]["final"] > least


@pytest.fixture
def wards(tmp_path) -> Path:
    """The server's table, and those of two sites: one lacks a category, has another order and a column more."""
    write(tmp_path / "server.csv", patients())
    write(
        tmp_path / "sites" / "east.csv",
        {"name": list("abcdef")} | {key: (PATIENTS[key] * 2)[:6] for key in reversed(PATIENTS)},
    )
    write(
        tmp_path / "sites" / "west.csv",
        {"age": [80] * 5, "sex": ["m"] * 5, "smoker": [True] * 5, "target": ["ill"] * 5},
    )
    return tmp_path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("age,target\n", "no row"),
        ("age;target\n60;ill;x\n", "row 1 .*3 values, .* 2"),
        ("age:target\n60:ill\n", "no column 'target' .*age:target"),
        ("age,target\n60,ill\n61,ill,x\n", "row 2 .*3 values, .* 2"),
    ],
)
def test_what_is_no_table_is_one_line_that_shows_no_row(tmp_path, text, says):
    file = tmp_path / "table.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(fb.UserError, match=says) as error:
        read_table("table", {"train": file}, Schema(target=("target",)))
    assert "60" not in str(error.value).replace(str(tmp_path), "")  # the folder's name may have it


def test_a_column_in_other_units_is_warned_of(wards):
    rows = {"age": [50_000.0, 61_000.0], "sex": ["m", "f"], "smoker": [True, False], "target": ["ill", "well"]}
    write(wards / "sites" / "west.csv", rows)
    notes = find(make_experiment(settings(wards))).notes
    assert [note for note in notes if re.search(r"west.csv: check column 'age': .*units", note)]


def test_a_remedy_suits_what_is_wrong(tmp_path):
    schema = table({"age": [30, 50, 70, 50], "target": [0, 1, 0, 1]}).schema
    with pytest.raises(fb.UserError, match=r"'1,250', .*1250 or 1.250.*decimal='point'"):
        table({"age": ["30", "1,250"], "target": [0, 1]}, schema=schema)
    with pytest.raises(fb.UserError, match=r"'age'.* Age, target.*' Age'"):
        table({" Age": [30, 50], "target": [0, 1]}, schema=schema)


def settings(wards: Path, **more):
    where = {"dataset": str(wards / "server.csv"), "client_data": str(wards / "sites")}
    return {"method": "fedavg", "partition": "local"} | where | more


def test_what_the_servers_columns_mean_holds_at_every_site(wards):
    found = find(make_experiment(settings(wards)))
    task = found.task
    assert len(task.data.test) == 4  # all of the server's
    assert task.data.label_counts()["train"] == [[2, 2], [4, 0]]
    west = task.data.clients[1].train.load()[0]
    assert west[0].tolist() == pytest.approx([30 / math.sqrt(200), 1, 0, 1])
    again = make_experiment(found.experiment.settings())  # as config.toml has it, and Flower's run config at a node
    node = find(again, here=(1,)).task
    assert torch.equal(node.data.clients[1].train.load()[0], west)
    assert node.problem.agreed == task.problem.agreed


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"sex": ["m", "x"]},
            r"west\.csv: .*'sex', row 2 .*'x' is a category",
        ),
        ({"sex": None}, r"west\.csv .*no column 'sex'"),
        ({"age": [50, None]}, r"west\.csv: .*'age', row 2"),
        (
            {"target": ["sick", "ill"]},
            r"west\.csv .*: sick; .*ill, sick, .*ill, well",
        ),
    ],
)
def test_a_site_whose_table_does_not_suit_is_named(wards, columns, says):
    two = {"age": [1, 2], "sex": ["m", "f"], "smoker": [True, False], "target": ["ill", "well"]} | columns
    write(wards / "sites" / "west.csv", {name: values for name, values in two.items() if values is not None})
    with pytest.raises(fb.UserError, match=says):
        find(make_experiment(settings(wards)))


def test_what_is_said_of_tables_is_for_tables():
    with pytest.raises(fb.UserError, match=r"target .*digits"):
        find(make_experiment({"method": "fedavg", "target": "y"}))
