"""Images: 8-bit pixels, through a lossless image codec if that is smaller."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.state import State
from fewbytes.wire import words
from fewbytes.wire.sections import Array, Buffer, section_cost, size_of
from fewbytes.wire.value import Counted, Reader, Writer
from fewbytes.wire.values import FrameWriter

EDGE = 16383  # pixels: the maximum side of a WebP file
SHEET = 1 << 20  # maximum pixels of a sheet: decoding takes about 25 bytes for each
HEAD = struct.Struct("<4sI4s4sIBI")  # head of a WebP file with one lossless image and nothing else


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size: `pixels` uint8 (n, channels, height, width). Papers count four bytes for each number.

    (FedKTL, Table 5, counts C (3 h w + H) numbers.) The lossy step is `of`: values are rounded to 256 steps.
    """

    pixels: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Round floats (n, channels, height, width) in [0, 1] to the nearest of 0/255, 1/255 … 255/255.

        >>> import fewbytes as fb
        >>> import torch
        >>> images = fb.Images.of(torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 1, 3))
        >>> images.pixels.flatten().tolist()
        [0, 128, 255]
        """
        return cls((values.detach().cpu() * 255).round().clamp(0, 255).to(torch.uint8))

    def values(self) -> Tensor:
        """The images as float32 in [0, 1]."""
        return self.pixels.float() / 255

    def write(self, writer: Writer) -> Any:
        """Write lossless WebP sheets if they are smaller, else raw pixels; the header is [shape, pixels or None].

        Raises TypeError unless pixels are uint8 (n, channels, height, width).
        """
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            shape = tuple(self.pixels.shape)
            raise TypeError(f"images travel as uint8 (n, channels, height, width), not {self.pixels.dtype} {shape}")
        plain = FrameWriter(None, None, writer.coded)
        numbers = plain.numbers([self.pixels], [None])
        sections = plain.sections
        if writer.coded:
            sheets: list[list[Buffer]] = [[_squeezed(sheet)] for sheet in _sheets(self.pixels)]
            if sheets and _size(sheets) < _size(sections):
                numbers, sections = None, sheets
        for section in sections:
            writer.section(section)
        return [list(self.pixels.shape), numbers]

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Raises FrameError for sheets of another size, or for colours in grey ones."""
        match header:
            case [[_, _, _, _] as shape, numbers]:
                (entry,) = reader.entries([["", "uint8", shape]])
                reader.spend(4 * entry.size)  # of `values`
            case _:
                raise FrameError("header", "images are malformed")
        if numbers is not None:
            return cls(reader.numbers(numbers, torch.uint8, [entry.size], [None]).view(entry.shape))
        reader.spend(entry.size)
        n, channels, height, width = entry.shape
        per_sheet = _per_sheet(height, width)
        if not entry.size or not per_sheet:
            raise FrameError("coding", "images of this size do not travel as sheets")
        pictures = n if channels == 3 else n * channels
        found = []
        for start in range(0, pictures, per_sheet):
            sheet = _unsqueezed(reader.section(), min(per_sheet, pictures - start) * height, width)
            if channels != 3 and (sheet != sheet[..., :1]).any():
                raise FrameError("coding", "a grey sheet is not grey")
            colours = torch.from_numpy(sheet[..., : 3 if channels == 3 else 1])
            found.append(colours.unflatten(0, (-1, height)).permute(0, 3, 1, 2).contiguous())
        return cls(torch.cat(found).view(entry.shape))

    def states(self) -> State:
        """Nothing: replies are not coded against images."""
        return {}

    def numbers(self) -> State:
        """Nothing: pixels are finite."""
        return {}

    def counted(self) -> Counted:
        """Four bytes for every number."""
        return Counted(value_bytes=4 * self.pixels.numel())

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        (n, channels, height, width), numbers = header
        return [f"{n:,} images, {channels}x{height}x{width}: {words.numbers(numbers) if numbers else 'lossless WebP'}"]


def _per_sheet(height: int, width: int) -> int:
    """Number of pictures in a sheet, one below the other; 0 if not even one fits, or it is empty."""
    return min(EDGE, SHEET // width) // height if 0 < width <= EDGE and height else 0


def _sheets(pixels: Tensor) -> Iterator[Array]:
    """RGB sheets (rows, width, 3) of all images; unless there are three channels, each is a grey picture of its own."""
    n, channels, height, width = pixels.shape
    per_sheet = _per_sheet(height, width)
    if not pixels.numel() or not per_sheet:
        return
    if channels == 3:
        pictures = pixels.permute(0, 2, 3, 1)
    else:
        pictures = pixels.reshape(n * channels, height, width, 1).expand(-1, -1, -1, 3)
    for part in pictures.split(per_sheet):
        yield part.reshape(-1, width, 3).cpu().numpy()


def _head(rows: int, width: int, length: int) -> bytes:
    """The head of a WebP file of one lossless image without transparency; `length`: bytes after the head.

    It has only its own size and the image's, which the receiver knows: so it does not travel, and cannot be forged.
    """
    chunk = 5 + length
    size = (rows - 1) << 14 | (width - 1)
    return HEAD.pack(b"RIFF", 12 + chunk + chunk % 2, b"WEBP", b"VP8L", chunk, 0x2F, size)


def _squeezed(sheet: Array) -> bytes:
    """A sheet as WebP without its head. More effort takes 20 times as long and saves at most 1 %."""
    file = BytesIO()
    Image.fromarray(np.ascontiguousarray(sheet)).save(file, "WEBP", lossless=True, quality=75, method=4)
    data = file.getvalue()
    chunk = int.from_bytes(data[16:20], "little")
    return data[HEAD.size : 20 + chunk]


def _unsqueezed(data: memoryview, rows: int, width: int) -> Array:
    """Undo `_squeezed`: (rows, width, 3)."""
    try:
        file = BytesIO(b"".join((_head(rows, width, data.nbytes), data, bytes(1 - data.nbytes % 2))))
        with Image.open(file, formats=["WEBP"]) as image:
            sheet: Array = np.array(image)
    except (OSError, EOFError, struct.error) as error:
        raise FrameError("coding", f"a sheet of images cannot be decoded: {error}") from None
    return sheet


def _size(sections: list[list[Buffer]]) -> int:
    return sum(section_cost(size_of(part)) for parts in sections for part in parts)
