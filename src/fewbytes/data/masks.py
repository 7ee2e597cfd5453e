"""Segmentation data: images with masks, whose pixels are class numbers, or with filled boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fewbytes.base.errors import UserError, listed
from fewbytes.data.clients import Dataset
from fewbytes.data.folders import SUFFIXES, TEST_NAMES, check_inside, is_stray
from fewbytes.data.images import Pixels, raw_image, read_image, squared, wrong_image
from fewbytes.data.split import IGNORED_PIXEL, Split, Targets

MOST_VALUES = 32
"""Maximum number of mask values read as classes if they are not class numbers; grey pictures have more."""
MASKS = ("_mask", "_segmentation")
"""Suffixes that the name of an image's mask may have."""
GROUPS = ("samples",)
"""The labels of images with masks, which are split like one class."""


def holds_masks(folder: Path) -> bool:
    """Whether a folder has images with masks: `train/images/<name>` and `train/masks/<name>.png`."""
    return (folder / "train" / "images").is_dir() and (folder / "train" / "masks").is_dir()


def read_masks(name: str, folder: Path, size: int | None, only_test: bool = False) -> Dataset:
    """Read a data set with `train/` and one of TEST_NAMES, each with `images/` and `masks/`. A mask is a picture with
    one channel or a palette. It has its image's name, possibly with one of MASKS; its pixels are class numbers, and 255
    is none.

    If there are only 0 and 255, or values far apart (0, 128, 255), each value is a class, in order; beside small
    numbers (0, 1, 5, 255) all except 255 are (`class_values`). Images (channels, height, width) have one size, or are
    scaled and cropped to `size` pixels per side (masks by the nearest pixel). They are uint8, or float32 if deeper than
    8 bits. Classes are named by the lines of `classes.txt`, else by the values of masks. Without test images, a fifth
    of the training images is for testing. Raises UserError, naming the file, if one is missing, cannot be read or
    differs in size, and for values that are not classes or differ in meaning between the splits.
    """
    test = next((folder / place for place in TEST_NAMES if (folder / place / "images").is_dir()), None)
    if only_test and test is None and not (folder / "train" / "images").is_dir():
        raise UserError(f"{folder} has no test images: there is no test/images/ with test/masks/")
    places = [folder / "train", *([] if test is None else [test])]
    named = folder / "classes.txt"
    check_inside(folder, [named, *(file for place in places for file in place.glob("*/*"))])
    pairs = [_pairs(place, size) for place in places if (place / "images").is_dir()]
    values = [np.unique(masks).tolist() for _, masks in pairs]
    found = sorted({value for each in values for value in each})
    names = _names(named)
    chosen = class_values(found, len(names) or None, folder)
    _check_consistent(folder, values, chosen, len(names) or None)
    if chosen is None:
        classes = names or tuple(map(str, range(max(value for value in found if value != IGNORED_PIXEL) + 1)))
    else:
        number = np.full(256, IGNORED_PIXEL, np.uint8)
        number[list(chosen)] = np.arange(len(chosen), dtype=np.uint8)
        pairs = [(images, number[masks]) for images, masks in pairs]
        classes = names or tuple(map(str, chosen))
    splits = [
        Split(images, torch.zeros(len(images), dtype=torch.int64), learnt=Targets("masks", torch.from_numpy(masks)))
        for images, masks in pairs
    ]
    if len(splits) == 1:
        order = np.random.RandomState(0).permutation(len(splits[0]))
        tested = max(1, len(order) // 5)
        splits = [splits[0].take(np.sort(order[tested:])), splits[0].take(np.sort(order[:tested]))]
    note = f"{sum(map(len, splits))} images with masks of the values {listed_numbers(found)}: {_words(found, chosen)}"
    return Dataset(name, splits[0], splits[1], classes, GROUPS, notes=(note,))


def class_values(found: Sequence[int], named: int | None, where: Path) -> tuple[int, ...] | None:
    """The mask values that are classes, in order, if they are not class numbers; None: they are, and 255 is none.

    `found`: all values that occur, ascending; `named`: the number of classes in classes.txt. Values with gaps are one
    class each, except 255 beside small ones; 0 and 255 are two classes. Numbers from 1 to `named` are these classes.
    Raises UserError if there are not `named` values, if 0 and 255 occur with more than two names, for fewer numbers
    than names from 1 on (counted from 0 or from 1), and for the values of a grey picture.
    """
    numbers = [value for value in found if value != IGNORED_PIXEL]
    binary = _binary(found) and named != 1
    in_a_row = numbers == list(range(len(numbers)))
    if named and numbers == list(range(1, named + 1)):
        return tuple(numbers)
    from_0 = in_a_row if named is None else numbers and max(numbers) < named
    if numbers and not binary and from_0 and (named is None or numbers[0] != 1):
        return None
    if binary and named in (None, 2):
        return (0, IGNORED_PIXEL)
    # a subset of those values, as at another site, would be read as other class numbers
    unsure = named is not None and any(value < named and value != i for i, value in enumerate(found))
    chosen = numbers if _small(found) and named != len(found) else list(found)
    if named is not None and unsure:
        what = f"which do not identify the {named} classes: write numbers of classes from 0"
        raise UserError(
            f"{where}: masks have the values {listed_numbers(found)}, {what}, the first that classes.txt names",
            public=f"masks have {len(found)} values, {what}",
        )
    if named is not None and (len(chosen) != named or named == 1):
        raise UserError(
            f"{where}: classes.txt names {named} classes, and masks have the values {listed_numbers(found)}: name one "
            "for each value, or write numbers of classes from 0, and 255 for none",
            public=f"masks have {len(found)} values, and {named} classes are named: name one for each, or numbers "
            "of classes from 0",
        )
    if len(found) > MOST_VALUES:
        raise UserError(
            f"{where}: masks have {len(found)} values, {listed_numbers(found)}, which are no numbers of classes from 0 "
            "(are masks grey pictures, or stored as JPEG?): write numbers of classes, and 255 for none",
            public=f"masks have {len(found)} values, which are no numbers of classes from 0",
        )
    return tuple(chosen)


def _small(found: Sequence[int]) -> bool:
    """Whether values are 255 and several small numbers, not evenly spaced (0, 127, 255)."""
    *numbers, last = found
    steps = np.diff(found)
    return last == IGNORED_PIXEL and len(numbers) > 1 and max(numbers) < 128 and int(np.ptp(steps)) > 2


def _binary(found: Sequence[int]) -> bool:
    """Whether values are those of one object's masks: 255, and possibly 0."""
    return IGNORED_PIXEL in found and {*found} <= {0, IGNORED_PIXEL}


def _check_consistent(
    where: Path, splits: Sequence[Sequence[int]], chosen: tuple[int, ...] | None, named: int | None
) -> None:
    """Raises UserError if the splits' values differ in meaning: 0 and 255 in one and class numbers in the other, or, if
    each value is a class, a value that does not occur in training."""
    mixed = chosen is None and named != 1 and any(map(_binary, splits))
    other = chosen is not None and not {*splits[-1]} & {*chosen} <= {*splits[0]}
    if mixed or other:
        first, last = map(listed_numbers, (splits[0], splits[-1]))
        raise UserError(
            f"{where}: masks for training have the values {first}, those for testing {last}: write both in one way, as "
            "numbers of classes from 0, and 255 for none",
            public="masks for training and for testing have different values: write both in one way",
        )


def _words(found: Sequence[int], chosen: tuple[int, ...] | None) -> str:
    """The meaning of the values, as text."""
    none = f", but {IGNORED_PIXEL}, which is none" if IGNORED_PIXEL in {*found} - {*(chosen or ())} else ""
    return ("numbers of classes" if chosen is None else f"these are classes 0 to {len(chosen) - 1}") + none


def listed_numbers(values: Sequence[int]) -> str:
    """Values as text, shortened if there are many."""
    return listed([str(value) for value in values], 10)


def _names(path: Path) -> tuple[str, ...]:
    """The names in classes.txt; empty if it is missing. Raises UserError for an empty line between names."""
    if not path.is_file():
        return ()
    names = tuple(line.strip() for line in path.read_text("utf-8-sig").rstrip().split("\n"))
    if "" in names and len(names) > 1:
        raise UserError(
            f"{path} has an empty line between names: name a class in each line",
            public="names of classes leave out a line: name one in each",
        )
    return names if any(names) else ()


def masks_of_boxes(dataset: Dataset) -> Dataset:
    """A detection data set with masks in place of boxes: a pixel's class is that of the smallest box that contains it;
    class 0, `background`, is outside all boxes."""

    def filled(split: Split) -> Split:
        boxes = split.targets.numpy()
        _, height, width = split.shape
        masks = np.zeros((len(split), height, width), np.uint8)
        for mask, objects in zip(masks, boxes, strict=True):
            for label, x, y, w, h in sorted(objects[objects.any(1)].tolist(), key=lambda o: -o[3] * o[4]):
                top, left = max(0, round(y - h / 2)), max(0, round(x - w / 2))
                mask[top : round(y + h / 2), left : round(x + w / 2)] = 1 + int(label)
        images = split.x if split.rows is None else np.asarray(split.x)[split.rows]
        return Split(
            images, torch.zeros(len(split), dtype=torch.int64), learnt=Targets("masks", torch.from_numpy(masks))
        )

    classes = ("background", *dataset.classes)
    return replace(dataset, train=filled(dataset.train), test=filled(dataset.test), classes=classes, groups=GROUPS)


def _pairs(place: Path, size: int | None) -> tuple[Pixels, NDArray[np.uint8]]:
    """The images (n, channels, height, width) and masks (n, height, width) of a split."""
    files = _pictures(place / "images")
    if not files:
        raise UserError(f"{place / 'images'} has no images", public="a folder called images has none")
    masks: dict[str, list[Path]] = {}
    for path in _pictures(place / "masks"):
        masks.setdefault(path.stem, []).append(path)
    pairs = [_pair(file, _mask(file, masks, place / "masks"), size, i) for i, file in enumerate(files)]
    height, width = pairs[0][0].shape[:2]
    for file, (image, _) in zip(files, pairs, strict=True):
        if image.shape[:2] != (height, width):
            raise wrong_image(
                file, place, 0,
                f"is {image.shape[1]} x {image.shape[0]} pixels large, the first image {width} x {height}: set "
                "image_size (--image-size), the pixels per side for all images",
            )  # fmt: skip
    deep = any(image.dtype != np.uint8 for image, _ in pairs)
    images = [(image / 255).astype(np.float32) if deep and image.dtype == np.uint8 else image for image, _ in pairs]
    return np.stack(images).transpose(0, 3, 1, 2), np.stack([mask for _, mask in pairs])


def _pictures(place: Path) -> list[Path]:
    """The pictures in a folder, in order; none if it is missing."""
    return sorted(path for path in place.glob("*") if path.suffix.lower() in SUFFIXES and not is_stray(path))


def _mask(file: Path, masks: Mapping[str, list[Path]], place: Path) -> Path:
    """An image's mask. Raises UserError if there is none, or if there are several."""
    found = [path for end in ("", *MASKS) for path in masks.get(file.stem + end, ())]
    if len(found) != 1:
        what = f"has several masks, {listed([path.name for path in found])}" if found else f"has no mask in {place}"
        raise UserError(
            f"{file} {what}: give it one, called {file.stem}.png or {file.stem}{MASKS[0]}.png",
            public=f"an image has {'several masks' if found else 'no mask'}: call one as its image, or with {MASKS[0]} "
            "behind",
        )
    return found[0]


def _pair(file: Path, mask_file: Path, size: int | None, number: int) -> tuple[Pixels, NDArray[np.uint8]]:
    """An image (height, width, 3) and its mask (height, width)."""
    image = read_image(file, file.parent, number)
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    mask = raw_image(mask_file, mask_file.parent, number)
    if isinstance(mask, np.ndarray) or mask.mode not in ("L", "P", "1"):
        raise wrong_image(
            mask_file, mask_file.parent, number,
            "is not a mask: its pixels must be class numbers, in one channel of 8 bits or a palette",
        )  # fmt: skip
    values = np.asarray(mask)
    values = values.astype(np.uint8)[..., None]
    if values.shape[:2] != image.shape[:2]:
        raise wrong_image(
            mask_file, mask_file.parent, number,
            f"is {mask.width} x {mask.height} pixels large, its image {image.shape[1]} x {image.shape[0]}",
        )  # fmt: skip
    if size is not None:
        image, values = squared(image, size), squared(values, size, Image.Resampling.NEAREST)
    return image, values[..., 0]
