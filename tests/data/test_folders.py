"""Folders of pictures as people have them: which of their names are classes, splits, groups, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data import client_folders, load_dataset
from fewbytes.data.clients import Dataset
from fewbytes.experiments.settings import make_experiment

CASES = Path(os.environ.get("FEWBYTES_DATA", "data")).parent / "cases" / "data"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


def write(folder: Path, *places: str, count: int = 2, suffix: str = ".png") -> dict[int, str]:
    """So many pictures in each place, each of a grey of its own: the place by the grey."""
    greys = {}
    for place in places:
        (folder / place).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            grey = len(greys) + 1
            Image.new("L", (4, 4), grey).save(folder / place / f"{i}{suffix}", "PNG")
            greys[grey] = place
    return greys


def greys(data: Dataset, split: str) -> list[int]:
    return [round(float(x) * 255) for x in getattr(data, split).load()[0][:, 0, 0, 0]]


def places(data: Dataset, split: str, written: dict[int, str]) -> set[str]:
    return {written[grey] for grey in greys(data, split)}


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train/{c}", "test/{c}"),
        ("Train/{c}", "Test/{c}"),
        ("Training/{c}", "Testing/{c}"),
        ("training_set/{c}", "test_set/{c}"),
        ("training_set/training_set/{c}", "test_set/test_set/{c}"),
        ("seg_train/seg_train/{c}", "seg_test/seg_test/{c}"),
        ("train_images/{c}", "test_images/{c}"),
        ("images/train/{c}", "images/val/{c}"),
        ("TRAIN/{c}", "Valid/{c}"),
        ("train2017/{c}", "val2017/{c}"),
        ("data/raw/train/{c}", "data/raw/eval/{c}"),
        ("train/{c}", "validation/images/{c}"),
        ("{c}/train", "{c}/test"),
        ("{c}/images/Training", "{c}/images/Validation"),
    ],
)
def test_splits_in_every_usual_spelling_and_at_every_level_are_no_classes_and_stay_apart(train, test, tmp_path):
    written = write(tmp_path / "x", *(how.format(c=c) for how in (train, test) for c in ("cat", "dog")))
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("cat", "dog")
    assert places(data, "train", written) == {train.format(c=c) for c in ("cat", "dog")}
    assert places(data, "test", written) == {test.format(c=c) for c in ("cat", "dog")}
    assert all(
        data.classes[y] in written[grey] for grey, y in zip(greys(data, "train"), data.train.labels, strict=True)
    )
    assert "4 pictures of 2 classes for training, 4 for testing" in data.notes[0]


def test_test_pictures_are_tested_on_where_there_are_pictures_for_validation_and_for_prediction_too(tmp_path):
    written = write(tmp_path / "x", *(f"{s}/{c}" for s in ("Train", "Val", "Test") for c in "ab"), "seg_pred/seg_pred")
    (tmp_path / "x" / "Train" / "c").mkdir()
    data = load_dataset(str(tmp_path / "x"))
    assert places(data, "test", written) == {"Test/a", "Test/b"}
    assert places(data, "train", written) == {"Train/a", "Train/b"}
    assert (
        "passed over: 2 pictures beside the splits, 4 pictures in val/, folders without pictures: Train/c"
        in (data.notes[0])
    )


def test_a_class_may_be_called_train_where_splits_stand_above(tmp_path):
    write(tmp_path / "x", *(f"{split}/{c}" for split in ("train", "test") for c in ("bus", "train")))
    assert load_dataset(str(tmp_path / "x")).classes == ("bus", "train")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("bus", "car", "train"), "beside others: keep to train/<class>/"),
        (("train/cat/test", "train/dog/test"), "of two splits at once"),
    ],
)
def test_what_looks_like_splits_and_cannot_be_read_so_is_refused_without_names_for_others(where, words, tmp_path):
    write(tmp_path / "x", *where)
    with pytest.raises(UserError, match=words) as refused:
        load_dataset(str(tmp_path / "x"))
    assert refused.value.told is not None
    assert "/x" not in refused.value.told


def test_no_patient_is_on_both_sides(tmp_path):
    patients = [f"{c}/{c[0]}p{i}" for c in ("benign", "malignant") for i in range(6)]
    written = write(tmp_path / "x", *patients, count=3)
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("benign", "malignant")
    train, test = places(data, "train", written), places(data, "test", written)
    assert (len(train), len(test), train | test) == (10, 2, set(patients))
    assert {place.split("/")[0] for place in test} == {"benign", "malignant"}
    assert greys(load_dataset(str(tmp_path / "x")), "test") == greys(data, "test")
    assert "of 12 groups" in data.notes[0]


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
def test_the_case_of_patients_in_classes():
    data = load_dataset(str(CASES / "nested"))
    assert data.classes == ("benign", "malignant")
    assert (len(data.train), len(data.test)) == (12, 6)  # of 3 patients with 3 pictures each one a class


def test_patients_of_published_splits_are_no_classes_either(tmp_path):
    written = write(tmp_path / "x", "train/a/p1", "train/a/p2", "train/b/p3", "test/a/p4", "test/b/p5")
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("a", "b")
    assert places(data, "test", written) == {"test/a/p4", "test/b/p5"}


def test_most_classes_in_several_domains_are_classes_few_are_refused_and_one_group_a_class_too(tmp_path):
    write(tmp_path / "most", "art/cat", "art/dog", "photo/cat", "photo/dog", "photo/fox")
    assert load_dataset(str(tmp_path / "most")).classes == ("cat", "dog", "fox")
    write(tmp_path / "few", "benign/p1", "benign/p2", "benign/p3", "malignant/p3", "malignant/p4")
    with pytest.raises(UserError, match="could be <domain>/<class>/<image> as p3/ is in several"):
        load_dataset(str(tmp_path / "few"))
    write(tmp_path / "one", "benign/p1", "malignant/p2")
    with pytest.raises(UserError, match=r"one group .* for each class"):
        load_dataset(str(tmp_path / "one"))


# Stray files ----------------------------------------------------------------------------------------------------------


def litter(folder: Path) -> None:
    """What systems and people leave in a folder."""
    for place in ("__MACOSX/north", "old/older"):
        (folder / place).mkdir(parents=True)
    for name in ("__MACOSX/._north.csv", "__MACOSX/north/._0.png", "._north.csv", "._0.png", ".DS_Store", "Thumbs.db"):
        (folder / name).write_bytes(b"\0\5\x16\7")
    (folder / "__MACOSX" / "0.png").write_bytes(b"not a picture")
    (folder / "desktop.ini").write_text("[.ShellClassInfo]")
    (folder / "old" / ".DS_Store").write_bytes(b"\0")
    (folder / "gone.lnk").symlink_to(folder / "nowhere")


def test_stray_files_are_no_sites_and_are_said(tmp_path, caplog):
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text("x,y\n1,2\n")
    litter(tmp_path)
    assert [path.name for path in client_folders(str(tmp_path))] == ["north.csv", "south.csv"]
    assert client_folders(str(tmp_path))
    assert [r.getMessage().count("old") for r in caplog.records] == [1]  # once
    (tmp_path / "old" / "north.csv").write_text("x,y\n1,2\n")
    with pytest.raises(UserError, match=r"has folders \(old\) and tables \(north.csv, south.csv\)"):
        client_folders(str(tmp_path))


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
def test_the_case_of_two_sites_beside_what_a_mac_leaves():
    assert [path.name for path in client_folders(str(CASES / "sites_MACOSX"))] == ["north.csv", "south.csv"]


@pytest.mark.parametrize("layout", ["{s}/{c}", "{s}/train/{c}", "{s}/Training/{c}", "{s}/images/{c}"])
def test_stray_files_are_no_sites_of_pictures_and_no_classes(layout, tmp_path):
    write(tmp_path, *(layout.format(s=s, c=c) for s in ("north", "south") for c in "ab"), count=5)
    for folder in (tmp_path, tmp_path / "north", (tmp_path / layout.format(s="north", c="")).resolve()):
        if not (folder / "old").exists():
            litter(folder)
    folders = client_folders(str(tmp_path))
    assert [path.name for path in folders] == ["north", "south"]
    data = load_dataset(str(folders[0]))
    assert (data.classes, len(data.train) + len(data.test)) == (("a", "b"), 10)
    assert "__MACOSX" in data.notes[0]
    assert "old" in data.notes[0]


@pytest.mark.parametrize("suffix", [".PNG", ".Png", ".png"])
@pytest.mark.parametrize("layout", ["{s}/{c}", "{s}/train/{c}"])
def test_a_site_may_hold_one_class_and_a_data_set_that_is_dealt_out_may_not(layout, suffix, tmp_path):
    whole = [f"server/test/{c}" for c in "ab"]
    write(
        tmp_path, *whole, *(layout.format(s=f"sites/{s}", c=c) for s, c in ("na", "nb", "sb")), count=5, suffix=suffix
    )
    settings = {"method": "fedavg", "dataset": str(tmp_path / "server"), "clients": 2}
    local = settings | {"partition": "local", "client_data": str(tmp_path / "sites")}
    assert make_experiment(local).task().data.label_counts()["train"] == [[4, 4], [0, 4]]
    with pytest.raises(UserError, match="has one class, b: there is nothing to tell apart"):
        make_experiment(settings | {"dataset": str(tmp_path / "sites" / "s"), "partition": "iid"}).task()


def test_a_link_to_nowhere_is_refused_where_it_is_a_picture_without_its_name_for_others(tmp_path):
    write(tmp_path, "a", "b")
    (tmp_path / "a" / "notes.txt").symlink_to(tmp_path / "nowhere")
    assert len(load_dataset(str(tmp_path)).train) == 4
    (tmp_path / "a" / "MEIER.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"MEIER.png is a link to a file that is not there") as refused:
        load_dataset(str(tmp_path))
    assert refused.value.told == "a link among the data leads to a file that is not there"
