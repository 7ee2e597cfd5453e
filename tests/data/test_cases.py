"""The small inputs that people have, beside the real data sets: each is read as its README says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas
import pytest
from commands import fewbytes
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data import client_folders
from fewbytes.data.datasets import load_dataset  # its errors name options, as on the command line
from fewbytes.data.schema import Schema

PLACE = Path(os.environ.get("FEWBYTES_CASES") or Path(os.environ.get("FEWBYTES_DATA", "")).parent / "cases") / "data"
pytestmark = pytest.mark.skipif(not PLACE.is_dir(), reason="the cases are not here (FEWBYTES_CASES)")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


def test_pictures_of_16_bits_keep_them():
    data = load_dataset(str(PLACE / "png16"))
    whole = np.concatenate([split.load()[0].numpy()[:, 0] for split in (data.train, data.test)])
    for path in (PLACE / "png16").rglob("*.png"):
        with Image.open(path) as image:
            wanted = np.asarray(image) / 65535
        assert any(np.allclose(each, wanted, atol=1e-7) for each in whole), path
    assert len(np.unique(whole[0])) > 256


def test_masks_of_0_and_255_are_two_classes():
    data = load_dataset(str(PLACE / "m255"))
    assert data.classes == ("background", "lesion")
    masks = data.train.targets.numpy()
    assert sorted(np.unique(masks)) == [0, 1]
    background = (masks == 0).mean()
    assert 0 < background < 1  # so that a model of nothing but background is wrong somewhere


def test_patients_are_in_training_or_in_test():
    data = load_dataset(str(PLACE / "nested"))
    assert data.classes == ("benign", "malignant")
    assert len(data.train) + len(data.test) == len(list((PLACE / "nested").rglob("*.png")))
    assert "6 groups" in data.notes[0]


def test_an_outcome_written_as_a_decimal_runs_at_sites(tmp_path):
    place = PLACE / "float"
    options = ["--target", "outcome", "--partition", "local", "--client-data", place / "sites", "--clients", "2"]
    done = fewbytes(
        "run", "fedavg", "--dataset", place / "server.csv", *options, "--rounds", "1", "--out", tmp_path / "runs"
    )
    assert done.returncode == 0, done.stderr


def test_the_index_is_no_feature():
    data = load_dataset(str(PLACE / "idx.parquet"), schema=Schema(target=("y",)))
    assert "__index_level_0__" not in data.schema.features


def test_decimal_commas_are_numbers():
    data = load_dataset(str(PLACE / "qdc4.csv"), schema=Schema(target=("y",)))
    (temperature,) = data.schema.numbers.values()
    written = pandas.read_csv(PLACE / "qdc4.csv", decimal=",")["temp"].mean()
    assert temperature[0] == pytest.approx(written, abs=0.2)


def test_what_systems_leave_is_no_site():
    assert [place.name for place in client_folders(str(PLACE / "sites_MACOSX"))] == ["north.csv", "south.csv"]


def test_an_id_beyond_2_to_53_is_refused_until_it_is_named():
    with pytest.raises(UserError, match="--leave-out uid"):
        load_dataset(str(PLACE / "bigint.csv"), schema=Schema(target=("y",)))
    data = load_dataset(str(PLACE / "bigint.csv"), schema=Schema(target=("y",), leave_out=("uid",)))
    assert data.schema.features == ("age", "lab")
    asked = load_dataset(str(PLACE / "bigint.csv"), schema=Schema(target=("y",), columns=("age", "uid")))
    assert asked.schema.features == ("age", "uid")
