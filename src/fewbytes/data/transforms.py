"""Random changes of training samples at each access: augmentation, and the shapes of a backdoor.

A transform takes a batch (x, labels), x float32 (n, C, H, W) in 0..1, and returns x changed, of the same shape and
memory format; its input stays unchanged. It draws from torch's global CPU generator, which a handler's name seeds, so
results do not depend on the number of workers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from PIL import Image, ImageColor, ImageDraw
from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.data.clients import FederatedData
from fewbytes.data.split import ClientData, Split, Transform, transform_name

SIZE = 10
"""Shapes extend from their corner by this number of pixels to the right and down, both ends included."""
CORNERS = 22
"""The highest row and column of a shape's corner: 32 - SIZE, as FuseFL's images are 32 x 32."""
SHAPES: dict[str, list[tuple[str, tuple[float, ...]]]] = {
    "circle": [("ellipse", (0, 0, 1, 1))],
    "triangle": [("polygon", (0.5, 0, 1, 1, 0, 1))],
    "square": [("rectangle", (0, 0, 1, 1))],
    "ellipse": [("ellipse", (0, 0, 2, 1))],
    "star": [("polygon", (0.5, 0, 0.65, 0.35, 1, 0.35, 0.7, 0.55, 0.8, 1, 0.5, 0.75, 0.2, 1, 0.3, 0.55, 0, 0.35,
                          0.35, 0.35))],
    "diamond": [("polygon", (0.5, 0, 1, 0.5, 0.5, 1, 0, 0.5))],
    "heart": [("ellipse", (0, 0, 0.5, 0.5)), ("ellipse", (0.5, 0, 1, 0.5)), ("polygon", (0, 1 / 3, 1, 1 / 3, 0.5, 1))],
    "cross": [("rectangle", (0.2, 0, 0.8, 1)), ("rectangle", (0, 0.2, 1, 0.8))],
    "pentagon": [("polygon", (0.206, 0.095, 0.794, 0.095, 0.976, 0.655, 0.5, 1, 0.024, 0.655))],
    "hexagon": [("polygon", (0.5, 0, 0.933, 0.25, 0.933, 0.75, 0.5, 1, 0.067, 0.75, 0.067, 0.25))],
}  # fmt: skip
"""The shape of each label in order: Pillow's drawing commands, (x, y, …) relative to the shape's corner and size."""
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "pink", "brown", "black", "grey")
"""The colours of shapes, by Pillow's names."""


def crop_flip(x: Tensor, labels: Tensor) -> Tensor:
    """Crop each image at random to its own size after padding with zeros, and mirror it with probability 1/2.

    The padding is 4 pixels, but at most an eighth of the height. Source: the usual augmentation of CIFAR. Raises
    UserError if samples are not images.
    """
    return _mirrored(_cropped(_images(x, "crop-flip")))


def flip_rotate15_crop(x: Tensor, labels: Tensor) -> Tensor:
    """Mirror each image with probability 1/2, rotate it by up to 15 degrees either way, and crop it as `crop_flip`.

    Source: FedPURIN's code on CIFAR-100. Raises UserError if samples are not images.
    """
    return _cropped(_rotated(_mirrored(_images(x, "flip-rotate15-crop")), 15))


def rotate20_flip(x: Tensor, labels: Tensor) -> Tensor:
    """Rotate each image by up to 20 degrees either way, and mirror it with probability 1/2.

    Source: FuseFL's code on Tiny-ImageNet. Raises UserError if samples are not images.
    """
    return _mirrored(_rotated(_images(x, "rotate20-flip"), 20))


AUGMENTATIONS: dict[str, Transform | None] = {
    "none": None,
    "crop-flip": crop_flip,
    "flip-rotate15-crop": flip_rotate15_crop,
    "rotate20-flip": rotate20_flip,
}
"""The transforms that the setting `augment` names."""


def stamp_shapes(x: Tensor, labels: Tensor) -> Tensor:
    """Draw one filled, opaque shape on each image: the shape of its label in a random colour at a random corner.

    The colour is uniform among COLOURS, the corner among rows and columns 0..CORNERS, if the image has SIZE pixels to
    the right and below; the rest is cut at the border. From ten classes on, shapes repeat. Source: FuseFL's backdoored
    clients. Raises UserError if samples are not images of one or three channels, or are smaller than a shape.
    """
    _images(x, "backdoor")
    n, channels, height, width = x.shape
    if min(height, width) <= SIZE:
        raise UserError(
            f"backdoor draws shapes of {SIZE + 1} x {SIZE + 1} pixels, images are {height} x {width}; use larger images"
        )
    if channels not in (1, 3):
        raise UserError(f"backdoor draws on images of 1 or 3 channels, these have {channels}")
    colours = torch.randint(len(COLOURS), (n,))
    left, top = (torch.randint(min(CORNERS, side - SIZE) + 1, (n,)) for side in (width, height))
    return draw_shapes(x, labels.cpu() % len(SHAPES), colours, left, top)


def draw_shapes(x: Tensor, shapes: Tensor, colours: Tensor, left: Tensor, top: Tensor, size: int = SIZE) -> Tensor:
    """A copy of images (n, C, H, W), C 1 or 3, with one shape of `size` pixels on each.

    `shapes` and `colours` index SHAPES and COLOURS, `left` and `top` are the corner's column and row: int64 (n,) each,
    on the CPU. Images of one channel get the colour's luminance.
    """
    _, channels, height, width = x.shape
    windows = _canvases(height, width, size).unfold(1, height, 1).unfold(2, width, 1)
    image, row, column = windows[shapes, height - top, width - left].nonzero(as_tuple=True)
    x = x.clone()
    x[image, :, row, column] = _palette(channels)[colours[image]].to(x.device)
    return x


def chain(*transforms: Transform) -> Transform:
    """One transform that applies several in order."""

    def chained(x: Tensor, labels: Tensor) -> Tensor:
        for transform in transforms:
            x = transform(x, labels)
        return x

    # Checkpoints identify a transform by its name.
    chained.__qualname__ = f"chain({', '.join(map(transform_name, transforms))})"
    return chained


def with_transforms(data: FederatedData, augment: Transform | None = None, backdoor: int = 0) -> FederatedData:
    """`data` with random changes of training samples at each access: all clients' by `augment`, then those of the first
    `backdoor` clients by `stamp_shapes`. Test samples stay unchanged.

    Raises UserError if there are fewer clients, or if a transform does not fit a client's samples.

    >>> from fewbytes.data import Partition, crop_flip, federate, load_dataset, with_transforms
    >>> data = federate(load_dataset("digits"), Partition(clients=2))
    >>> client = with_transforms(data, crop_flip).clients[0]
    >>> client.train.transform is None, client.test.transform is None
    (False, True)
    """
    if not 0 <= backdoor <= len(data.clients):
        raise UserError(f"backdoor must be a number of clients, 0 to {len(data.clients)} here, not {backdoor}")

    def changed(i: int, client: ClientData) -> ClientData:
        train = client.train
        if train.learns in ("boxes", "masks") and (augment is not None or i < backdoor):
            raise UserError("augmented images would not match their boxes or masks: leave out augment and backdoor")
        wanted = [train.transform, augment, stamp_shapes if i < backdoor else None]
        transforms = [transform for transform in wanted if transform is not None]
        if not (transforms and len(train)):  # a client with data on its own node has none here
            return client
        transform = chain(*transforms)
        with torch.random.fork_rng(devices=[]):
            transform(*train.take([0]).load())  # so that unsuitable samples are refused before anything is written
        return replace(client, train=Split(train.x, train.y, train.rows, transform))

    return replace(data, clients=tuple(changed(i, c) for i, c in enumerate(data.clients)))


def _images(x: Tensor, what: str) -> Tensor:
    if x.dim() != 4:
        raise UserError(f"{what} needs images (channels, height, width), samples have shape {tuple(x.shape[1:])}")
    return x


def _cropped(x: Tensor) -> Tensor:
    n, _, height, width = x.shape
    pad = min(4, height // 8)
    top, left = torch.randint(2 * pad + 1, (2, n))
    windows = F.pad(x, (pad,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # (n, C, tops, lefts, height, width)
    return windows.permute(0, 2, 3, 1, 4, 5)[torch.arange(n), top, left]


def _mirrored(x: Tensor) -> Tensor:
    mirrored = torch.rand(len(x)) < 0.5
    return torch.where(mirrored.to(x.device).view(-1, 1, 1, 1), x.flip(3), x)


def _rotated(x: Tensor, most: float) -> Tensor:
    """Rotate each image by at most `most` degrees, uniformly."""
    return turned(x, most * (2 * torch.rand(len(x)) - 1))


def turned(x: Tensor, degrees: Tensor) -> Tensor:
    """Images (n, C, H, W) rotated about their centres by `degrees` (n,): nearest pixels, black outside."""
    n, _, height, width = x.shape
    angle = torch.deg2rad(degrees)
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros(n)
    turns = torch.stack([cos, -sin * height / width, none, sin * width / height, cos, none], 1).view(n, 2, 3)
    places = F.affine_grid(turns.to(x.device), list(x.shape), align_corners=False)
    return torch.empty_like(x).copy_(F.grid_sample(x, places, mode="nearest", align_corners=False))  # in x's format


@cache
def _canvases(height: int, width: int, size: int) -> Tensor:
    """Masks (shapes, 2 height, 2 width), with each shape's corner at (height, width): images are windows of them."""
    masks = []
    for parts in SHAPES.values():
        mask = Image.new("1", (2 * width, 2 * height))
        for kind, numbers in parts:
            xy = [v * size + (width, height)[i % 2] for i, v in enumerate(numbers)]
            getattr(ImageDraw.Draw(mask), kind)(xy, fill=1)
        masks.append(torch.frombuffer(bytearray(mask.convert("L").tobytes()), dtype=torch.uint8).view(mask.size[::-1]))
    return torch.stack(masks) > 0


@cache
def _palette(channels: int) -> Tensor:
    """COLOURS as float32 (colours, channels), 8-bit values / 255 as in `Split.load`."""
    mode = {1: "L", 3: "RGB"}[channels]
    values = [ImageColor.getcolor(name, mode) for name in COLOURS]
    return torch.tensor(values).view(len(COLOURS), channels).float().div_(255)
