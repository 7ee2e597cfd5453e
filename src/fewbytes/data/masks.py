"""Segmentation data: images and a mask for each, whose pixels are numbers of classes; or boxes, filled in."""

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
"""Maximum number of mask values that are read as classes if they are no class numbers; grey pictures have more."""
MASKS = ("_mask", "_segmentation")
"""What may stand behind an image's name in that of its mask."""
GROUPS = ("samples",)
"""The labels of images with masks, which are split like one class."""


def holds_masks(folder: Path) -> bool:
    """Whether a folder has images with masks: `train/images/<name>` and `train/masks/<name>.png`."""
    return (folder / "train" / "images").is_dir() and (folder / "train" / "masks").is_dir()


def read_masks(name: str, folder: Path, size: int | None, only_test: bool = False) -> Dataset:
    """The data set in a folder, `train/` and one of TEST_NAMES with `images/` and `masks/`: a mask is a picture of one
    channel or a palette, of its image's name, possibly followed by one of MASKS, whose pixels are numbers of classes;
    255 is none.

    Where the only values beside 0 and 255 are none, or values lie far apart (0, 128, 255), each value is a class, in
    their order, and beside small numbers (0, 1, 5, 255) all but 255 (`class_values`). Images (channels, height, width)
    are of one size, or scaled and cut to `size` pixels a side (masks by the nearest); uint8, or float32 if they are
    deeper than 8 bits. Classes are named by the lines of `classes.txt`, else by the values of masks. Without test
    images a fifth of the training images is for testing.
    Raises UserError naming the file that is missing, cannot be read or differs in size, and for values that are no
    classes, or not the same ones in both splits.
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
    """Which values of masks are classes, in order, where they are not numbers of classes; None: they are, and 255 is
    none.

    `found`: all values that are there, ascending; `named`: how many classes classes.txt names. Values that leave out
    numbers are a class each, but for 255 beside small ones, and 0 and 255 are two classes. Numbers from 1 to as many as
    are named are these classes. Raises UserError for other values than are named, for 0 and 255 where more than two
    are, for fewer numbers than are named of which 1 is the lowest, which may be counted from 0 or from 1, and for those
    of a grey picture.
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
    # of those values fewer, as another site may have, would be numbers of other classes
    unsure = named is not None and any(value < named and value != i for i, value in enumerate(found))
    chosen = numbers if _small(found) and named != len(found) else list(found)
    if named is not None and unsure:
        what = f"which do not say which of {named} classes each is: write numbers of classes from 0"
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
    """Whether values are 255 and several small numbers, and not as far from each other as from it (0, 127, 255)."""
    *numbers, last = found
    steps = np.diff(found)
    return last == IGNORED_PIXEL and len(numbers) > 1 and max(numbers) < 128 and int(np.ptp(steps)) > 2


def _binary(found: Sequence[int]) -> bool:
    """Whether values are those of masks of one thing: 255, and nothing else but 0."""
    return IGNORED_PIXEL in found and {*found} <= {0, IGNORED_PIXEL}


def _check_consistent(
    where: Path, splits: Sequence[Sequence[int]], chosen: tuple[int, ...] | None, named: int | None
) -> None:
    """Raises UserError for splits whose values do not mean the same: 0 and 255 in one and numbers of classes in the
    other, and, where each value is a class, one that training has not."""
    mixed = chosen is None and named != 1 and any(map(_binary, splits))
    other = chosen is not None and not {*splits[-1]} & {*chosen} <= {*splits[0]}
    if mixed or other:
        first, last = map(listed_numbers, (splits[0], splits[-1]))
        raise UserError(
            f"{where}: masks for training have the values {first}, those for testing {last}: write both in one way, as "
            "numbers of classes from 0, and 255 for none",
            public="masks for training and for testing have values that do not fit: write both in one way",
        )


def _words(found: Sequence[int], chosen: tuple[int, ...] | None) -> str:
    """What values mean, for people."""
    none = f", but {IGNORED_PIXEL}, which is none" if IGNORED_PIXEL in {*found} - {*(chosen or ())} else ""
    return ("numbers of classes" if chosen is None else f"these are classes 0 to {len(chosen) - 1}") + none


def listed_numbers(values: Sequence[int]) -> str:
    """Values for people, not too many."""
    return listed([str(value) for value in values], 10)


def _names(path: Path) -> tuple[str, ...]:
    """What classes.txt names; nothing if it is not there. Raises UserError for an empty line between names."""
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
    """A detection data set with a class for every pixel in place of boxes: that of the box it lies in, of several the
    smallest one's; class 0, `background`, outside all."""

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
    """The pictures in a folder, in order; none if it is not there."""
    return sorted(path for path in place.glob("*") if path.suffix.lower() in SUFFIXES and not is_stray(path))


def _mask(file: Path, masks: Mapping[str, list[Path]], place: Path) -> Path:
    """An image's mask. Raises UserError for none and for several."""
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
            "is no mask: its pixels must be class numbers, in one channel of 8 bits or a palette",
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
