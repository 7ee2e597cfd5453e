"""Boxes as files have them: COCO's format as programs write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from fewbytes.base.errors import UserError
from fewbytes.data import holds_text, load_dataset


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


def write(folder: Path, box: tuple[float, ...], name: str = "1.png", **image: Any) -> Path:
    file = {
        "images": [{"id": 1, "width": 64, "height": 32, "file_name": name} | image],
        "annotations": [{"image_id": image.get("id", 1), "category_id": 3, "bbox": box}],
        "categories": [{"id": 3, "name": "cell"}],
    }
    (folder / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        text = json.dumps(file).replace("SPLIT", split)
        (folder / "annotations" / f"instances_{split}.json").write_text(text)
        (folder / split).mkdir()
        Image.new("RGB", (64, 32)).save(folder / split / "1.png")
    return folder


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"id": "a3"},
        {"id": "0001"},
        {"width": 64.0, "height": 32.0},
        {"name": "SPLIT/1.png"},
    ],
)
def test_ids_of_text_sizes_with_a_point_and_folders_in_names_are_read(how, tmp_path):
    data = load_dataset(str(write(tmp_path / "x", (16, 8, 32, 16), **how)), 64)
    assert data.train.targets.tolist() == [[[0, 32, 16, 32, 16]]]
    assert data.classes == ("cell",)
    assert data.notes == ("1 images with boxes in train2017; 1 images with boxes in val2017",)


def test_ids_of_digits_are_the_numbers_elsewhere(tmp_path):
    folder = write(tmp_path / "x", (16, 8, 32, 16))
    for path in folder.glob("annotations/*"):
        path.write_text(path.read_text().replace('"image_id": 1', '"image_id": "1"'))
    assert load_dataset(str(folder), 64).train.targets.tolist() == [[[0, 32, 16, 32, 16]]]


def test_boxes_slightly_outside_are_cut_and_counted(tmp_path):
    data = load_dataset(str(write(tmp_path / "x", (-1, 8, 33, 24.9))), 64)
    assert data.train.targets.tolist() == [[[0, 16, 20, 32, 24]]]
    assert "1 images with boxes, 1 boxes cut to their image, in train2017" in data.notes[0]


@pytest.mark.parametrize(
    ("box", "how", "words"),
    [
        ((-9, 8, 33, 24), {}, "outside the image"),
        ((1, 1, 2, 2), {"width": 63.5}, "number of pixels"),
        ((1, 1, 2, 2), {"name": "../MEIER/1.png"}, "leads out of"),
    ],
)
def test_boxes_and_names_that_cannot_be_are_refused_without_names_for_others(box, how, words, tmp_path):
    with pytest.raises(UserError, match=words) as refused:
        load_dataset(str(write(tmp_path / "MEIER", box, **how)), 64)
    assert refused.value.public is not None
    assert "MEIER" not in refused.value.public


@pytest.mark.parametrize(
    ("images", "labels"),
    [("images/{s}", "labels/{s}"), ("{s}/images", "{s}/labels"), ("images", "labels"), ("{s}", "{s}")],
)
@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("classes.txt", "cell\nvirus\n"),
        ("data.yaml", "path: x\nnames: ['cell', virus]\nnc: 2\n"),
        ("data.yaml", "names:\n  0: cell\n  1: virus\n"),
        ("data.yaml", "names:\n  1: virus\n  0: cell\n"),
        ("data.yaml", "names: {1: virus, 0: 'cell'}\n"),
        ("data.yaml", "names: [\n  cell,  # one\n  virus\n]\n"),
        ("dataset.yaml", "names:\n- cell  # one\n- virus\nnc: 2\n"),
    ],
)
def test_yolos_folders_are_boxes(images, labels, file, names, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / file).write_text(names)
    for split in ("train", "val"):
        for i in range(6):
            for where, suffix in ((images, ".PNG"), (labels, ".txt")):
                path = tmp_path / "x" / where.format(s=split) / f"{i}{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                if suffix == ".txt":
                    path.write_text("1 0.5 0.5 0.5 0.5\n")
                else:
                    Image.new("RGB", (64, 32)).save(path)
    assert not holds_text(str(tmp_path / "x"))
    data = load_dataset(str(tmp_path / "x"), 64)
    assert (data.learns, data.classes) == ("boxes", ("cell", "virus"))
    assert data.train.targets[:1].tolist() == [[[1, 32, 16, 32, 16]]]
    assert (len(data.train), len(data.test)) == ((6, 6) if "{s}" in images else (5, 1))
    assert data.test.learnt.truth["annotations"][0]["bbox"] == [16, 8, 32, 16]
    (tmp_path / "x" / labels.format(s="train") / "MEIER.txt").write_text("1 0.5 0.5\n")
    Image.new("RGB", (64, 32)).save(tmp_path / "x" / images.format(s="train") / "MEIER.png")
    with pytest.raises(UserError, match=r"MEIER.txt, line 1: .*below 2") as refused:
        load_dataset(str(tmp_path / "x"), 64)
    assert refused.value.public is not None
    assert "MEIER" not in refused.value.public


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("data.yaml", "names:\n  0: cell\n  3: virus\n"),
        ("data.yaml", "names: {1: cell, 2: virus}\n"),
        ("classes.txt", "cell\n\nvirus\n"),
    ],
)
def test_numbers_of_classes_without_a_name_are_refused(file, names, tmp_path):
    for place, suffix in (("images", ".png"), ("labels", ".txt")):
        (tmp_path / place).mkdir()
        if suffix == ".txt":
            (tmp_path / place / "1.txt").write_text("1 0.5 0.5 0.5 0.5\n")
        else:
            Image.new("RGB", (64, 32)).save(tmp_path / place / "1.png")
    (tmp_path / file).write_text(names)
    with pytest.raises(UserError, match="no name"):
        load_dataset(str(tmp_path), 64)


@pytest.mark.parametrize("turn", [5, 6, 7, 8])
@pytest.mark.parametrize("sizes", ["stored", "shown"])
def test_boxes_of_pictures_that_lie_on_their_side_are_turned_with_them(turn, sizes, tmp_path):
    """A bright rectangle in a picture, its box as it is stored, or as it is shown: it is in the box that is read."""
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[4:12, 8:40] = 255
    exif = Image.Exif()
    exif[274] = turn
    stored = Image.fromarray(pixels)
    stored.getexif()[274] = turn
    shown = np.asarray(ImageOps.exif_transpose(stored))[..., 0] > 0
    rows, columns = np.flatnonzero(shown.any(axis=1)), np.flatnonzero(shown.any(axis=0))
    inside = (int(columns[0]), int(rows[0]), len(columns), len(rows))
    box, size = ((8, 4, 32, 8), (64, 32)) if sizes == "stored" else (inside, (32, 64))
    folder = write(tmp_path / "x", box, width=size[0], height=size[1])
    for split in ("train2017", "val2017"):
        stored.save(folder / split / "1.png", exif=exif)
    data = load_dataset(str(folder), 64)
    assert data.test.learnt.truth["annotations"][0]["bbox"] == list(inside)
    _, x, y, width, height = data.train.targets[0, 0].int().tolist()
    bright = data.train.load()[0][0, 0] > 0.9
    assert bright[y - height // 2 : y + height // 2, x - width // 2 : x + width // 2].all()
    assert int(bright.sum()) == width * height == 32 * 8


@pytest.mark.parametrize("crowd", [False, None, 0])
def test_crowds_may_be_said_by_false_or_by_nothing(crowd, tmp_path):
    folder = write(tmp_path / "x", (16, 8, 32, 16))
    for path in folder.glob("annotations/*"):
        file = json.loads(path.read_text())
        file["annotations"][0]["iscrowd"] = crowd
        path.write_text(json.dumps(file))
    data = load_dataset(str(folder), 64)
    assert data.train.targets.tolist() == [[[0, 32, 16, 32, 16]]]
    assert data.test.learnt.truth["annotations"][0]["iscrowd"] == 0


def test_roboflows_folders_are_read(tmp_path):
    folder = write(tmp_path / "x", (16, 8, 32, 16))
    for split in ("train", "valid"):
        (folder / f"{split.replace('valid', 'val')}2017").rename(folder / split)
        old = folder / "annotations" / f"instances_{split.replace('valid', 'val')}2017.json"
        old.rename(folder / split / "_annotations.coco.json")
    (folder / "annotations").rmdir()
    data = load_dataset(str(folder), 64)
    assert data.train.targets.tolist() == [[[0, 32, 16, 32, 16]]]
    assert data.notes == ("1 images with boxes in train; 1 images with boxes in valid",)
