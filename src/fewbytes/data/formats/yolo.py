"""YOLO's folders: images, each with a text that has a line per object: class, centre x, centre y, width and height as
fractions of the image's sides."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data.clients import Dataset, rows_for_testing
from fewbytes.data.coco import Box, BoxFile, BoxImage, Category, split_of_boxes
from fewbytes.data.folders import SUFFIXES, TEST_NAMES, check_inside, is_stray, split_of, subfolders
from fewbytes.data.images import ORIENTATION, SIDEWAYS, wrong_image

NAMES = ("classes.txt", "obj.names", "data.yaml", "data.yml", "dataset.yaml", "dataset.yml")

Places = dict[str, tuple[Path, Path]]  # by split the folders of images and of labels


def yolo_places(folder: Path) -> Places:
    """The folders of YOLO's splits: `images/train` with `labels/train`, `train/images` with `train/labels`, `images`
    with `labels`, or `train` with both; empty if the folder is none of these."""
    found: Places = {}
    for place in (*subfolders(folder / "images"), *subfolders(folder)):
        split, images = split_of(place.name), place / "images" if place.parent == folder else place
        labels = place / "labels" if place.parent == folder else folder / "labels" / place.name
        if split is not None and images.is_dir() and any(labels.glob("*.txt")):
            found.setdefault(split, (images, labels))
    for place in subfolders(folder):  # Darknet's layout, with labels beside images
        if (split := split_of(place.name)) is not None and any(map(_has_label, place.iterdir())):
            found.setdefault(split, (place, place))
    if not found and any((folder / "labels").glob("*.txt")) and (folder / "images").is_dir():
        found["train"] = (folder / "images", folder / "labels")
    return found if "train" in found else {}


def _has_label(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not is_stray(path) and path.with_suffix(".txt").is_file()


def read_yolo(name: str, folder: Path, size: int) -> Dataset:
    """Read the data set in a folder as `read_coco` does; without a test split a fixed fifth of the images is for
    testing. Raises UserError for invalid labels, and for a class without a name."""
    places = yolo_places(folder)
    test = next((split for split in TEST_NAMES if split in places), None)
    names = _names(folder)
    files = {split: _read(folder, *places[split], names) for split in ("train", test) if split}
    if test is None:
        test, whole = "images", files["train"]
        tested = rows_for_testing(np.zeros(len(whole.images)))
        for split, chosen in (("train", ~tested), (test, tested)):
            kept = [image for image, is_chosen in zip(whole.images, chosen, strict=True) if is_chosen]
            ids = {image.id for image in kept}
            files[split] = BoxFile(kept, [b for b in whole.annotations if b.image_id in ids], whole.categories)
        places[test] = places["train"]
    classes = {category.id: category.name for category in files["train"].categories}
    splits = {
        split: split_of_boxes(places[split][1], file, classes, folder, places[split][0], size, split == "train")
        for split, file in files.items()
    }
    note = "; ".join(f"{words} in {split}" for split, (_, words) in splits.items())
    return Dataset(name, splits["train"][0], splits[test][0], names, notes=(note,))


def _read(folder: Path, images: Path, labels: Path, names: Sequence[str]) -> BoxFile:
    paths = sorted(path for path in images.iterdir() if path.suffix.lower() in SUFFIXES and not is_stray(path))
    check_inside(folder, (*paths, *labels.glob("*.txt")))
    found, boxes = [], []
    for i, path in enumerate(paths):
        width, height = _size(path)
        found.append(BoxImage(i, path.name, width, height))
        about = labels / f"{path.stem}.txt"
        for number, line in enumerate(about.read_text("utf-8").splitlines() if about.is_file() else (), 1):
            if not line.strip():
                continue
            c, x, y, w, h = _line(about, number, line, len(names))
            boxes.append(Box(i, c, ((x - w / 2) * width, (y - h / 2) * height, w * width, h * height)))
    return BoxFile(found, boxes, [Category(c, name) for c, name in enumerate(names)])


def _line(path: Path, number: int, line: str, classes: int) -> tuple[int, float, float, float, float]:
    try:
        c, *sides = line.split()
        x, y, w, h = map(float, sides)
        if 0 <= int(c) < classes and all(math.isfinite(side) and 0 <= side <= 1 for side in (x, y, w, h)):
            return int(c), x, y, w, h
    except ValueError:
        pass
    what = f"no class below {classes}, centre x, centre y, width and height, as parts of the image's sides"
    raise UserError(f"{path}, line {number}: {what}: correct it", public=f"a line of a file of labels: {what}")


def _size(path: Path) -> tuple[int, int]:
    """Width and height as in `read_image`."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(ORIENTATION) in SIDEWAYS else (width, height)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise wrong_image(path, path, 0, "is not a readable image; remove or replace it") from None


def _names(folder: Path) -> tuple[str, ...]:
    """The class names: lines, or in YAML `names`. Raises UserError for none, and for a number without a name."""
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{folder} has images and labels of boxes but no names of classes: add classes.txt, a name a line",
            public="images with boxes have no names of classes: add classes.txt, a name a line",
        )
    check_inside(folder, [path])
    text = path.read_text("utf-8-sig", errors="replace")
    if path.suffix in (".yaml", ".yml"):
        found = _yaml_names(text)
        numbered = all(number for number, _ in found)
        names = (
            [name for _, name in sorted(found, key=lambda item: int(item[0]))] if numbered else [n for _, n in found]
        )
        given = {number for number, _ in found}
        wrong = given not in ({""}, {str(number) for number in range(len(found))})
    else:
        names = [line.strip() for line in text.rstrip().splitlines()]
        wrong = False
    if not any(names):
        raise UserError(
            f"{path} has no names of classes: add classes.txt, a name a line", public="there are no classes"
        )
    if wrong or "" in names:
        raise UserError(
            f"{path} has no name for some number of a class: name all from 0, none left out",
            public="names of classes leave out a number: name all from 0",
        )
    return tuple(names)


def _yaml_names(text: str) -> list[tuple[str, str]]:
    """YAML's list `names`, (number or nothing, name): a line each, or in brackets."""
    text = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    if in_brackets := re.search(r"^names:\s*[\[{]([^\]}]*)[\]}]", text, re.M):
        items = re.findall(r"""(?:'[^']*'|"[^"]*"|[^,'"])+""", in_brackets[1])
    else:
        lines = re.search(r"^names:[ ]*\n((?:[ ]*(?:-|\d+[ ]*:)[^\n]*(?:\n|$)|[ ]*\n)+)", text, re.M)
        items = lines[1].splitlines() if lines else []
    found = [re.fullmatch(r"\s*(?:(\d+)\s*:|-\s)?\s*(.*?)\s*", item) for item in items if item.strip()]
    return [(item[1] or "", item[2].strip("'\"")) for item in found if item]
