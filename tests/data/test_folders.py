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
from fewbytes.experiments.tasks import find

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
        ("brain_train/{c}", "brain_test/{c}"),
        ("asl_alphabet_train/asl_alphabet_train/{c}", "asl_alphabet_test/asl_alphabet_test/{c}"),
        ("00-train/{c}", "01-test/{c}"),
        ("trn/{c}", "tst/{c}"),
        ("my train/{c}", "my testing/{c}"),
        ("train.v2/{c}", "valid.v2/{c}"),
        ("train_{c}", "test_{c}"),
        ("{c}_train", "{c}_val"),
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
    for words in ("2 pictures beside the splits", "4 pictures in val/", "Train/c"):
        assert words in data.notes[0]


def test_sets_that_are_called_by_letters_after_their_split_are_classes(tmp_path):
    written = write(tmp_path / "x", *(f"{split}{c}" for split in ("train", "test") for c in "AB"))
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("A", "B")
    assert places(data, "test", written) == {"testA", "testB"}


def test_classes_that_end_like_splits_are_classes(tmp_path):
    write(tmp_path / "x", "bullet_train", "steam_train", "car")
    assert load_dataset(str(tmp_path / "x")).classes == ("bullet_train", "car", "steam_train")
    write(tmp_path / "y", "steam_train", "steam_test", "car")
    with pytest.raises(UserError, match=r"\(steam_test, steam_train\)"):
        load_dataset(str(tmp_path / "y"))


def test_a_class_may_be_called_train_where_splits_stand_above(tmp_path):
    write(tmp_path / "x", *(f"{split}/{c}" for split in ("train", "test") for c in ("bus", "train")))
    assert load_dataset(str(tmp_path / "x")).classes == ("bus", "train")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("bus", "car", "train"), "keep to train/<class>/"),
        (("train/cat/test", "train/dog/test"), "two splits"),
    ],
)
def test_what_looks_like_splits_and_cannot_be_read_so_is_refused_without_names_for_others(where, words, tmp_path):
    write(tmp_path / "x", *where)
    with pytest.raises(UserError, match=words) as refused:
        load_dataset(str(tmp_path / "x"))
    assert refused.value.public is not None
    assert "/x" not in refused.value.public


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
    with pytest.raises(UserError, match=r"<domain>/<class>/<image> .*p3/"):
        load_dataset(str(tmp_path / "few"))
    write(tmp_path / "one", "benign/p1", "malignant/p2")
    with pytest.raises(UserError, match=r"one group .*each class"):
        load_dataset(str(tmp_path / "one"))


def test_no_patient_above_classes_is_on_both_sides(tmp_path):
    written = write(tmp_path / "x", *(f"{i:03}/{c}" for i in range(10) for c in ("ill", "well")))
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("ill", "well")
    train, test = ({place.split("/")[0] for place in places(data, s, written)} for s in ("train", "test"))
    assert (len(train), len(test), train & test) == (8, 2, set())
    assert "(000, 001, 002 and 7 more) are groups" in data.notes[0]
    numbers = write(tmp_path / "y", *(f"{i:03}/{c}" for i in range(10) for c in (0, 1)))
    data = load_dataset(str(tmp_path / "y"))
    assert data.classes == ("0", "1")
    assert len({place.split("/")[0] for place in places(data, "train", numbers)}) == 8


@pytest.mark.parametrize("split", [("train", "test"), ("x_train", "x_val")])
@pytest.mark.parametrize("how", ["{s}/{c}/{c}{p}", "{s}/p{p}/{c}"])
def test_patients_of_both_published_splits_are_refused_and_not_told(how, split, tmp_path):
    write(tmp_path / "x", *(how.format(s=s, c=c, p=p) for s in split for c in "ab" for p in range(3)))
    with pytest.raises(UserError, match=r"same groups.* in .*: keep each in one") as refused:
        load_dataset(str(tmp_path / "x"))
    assert "in training and in test" in refused.value.public


@pytest.mark.parametrize("where", ["{c}/{k}X", "{c}/p{k}", "train/{c}/p{k}", "{c}/{k}"])
@pytest.mark.parametrize("classes", [("benign", "malignant"), ("a", "b", "c", "d")])
def test_folders_called_by_numbers_in_several_others_are_neither_classes_nor_patients_without_a_word(
    where, classes, tmp_path
):
    write(tmp_path / "x", *(where.format(c=c, k=k) for c in classes for k in (1, 2, 3)))
    with pytest.raises(UserError, match=r"<class>/<group>.*words"):
        load_dataset(str(tmp_path / "x"))


def test_all_ten_digits_in_each_folder_are_classes(tmp_path):
    write(tmp_path / "x", *(f"{domain}/{digit}" for domain in ("mnist", "usps") for digit in range(10)))
    assert load_dataset(str(tmp_path / "x")).classes == tuple("0123456789")


@pytest.mark.parametrize(
    ("where", "classes"),
    [
        ("site{d}/{s}/{c}", ("benign", "malignant")), ("{s}/center_{d}/{c}", ("normal", "tumor")),
        ("hospital{d}/{s}/{c}", ("0", "1")), ("{s}/north{d}/{c}", ("grade 0", "grade 1", "grade 2")),
    ],
)  # fmt: skip
def test_domains_and_classes_that_are_called_so_may_have_numbers(where, classes, tmp_path):
    paths = [where.format(d=d, s=s, c=c) for d in (1, 2, 3) for s in ("train", "test") for c in classes]
    written = write(tmp_path / "x", *paths)
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == classes
    assert len(places(data, "test", written)) == 3 * len(classes)


def test_which_folders_are_classes_is_said(tmp_path):
    write(tmp_path / "x", *(f"{domain}/{c}" for domain in ("art", "photo") for c in ("cat", "dog", "fox", "hen")))
    (note,) = load_dataset(str(tmp_path / "x")).notes
    assert "cat, dog, fox and 1 more" in note
    assert "(art, photo) are domains" in note


@pytest.mark.parametrize(
    "places",
    [
        ("images", "labels"), ("train/image", "train/label"), ("imagesTr", "labelsTr"), ("train/images", "train/mask"),
        ("images/a", "images/b", "masks/a", "masks/b"), ("Images", "GroundTruth"),
    ],
)  # fmt: skip
def test_pictures_beside_masks_are_no_classes(places, tmp_path):
    write(tmp_path / "x", *places)
    with pytest.raises(UserError, match=r"no classes: .*train/images/") as no:
        load_dataset(str(tmp_path / "x"))
    assert str(tmp_path) not in no.value.public
    write(tmp_path / "y", "images/mask", "images/none")  # faces
    assert load_dataset(str(tmp_path / "y")).classes == ("mask", "none")


@pytest.mark.parametrize("mask", ["{}_mask.png", "{}_mask_1.png", "{}_segmentation.bmp", "{}_MASK.PNG"])
def test_masks_beside_pictures_are_passed_over_and_said(mask, tmp_path):
    written = write(tmp_path / "x", "benign", "malignant", count=6)
    for place in ("benign", "malignant"):
        for i in range(6):
            Image.new("L", (4, 4), 255).save(tmp_path / "x" / place / mask.format(i))
    Image.new("L", (4, 4), 100).save(tmp_path / "x" / "benign" / "gas_mask.png")  # of no picture
    data = load_dataset(str(tmp_path / "x"))
    assert sorted(greys(data, "train") + greys(data, "test")) == [*written, 100]
    assert "skipped: 12 masks of pictures" in data.notes[-1]


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
    for place in ("old", "logs", "Backup"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "north.csv").write_text("x,y\n1,2\n")
    (tmp_path / "~$north.csv").write_bytes(b"Meier")
    assert [path.name for path in client_folders(str(tmp_path))] == ["north.csv", "south.csv"]
    assert caplog.records[-1].getMessage().startswith(f"{tmp_path}: 2 clients; skipped, as no client's data: Backup")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "north.csv").write_text("x,y\n1,2\n")
    with pytest.raises(UserError, match=r"folders \(more\) .*\(north.csv, south.csv\)"):
        client_folders(str(tmp_path))


def test_old_folders_among_folders_of_sites_are_no_sites_unless_all_are_called_so(tmp_path):
    write(tmp_path / "x", *(f"{s}/{c}" for s in ("north", "south", "old", "logs") for c in "ab"))
    assert [path.name for path in client_folders(str(tmp_path / "x"))] == ["north", "south"]
    write(tmp_path / "y", *(f"{s}/{c}" for s in ("old", "young") for c in "ab"))
    assert [path.name for path in client_folders(str(tmp_path / "y"))] == ["old", "young"]


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
    assert find(make_experiment(local)).task.data.label_counts()["train"] == [[4, 4], [0, 4]]
    with pytest.raises(UserError, match="one class, b"):
        find(make_experiment(settings | {"dataset": str(tmp_path / "sites" / "s"), "partition": "iid"}))


def test_links_to_nowhere_are_passed_over_and_said_and_links_out_are_refused(tmp_path):
    write(tmp_path / "x", "a", "b")
    for name, target in (("notes.txt", tmp_path / "nowhere"), ("MEIER.png", "/nowhere/MEIER.png"), ("0.jpg", "gone")):
        (tmp_path / "x" / "a" / name).symlink_to(target)
    (tmp_path / "x" / "c").symlink_to("/nowhere/c")
    data = load_dataset(str(tmp_path / "x"))
    assert (data.classes, len(data.train) + len(data.test)) == (("a", "b"), 4)
    assert "skipped: 4 links to missing files" in data.notes[0]
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "train.csv").symlink_to("/nowhere/train.csv")
    with pytest.raises(UserError, match=r"train.csv \(a link"):
        load_dataset(str(tmp_path / "y"))
    Image.new("L", (4, 4)).save(tmp_path / "out.png")
    (tmp_path / "x" / "a" / "9.png").symlink_to(tmp_path / "out.png")
    with pytest.raises(UserError, match="leads out"):
        load_dataset(str(tmp_path / "x"))
