"""Images travel bit for bit in as few bytes as claimed."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_wire import Album, Case, GiB, assemble, cases, photographs, round_trip, slow, take_apart
from torch import Tensor

from fewbytes.data import load_dataset
from fewbytes.wire import Counted, Images, counted, pack, unpack


@st.composite
def pixels(draw: st.DrawFn) -> Tensor:
    """Smooth, flat, noisy and drawn images of any size and number, in any memory order."""
    n, channels = draw(st.sampled_from([0, 1, 2, 7, 40])), draw(st.sampled_from([1, 2, 3, 3, 4]))
    size = draw(st.sampled_from([1, 2, 5, 8, 16]))
    match draw(st.sampled_from(["smooth", "flat", "noise", "drawn", "wide"])):
        case "smooth":
            x = photographs(n, channels, size)
        case "flat":
            x = torch.full((n, channels, size, size), draw(st.integers(0, 255)), dtype=torch.uint8)
        case "noise":
            x = photographs(n, channels, size, noise=256)
        case "drawn":
            x = photographs(n, channels, size) // 128 * 255
        case _:
            x = photographs(n, channels, size)[:, :, : max(1, size // 3)]
    return x.contiguous(memory_format=torch.channels_last) if draw(st.booleans()) else x


@slow
@given(pixels(), st.booleans())
def test_images_come_back_bit_for_bit(x: Tensor, coded: bool) -> None:
    back = round_trip(Album(Images(x)), coded=coded).images
    assert back.pixels.is_contiguous()
    assert bytes(pack(Album(back), coded=coded)) == bytes(pack(Album(Images(x)), coded=coded))
    assert len(pack(Album(Images(x)), coded=coded)) <= len(pack(Album(Images(x)), coded=False))


@pytest.mark.parametrize(
    ("shape", "sheets"),
    [
        ((2047, 3, 8, 1), 1), ((2048, 3, 8, 1), 2), ((16384, 1, 1, 1), 2), ((2, 1, 400, 1400), 2),
        ((1, 3, 1, 16383), 1), ((1, 3, 16383, 64), 1), ((1, 3, 1, 16384), None), ((1, 1, 16384, 1), None),
        ((1, 3, 16383, 65), None), ((0, 3, 8, 8), None),
        ((3, 3, 0, 8), None), ((3, 3, 8, 0), None), ((3, 0, 8, 8), None),
    ],
)  # fmt: skip
def test_sheets_hold_as_many_images_as_fit(shape: tuple[int, ...], sheets: int | None) -> None:
    """16383 rows and columns, 2^20 pixels; images that are larger travel as numbers."""
    n, _, height, width = shape
    waves = torch.arange(n)[:, None, None, None] + torch.arange(height)[:, None] * torch.arange(width) // 50
    waves = waves + torch.arange(width) // 50
    x = waves.to(torch.uint8).expand(shape)
    _, fields, sections, _ = take_apart(bytes(pack(Album(Images(x)))))
    assert (None if fields[0][1] else len(sections)) == sheets
    round_trip(Album(Images(x)))


def test_a_section_is_a_webp_file_as_the_prose_says() -> None:
    """25 bytes written by hand make it one that anything opens; and such a file without them is a section."""
    x = photographs(5, 3, 8)
    section = take_apart(cases()["images"].frame)[2][0]
    length = 5 + len(section)
    head = b"RIFF" + (12 + length + length % 2).to_bytes(4, "little") + b"WEBPVP8L" + length.to_bytes(4, "little")
    head += b"\x2f" + (7 | 39 << 14).to_bytes(4, "little")
    with Image.open(BytesIO(head + section + bytes(length % 2))) as image:
        assert image.mode == "RGB"
        assert np.array_equal(np.array(image), x.permute(0, 2, 3, 1).reshape(40, 8, 3).numpy())
    file = BytesIO()
    Image.fromarray(x.permute(0, 2, 3, 1).reshape(40, 8, 3).numpy()).save(file, "WEBP", lossless=True, method=0)
    frame = assemble("Album", [[[5, 3, 8, 8], None]], [file.getvalue()[25:]])
    assert torch.equal(unpack(Album, frame).images.pixels, x)


@pytest.mark.parametrize(
    "header",
    [
        None, [], [None, None], [[5, 3, 8], None], [[5, 3, 8, 8, 1], None], [[5, 3, 8, 8]], [[40, 8], None],
        [[5, 3, 8, 8], None, None], [[5, 3, 8, -8], None], [[5, 3, 8, True], None], [[5, 3, 8.0, 8], None],
        [[5, 3, 8, 0], None], [[0, 3, 8, 8], None], [[0, 3, 8, 8], [0]], [[5, 3, 8, 9], None],
        [[5, 3, 8, 8], [0]], [[5, 3, 8, 8], [1, [0]]], [[5, 3, 8, 8], [1, [1]]], [[5, 3, 8, 8], 0],
        [[5, 1, 8, 8], None], [[2400, 3, 8, 8], None], [[1, 3, 1 << 14, 8], None], [[1 << 40, 3, 8, 8], None],
    ],
)  # fmt: skip
def test_headers_that_do_not_fit_are_refused(header: object) -> None:
    """The right one is [[5, 3, 8, 8], None]."""
    sections = take_apart(cases()["images"].frame)[2]
    for limit in (5 * 960, GiB):
        Case(Album, b"").refuse(assemble("Album", [header], sections), limit=limit)


@pytest.mark.parametrize("options", [{}, {"lossless": True, "alpha": True}, {"save_all": True}, {"exif": b"Exif\0\0"}])
def test_other_webp_files_are_refused(options: dict[str, object]) -> None:
    """Lossy, transparent, animated and annotated ones: whole, and without what their first 25 bytes would be."""
    x = photographs(5, 3, 8).permute(0, 2, 3, 1).reshape(40, 8, 3).numpy()
    images = [Image.fromarray(x), Image.fromarray(255 - x)]
    options = dict(options)
    if options.pop("alpha", False):
        images[0].putalpha(Image.fromarray(x[..., 0]))
    more = {"append_images": images[1:]} if "save_all" in options else {}
    file = BytesIO()
    images[0].save(file, "WEBP", **options, **more)
    for start in (0, 25):
        data = file.getvalue()[start:]
        outcome = Case(Album, b"").outcome(assemble("Album", [[[5, 3, 8, 8], None]], [data]))
        if start == 0 or "lossless" not in options:
            assert outcome.code == "coding"
        else:  # the same image, but its transparency is neither known nor kept
            assert outcome.images.pixels.shape == (5, 3, 8, 8)


@pytest.mark.parametrize("coded", [True, False])
def test_a_receiver_holds_no_more_images_than_its_limit(coded: bool) -> None:
    frame = bytes(pack(Album(Images(photographs(5, 3, 8))), coded=coded))
    limit = 5 * 3 * 8 * 8 * (1 + 4)  # pixels, and as floats
    unpack(Album, frame, limit=limit)
    assert Case(Album, b"").refuse(frame, limit=limit - 1) == "length"


def test_a_small_sheet_of_many_pixels_takes_the_size_the_header_says() -> None:
    """A megapixel in 60 bytes: a receiver that was told of 64 pixels decodes 64."""
    pixels = torch.full((1, 3, 1024, 1024), 7, dtype=torch.uint8)
    pixels[0, :, 0, 0] = 9
    flat = Images(pixels)
    frame = bytes(pack(Album(flat)))
    assert len(frame) < 300
    section = take_apart(frame)[2][0]
    outcome = Case(Album, b"").outcome(assemble("Album", [[[1, 3, 8, 8], None]], [section]), limit=5 * 192)
    assert isinstance(outcome, Exception) or outcome.images.pixels.shape == (1, 3, 8, 8)
    assert Case(Album, b"").refuse(frame, limit=(15 << 20) - 1) == "length"


def test_rounding_is_the_lossy_step_and_papers_count_floats() -> None:
    images = Images.of(torch.tensor([0.0, 0.1, 0.5, 0.999, 1.0, 1.00001, -0.001]).view(1, 1, 1, 7))
    assert images.pixels.flatten().tolist() == [0, 26, 128, 255, 255, 255, 0]
    grey = torch.rand(3, 2, 4, 4, requires_grad=True)
    assert (Images.of(grey).values() - grey).abs().max() <= 0.5 / 255 + 1e-7
    every = Images(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16))
    assert torch.equal(Images.of(every.values()).pixels, every.pixels)
    assert counted(Album(every)) == Counted(value_bytes=4 * 256)


@pytest.mark.parametrize("wrong", [torch.zeros(1, 3, 4, 4), torch.zeros(3, 4, 4, dtype=torch.uint8)], ids=["f", "3d"])
def test_what_is_no_image_does_not_travel(wrong: Tensor) -> None:
    with pytest.raises(TypeError, match="uint8"):
        pack(Album(Images(wrong)))


def test_smooth_images_take_about_half_in_colour_and_grey() -> None:
    for channels in (1, 3):
        x = photographs(20, channels, 32)
        assert len(pack(Album(Images(x)))) < 0.55 * x.numel()


@pytest.mark.skipif("FEWBYTES_DATA" not in os.environ, reason="needs the real data sets")
def test_real_photographs_take_less_than_half(tmp_path: Path) -> None:
    (file,) = (Path(os.environ["FEWBYTES_DATA"]) / "cifar10").glob("test-*.parquet")
    for split in ("train", "test"):  # 100 pictures are decoded, not 60,000
        pq.write_table(pq.read_table(file).slice(0, 100), tmp_path / f"{split}-00000-of-00001.parquet")
    x = torch.from_numpy(np.array(load_dataset(str(tmp_path)).test.x))
    assert len(pack(Album(Images(x)))) < 0.47 * x.numel()  # 0.46; PNG 0.71, zstandard 0.91
