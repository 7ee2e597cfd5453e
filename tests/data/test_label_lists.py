"""Images with a table of their labels, in the ways people have them: each image has the label of its own row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data import client_folders
from fewbytes.data.clients import Dataset
from fewbytes.data.datasets import load_dataset  # its errors name options, as on the command line
from fewbytes.data.schema import Schema
from fewbytes.data.text import holds_text
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

IDS = [f"ISIC_{i:04}" for i in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


def images(folder: Path, names: list[str]) -> Path:
    """Image i has pixels of i."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(folder / name)
    return folder


def read(folder: Path, target: str = "", uncertain: str = "refuse", **how: str) -> Dataset:
    schema = Schema(target=(target,) if target else (), **how)
    return load_dataset(str(folder), schema=schema, uncertain=uncertain)  # type: ignore[arg-type]


def labels(data: Dataset) -> dict[int, str]:
    """By image the class it has, in training and in test."""
    found = {}
    for split in (data.train, data.test):
        pixels = (split.load()[0][:, 0, 0, 0] * 255).round().int().tolist()
        assert not found.keys() & set(pixels)
        found |= dict(zip(pixels, (data.classes[c] for c in split.labels), strict=True))
    return found


def test_the_target_that_is_named_is_learnt_of_many_columns(tmp_path):
    images(tmp_path, [f"p{1 + i % 2}/{name}.png" for i, name in enumerate(IDS)])
    frame = pandas.DataFrame(
        {"lesion": [i // 2 for i in range(12)], "image_id": IDS, "dx": ["mel", "nv"] * 6, "age": 7}
    )
    frame.to_csv(tmp_path / "HAM10000_metadata.csv", index=False)
    assert labels(read(tmp_path, "dx")) == dict(enumerate(frame["dx"]))
    with pytest.raises(UserError, match=r"'dxx' \(did you mean 'dx'"):
        read(tmp_path, "dxx")
    assert client_folders(str(tmp_path)) == [tmp_path]


@pytest.mark.parametrize(
    "places",
    [["part_1/{}.png", "part_2/{}.png"], ["images_001/images/{}.png", "images_002/images/{}.png"], ["img/{}.png"]],
)
@pytest.mark.parametrize("table", ["labels.csv", "train.csv"])
def test_folders_that_pictures_were_cut_into_are_no_classes(places, table, tmp_path):
    images(tmp_path, [places[i % len(places)].format(name) for i, name in enumerate(IDS)])
    frame = pandas.DataFrame({"image_id": IDS, "dx": ["mel", "nv"] * 6, "age": 7})
    frame.to_csv(tmp_path / table, index=False)
    with pytest.raises(UserError, match=r"--target COLUMN\).*table elsewhere") as error:
        read(tmp_path)
    assert "dx" not in error.value.public
    assert labels(read(tmp_path, "dx")) == dict(enumerate(frame["dx"]))


@pytest.mark.parametrize(
    "column",
    [
        {"age": range(20, 32)}, {"patient": [f"p{i // 2}" for i in range(12)]}, {"split": ["train", "test"] * 6},
        {"smokes": [0, 1, 1] * 4, "old": [1, 0, 0] * 4},
    ],
)  # fmt: skip
def test_a_table_of_anything_beside_folders_of_classes_does_not_take_over(column, tmp_path):
    images(tmp_path, [f"{'ab'[i % 2]}/{name}.png" for i, name in enumerate(IDS)])
    pandas.DataFrame({"file": IDS, **column}).to_csv(tmp_path / "more.csv", index=False)
    with pytest.raises(UserError, match="table elsewhere"):
        read(tmp_path)
    (tmp_path / "more.csv").unlink()
    assert read(tmp_path).classes == ("a", "b")


@pytest.mark.parametrize("more", [{}, {"age": 7, "sex": "f"}])
def test_folders_whose_names_a_table_repeats_are_the_classes(more, tmp_path):
    places = [f"{('train', 'test')[i // 8]}/{'ab'[i % 2]}/{name}.png" for i, name in enumerate(IDS)]
    pandas.DataFrame({"file": places, "label": ["A", "B"] * 6, **more}).to_csv(
        images(tmp_path, places) / "train.csv", index=False
    )
    data = read(tmp_path)
    assert (data.classes, len(data.train), len(data.test)) == (("a", "b"), 8, 4)
    assert "train.csv" in data.notes[-1]


@pytest.mark.parametrize("test", ["test", "valid", "Testing", "val_images"])
@pytest.mark.parametrize("place", ["{}/{}.png", "data/{}/x/{}.png"])
def test_a_list_keeps_the_splits_that_folders_have(test, place, tmp_path):
    splits = ["train" if test.islower() else "Training", test, "eval"]
    names = [place.format(splits[0 if i < 3 else 1 if i < 10 else 2], name) for i, name in enumerate(IDS)]
    frame = pandas.DataFrame({"file": names, "y": ["a", "b"] * 6, "patient": [f"p{i // 3}" for i in range(12)]})
    frame.to_csv(images(tmp_path, names) / "list.csv", index=False)
    data = read(tmp_path, "y")
    pixels = [(split.load()[0][:, 0, 0, 0] * 255).round().int().tolist() for split in (data.train, data.test)]
    assert pixels == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
    assert labels(data) == {i: "ab"[i % 2] for i in range(10)}
    assert "3 for training and 7 for testing by their folders; skipped: 2 in other folders" in data.notes[0]
    frame.assign(patient="p").to_csv(tmp_path / "list.csv", index=False)
    with pytest.raises(UserError, match="of 'patient'"):
        read(tmp_path, "y", group="patient")
    frame.assign(y=frame["y"].where(frame.index < 3)).to_csv(tmp_path / "list.csv", index=False)  # as of a contest
    assert labels(read(tmp_path, "y")) == {0: "a", 1: "b", 2: "a"}


def test_folders_are_not_the_classes_where_pictures_for_testing_lie_in_none(tmp_path):
    """As GTSRB has them: else its published test would be passed over."""
    images(
        tmp_path, [f"Train/{i % 2}/{name}.png" for i, name in enumerate(IDS[:8])] + [f"Test/{n}.png" for n in IDS[8:]]
    )
    frame = pandas.DataFrame({"Path": IDS, "ClassId": [0, 1] * 6, "Width": 30})
    frame[:8].to_csv(tmp_path / "Train.csv", index=False)
    frame[8:].to_csv(tmp_path / "Test.csv", index=False)
    with pytest.raises(UserError, match="--target"):
        read(tmp_path)
    data = read(tmp_path, "ClassId")
    assert (len(data.train), len(data.test)) == (8, 4)


def test_train_csv_beside_pictures_is_their_labels_and_no_table(tmp_path):
    images(tmp_path, [f"train_images/{name}.png" for name in IDS[:10]])
    images(tmp_path, [f".cache/{name}.png" for name in IDS[:10]])
    frame = pandas.DataFrame({"id_code": IDS[:10], "diagnosis": [i % 2 for i in range(10)]})
    frame.to_csv(tmp_path / "train.csv", index=False)
    frame[["id_code"]].to_csv(tmp_path / "test.csv", index=False)
    frame.assign(diagnosis=0).to_csv(tmp_path / "sample_submission.csv", index=False)
    data = read(tmp_path)
    assert labels(data) == {i: str(i % 2) for i in range(10)}
    assert data.notes[0].startswith("train.csv: 10 images by column 'id_code'; 2 classes (0, 1)")
    frame.assign(age=range(10)).to_csv(tmp_path / "train.csv", index=False)
    with pytest.raises(UserError, match="--target"):
        read(tmp_path)


def test_a_table_for_training_and_one_for_testing_each_have_their_own_images(tmp_path):
    images(tmp_path, [f"{name}.png" for name in IDS])
    frame = pandas.DataFrame({"file": IDS, "y": ["a", "b"] * 6})
    frame[:8].to_csv(tmp_path / "train.csv", index=False)
    frame[8:].to_csv(tmp_path / "test.csv", index=False)
    data = read(tmp_path)
    assert (len(data.train), len(data.test)) == (8, 4)
    assert labels(data) == dict(enumerate(frame["y"]))


@pytest.mark.parametrize("names", [[str(i) for i in range(12)], [f"{i:04}" for i in range(12)]])
@pytest.mark.parametrize("folder", ["images", "part1"])
def test_whole_numbers_name_images_and_keep_their_zeros(names, folder, tmp_path):
    images(tmp_path, [f"{folder}/{name}.png" for name in names])
    frame = pandas.DataFrame({"label": [i % 2 for i in range(12)], "id": names})
    frame.to_csv(tmp_path / "trainLabels.csv", index=False)
    assert labels(read(tmp_path)) == {i: str(i % 2) for i in range(12)}


@pytest.mark.parametrize("form", ["semicolons", "Latin-1", "xlsx", "index", "packed"])
def test_lists_are_read_as_tables_are(form, tmp_path):
    images(tmp_path, [f"{name}.png" for name in IDS])
    frame = pandas.DataFrame({"file": IDS, "art": ["gutartig", "bösartig"] * 6})
    if form == "xlsx":
        pytest.importorskip("openpyxl", reason="openpyxl is not installed")
        frame.to_excel(tmp_path / "a.xlsx", index=False)
    elif form == "packed":
        frame.to_csv(tmp_path / "a.csv.gz", index=False)
    else:
        options = {"semicolons": {"sep": ";"}, "Latin-1": {"encoding": "latin-1"}, "index": {"index": True}}[form]
        frame.to_csv(tmp_path / "a.csv", **{"index": False} | options)
    data = read(tmp_path)
    assert data.classes == ("bösartig", "gutartig")
    assert labels(data) == dict(enumerate(frame["art"]))


def chexpert(folder: Path, values: list[float]) -> Path:
    names = [f"train/patient{i // 2:05}/study{i % 2}/view1.png" for i in range(12)]
    marks = {"Edema": values, "Pneumonia": [0.0, 1.0] * 6}
    frame = pandas.DataFrame({"Path": [f"CheXpert-v1.0-small/{name}" for name in names], "Sex": "Male", **marks})
    frame.to_csv(images(folder, names) / "train.csv", index=False)
    return folder


def test_of_one_label_nothing_is_0_and_uncertain_as_is_said(tmp_path):
    chexpert(tmp_path, [1, 0, -1, float("nan")] * 3)
    with pytest.raises(UserError, match=r"3 rows .*uncertain"):
        read(tmp_path, "Edema")
    for uncertain, wanted in {"zero": "1000", "one": "1010", "drop": "10_0"}.items():
        data = read(tmp_path, "Edema", uncertain)
        assert (data.classes, data.learns) == (("0", "1"), "classes")
        assert labels(data) == {i: wanted[i % 4] for i in range(12) if wanted[i % 4] != "_"}
        assert f"3 empty labels taken as 0; 3 uncertain labels taken as {uncertain}" in data.notes[0]


def test_a_patients_pictures_are_in_training_or_in_test(tmp_path):
    data = read(chexpert(tmp_path, [1, 0] * 6))
    train, test = (
        {i // 2 for i in ((s.load()[0][:, 0, 0, 0] * 255).round().int().tolist())} for s in (data.train, data.test)
    )
    assert test
    assert not train & test
    assert "6 patients" in data.notes[-1]


def test_group_keeps_rows_of_a_value_together(tmp_path):
    images(tmp_path, [f"{name}.png" for name in IDS])
    frame = pandas.DataFrame({"file": IDS, "lesion": [f"L{i // 3}" for i in range(12)], "dx": ["a", "b", "a"] * 4})
    frame.to_csv(tmp_path / "list.csv", index=False)
    data = read(tmp_path, "dx", group="lesion")
    train, test = (
        {i // 3 for i in ((s.load()[0][:, 0, 0, 0] * 255).round().int().tolist())} for s in (data.train, data.test)
    )
    assert test
    assert not train & test
    frame[:7].to_csv(tmp_path / "train.csv", index=False)
    frame[7:].to_csv(tmp_path / "test.csv", index=False)
    (tmp_path / "list.csv").unlink()
    with pytest.raises(UserError, match="of 'lesion'") as error:
        read(tmp_path, "dx", group="lesion")
    assert "L2" not in error.value.public


def test_a_run_takes_what_is_said_of_a_list(tmp_path):
    images(tmp_path / "x", [f"{name}.png" for name in IDS])
    frame = pandas.DataFrame({"file": IDS, "lesion": [f"L{i // 3}" for i in range(12)], "dx": ["a", "b", "?"] * 4})
    frame.to_csv(tmp_path / "x" / "list.csv", sep="^", index=False)
    said = {"target": ["dx"], "group": "lesion", "separator": "^", "missing_marks": ["?"]}
    config = {"method": "fedavg", "dataset": str(tmp_path / "x"), "partition": "iid", "clients": 1}
    data = find(make_experiment(config | said)).task.data
    assert data.classes == ("a", "b")
    assert sum(len(split) for split in (data.clients[0].train, data.test)) == 8


@pytest.mark.parametrize(
    ("values", "words"),
    [([i + 0.5 for i in range(12)], "whole"), ([f"n{i}" for i in range(24)], "24 different")],
)
def test_what_is_measured_and_what_names_rows_are_no_classes(values, words, tmp_path):
    names = [f"x{i}.png" for i in range(len(values))]
    pandas.DataFrame({"file": names, "age": values}).to_csv(images(tmp_path, names) / "a.csv", index=False)
    with pytest.raises(UserError, match=words):
        read(tmp_path)


def test_a_row_for_testing_of_no_class_or_two_is_refused(tmp_path):
    images(tmp_path, [f"{name}.png" for name in IDS])
    frame = pandas.DataFrame({"image": IDS, "MEL": [1, 0] * 6, "NV": [0, 1] * 5 + [0, 0]})
    frame[:8].to_csv(tmp_path / "train.csv", index=False)
    frame[8:].to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(UserError, match="1 rows"):
        read(tmp_path)


def test_several_lists_are_refused_by_name(tmp_path):
    images(tmp_path, [f"{name}.png" for name in IDS])
    frame = pandas.DataFrame({"file": IDS, "y": ["a", "b"] * 6})
    for name in ("first", "second"):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(UserError, match=r"first\.csv, second\.csv") as error:
        read(tmp_path)
    assert "first" not in error.value.public


def test_a_licence_beside_a_list_of_labels_makes_it_no_text(tmp_path):
    images(tmp_path, [f"images/{name}.png" for name in IDS])
    pandas.DataFrame({"image": IDS, "dx": ["mel", "nv"] * 6}).to_csv(tmp_path / "labels.csv", index=False)
    (tmp_path / "LICENSE.txt").write_text("As you like.")
    assert not holds_text(str(tmp_path))
