"""A column in other units, or empty at one site, is named with its site; errors in Python name Python's remedies."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from commands import fewbytes

import fewbytes as fb
from fewbytes.base.errors import LikelyMistake, UserError
from fewbytes.base.python_words import python_words
from fewbytes.data import load_dataset, table


def patients(n: int, seed: int, **changed: Any) -> pandas.DataFrame:
    """Rows with a lab value in mg/dL (creatinine) and an outcome that it predicts."""
    rng = np.random.default_rng(seed)
    creatinine = rng.normal(1.0, 0.3, n)
    frame = pandas.DataFrame(
        {
            "age": rng.normal(60, 10, n),
            "creatinine": creatinine,
            "ward": rng.choice(["a", "b"], n),
            "ill": np.where(creatinine + rng.normal(0, 0.1, n) > 1, "yes", "no"),
        }
    )
    return frame.assign(**changed)


SERVER = patients(200, 0)
SCHEMA = table(SERVER, "ill").schema


@pytest.mark.parametrize("factor", [88.4, 1 / 88.4])
def test_other_units_are_named_with_their_column(factor: float) -> None:
    site = patients(100, 1)
    site["creatinine"] *= factor
    server = SERVER.assign(creatinine=SERVER["creatinine"] * (1 if factor > 1 else 88.4))
    if factor < 1:
        site["creatinine"] *= 88.4
    schema = table(server, "ill").schema
    with pytest.warns(LikelyMistake, match=r"check column 'creatinine': mean .* are the units the same\?") as seen:
        data = table(site, "ill", schema=schema)
    assert len(seen) == 1
    assert any("check column 'creatinine'" in note for note in data.notes)


def test_a_similar_site_raises_no_doubt() -> None:
    with warnings.catch_warnings(action="error"):
        table(patients(100, 1), "ill", schema=SCHEMA)
        table(patients(100, 1, age=60.0), "ill", schema=SCHEMA)  # constant, near the server's mean


def test_an_empty_column_is_named() -> None:
    empty = patients(30, 1, creatinine=np.nan)
    for missing in ("refuse", "drop"):
        schema = table(SERVER, "ill", missing=missing).schema
        with pytest.raises(UserError, match=r"column 'creatinine' is empty, all 30 rows .*missing='mean'$") as error:
            table(empty, "ill", schema=schema)
        assert error.value.public is not None
    schema = table(SERVER, "ill", missing="mean").schema
    with pytest.warns(
        LikelyMistake, match="check column 'creatinine': it is empty here, and the schema has values of it"
    ):
        table(empty, "ill", schema=schema)


def test_missing_and_other_options_are_python_s() -> None:
    frame = patients(40, 1)
    frame.loc[3, "age"] = np.nan
    with pytest.raises(UserError, match=r"'age', row 4 .*fill it in, or pass missing='drop', or missing='mean'$"):
        table(frame, "ill")
    assert len(table(frame, "ill", missing="drop").train) + len(table(frame, "ill", missing="drop").test) == 39
    mean = table(frame, "ill", missing="mean")
    assert len(mean.train) + len(mean.test) == 40
    with pytest.raises(UserError, match=r"one to predict \(target='COLUMN'\)"):
        table(frame)
    with pytest.raises(UserError, match=r"no option 'mising' .*'missing'"):
        table(frame, "ill", mising="drop")
    with pytest.raises(UserError, match=r"the table's options: .*'maybe'"):
        table(frame, "ill", missing="maybe")
    assert table(frame, "ill", missing="drop", leave_out="ward").schema.features == ("age", "creatinine")
    assert table(frame.assign(ward=1), "ill", missing="drop", categories=["ward"]).schema.categories == {"ward": ("1",)}


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("leave it out (--leave-out 'case id'), or", "leave it out (leave_out=['case id']), or"),
        ("(--missing-marks NA,-999)", "(missing_marks=['NA', '-999'])"),
        ("say what it means (--limits half|value)", "say what it means (limits='half' or 'value')"),
        ("--target names a column twice", "target names a column twice"),
        ("(--keep-checkpoints sets how many)", "(keep_checkpoints sets how many)"),
        ("a -- b", "a -- b"),
    ],
)
def test_options_become_arguments(text: str, python: str) -> None:
    assert python_words(text) == python


def test_a_run_in_python_names_arguments(tmp_path: Path) -> None:
    data = load_dataset("digits")
    task = fb.Task.on(fb.data.federate(data, fb.data.Partition(clients=2)), model)
    fb.run(fb.FedAvg(), task, rounds=4, out=tmp_path / "run", workers=1)
    with pytest.raises(UserError, match=r"only those of 3 and 4 \(keep_checkpoints sets how many"):
        fb.run(fb.FedAvg(), task, rounds=4, out=tmp_path / "run", workers=1, resume=True, from_round=1)


def model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_a_run_names_the_site_and_the_column_instead_of_another_lr(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    SERVER.to_csv(tmp_path / "server.csv", index=False)
    patients(60, 1).to_csv(tmp_path / "sites" / "north.csv", index=False)
    south = patients(60, 2)
    south["creatinine"] *= 88.4
    south.to_csv(tmp_path / "sites" / "south.csv", index=False)
    done = fewbytes(
        "run", "fedavg", "--dataset", tmp_path / "server.csv", "--target", "ill", "--partition", "local",
        "--client-data", tmp_path / "sites", "--clients", "2", "--rounds", "1", "--set", "lr=1e-9",
        "--metrics", "auc,sensitivity@specificity=0.9", "--positive", "yes", "--out", tmp_path / "runs",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "south.csv: check column 'creatinine'" in said
    assert "another lr" not in said
