"""Segmentation data: images and a mask for each, whose pixels are numbers of classes; or boxes, filled in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fewbytes.base.errors import UserError
from fewbytes.data.clients import Dataset
from fewbytes.data.folders import SUFFIXES, TEST_NAMES, check_inside
from fewbytes.data.images import open_image, squared
from fewbytes.data.split import IGNORED_PIXEL, Split, Targets

GROUPS = ("samples",)
"""The labels of images with masks, which are dealt out alike."""


def holds_masks(folder: Path) -> bool:
    """Whether a folder has images with masks: `train/images/<name>` and `train/masks/<name>.png`."""
    return (folder / "train" / "images").is_dir() and (folder / "train" / "masks").is_dir()


def read_masks(name: str, folder: Path, size: int | None, only_test: bool = False) -> Dataset:
    """The data set in a folder, `train/` and one of TEST_NAMES with `images/` and `masks/`: a mask is a PNG of one
    channel or a palette, of its image's name, whose pixels are numbers of classes; 255 is none.

    Images are uint8 (3, height, width), of one size, or scaled and cut to `size` pixels a side (masks by the nearest).
    Classes are named by the lines of `classes.txt`, else numbered. Without test images a fifth of the training images
    is for testing. Raises UserError naming the file that is missing, cannot be read or differs in size.
    """
    test = next((folder / place for place in TEST_NAMES if (folder / place / "images").is_dir()), None)
    if only_test and test is None and not (folder / "train" / "images").is_dir():
        raise UserError(f"{folder} has no test images: there is no test/images/ with test/masks/")
    places = [folder / "train", *([] if test is None else [test])]
    listed = folder / "classes.txt"
    check_inside(folder, [listed, *(file for place in places for file in place.glob("*/*"))])
    splits = [_split(place, size) for place in places if (place / "images").is_dir()]
    highest = max((int(m[m != IGNORED_PIXEL].max()) for s in splits if (m := s.targets).numel()), default=0)
    names = listed.read_text("utf-8").split("\n") if listed.is_file() else [str(c) for c in range(highest + 1)]
    classes = tuple(line.strip() for line in names if line.strip())
    if highest >= len(classes):
        raise UserError(f"{listed} names {len(classes)} classes, and a mask has a pixel of class {highest}")
    if len(splits) == 1:
        order = np.random.RandomState(0).permutation(len(splits[0]))
        held = max(1, len(order) // 5)
        splits = [splits[0].take(np.sort(order[held:])), splits[0].take(np.sort(order[:held]))]
    return Dataset(name, splits[0], splits[1], classes, GROUPS)


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


def _split(place: Path, size: int | None) -> Split:
    files = sorted(path for path in (place / "images").iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"{place / 'images'} has no images")
    pairs = [_pair(file, place / "masks" / f"{file.stem}.png", size, i) for i, file in enumerate(files)]
    for file, (image, _) in zip(files, pairs, strict=True):
        if image.shape != pairs[0][0].shape:
            raise UserError(
                f"{file} is {image.shape[2]} x {image.shape[1]} pixels large, the first image {pairs[0][0].shape[2]} x "
                f"{pairs[0][0].shape[1]}: give image_size (--image-size), the pixels a side that all are to have"
            )
    images, masks = np.stack([image for image, _ in pairs]), np.stack([mask for _, mask in pairs])
    labels = torch.zeros(len(files), dtype=torch.int64)
    return Split(images, labels, learnt=Targets("masks", torch.from_numpy(masks)))


def _pair(file: Path, mask_file: Path, size: int | None, number: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    image = open_image(file, file.parent, number).convert("RGB")
    if not mask_file.is_file():
        raise UserError(f"{file} has no mask: {mask_file} is missing")
    mask = open_image(mask_file, mask_file.parent, number)
    if mask.mode not in ("L", "P", "1"):
        raise UserError(f"{mask_file} is no mask: its pixels are to be numbers of classes, one channel or a palette")
    if mask.size != image.size:
        raise UserError(
            f"{mask_file} is {mask.width} x {mask.height} pixels large, its image {image.width} x {image.height}"
        )
    if size is not None:
        image, mask = squared(image, size), ImageOps.fit(mask, (size, size), Image.Resampling.NEAREST)
    return np.asarray(image).transpose(2, 0, 1), np.asarray(mask).astype(np.uint8)
