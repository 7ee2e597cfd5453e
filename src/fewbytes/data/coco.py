"""Object detection data in COCO's format: annotation files in JSON, and folders of images.

`annotations/instances_<split>.json` lists the objects in the images in `<split>/`. Images are letter-boxed to one size:
scaled to fit, with their proportions kept, at the top left; the rest is grey.

Source: cocodataset.org/#format-data; the letter-box is YOLOX's.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fewbytes.base.errors import UserError, visible
from fewbytes.base.files import replacing
from fewbytes.data.clients import Dataset
from fewbytes.data.folders import check_inside
from fewbytes.data.images import ORIENTATION, SIDEWAYS, cache_folder, in_bytes, read_image
from fewbytes.data.split import Split, Targets

log = logging.getLogger(__name__)

SIZE = 416  # default pixels per side of a letter-boxed image
STRIDE = 32  # image sizes are multiples of this number of pixels
GREY = 114  # value of the border
LEEWAY = 0.02  # fraction of an image's side, at least a pixel, by which a box may exceed it; the box is cut
CHUNK = 256  # images decoded before they are written
ROBOFLOW = "_annotations.coco.json"  # beside the images of each split


Name = int | str  # of an image, as in the file


class BoxImage(msgspec.Struct):
    """An image in COCO's format."""

    id: Name
    file_name: str
    width: int | float
    height: int | float


class Box(msgspec.Struct):
    """An object in an image."""

    image_id: Name
    category_id: Name
    bbox: tuple[float, float, float, float]  # left, top, width, height
    area: float | None = None
    iscrowd: int | bool | None = 0


class Category(msgspec.Struct):
    """A class."""

    id: Name
    name: str


class BoxFile(msgspec.Struct):
    """The images of a split, their objects and the classes."""

    images: list[BoxImage]
    annotations: list[Box]
    categories: list[Category]


def is_coco(folder: Path) -> bool:
    """Whether a folder holds annotations in COCO's format."""
    return any((folder / "annotations").glob("instances_*.json")) or any(folder.glob(f"train*/{ROBOFLOW}"))


def read_coco(name: str, folder: Path, size: int) -> Dataset:
    """Read the data set in a folder: images uint8 (3, size, size) with boxes; a sample's label is the category of its
    largest object, or -1 for a test image without objects.

    Test samples are those of `instances_test*.json`, else of `instances_val*.json`. Training images without objects and
    objects without area are dropped. Crowds count only in scoring, as in COCO. Raises UserError, naming the file, for
    anything missing or wrong. Roboflow's folders have `_annotations.coco.json` beside each split's images.
    """
    if size < STRIDE or size % STRIDE:
        raise UserError(f"image_size is a multiple of {STRIDE} pixels, not {size}")
    splits, notes = {}, []
    train_file, test_file = _annotations(folder, "train"), _annotations(folder, "test", "val")
    check_inside(folder, (train_file, test_file))
    train, test = _read(train_file), _read(test_file)
    classes = {category.id: category.name for category in sorted(train.categories, key=_order)}
    if {category.id: category.name for category in test.categories} != classes:
        raise UserError(f"{test_file} has other categories than {train_file.name}: give both the same")
    for path, file in ((train_file, train), (test_file, test)):
        split = path.parent.name if path.name == ROBOFLOW else path.stem.removeprefix("instances_")
        for image in file.images:  # some files include the folder: train2017/0001.jpg
            if not (folder / split / image.file_name).exists() and PurePath(image.file_name).parts[:1] == (split,):
                image.file_name = str(PurePath(*PurePath(image.file_name).parts[1:]))
        splits[path], note = split_of_boxes(path, file, classes, folder, folder / split, size, path == train_file)
        notes.append(f"{note} in {split}")
    return Dataset(name, splits[train_file], splits[test_file], tuple(classes.values()), notes=("; ".join(notes),))


def split_of_boxes(
    path: Path, file: BoxFile, classes: Mapping[Name, str], folder: Path, images: Path, size: int, training: bool
) -> tuple[Split, str]:
    """The images below `images` of a data set in `folder`, with the annotations in `path`, and a note on their number.
    Boxes are rotated with images that EXIF data rotate by 90 degrees if the file states the stored sizes. Raises
    UserError as `read_coco`."""
    try:
        return _split_of_boxes(path, file, classes, folder, images, size, training)
    except _StoredSize:
        _turn(file, images)
        return _split_of_boxes(path, file, classes, folder, images, size, training)


def _split_of_boxes(
    path: Path, file: BoxFile, classes: Mapping[Name, str], folder: Path, images: Path, size: int, training: bool
) -> tuple[Split, str]:
    objects, cut = _objects(path, file, {number: i for i, number in enumerate(classes)})
    kept = [image for image in file.images if not training or any(not o.iscrowd for o in objects[image.id])]
    if not kept:
        raise _wrong(path, f"has no images{' with objects' if file.images else ''}")
    found = [objects[image.id] for image in kept]
    targets = _targets(kept, found, size)
    labels = torch.tensor([_main_category(mine) for mine in found])
    truth = None if training else _truth(kept, found, tuple(classes.values()))
    check_inside(folder, (images / image.file_name for image in kept))
    split = Split(_decoded(kept, images, path, size), labels, learnt=Targets("boxes", targets, truth))
    return split, f"{len(kept)} images with boxes" + (f", {cut} boxes cut to their image," if cut else "")


def _annotations(folder: Path, *splits: str) -> Path:
    for split in splits:
        places = (folder / "annotations").glob(f"instances_{split}*.json"), folder.glob(f"{split}*/{ROBOFLOW}")
        if found := [path for place in places for path in sorted(place)]:
            return found[0]
    names = " or ".join(f"instances_{split}*.json" for split in splits)
    raise UserError(f"{folder / 'annotations'} has no {names}: COCO's format needs it")


def _read(path: Path) -> BoxFile:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=BoxFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wrong(path, f"is not in COCO's format: {error}") from None
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    for image in file.images:
        if image.width % 1 or image.height % 1:  # JSON has no NaN and no infinity
            raise _wrong(path, "has an image of a fractional number of pixels", image.file_name)
        image.width, image.height = int(image.width), int(image.height)
        image.id = _number(image.id)
    for category in file.categories:
        category.id = _number(category.id)
    for annotation in file.annotations:
        annotation.image_id = _number(annotation.image_id)
        annotation.category_id = _number(annotation.category_id)
        annotation.iscrowd = int(annotation.iscrowd or 0)
    return file


def _wrong(path: Path, what: str, which: str = "") -> UserError:
    """The error for a file of annotations. The server's version does not name the image or box."""
    return UserError(f"{path} {what}{f' ({which})' if which else ''}", public=f"a file of annotations {what}")


def _order(category: Category) -> tuple[bool, Name]:
    return isinstance(category.id, str), category.id


def _number(name: Name) -> Any:
    """Ids may be digit strings in one list and numbers in another."""
    return int(name) if isinstance(name, str) and name.isdecimal() and str(int(name)) == name else name


def _objects(path: Path, file: BoxFile, classes: dict[Name, int]) -> tuple[dict[Name, list[Box]], int]:
    """The objects of each image, with boxes cut to the image, class numbers as categories, and nonzero area; and the
    number of boxes cut."""
    images = {image.id: image for image in file.images}
    if len(images) < len(file.images) or len(classes) < len(file.categories):
        raise UserError(f"{path} has two images or two categories of one id: give each its own")
    for image in file.images:
        if min(image.width, image.height) < 1:
            raise UserError(f"{path}: image {image.file_name} is {image.width} x {image.height} pixels large")
    objects: dict[Name, list[Box]] = {number: [] for number in images}
    flat = cut = 0
    for annotation in file.annotations:
        left, top, width, height = annotation.bbox
        where = f"{path}: the box {list(annotation.bbox)}"
        if annotation.image_id not in images:
            raise UserError(f"{where} is of image {annotation.image_id}, which the file does not list")
        image = images[annotation.image_id]
        where += f" of {image.file_name}"
        if annotation.category_id not in classes:
            raise UserError(f"{where} is of category {annotation.category_id}, which the file does not list")
        if not all(map(math.isfinite, annotation.bbox)) or min(width, height) < 0:
            raise UserError(f"{where} is not left, top, width and height: correct it")
        across, down = max(-left, left + width - image.width), max(-top, top + height - image.height)
        if across > max(1.0, LEEWAY * image.width) or down > max(1.0, LEEWAY * image.height):
            raise UserError(
                f"{where} lies outside the image, {image.width} x {image.height}: correct it",
                public="a file of annotations has a box outside of its image",
            )
        cut += max(across, down) > 0
        left, top, right, bottom = (
            min(max(value, 0.0), float(side))
            for value, side in zip(
                (left, top, left + width, top + height), (image.width, image.height) * 2, strict=True
            )
        )
        if min(right - left, bottom - top) <= 0:
            flat += 1
            continue
        area = width * height if annotation.area is None else annotation.area
        box = (left, top, right - left, bottom - top)
        number = classes[annotation.category_id]
        objects[image.id].append(Box(image.id, number, box, area, annotation.iscrowd))
    if flat:
        log.warning("%s: boxes of no area are left out: %d", visible(str(path)), flat)
    return objects, cut


def _main_category(objects: Sequence[Box]) -> int:
    """The class of the largest object, the first in a tie; -1 without objects."""
    single = [o for o in objects if not o.iscrowd]
    return int(max(single, key=lambda o: o.area or 0.0).category_id) if single else -1


def _targets(images: Sequence[BoxImage], objects: Sequence[Sequence[Box]], size: int) -> torch.Tensor:
    """A detector's training targets, as in `Kind`."""
    rows = [
        [
            (o.category_id, *(ratio(image.width, image.height, size) * v for v in _centred(o.bbox)))
            for o in mine
            if not o.iscrowd
        ]
        for image, mine in zip(images, objects, strict=True)
    ]
    targets = torch.zeros(len(rows), max(map(len, rows)), 5)
    for i, row in enumerate(rows):
        if row:
            targets[i, : len(row)] = torch.tensor(row)
    return targets


def _centred(box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    left, top, width, height = box
    return left + width / 2, top + height / 2, width, height


def _truth(images: Sequence[BoxImage], objects: Sequence[Sequence[Box]], classes: Sequence[str]) -> dict[str, Any]:
    """The ground truth for scoring detections, as in `Targets`."""
    numbers = itertools.count(1)  # 0 means no match in pycocotools
    return {
        "info": {},
        "images": [{"id": i, "width": image.width, "height": image.height} for i, image in enumerate(images)],
        "annotations": [
            {
                "id": next(numbers),
                "image_id": i,
                "category_id": o.category_id,
                "bbox": list(o.bbox),
                "area": o.area,
                "iscrowd": o.iscrowd,
            }
            for i, mine in enumerate(objects)
            for o in mine
        ],
        "categories": [{"id": i, "name": name} for i, name in enumerate(classes)],
    }


class _StoredSize(Exception):
    """The file states the stored size of an image that EXIF data rotate by 90 degrees."""


def _turn(file: BoxFile, folder: Path) -> None:
    """Set the displayed size of images stored on their side, and rotate their boxes."""
    turned = {}
    for image in file.images:
        with Image.open(folder / image.file_name) as opened:
            turn = opened.getexif().get(ORIENTATION, 1)
            if turn in SIDEWAYS and opened.size == (image.width, image.height):
                turned[image.id] = (turn, image.width, image.height)
                image.width, image.height = image.height, image.width
    for annotation in file.annotations:
        if annotation.image_id in turned:
            turn, across, down = turned[annotation.image_id]
            left, top, width, height = annotation.bbox
            x = down - top - height if turn in (6, 7) else top
            y = across - left - width if turn in (7, 8) else left
            annotation.bbox = (x, y, height, width)


# Images ---------------------------------------------------------------------------------------------------------------


def ratio(width: float, height: float, size: int) -> float:
    """The scale factor that fits an image into `size` x `size`."""
    return min(size / width, size / height)


def letter_boxed(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """A letter-boxed image, uint8 (3, size, size)."""
    scale = ratio(*image.size, size)
    width, height = (max(1, round(scale * side)) for side in image.size)
    canvas = Image.new("RGB", (size, size), (GREY,) * 3)
    canvas.paste(image.resize((width, height), Image.Resampling.BILINEAR))
    return np.asarray(canvas).transpose(2, 0, 1)


def _decoded(images: Sequence[BoxImage], folder: Path, path: Path, size: int) -> NDArray[np.uint8]:
    """The letter-boxed images (n, 3, size, size), decoded once and memory-mapped from the cache folder."""
    kept = cache_folder() / f"{_key(images, folder, path, size)}.npy"
    shape = (len(images), 3, size, size)
    with suppress(OSError, ValueError):  # missing or damaged
        x = _kept(kept)
        if x.shape == shape and x.dtype == np.uint8:
            return x
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for part in _parts(images, folder, path, size):
                file.write(part.tobytes())
        return _kept(kept)
    except OSError as error:
        log.warning("decoded images cannot be kept in %s (%s); they are decoded at every start", kept.parent, error)
        return np.concatenate(list(_parts(images, folder, path, size)))


def _kept(path: Path) -> NDArray[np.uint8]:
    x: NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    return x


def _key(images: Sequence[BoxImage], folder: Path, path: Path, size: int) -> str:
    """A key that changes with any image's name, size or time. Raises UserError for a missing image."""
    digest = hashlib.sha256(f"coco 2 {size} {folder.absolute()}".encode())  # 2: the version of the cache's layout
    for image in images:
        if PurePath(image.file_name).is_absolute() or ".." in PurePath(image.file_name).parts:
            raise UserError(
                f"{path} lists {image.file_name}, which leads out of {folder}: correct it",
                public="a file of annotations lists an image out of its folder",
            )
        try:
            about = (folder / image.file_name).stat()
        except OSError:
            raise UserError(
                f"{path} lists {image.file_name}, which is not in {folder}",
                public="a file of annotations lists an image that is not there",
            ) from None
        digest.update(f"\n{image.file_name} {image.width} {image.height} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _is_sideways(path: Path) -> bool:
    with Image.open(path) as image:
        return image.getexif().get(ORIENTATION) in SIDEWAYS


def _parts(images: Sequence[BoxImage], folder: Path, path: Path, size: int) -> Iterator[NDArray[np.uint8]]:
    def decoded(image: BoxImage) -> NDArray[np.uint8]:
        opened = Image.fromarray(in_bytes(read_image(folder / image.file_name, path, 0)))
        if opened.size != (image.width, image.height):
            if opened.size == (image.height, image.width) and _is_sideways(folder / image.file_name):
                raise _StoredSize
            raise UserError(
                f"{folder / image.file_name} is {opened.width} x {opened.height} pixels large, "
                f"{path} says {image.width} x {image.height}: correct it",
                public="an image has another size than its file of annotations says: correct it",
            )
        return letter_boxed(opened, size)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(images), CHUNK):
            yield np.stack(list(pool.map(decoded, images[start : start + CHUNK])))
