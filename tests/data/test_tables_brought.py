"""Tables as people bring them: numbers of rows, numbers and dates written otherwise, classes as sites write them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import fewbytes

import fewbytes as fb
from fewbytes.data import Dataset, Schema, load_dataset, table
from fewbytes.data.split import Split
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

CASES = Path(os.environ.get("FEWBYTES_CASES", Path(os.environ.get("FEWBYTES_DATA", "data")).parent / "cases" / "data"))
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not here")
ROWS = 40
Y = [0, 1] * (ROWS // 2)
LAB = [i % 7 + 0.5 for i in range(ROWS)]


def features(data: Dataset) -> tuple[str, ...]:
    assert data.schema is not None
    return data.schema.features


def whole(data: Dataset, name: str) -> list[float]:
    """A numeric column's values as they were understood, of all samples, in order of size."""
    assert data.schema is not None
    mean, deviation = data.schema.numbers[name]
    place = features(data).index(name)
    parts = [split.load()[0][:, place] for split in (data.train, data.test)]
    return sorted(round(float(x), 3) for x in torch.cat(parts).double() * deviation + mean)


# Numbers of rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Unnamed: 0", "Unnamed: 0.1", "Unnamed: 0.1.1", "", "__index_level_0__"])
def test_an_index_that_was_written_is_no_feature_and_that_is_said(name):
    data = table({name: [i * 7 % ROWS for i in range(ROWS)], "lab": LAB, "y": Y}, "y")
    assert features(data) == ("lab",)
    assert f"left out {name!r}, which number the rows" in data.notes[0]


def test_what_a_comma_at_the_end_of_lines_gives_is_said_to_be_empty(tmp_path):
    lines = ["lab,y,", *(f"{lab},{y}," for lab, y in zip(LAB, Y, strict=True))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    data = load_dataset(str(tmp_path / "a.csv"), schema=Schema(target=("y",)))
    assert "left out '', which are empty" in data.notes[0]


def test_the_index_in_pandas_metadata_is_no_feature(tmp_path):
    frame = pandas.DataFrame({"lab": LAB, "y": Y}, index=pandas.Index(np.arange(ROWS)[::-1] // 2, name="visit"))
    frame.to_parquet(tmp_path / "a.parquet")
    assert features(load_dataset(str(tmp_path / "a.parquet"), schema=Schema(target=("y",)))) == ("lab",)
    learnt = load_dataset(str(tmp_path / "a.parquet"), schema=Schema(target=("visit",)))
    assert features(learnt) == ("lab", "y")


NAMED = (
    "id", "patient_id", "PatientID", "mrn", "row", "nr", "no", "uid", "ID", "case id", "level_0", "rownames",
    "Fallnummer", "ssn", "case_number",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("values", [[(i * 17) % 101 for i in range(ROWS)], [f"P{i * 7 % 101}" for i in range(ROWS)]])
def test_what_names_the_rows_is_refused_until_the_user_decides(name, values):
    columns = {name: values, "lab": LAB, "y": Y}
    with pytest.raises(fb.UserError, match=f"'{re.escape(name)}' .*number the rows .*leave_out=.*columns=") as error:
        table(columns, "y")
    assert repr(name) not in (error.value.public or repr(name))
    assert features(table(columns, "y", leave_out=[name])) == ("lab",)
    if isinstance(values[0], int):
        assert features(table(columns, "y", columns=["lab", name])) == ("lab", name)


@pytest.mark.parametrize("rows", [2, 5, 10])
@pytest.mark.parametrize("text", [False, True])
def test_ids_with_a_few_rows_each_are_refused_and_codes_with_many_are_not(rows, text):
    def columns(name: str, each: int) -> dict[str, list]:
        whose = [i // each * 17 % 211 for i in range(rows * 40)]
        values = [f"P{who}" for who in whose] if text else [3 * who for who in whose]
        return {name: values, "lab": LAB * rows, "y": Y * rows}

    with pytest.raises(fb.UserError, match=r"40 .* in .* rows.*group='study_id'"):
        table(columns("study_id", rows), "y")
    grouped = table(columns("study_id", rows), "y", schema=Schema(group="study_id"))
    assert features(grouped) == ("lab",)
    assert any("ward" in name for name in features(table(columns("ward", rows), "y")))
    assert any("num" in name for name in features(table(columns("num", rows), "y")))  # of which some are alike
    few = {"id": [f"k{i % 15}" if text else i % 15 for i in range(40 * rows)], "lab": LAB * rows, "y": Y * rows}
    assert any("id" in name for name in features(table(few, "y")))


@pytest.mark.parametrize("name", ["patient_id", "subject#", "patient_nbr", "Patient", "person id"])
@pytest.mark.parametrize("text", [False, True])
def test_numbers_of_people_are_refused_however_many_rows_each_has(name, text):
    whose = [i % 20 * 3 for i in range(ROWS * 20)]
    columns = {name: [f"P{who}" for who in whose] if text else whose, "lab": LAB * 20, "y": Y * 20}
    with pytest.raises(fb.UserError, match=r"20 .* in 800 rows.*group="):
        table(columns, "y")
    assert features(table({"patient_age": whose, "lab": LAB * 20, "y": Y * 20}, "y")) == ("patient_age", "lab")


def test_an_index_of_two_levels_is_no_feature_and_ids_of_many_digits_are_refused(tmp_path):
    frame = pandas.DataFrame({"lab": LAB, "y": Y})
    frame.set_index(pandas.MultiIndex.from_product([range(4), range(10)])).to_csv(tmp_path / "a.csv")
    assert features(load_dataset(str(tmp_path / "a.csv"), schema=Schema(target=("y",)))) == ("lab",)
    for start in (2**63 + 5, 10**25):
        frame.assign(uid=[str(start + i * 7 % 41) for i in range(ROWS)]).to_csv(tmp_path / "a.csv", index=False)
        with pytest.raises(fb.UserError, match=r"'uid' .*digits"):
            load_dataset(str(tmp_path / "a.csv"), schema=Schema(target=("y",)))


@pytest.mark.parametrize("name", ["X", "X.1", "Var1", "uid"])
def test_an_index_in_any_order_is_refused_whatever_it_is_called(name):
    for values in ([i * 7 % ROWS for i in range(ROWS)], [2.0**52 - i * 7 % ROWS for i in range(ROWS)]):
        with pytest.raises(fb.UserError, match=f"'{name}' .*range once"):
            table({name: values, "lab": LAB, "y": Y}, "y")
    assert "X" in features(table({"X": [i * 7 % 41 for i in range(ROWS)], "lab": LAB, "y": Y}, "y"))


def test_what_an_error_says_to_type_can_be_typed():
    with pytest.raises(fb.UserError, match=r"\(leave_out=\['case id'\]\).*\(columns=\['case id', 'my lab'\]\)"):
        table({"case id": [i * 7 % 101 for i in range(ROWS)], "my lab": LAB, "y": Y}, "y")


def test_whole_numbers_that_rise_with_every_row_are_refused_whatever_they_are_called():
    with pytest.raises(fb.UserError, match=r"'visit' .*rise or fall"):
        table({"visit": [3 * i for i in range(ROWS)], "lab": LAB, "y": Y}, "y")
    assert features(table({"visit": [i // 2 for i in range(ROWS)], "y": Y}, "y")) == ("visit",)  # some are equal
    assert features(table({"lab": [i / 2 for i in range(ROWS)], "y": Y}, "y")) == ("lab",)  # no whole numbers
    assert features(table({"id": list(range(10)), "y": [0, 1] * 5}, "y")) == ("id",)  # too few rows to tell


def test_sites_leave_out_the_same(tmp_path):
    """Also where a site lacks the column, or has it only there."""
    sites = tmp_path / "sites"
    sites.mkdir()
    columns = {"uid": [i * 7 % 101 for i in range(ROWS)], "lab": LAB, "y": Y}
    pandas.DataFrame(columns).to_csv(tmp_path / "server.csv", index=False)
    pandas.DataFrame(columns).to_csv(sites / "a.csv")
    pandas.DataFrame(columns).drop(columns="uid").to_csv(sites / "b.csv", index=False)
    where = {"dataset": str(tmp_path / "server.csv"), "client_data": str(sites), "clients": 2, "target": ["y"]}
    said = {"method": "fedavg", "partition": "local", "leave_out": ["uid"]} | where
    found = find(make_experiment(said))
    assert [client.train.shape for client in found.task.data.clients] == [(1,), (1,)]
    assert find(make_experiment(found.experiment.settings())).task.data.test.shape == (1,)
    with pytest.raises(fb.UserError, match=r"server.csv .*'uit' \(did you mean 'uid'\?\)"):
        find(make_experiment(said | {"leave_out": ["uit"]}))


@needs_cases
def test_the_cases_of_row_numbers():
    assert features(load_dataset(str(CASES / "idx.parquet"), schema=Schema(target=("y",)))) == ("age", "lab")
    with pytest.raises(fb.UserError, match=r"'uid' .*number the rows"):
        load_dataset(str(CASES / "bigint.csv"), schema=Schema(target=("y",)))
    without = load_dataset(str(CASES / "bigint.csv"), schema=Schema(target=("y",), leave_out=("uid",)))
    assert features(without) == ("age", "lab")
    named = load_dataset(str(CASES / "bigint.csv"), schema=Schema(target=("y",), columns=("lab", "uid")))
    assert features(named) == ("lab", "uid")


def test_ids_above_2_to_53_are_told_apart():
    start = 2**60
    with pytest.raises(fb.UserError, match=r"'uid' .*number"):
        table({"uid": [start + (i * 17) % 101 for i in range(ROWS)], "lab": LAB, "y": Y}, "y")
    assert features(table({"x": [start + (i * 17) % 101 for i in range(ROWS)], "y": Y}, "y")) == ("x",)


def test_integers_above_2_to_53_stay_apart_as_classes_and_as_groups(tmp_path):
    start = 2**60
    codes = [start + i % 3 for i in range(ROWS)]
    for values in (codes, [*map(str, codes)], np.array(codes, dtype=np.uint64) + np.uint64(2**63)):
        data = table({"lab": LAB, "y": values}, "y")
        assert data.classes == tuple(str(v) for v in sorted(set(map(int, values))))
        assert torch.bincount(torch.cat([data.train.labels, data.test.labels])).tolist() == [14, 13, 13]
    pandas.DataFrame({"lab": LAB, "y": [10**25 + i % 3 for i in range(ROWS)]}).to_csv(tmp_path / "a.csv", index=False)
    assert load_dataset(str(tmp_path / "a.csv"), schema=Schema(target=("y",))).classes == tuple(
        str(10**25 + i) for i in range(3)
    )
    grouped = {"who": [start + i % 20 for i in range(ROWS)], "x": [i % 20 + 0.5 for i in range(ROWS)], "y": Y}
    data = table(grouped, "y", schema=Schema(group="who"))
    train, test = ({round(float(v), 4) for v in split.load()[0][:, 0]} for split in (data.train, data.test))
    assert (len(train), len(test), train & test) == (16, 4, set())


# Numbers written otherwise --------------------------------------------------------------------------------------------


@needs_cases
def test_the_case_of_decimal_commas():
    data = load_dataset(str(CASES / "qdc4.csv"), schema=Schema(target=("y",)))
    assert features(data) == ("temp",)
    assert data.schema is not None
    assert data.schema.numbers["temp"][0] == pytest.approx(37, abs=0.1)
    assert "a decimal comma in 'temp'" in data.notes[0]
    theirs = pandas.read_csv(CASES / "qdc4.csv", decimal=",")["temp"]
    assert whole(data, "temp") == pytest.approx(sorted(theirs), abs=1e-3)


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["36,5", "1.250", "-0,25", "1.234,5"], [36.5, 1250, -0.25, 1234.5]),
        (["36.5", "1,250", "-0.25", "1,234.5"], [36.5, 1250, -0.25, 1234.5]),
        (["1,234,567", "1,250", "7", "+8"], [1234567, 1250, 7, 8]),
        (["1.234.567", "1.250", "7", "8"], [1234567, 1250, 7, 8]),
        (["1 234,5", "12 345", "1\u00a0250", "8"], [1234.5, 12345, 1250, 8]),
        (["1'234.5", "12'345", "7", "8"], [1234.5, 12345, 7, 8]),
        (["1e-3", ".5", "5.", " 7 "], [0.001, 0.5, 5, 7]),
        (["0,250", "0,125", "0,750", "0,5"], [0.25, 0.125, 0.75, 0.5]),
    ],
)
def test_numbers_are_read_however_they_are_written(texts, numbers):
    data = table({"x": texts * 5, "y": [0, 1] * 10}, "y")
    assert features(data) == ("x",)
    assert whole(data, "x") == pytest.approx(sorted(numbers * 5), abs=0.1 if max(numbers) > 1e5 else 1e-3)


def test_what_can_be_read_in_two_ways_is_refused_or_follows_the_files_other_columns(tmp_path):
    either = {"x": ["1,250", "3,125"] * 10, "y": [0, 1] * 10}
    with pytest.raises(fb.UserError, match=r"'1,250', .*1250 or 1.250.*decimal=") as error:
        table(either, "y")
    assert "1,250" not in (error.value.public or "1,250")
    assert whole(table(either, "y", schema=Schema(decimal="comma")), "x")[0] == 1.25
    assert whole(table(either, "y", schema=Schema(decimal="point")), "x")[0] == 1250
    assert whole(table(either | {"z": ["0,5", "0,7"] * 10}, "y"), "x")[0] == 1.25
    assert whole(table(either | {"z": ["0.5", "0.7"] * 10}, "y"), "x")[0] == 1250
    # a CSV's 1.250 beside decimal commas is 1250, though it looks like a number
    (tmp_path / "a.csv").write_text("cost;lab;y\n" + "1.250;0,5;0\n3.125;0,7;1\n" * 10)
    data = load_dataset(str(tmp_path / "a.csv"), schema=Schema(target=("y",)))
    assert whole(data, "cost") == [1250] * 10 + [3125] * 10
    with pytest.raises(fb.UserError, match=r"decimal point .*decimal comma"):
        table({"x": ["0,5", "0.5"] * 10, "y": [0, 1] * 10}, "y")


def test_a_site_may_write_numbers_otherwise():
    schema = table({"x": [1.5, 2.5, 1000.5], "y": [0, 1, 0]}, "y").schema
    data = table({"x": ["1,5", "2,5", "1.000,5"], "y": [0, 1, 0]}, schema=schema)
    assert whole(data, "x") == [1.5, 2.5, 1000.5]
    two = table({"x": [1000.5, 2000.5], "z": [0.5, 0.7], "y": [0, 1]}, "y").schema
    data = table({"x": ["1,250", "3,125"], "z": ["0.5", "0.7"], "y": [0, 1]}, schema=two)  # as the other column tells
    assert whole(data, "x") == [1250, 3125]


def test_the_usual_marks_of_missing_values_are_such_and_others_are_named():
    marks = ["", "NA", "N/A", "NaN", "nan", "null", "None", "?", "-", ".", None]
    columns = {"x": [*marks, *(f"{i / 4}" for i in range(29))], "kind": [*marks, *["a", "b"] * 14, "a"], "y": Y}
    data = table(columns, "y", schema=Schema(missing="drop"))
    assert features(data) == ("x", "kind=a", "kind=b")
    assert len(data.train) + len(data.test) == 29
    assert "22 values missing (11 rows left out): " in data.notes[0]
    named = table(
        columns | {"x": ["gone", *map(str, LAB[1:])]}, "y", schema=Schema(missing="mean", missing_marks=("gone", "NA"))
    )
    assert "x" in features(named)
    assert "kind=?" in features(named)


def test_a_number_far_from_all_others_is_refused_until_the_user_decides(tmp_path):
    columns = {"x": [-999, *LAB[1:]], "y": Y}
    with pytest.raises(fb.UserError, match=r"row 1 .*-999.0 .*missing_marks=\['NA', '-999'\]") as error:
        table(columns, "y")
    assert "999" not in (error.value.public or "999")
    taken = table(columns, "y", schema=Schema(missing="drop", missing_marks=("NA", "-999")))
    assert min(whole(taken, "x")) == 0.5
    kept = table(columns, "y", schema=Schema(missing_marks=("NA",)))
    assert min(whole(kept, "x")) == -999
    assert min(whole(table({"x": [-999, *range(-1200, -420, 20)], "y": Y}, "y"), "x")) == -1200  # not far
    pandas.DataFrame(columns).to_csv(tmp_path / "a.csv", index=False)
    command = ["run", "fedavg", "--dataset", tmp_path / "a.csv", "--target", "y", "--rounds", "1", "--clients", "2"]
    command += ["--out", tmp_path / "out", "--json"]
    assert fewbytes(*command).returncode == 2
    done = fewbytes(*command, "--missing-marks", "-999", "--missing", "drop")
    assert done.returncode == 0, done.stderr


def numbered(values: list[str], rows: int = 200) -> dict[str, list]:
    """Columns of which one has numbers with a point and, in three of ten rows, those values."""
    few = iter(values * rows)
    x = [next(few) if i % 10 in (1, 4, 8) else f"{i * 37 % 59 / 10}" for i in range(rows)]
    return {"x": x, "lab": [i % 7 + 0.5 for i in range(rows)], "y": [0, 1] * (rows // 2)}


@pytest.mark.parametrize("odd", [["neg"], ["<LOD"], ["unknown"], ["none", "not done"], ["#DIV/0!"], ["12%"], ["(5.1)"]])
def test_a_column_that_is_mostly_numbers_is_never_categories_until_the_user_says_so(odd):
    columns = numbered(odd)
    with pytest.raises(fb.UserError, match=r"'x', row 2 .*not a number.*missing_marks.*categories") as error:
        table(columns, "y")
    assert odd[0] not in (error.value.public or odd[0])
    named = table(columns, "y", schema=Schema(missing_marks=("NA", *odd), missing="drop"))
    assert features(named) == ("x", "lab")
    said = table(columns, "y", schema=Schema(categories={"x": ()}))
    assert f"x={odd[0]}" in features(said)
    numbers = len({*columns["x"]} - {*odd})
    about = "which seem to be numbers with a unit" if odd == ["12%"] else f"{numbers} of them numbers"
    assert f"{numbers + len(odd)} categories in 'x', {about}" in said.notes[0]
    other = columns | {"x": [*columns["x"][2:], *columns["x"][:2]]}  # a site's own shares change nothing
    assert features(table(other, schema=said.schema)) == features(said)


def test_a_column_whose_different_values_are_mostly_numbers_is_one_of_numbers():
    x = [f"{i / 10}" if i % 5 == 0 else "neg" for i in range(ROWS * 5)]  # in a fifth of the rows
    with pytest.raises(fb.UserError, match=r"'x', row 2 .*'neg' is not a number, .*40"):
        table({"x": x, "lab": LAB * 5, "y": Y * 5}, "y")


def test_few_whole_numbers_among_texts_are_categories_and_that_is_said():
    data = table({"x": ["0", "1", "2", "unknown"] * 10, "size": ["0.5 mg", "1 mg"] * 20, "y": Y}, "y")
    assert features(data) == ("x=0", "x=1", "x=2", "x=unknown", "size=0.5 mg", "size=1 mg")
    assert "4 categories in 'x', 3 of them numbers" in data.notes[0]
    assert "2 categories in 'size', which seem to be numbers with a unit" in data.notes[0]
    ages = table({"age": ["<20", "20-39", "40-59", ">60"] * 10, "y": Y}, "y")
    assert len(features(ages)) == 4


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("{}%", "numbers with a unit"),
        ("{}.5 mmol/l", "numbers with a unit"),
        ("€ {}", "numbers with a unit"),
        ("${},000", "numbers with a unit"),
        ("{}:30", "times of day"),
        ("{:02}/01/20", "dates"),
        ("{:02}/13/2020 3:04 PM", "dates"),
    ],
)
@pytest.mark.parametrize("every", [30, 200])
def test_numbers_and_dates_that_cannot_be_read_are_no_categories(how, what, every):
    columns = {"x": [how.format(i * 7 % every) for i in range(200)], "y": Y * 5}
    with pytest.raises(fb.UserError, match=f"'x' .*{what}.*categories") as error:
        table(columns, "y")
    assert columns["x"][0] not in (error.value.public or columns["x"][0])
    if every == 30:
        assert len(features(table(columns, "y", schema=Schema(categories={"x": ()})))) == 30


def test_categories_of_pandas_are_such_unless_they_are_decimals():
    def of(values: list[str]) -> tuple[str, ...]:
        return features(table(pandas.DataFrame({"x": pandas.Categorical(values), "y": Y}), "y"))

    assert of([f"{i % 7 + 0.5}" for i in range(ROWS)]) == ("x",)
    assert of(["1", "2"] * 20) == ("x=1", "x=2")
    assert of(["a", "b"] * 20) == ("x=a", "x=b")
    with pytest.raises(fb.UserError, match="'neg' is not a number"):
        of(["neg", *(f"{i % 7 + 0.5}" for i in range(ROWS - 1))])


def test_columns_are_categories_in_runs_from_the_command_line(tmp_path):
    frame = pandas.DataFrame({"ward": [i * 7 % 30 for i in range(90)], "lab": [i % 7 + 0.5 for i in range(90)]})
    frame.assign(y=[0, 1] * 45).to_csv(tmp_path / "a.csv", index=False)
    said = {"method": "fedavg", "dataset": str(tmp_path / "a.csv"), "target": ["y"], "clients": 2}
    said |= {"partition": "iid", "categories": ["ward"]}
    found = find(make_experiment(said))
    assert found.task.data.test.shape == (31,)
    assert find(make_experiment(found.experiment.settings())).task.data.test.shape == (31,)
    with pytest.raises(fb.UserError, match=r"'wart' \(did you mean 'ward'\?\).*categories"):
        find(make_experiment(said | {"categories": ["wart"]}))


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ([i * 7 % 60 + 20 for i in range(ROWS)], (-9, -99, 999, 8888, 777)),
        ([i % 5 for i in range(ROWS)], (-9, 99, -8)),
        ([i % 5 + 0.5 for i in range(ROWS)], (-99, 88)),
        ([i * 7 % ROWS * 5.0 for i in range(ROWS)], (-9,)),
        ([0, 1] * 20, (-9, -99)),
    ],
)
def test_marks_of_missing_values_are_found_by_their_distance(values, marks):
    for found in [*((mark,) for mark in marks), marks]:
        columns = {"x": [*values, *found, *found], "y": [0, 1] * (len(values) // 2) + [0, 1] * len(found)}
        named = ", ".join(f"'{mark}'" for mark in sorted(found))
        with pytest.raises(fb.UserError, match=rf"is far from .*missing_marks=\['NA', {named}\]\)"):
            table(columns, "y")
        taken = Schema(missing="drop", missing_marks=("NA", *map(str, found)))
        assert whole(table(columns, "y", schema=taken), "x") == sorted(values)
        kept = table(columns, "y", schema=Schema(missing_marks=("NA",)))
        assert f"{', '.join(map(str, sorted(found)))} far from all others in 'x'" in kept.notes[0]


@pytest.mark.parametrize("mark", [-999, 999, 8888])
def test_once_is_enough_of_a_mark_that_is_very_far(mark):
    with pytest.raises(fb.UserError, match="is far from"):
        table({"x": [*(i * 7 % 60 + 20 for i in range(ROWS - 1)), mark], "y": Y}, "y")


def test_no_mark_is_what_lies_among_others_or_where_the_servers_values_do():
    for x in (
        [*range(-20, 19), -9], [*range(60, 99), 99], [i % 4 for i in range(39)] + [9], [0, 1] * 19 + [9, 9],
        [0] * 36 + [1, 2, 88, 99], [0] * 30 + [1, 2, 3, 4, 5, 6, 7, 8, 99, 99], [*range(0, 117, 3), -9],
        [*(91 + i * 7 for i in range(39)), 999], [101, 205] * 19 + [999, 999],
    ):  # fmt: skip
        assert "x" in features(table({"x": [v + 0.0 for v in x], "y": Y}, "y", columns=["x"]))
    server = table({"x": [i * 2 % 101 + 0.5 for i in range(200)], "y": [i % 100 for i in range(200)]}, "y")
    old = {"x": [80.5, 81.5, 82.5, 99.0] * 10, "y": [1.0, 2.0] * 20}
    assert len(table(old, schema=server.schema).train) == 32
    digits = table({"x": LAB, "y": [i % 10 for i in range(ROWS)]}, "y")
    assert table({"x": LAB, "y": [0, 9] * 20}, schema=digits.schema).classes == ("0", "9")  # a site's two classes


def test_values_under_a_limit_are_refused_until_the_user_says_what_to_take():
    columns = {"x": ["<0,5", "≤ 0,5", ">100", *(f"{i},25" for i in range(37))], "y": Y}
    with pytest.raises(fb.UserError, match=r"row 1 .* 2 more: '<0,5' .*limits='half' or 'value'") as error:
        table(columns, "y")
    assert "<0,5" not in (error.value.public or "<0,5")
    rest = [i + 0.25 for i in range(37)]
    assert whole(table(columns, "y", schema=Schema(limits="half")), "x") == sorted([0.25, 0.25, 100, *rest])
    assert whole(table(columns, "y", schema=Schema(limits="value")), "x") == sorted([0.5, 0.5, 100, *rest])
    assert whole(table(columns, "y", schema=Schema(limits="missing", missing="drop")), "x") == rest


def test_what_was_read_in_another_way_is_said(tmp_path):
    x = ["<0.5", "<0.5", "1,250.5", *(f"{i}.25" for i in range(37))]
    pandas.DataFrame({"x": x, "y": Y}).to_csv(tmp_path / "a.csv", index=False)
    for how, words in (("half", "half of it"), ("value", "the limit"), ("missing", "missing")):
        schema = Schema(target=("y",), limits=how, missing="drop")
        (note,) = load_dataset(str(tmp_path / "a.csv"), schema=schema).notes
        assert f"2 limits taken as {words} in 'x'" in note
        assert "commas between thousands in 'x'" in note
        assert note.startswith("40 rows")  # after the data set's name, and its path not twice
    (tmp_path / "a.csv").rename(tmp_path / "train.csv")
    (note,) = load_dataset(str(tmp_path), schema=schema).notes
    assert note.startswith("train.csv: 40 rows")


def test_a_missing_value_is_said_to_be_one_with_its_mark(tmp_path):
    for value, words in (("", "the value is missing"), ("?", r"the value is missing \('\?'\)")):
        columns = {"x": [value, *LAB[1:]], "kind": [value, *"ab" * 19, "a"], "y": Y}
        for only in ("x", "kind"):
            two = {name: [str(v) for v in columns[name]] if name == only else columns[name] for name in (only, "y")}
            with pytest.raises(fb.UserError, match=f"'{only}', row 1 .*{words}") as error:
                table(two, "y")
            assert error.value.public.startswith("a table's column")
            assert "has missing values in some rows: fill it in" in error.value.public


def test_many_categories_are_said():
    data = table({"kind": [f"k{i % 60}" for i in range(240)], "y": [0, 1] * 120}, "y")
    assert "60 categories in 'kind'" in data.notes[0]


# Dates and booleans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "days"),
    [
        (["1970-01-02", "1971-01-01"], [1, 365]),
        (["1970-01-02 12:00", "1971-01-01 00:00"], [1.5, 365]),
        (["1970/01/02", "1971/01/01"], [1, 365]),
        (["2.1.1970", "01.01.1971"], [1, 365]),
        (["02/01/1970", "31/01/1970"], [1, 30]),
        (["01/02/1970", "01/31/1970"], [1, 30]),
        (["02-Jan-1970", "1-JAN-1971"], [1, 365]),
        (["2. Januar 1970", "1. Jan. 1971"], [1, 365]),
        (["January 2, 1970", "Mar 1 1970"], [1, 59]),
        (["2 Mai 1970", "2 mai 1971"], [121, 486]),
        (["02.01.1970 12:00", "31.12.1970 00:00:00"], [1.5, 364]),
        (["19700102", "19710101"], [1, 365]),
    ],
)
def test_dates_are_days_since_1970(texts, days, tmp_path):
    columns = {"visit": texts * 10, "y": [0, 1] * 10}
    pandas.DataFrame(columns).to_csv(tmp_path / "a.csv", index=False)
    for data in (table(columns, "y"), load_dataset(str(tmp_path / "a.csv"), schema=Schema(target=("y",)))):
        assert whole(data, "visit") == [days[0]] * 10 + [days[1]] * 10
        assert "days since 1970 of 'visit'" in data.notes[0]


def test_days_and_months_that_may_be_either_are_refused_until_the_user_decides():
    columns = {"visit": ["02/01/1970", "03/01/1970"] * 10, "y": [0, 1] * 10}
    with pytest.raises(fb.UserError, match=r"'02/01/1970'.*date_order=") as error:
        table(columns, "y")
    assert "1970" not in (error.value.public or "1970")
    assert whole(table(columns, "y", schema=Schema(date_order="day-first")), "visit")[0] == 1
    assert whole(table(columns, "y", schema=Schema(date_order="month-first")), "visit")[0] == 31
    with pytest.raises(fb.UserError, match="day first"):
        table({"visit": ["13/01/1970", "01/13/1970"] * 10, "y": [0, 1] * 10}, "y")
    with pytest.raises(fb.UserError, match="'1970-02-30' is a date that does not"):
        table({"visit": ["1970-02-30", "1970-02-01"] * 10, "y": [0, 1] * 10}, "y")


def test_whole_numbers_that_are_all_dates_are_dates_and_others_are_not():
    moments = pandas.date_range("2019-01-01", periods=ROWS, freq="17D")
    written = [int(f"{moment:%Y%m%d}") for moment in moments[::-1]]
    data = table({"seen": [*written[1:], None], "y": Y}, "y", schema=Schema(missing="drop"))
    assert whole(data, "seen") == sorted(((moments - pandas.Timestamp(0)) / pandas.Timedelta(days=1))[:-1])
    assert "days since 1970 of 'seen'" in data.notes[0]
    site = table({"seen": [f"{moment:%d.%m.%Y}" for moment in moments], "y": Y}, schema=data.schema)
    assert whole(site, "seen")[0] == 17897
    with pytest.raises(fb.UserError, match="'seen' has no dates"):
        table({"seen": [5, 6], "y": [0, 1]}, schema=data.schema)
    counts = table({"seen": LAB, "y": Y}, "y")
    for values in (["2020-01-01", "2020-01-02"], pandas.to_datetime(["2020-01-01", "2020-01-02"])):
        with pytest.raises(fb.UserError, match="'seen' has dates"):
            table({"seen": values, "y": [0, 1]}, schema=counts.schema)
    for odd in (20200231, 20201301, 18991231, 20200101.5):
        plain = table({"seen": [*written[:-1], odd], "y": Y}, "y", columns=["seen"])
        assert plain.schema.dates == ()
        assert whole(plain, "seen")[-1] > 2e7
    with pytest.raises(fb.UserError, match="'2 Foo 2020' is not a date"):
        table({"seen": ["2 Jan 2020", "3 Jan 2020", "2 Foo 2020", ""] * 10, "y": Y}, "y", schema=Schema(missing="drop"))


# What is told of figures, and classes at sites ------------------------------------------------------------------------


def test_only_training_rows_count_for_means_and_deviations():
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"x": rng.normal(size=200) * 10, "cost": rng.normal(size=200) + 5.0, "y": [0, 1] * 100})
    plain = table(frame, "y")
    train = plain.train.load()[0]
    assert train.mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert train.std(0, correction=0).tolist() == pytest.approx([1, 1], abs=1e-5)
    moved = frame.copy()
    moved.loc[plain.test.rows, "x"] += 1000  # test rows say nothing of training samples
    assert torch.equal(table(moved, "y").train.load()[0], train)
    numbers = table(frame, "cost")
    assert float(numbers.train.targets.mean()) == pytest.approx(0, abs=1e-6)
    assert abs(float(numbers.test.targets.mean())) > 1e-3


@pytest.mark.parametrize("items", [False, True])
def test_bytes_are_pictures_only_if_they_look_like_such(items):
    def split(x: torch.Tensor) -> Split:
        y = torch.zeros(len(x), dtype=torch.int64)
        return Split.of(torch.utils.data.TensorDataset(x, y) if items else (x, y))

    ages = torch.tensor([[30, 200], [50, 255]], dtype=torch.uint8)
    assert split(ages).load()[0].tolist() == [[30, 200], [50, 255]]
    assert split(ages).load()[0].dtype == split(ages).blank().dtype == torch.float32
    for shape in ((2, 2, 2), (2, 1, 2, 2)):
        assert float(split(torch.full(shape, 255, dtype=torch.uint8)).load()[0].max()) == 1


@pytest.mark.parametrize(
    ("server", "site", "classes"),
    [
        (["1.0", "0.0"], ["1", "0"], ("0", "1")),
        (["1", "0"], ["1.0", "0.0"], ("0", "1")),
        (["True", "False"], ["true", "false"], ("false", "true")),
        (["TRUE", "FALSE"], [True, False], ("false", "true")),
        ([True, False], ["True", "False"], ("false", "true")),
        (["01", "02"], ["1", "2"], ("1", "2")),
        ([1, 2], ["01", "02"], ("1", "2")),
        ([1.0, 2.0], [1, 2], ("1", "2")),
        (["01", "unknown"], ["1", "unknown"], ("1", "unknown")),
        (["+1", "-1"], ["1", "-1.0"], ("-1", "1")),
        (["1.0e0", "0"], [1.0, 0.0], ("0", "1")),
        ([1e16, 2e16], ["1e16", "20000000000000000"], ("10000000000000000", "20000000000000000")),
        (["1,250.5", "2,500.0"], ["1250.5", "2500"], None),
        (["1'000", "2'000"], [1000, 2000], ("1000", "2000")),
        (["2020-01-01", "2021-01-01"], [20200101, 20210101], ("2020-01-01", "2021-01-01")),
        (["01.01.2020", "31.12.2020"], ["2020-01-01", "2020-12-31"], ("2020-01-01", "2020-12-31")),
        ([2**60, 2**60 + 1], [str(2**60), f"+{2**60 + 1}"], (str(2**60), str(2**60 + 1))),
        (["+1", "unknown"], ["1.0", "unknown"], ("1", "unknown")),
    ],
)
def test_classes_are_the_same_however_they_are_written(server, site, classes, tmp_path):
    mine = table({"x": LAB, "y": server * 20}, "y")
    if classes is None:  # numbers are learnt
        assert mine.learns == "numbers"
        return
    assert mine.classes == classes
    theirs = table({"x": LAB, "y": site * 20}, schema=mine.schema)
    assert theirs.numbered(mine.classes).train.labels.tolist() == mine.train.labels.tolist()
    for name, values in (("server", server), ("site", site)):
        pandas.DataFrame({"x": LAB, "y": values * 20}).to_csv(tmp_path / f"{name}.csv", index=False)
        pq.write_table(pa.table({"x": LAB, "y": values * 20}), tmp_path / f"{name}.parquet")
    for one in ("csv", "parquet"):
        first = load_dataset(str(tmp_path / f"server.{one}"), schema=Schema(target=("y",)))
        for other in ("csv", "parquet"):
            second = load_dataset(str(tmp_path / f"site.{other}"), schema=first.schema)
            assert second.numbered(first.classes).train.labels.tolist() == first.train.labels.tolist()


@needs_cases
def test_the_case_of_an_outcome_written_1_0(tmp_path):
    done = fewbytes(
        "run", "fedavg", "--dataset", "server.csv", "--target", "outcome", "--partition", "local", "--client-data",
        "sites", "--clients", "2", "--rounds", "2", "--json", "--out", tmp_path, cwd=CASES / "float",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["score"]["final"] >= 0
