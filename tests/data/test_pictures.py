"""Pictures as people have them are read as a viewer shows them: depth, transparency, pages, orientation, masks."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data import load_dataset
from fewbytes.data.coco import letter_boxed
from fewbytes.data.images import in_bytes, read_image
from fewbytes.data.masks import class_values

RAMP = np.arange(6 * 8, dtype=np.uint16).reshape(6, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


def read(path: Path) -> np.ndarray:
    return read_image(path, path.parent, 0)


def png_of_16_bits(pixels: np.ndarray) -> bytes:
    """A PNG of colours (height, width, 3 or 4), of 16 bits each, made by hand."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    whole = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + whole


# Depth ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_of_grey_are_parts_of_65535(suffix, tmp_path):
    Image.fromarray(RAMP * 1300).save(tmp_path / f"a{suffix}")
    read_back = read(tmp_path / f"a{suffix}")
    assert (read_back.dtype, read_back.shape) == (np.float32, (6, 8, 1))
    assert np.array_equal(read_back[..., 0], (RAMP.astype(np.float64) * 1300 / 65535).astype(np.float32))


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.uint32, np.float32, np.float64, np.float16])
def test_tiff_of_every_type_keeps_its_values(kind, tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    span = 1.0 if np.dtype(kind).kind == "f" else np.iinfo(kind).max
    values = (np.linspace(-0.5 if np.dtype(kind).kind != "u" else 0, 1, 48).reshape(6, 8) * span).astype(kind)
    tifffile.imwrite(tmp_path / "a.tif", values)
    wanted = values.astype(np.float64) / (1 if np.dtype(kind).kind == "f" else span)
    assert np.allclose(read(tmp_path / "a.tif")[..., 0], wanted, atol=1e-7)


@pytest.mark.parametrize("form", ["png", "tif"])
def test_sixteen_bits_of_colour_are_kept(form, tmp_path):
    pytest.importorskip("imagecodecs", reason="imagecodecs is not installed")
    colours = np.stack([RAMP, RAMP * 7, 65535 - RAMP], axis=2)  # unlike in the lower eight bits only
    path = tmp_path / f"a.{form}"
    if form == "png":
        path.write_bytes(png_of_16_bits(colours))
    else:
        pytest.importorskip("tifffile", reason="tifffile is not installed").imwrite(path, colours, photometric="rgb")
    assert np.allclose(read(path), colours / 65535, atol=1e-7)


def test_a_tiff_in_which_0_is_white_is_turned_about(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    tifffile.imwrite(tmp_path / "a.tif", RAMP * 1300, photometric="miniswhite")
    assert np.allclose(read(tmp_path / "a.tif")[..., 0], 1 - RAMP * 1300 / 65535, atol=1e-6)


def test_pixels_that_are_not_finite_are_refused(tmp_path):
    values = np.ones((4, 4), np.float32)
    values[1, 2] = np.nan
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(UserError, match="not finite"):
        read(tmp_path / "a.tif")


def write(folder: Path, pictures: dict[str, np.ndarray]) -> None:
    for name, pixels in pictures.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)


def test_pictures_unlike_above_the_lowest_eight_bits_stay_unlike_and_say_their_range(tmp_path):
    pictures = {
        f"{'ab'[c]}/{i}.png": np.full((4, 4), 30000 + 20000 * c + i, np.uint16) for c in (0, 1) for i in range(5)
    }
    write(tmp_path / "x", pictures)
    data = load_dataset(str(tmp_path / "x"))
    x, y = data.train.load()
    assert np.array_equal(x[:, 0, 0, 0].numpy() > 40000 / 65535, y.numpy() == 1)
    assert "from 0.458 to 0.763" in data.notes[0]
    assert load_dataset(str(tmp_path / "x")).notes == data.notes  # of the cache


@pytest.mark.parametrize("first", ["8 bits", "16 bits"])
def test_pictures_of_8_and_of_16_bits_beside_each_other(first, tmp_path):
    eight, sixteen = np.full((4, 4), 51, np.uint8), np.full((4, 4), 13107, np.uint16)
    order = [eight, sixteen] if first == "8 bits" else [sixteen, eight]
    write(tmp_path / "x" / "train", {f"{c}/{i}.png": order[i] for c in "ab" for i in (0, 1)})
    write(tmp_path / "x" / "test", {f"{c}/0.png": eight for c in "ab"})
    data = load_dataset(str(tmp_path / "x"))
    assert np.allclose(data.train.load()[0].numpy(), 0.2, atol=1e-6)
    assert np.allclose(data.test.load()[0].numpy(), 0.2, atol=1e-6)


def test_deep_pictures_are_scaled_as_others_are(tmp_path):
    rng = np.random.default_rng(0)
    eight = rng.integers(0, 256, (12, 16), dtype=np.uint8)
    write(tmp_path / "8", {f"{c}/{i}.png": eight for c in "ab" for i in range(2)})
    write(tmp_path / "16", {f"{c}/{i}.png": eight.astype(np.uint16) * 257 for c in "ab" for i in range(2)})
    a, b = (load_dataset(str(tmp_path / n), image_size=6).train.load()[0].numpy() for n in ("8", "16"))
    assert np.abs(a - b).max() < 1 / 255


def test_boxes_take_deep_pictures_scaled_to_bytes(tmp_path):
    Image.fromarray(RAMP * 1300).save(tmp_path / "a.png")
    boxed = letter_boxed(Image.fromarray(in_bytes(read(tmp_path / "a.png"))), 8)
    assert np.abs(boxed[0, :6].astype(int) - np.round(RAMP * 1300 / 257)).max() <= 1


# Colours and transparency ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coloured", [0, 3, 9])
def test_one_grey_picture_among_coloured_ones_changes_no_other(coloured, tmp_path):
    grey, colour = np.full((4, 4), 90, np.uint8), np.zeros((4, 4, 3), np.uint8)
    colour[...] = (200, 10, 60)
    names = [f"{c}/{i}.png" for c in "ab" for i in range(5)]
    write(tmp_path / "x" / "train", {name: colour if i == coloured else grey for i, name in enumerate(names)})
    x = load_dataset(str(tmp_path / "x")).train.x
    assert x.shape[1] == 3
    assert sorted(map(tuple, np.asarray(x)[:, :, 0, 0].tolist())) == [(90, 90, 90)] * 9 + [(200, 10, 60)] or len(x) < 10


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_on_white_whatever_colour_hides_there(mode, tmp_path):
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[...] = (30, 30, 30, 0)
    rgba[1, 1] = (30, 30, 30, 255)
    rgba[2, 2] = (30, 30, 30, 128)
    image = Image.fromarray(rgba)
    if mode == "LA":
        image = image.convert("LA")
    if mode == "P":
        image = image.quantize()
    image.save(tmp_path / "a.png")
    pixels = read(tmp_path / "a.png")
    assert pixels.shape[2] == (1 if mode == "LA" else 3)
    assert (pixels[0, 0] == 255).all()
    assert (pixels[1, 1] == 30).all()
    assert abs(int(pixels[2, 2, 0]) - (30 * 128 + 255 * 127) // 255) <= 1


def test_black_and_white_cmyk_and_palettes_are_as_pillow_converts_them(tmp_path):
    rng = np.random.default_rng(1)
    colour = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    for name, image in {
        "a.png": colour.quantize(8),
        "b.tif": colour.convert("CMYK"),
        "c.png": colour.convert("1"),
    }.items():
        image.save(tmp_path / name)
        with Image.open(tmp_path / name) as opened:
            wanted = np.asarray(opened.convert("L" if opened.mode == "1" else "RGB")).reshape(6, 8, -1)
        assert np.array_equal(read(tmp_path / name), wanted)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("extra", ["unassalpha", "assocalpha", "unspecified"])
def test_a_further_channel_of_tiff_is_transparency_only_where_the_file_says_so(kind, channels, extra, tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    rng = np.random.default_rng(2)
    most = 1.0 if kind is np.float32 else np.iinfo(kind).max
    alpha = rng.uniform(0.2, 1, (6, 8, 1))
    alpha[0, 0] = 0
    colours = rng.uniform(0, 1, (6, 8, channels - 1))
    stored = np.concatenate([colours * (alpha if extra == "assocalpha" else 1), alpha], axis=2)
    stored = (stored * most).round(0 if most > 1 else 6).astype(kind)
    photometric = "rgb" if channels == 4 else "minisblack"
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric=photometric, planarconfig="contig", extrasamples=[extra])
    if extra == "unspecified":
        with pytest.raises(UserError, match=f"{channels} channels"):
            read(tmp_path / "a.tif")
        return
    pixels = read(tmp_path / "a.tif")
    wanted = colours * alpha + (1 - alpha)
    assert pixels.shape == wanted.shape
    assert np.abs(pixels / (255 if pixels.dtype == np.uint8 else 1) - wanted).max() < (
        0.02 if kind is np.uint8 else 1e-4
    )


@pytest.mark.parametrize("colours", ["separated", "cielab"])
def test_deep_colours_that_are_neither_grey_nor_rgb_are_refused(colours, tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    values = np.zeros((6, 8, 4 if colours == "separated" else 3), np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric=colours)
    with pytest.raises(UserError, match="neither grey nor RGB"):
        read(tmp_path / "a.tif")


def test_what_a_png_of_16_bits_calls_transparent_is_white(tmp_path):
    Image.fromarray(RAMP * 1000).save(tmp_path / "a.png", transparency=8000)
    wanted = np.where(RAMP * 1000 == 8000, 1, RAMP * 1000 / 65535)
    assert np.allclose(read(tmp_path / "a.png")[..., 0], wanted)


# Pages and orientation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gif", "tif", "png", "webp"])
def test_a_file_of_several_pages_is_refused_in_words(form, tmp_path):
    pages = [Image.fromarray(np.full((4, 4, 3), 60 * i, np.uint8)) for i in range(3)]
    pages[0].save(tmp_path / f"a.{form}", save_all=True, append_images=pages[1:])
    with pytest.raises(UserError, match="has 3 pages") as error:
        read(tmp_path / f"a.{form}")
    assert "a." not in error.value.public


def test_a_tiff_with_a_thumbnail_is_one_picture(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(RAMP)
        file.write(RAMP[::2, ::2], subfiletype=1)
    assert np.allclose(read(tmp_path / "a.tif")[..., 0], RAMP / 65535, atol=1e-7)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("form", ["jpg", "png", "tif", "16 bits", "16 bits tif", "deep colour"])
def test_pictures_are_turned_as_a_viewer_shows_them(turn, form, tmp_path):
    shown = np.zeros((6, 8), np.uint8)
    shown[:3, :4] = 200  # upper left
    shown[:3, 4:] = 100  # upper right
    back = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}  # which of PIL's turns undoes it
    ways = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
            7: "TRANSVERSE", 8: "ROTATE_90"}  # fmt: skip
    stored = Image.fromarray(shown)
    if turn > 1:
        stored = stored.transpose(getattr(Image.Transpose, ways[back[turn]]))
    exif = Image.Exif()
    exif[274] = turn
    path = tmp_path / {"jpg": "a.jpg", "tif": "a.tif", "16 bits tif": "a.tif"}.get(form, "a.png")
    if form.startswith("16 bits"):
        Image.fromarray(np.asarray(stored).astype(np.uint16) * 257).save(path, exif=exif)
    elif form == "deep colour":
        pytest.importorskip("imagecodecs", reason="imagecodecs is not installed")
        whole = png_of_16_bits(np.repeat(np.asarray(stored)[..., None].astype(np.uint16) * 257, 3, axis=2))
        data = exif.tobytes().removeprefix(b"Exif\0\0")
        chunk = struct.pack(">I", len(data)) + b"eXIf" + data + struct.pack(">I", zlib.crc32(b"eXIf" + data))
        path.write_bytes(whole[:33] + chunk + whole[33:])
    else:
        stored.save(path, exif=exif, **({"quality": 95} if form == "jpg" else {}))
    pixels = read(path)
    pixels = pixels * 255 if pixels.dtype != np.uint8 else pixels
    assert pixels.shape[:2] == (6, 8)
    assert np.abs(pixels[..., 0].astype(float) - shown).max() < (30 if form == "jpg" else 1e-3)


# Masks ----------------------------------------------------------------------------------------------------------------


def write_masks(folder: Path, values: tuple[int, ...], names: str | None = None, count: int = 10) -> np.ndarray:
    """Pictures with masks of these values in stripes; the stripes' numbers."""
    rng = np.random.default_rng(0)
    stripes = np.arange(8) % len(values)
    numbers = np.broadcast_to(stripes[:, None], (8, 8))
    for i in range(count):
        mask = np.asarray(values, np.uint8)[numbers]
        write(
            folder / "train",
            {f"images/{i}.png": rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), f"masks/{i}.png": mask},
        )
    if names is not None:
        (folder / "classes.txt").write_text(names)
    return numbers


@pytest.mark.parametrize("values", [(0, 255), (0, 128, 255), (0, 85, 170, 255), (0, 100)])
@pytest.mark.parametrize("named", [False, True])
def test_values_that_are_not_numbers_of_classes_are_a_class_each_and_said(values, named, tmp_path):
    numbers = write_masks(tmp_path, values, "\n".join("abcd"[: len(values)]) if named else None)
    data = load_dataset(str(tmp_path))
    assert data.classes == (tuple("abcd"[: len(values)]) if named else tuple(map(str, values)))
    assert (data.train.targets.numpy() == numbers).all()
    assert ", ".join(map(str, values)) in data.notes[0]


def test_numbers_of_classes_stay_as_they_are_and_255_is_none(tmp_path):
    write_masks(tmp_path, (0, 1, 2, 255))
    data = load_dataset(str(tmp_path))
    assert data.classes == ("0", "1", "2")
    assert sorted(np.unique(data.train.targets)) == [0, 1, 2, 255]
    assert data.notes == (
        "10 images with masks of the values 0, 1, 2, 255: numbers of classes, but 255, which is none",
    )


def test_255_beside_some_small_numbers_is_none_and_said(tmp_path):
    write_masks(tmp_path, (0, 1, 5, 15, 255))
    data = load_dataset(str(tmp_path))
    assert data.classes == ("0", "1", "5", "15")
    assert np.unique(data.train.targets).tolist() == [0, 1, 2, 3, 255]
    assert "0, 1, 5, 15, 255: these are classes 0 to 3, but 255" in data.notes[0]


@pytest.mark.parametrize("count", [10, 1])
def test_numbers_from_1_have_their_names_in_order(count, tmp_path):
    """As Oxford-IIIT Pets, also where one split alone has all of them."""
    write_masks(tmp_path / "test", (2, 3), count=count)
    numbers = write_masks(tmp_path, (1, 2, 3), "pet\nbackground\nborder")
    (tmp_path / "test" / "train" / "images").rename(tmp_path / "test" / "images")
    (tmp_path / "test" / "train" / "masks").rename(tmp_path / "test" / "masks")
    (tmp_path / "test" / "train").rmdir()
    data = load_dataset(str(tmp_path))
    assert data.classes == ("pet", "background", "border")
    assert (data.train.targets.numpy() == numbers).all()
    assert np.unique(data.test.targets).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("found", "named", "meant"),
    [
        ([0], None, None), ([0], 2, None), ([0, 255], 1, None), ([0, 255], 2, (0, 255)), ([255], 2, (0, 255)),
        ([0, 2], 3, None), ([0, 1, 255], 2, None), ([0, 1, 255], None, None), ([1, 2], None, (1, 2)),
        ([0, 1, 5, 15, 255], None, (0, 1, 5, 15)), ([0, 2, 255], None, (0, 2)), ([1, 2, 255], None, (1, 2)),
        ([0, 1, 5, 15, 255], 21, None), ([0, 127, 255], None, (0, 127, 255)), ([0, 127, 255], 3, (0, 127, 255)),
        ([5, 255], None, (5, 255)), ([1, 2, 3], 3, (1, 2, 3)), ([1, 2, 3, 255], 3, (1, 2, 3)), ([1, 2], 2, (1, 2)),
    ],
)  # fmt: skip
def test_what_values_of_masks_mean(found, named, meant):
    assert class_values(found, named, Path("x")) == meant


@pytest.mark.parametrize(
    ("values", "names", "words"),
    [
        ((0, 128, 255), "a\nb", "2 classes.*0, 128, 255"),
        ((0, 255), "a\nb\nc", "3 classes.*0, 255"),
        ((255,), "a", "1 classes.*255"),
        # without 0, some of the numbers may be counted from 0, or from 1 as elsewhere
        ((1,), "a\nb", "values 1, .* 2 classes"),
        ((1, 2), "a\nb\nc", "values 1, 2, .* 3 classes"),
        ((0, 2, 5), "a\nb\nc", "values 0, 2, 5, .* 3 classes"),  # 2 may be the third
        (tuple(range(0, 250, 6)), None, "42 values"),
    ],
)
def test_values_that_cannot_be_classes_are_refused_with_them(values, names, words, tmp_path):
    rng = np.random.default_rng(0)
    for i in range(4):
        mask = rng.choice(np.asarray(values, np.uint8), (16, 16))
        write(tmp_path / "train", {f"images/{i}.png": np.zeros((16, 16, 3), np.uint8), f"masks/{i}.png": mask})
    if names:
        (tmp_path / "classes.txt").write_text(names)
    with pytest.raises(UserError, match=words):
        load_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("train", "test"), [((0, 255), (0, 1)), ((0, 1), (0, 255)), ((0, 128, 255), (0, 1, 2)), ((0, 255), (0, 100))]
)
def test_splits_whose_masks_are_written_unlike_are_refused(train, test, tmp_path):
    write_masks(tmp_path / "other", test)
    write_masks(tmp_path / "x", train)
    (tmp_path / "other" / "train").rename(tmp_path / "x" / "test")
    with pytest.raises(UserError, match=f"training .*{train[0]}, {train[1]}"):
        load_dataset(str(tmp_path / "x"))


@pytest.mark.parametrize("test", [(0,), (0, 255), (255,)])
def test_a_split_without_foreground_is_mapped_as_the_other(test, tmp_path):
    write_masks(tmp_path / "other", test, count=2)
    write_masks(tmp_path / "x", (0, 128, 255))
    (tmp_path / "other" / "train").rename(tmp_path / "x" / "test")
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("0", "128", "255")
    assert np.unique(data.test.targets).tolist() == [(0, 128, 255).index(value) for value in test]


def test_sites_whose_masks_mean_something_else_are_refused(tmp_path):
    """Without names for classes: 255 is none at the server, and the foreground at a site."""
    write_masks(tmp_path / "server", (0, 1, 255))
    write_masks(tmp_path / "site", (0, 255))
    server, site = (load_dataset(str(tmp_path / name)) for name in ("server", "site"))
    with pytest.raises(UserError, match="0, 255"):
        site.numbered(server.classes)


@pytest.mark.parametrize("name", ["{}.PNG", "{}.tif", "{}_mask.png", "{}_segmentation.PNG", "{}.bmp"])
def test_masks_of_other_suffixes_and_names_are_found(name, tmp_path):
    numbers = write_masks(tmp_path, (0, 1, 2))
    for path in list((tmp_path / "train" / "masks").iterdir()):
        with Image.open(path) as image:
            image.load()
        path.unlink()
        image.save(path.with_name(name.format(path.stem)))
    assert (load_dataset(str(tmp_path)).train.targets.numpy() == numbers).all()
    mask = next((tmp_path / "train" / "masks").glob("3*"))
    mask.rename(mask.with_name("other.png"))
    with pytest.raises(UserError, match=r"3.png has no mask.*3\.png or 3_mask\.png") as error:
        load_dataset(str(tmp_path))
    assert "3" not in error.value.public
    for end in ("", "_mask"):
        Image.new("L", (8, 8)).save(tmp_path / "train" / "masks" / f"3{end}.png")
    with pytest.raises(UserError, match=r"masks, 3\.png, 3_mask\.png"):
        load_dataset(str(tmp_path))


def test_a_split_without_a_folder_of_masks_is_refused(tmp_path):
    write_masks(tmp_path, (0, 1))
    write(tmp_path / "test", {"images/0.png": np.zeros((8, 8, 3), np.uint8)})
    with pytest.raises(UserError, match=r"0\.png has no mask"):
        load_dataset(str(tmp_path))


def test_images_and_masks_are_turned_alike(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    for place in ("images", "masks"):
        (tmp_path / "train" / place).mkdir(parents=True)
        for i in range(3):
            stored = np.zeros((4, 6), np.uint8)
            stored[:, :3] = 1
            shape = stored if place == "masks" else np.stack([stored * 200] * 3, axis=2)
            Image.fromarray(shape).save(tmp_path / "train" / place / f"{i}.png", exif=exif)
    data = load_dataset(str(tmp_path))
    assert data.train.shape == (3, 6, 4)
    assert np.array_equal(data.train.targets.numpy() == 1, data.train.load()[0].numpy()[:, 0] > 0.5)


def test_no_error_of_a_picture_tells_a_server_its_name(tmp_path):
    secret = tmp_path / "MEIER_Hans_1961.png"
    for content in (b"no picture", png_of_16_bits(np.zeros((2, 2, 3)))[:45], b"II*\0" + bytes(40)):
        secret.write_bytes(content)
        with pytest.raises(UserError) as error:
            read(secret)
        assert "MEIER" in str(error.value)
        assert error.value.public
        assert "MEIER" not in error.value.public
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    assert read_image(buffer.getvalue(), tmp_path, 0).shape == (4, 4, 3)
