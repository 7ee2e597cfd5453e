"""Public samples, which no client owns, for servers that train."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.base.streams import stream
from fewbytes.data.clients import Dataset
from fewbytes.data.datasets import load_dataset
from fewbytes.data.split import Split

GREY = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)
CHUNK = 1000  # images converted at a time


def with_public(dataset: Dataset, public: str, seed: int, image_size: int | None = None) -> tuple[Dataset, Split]:
    """The clients' data set and the public samples. `public` is a number of training samples, drawn and held out; or
    another data set, read with `image_size`, whose training images are converted to the same shape.

    Raises UserError for more samples than there are, an unknown data set, or samples that are not images.
    """
    if not public.isdecimal():
        return dataset, reshaped(load_dataset(public, image_size).train, dataset.train.shape)
    size = int(public)
    if not 0 < size < len(dataset.train):
        raise UserError(
            f"public is {size} samples of {len(dataset.train)}: use at least 1, and leave some for the clients"
        )
    order = stream(seed, "public").permutation(len(dataset.train))
    left = dataset.train.take(np.sort(order[size:]))
    return dataclasses.replace(dataset, train=left), dataset.train.take(order[:size])


def reshaped(images: Split, shape: tuple[int, ...]) -> Split:
    """The images resized (bilinear), with channels converted to `shape`, as uint8."""
    if images.shape == shape:
        return images
    if len(images.shape) != 3 or len(shape) != 3:
        raise UserError(f"public samples of shape {images.shape} cannot be made {shape}: both must be images")
    converted = torch.empty(len(images), *shape, dtype=torch.uint8)
    for start in range(0, len(images), CHUNK):
        stop = min(start + CHUNK, len(images))
        x = images.take(range(start, stop)).load()[0]
        x = with_channels(x, shape[0])
        if x.shape[2:] != shape[1:]:
            x = F.interpolate(x, shape[1:], mode="bilinear", antialias=True)
        converted[start:stop] = (x * 255).round().clamp(0, 255).to(torch.uint8)
    return Split(converted, torch.zeros(len(images), dtype=torch.int64))


def with_channels(x: Tensor, channels: int) -> Tensor:
    """Images (n, any channels, height, width) with `channels` channels; colours become grey if needed."""
    if x.shape[1] == channels:
        return x
    x = (x * x.new_tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True) if x.shape[1] == 3 else x
    return x.expand(-1, channels, -1, -1)
