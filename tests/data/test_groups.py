"""Rows of a table that belong together, such as a patient's, are all in training or all in test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fewbytes.base.errors import UserError
from fewbytes.data import Schema, load_dataset
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find


def write(path: Path, patients: int = 20, rows: int = 5, missing: bool = False) -> Path:
    """A table of a value that tells the patient, its patient and an outcome."""
    lines = [f"{p}.5,MEIER{p},{'yes' if (p + r) % 3 else 'no'}" for r in range(rows) for p in range(patients)]
    if missing:
        lines[3] = ",MEIER3,yes"
    path.write_text("value,patient,outcome\n" + "\n".join(lines) + "\n")
    return path


def whose(split: object, data: object) -> set[int]:
    mean, deviation = data.schema.numbers["value"]
    return {round(v) for v in np.asarray(split.load()[0][:, 0]) * deviation + mean - 0.5}


@pytest.mark.parametrize("missing", ["refuse", "drop"])
def test_no_patient_of_a_table_is_on_both_sides_and_who_it_is_is_not_learnt(missing, tmp_path):
    path = write(tmp_path / "a.csv", missing=missing == "drop")
    data = load_dataset(str(path), schema=Schema(target=("outcome",), missing=missing, group="patient"))
    assert data.schema.features == ("value",)
    train, test = whose(data.train, data), whose(data.test, data)
    assert (train | test, train & test) == (set(range(20)), set())
    assert 3 <= len(test) <= 5
    assert len(data.train) + len(data.test) == 100 - (missing == "drop")


def test_the_setting_holds_for_what_is_dealt_out_and_for_sites(tmp_path):
    (tmp_path / "sites").mkdir()
    for name in ("server.csv", "sites/north.csv", "sites/south.csv"):
        write(tmp_path / name)
    settings = {"method": "fedavg", "dataset": str(tmp_path / "server.csv"), "target": ["outcome"], "group": "patient"}
    local = {"partition": "local", "client_data": str(tmp_path / "sites"), "clients": 2}
    for how in ({"partition": "iid", "clients": 2}, local):
        for client in find(make_experiment(settings | how)).task.data.clients:
            train, test = ({float(v) for v in s.load()[0][:, 0]} for s in (client.train, client.test))
            assert train
            assert not train & test


@pytest.mark.parametrize(("group", "words"), [("patint", "'patient'"), ("outcome", "is the target")])
def test_a_column_that_cannot_group_rows_is_refused(group, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load_dataset(str(write(tmp_path / "a.csv")), schema=Schema(target=("outcome",), group=group))


def test_patients_in_both_of_two_tables_are_refused_and_not_told(tmp_path):
    write(tmp_path / "train.csv")
    write(tmp_path / "test.csv", patients=2)
    with pytest.raises(UserError, match="MEIER0, MEIER1") as refused:
        load_dataset(str(tmp_path), schema=Schema(target=("outcome",), group="patient"))
    assert "MEIER" not in refused.value.public
