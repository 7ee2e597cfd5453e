"""Folders of data: which images are in one, of which class each is, and that its files are its own."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from fewbytes.base.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
TEST_NAMES = ("test", "validation", "valid", "val")
SPLITS = re.compile(r"(train|test|val|eval)(ing|id|idation|uation)?[^a-z]*", re.IGNORECASE)

Labelled = list[tuple[Path, str]]  # images and the names of their classes


def labelled_images(folder: Path) -> dict[str, Labelled]:
    """The images below a folder by split, "train" and perhaps "test"; nothing if it is no folder of labelled images.

    `<class>/<image>` or `<class>/images/<image>` in `train/` and a folder of TEST_NAMES, of which Tiny-ImageNet's
    `val/` may be described by its `val_annotations.txt` instead. Else the whole is "train": `<class>/<image>`, or
    `<domain>/<class>/<image>`, the classes of all domains by their names. Raises UserError where images lie at both
    depths, or an image that is listed is not there.
    """
    if (folder / "train").is_dir():
        train = _by_class(folder / "train")
        held = {name for _, name in train}
        if empty := [place for place in subfolders(folder / "train") if held and place.name not in held]:
            raise UserError(f"{empty[0]} has no image in it, where those of other classes are: move them, or remove it")
        test = test_images(folder)
        return {"train": train, **({"test": test} if test else {})} if train else {}
    places = subfolders(folder)
    if any(SPLITS.fullmatch(place.name) for place in places):  # splits that are named otherwise are no classes
        return {}
    flat, deep = _by_class(folder), [pair for place in places for pair in _by_class(_domain(place))]
    if flat and {path.parent for path, _ in deep} - {path.parent for path, _ in flat}:
        raise UserError(
            f"{folder} has images in its folders ({flat[0][0]}) and in folders of these ({deep[0][0]}): "
            "keep to <class>/<image> or to <domain>/<class>/<image>"
        )
    whole = flat or deep
    return {"train": whole} if len({name for _, name in whole}) > 1 else {}


def test_images(folder: Path) -> Labelled:
    """The images of a folder's test split, the first of TEST_NAMES that is there."""
    return next((found for name in TEST_NAMES if (found := _test(folder / name))), [])


def holds_classes(folder: Path) -> bool:
    """Whether a folder is labelled images as `<class>/<image>`."""
    return bool(_by_class(folder))


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder but hidden ones, in order; none if it is not there."""
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Raises UserError for a file or folder of a data set in `folder` that is a link out of it, or lies behind one, and
    for what is no file, such as a pipe. The folder may be a link itself, and links within FEWBYTES_DATA are the user's.
    """
    paths, data = list(paths), os.environ.get("FEWBYTES_DATA")
    roots = [folder.resolve(), *([Path(data).expanduser().resolve()] if data else [])]
    links = [path for path in paths if path.is_symlink()]
    for place in (*sorted({path.parent for path in paths}), *links):
        target = place.resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise UserError(
                f"{place} leads out of the data folder {folder}, to {target}: copy what is there into the folder, or "
                "have both below the folder that FEWBYTES_DATA names"
            )
    for path in paths:
        if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise UserError(f"{path} is a pipe or a device, not a file: remove it")
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link to a file that is not there: remove it")


def _by_class(folder: Path) -> Labelled:
    """The images in the folders of a folder; none if all lie in one called images, which is no class."""
    places = subfolders(folder)
    found = [(path, place.name) for place in places for path in _images(place) or _images(place / "images")]
    return [] if {name for _, name in found} == {"images"} else found


def _images(folder: Path) -> Sequence[Path]:
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in inside if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]


def _domain(place: Path) -> Path:
    """Where a domain's classes lie: Office-31 has `<domain>/images/<class>/`."""
    return place / "images" if subfolders(place / "images") else place


def _test(folder: Path) -> Labelled:
    listed = folder / f"{folder.name}_annotations.txt"
    return _listed(listed) if listed.is_file() else _by_class(folder)


def _listed(path: Path) -> Labelled:
    """Images of `images/` as Tiny-ImageNet lists them: a line each, its name, its class and more, with tabs."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} cannot be read as text") from None
    found = []
    for number, line in enumerate(lines, 1):
        image, *more = line.split("\t")
        place = path.parent / "images" / image
        if not more or Path(image).name != image or not place.is_file():
            raise UserError(f"{path}, line {number}: no image of images/ and its class, with a tab between: correct it")
        found.append((place, more[0]))
    return found
