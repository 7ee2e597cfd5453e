"""Folders of images: their classes, splits and groups, and protection against links out of a folder."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fewbytes.base.errors import UserError, listed
from fewbytes.data.clients import rows_for_testing
from fewbytes.data.formats import dicom, nifti
from fewbytes.data.formats.dicom import is_series
from fewbytes.data.levels import SHOWN, Parts, Places, Reading, check_no_masks, meaning

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
TEST_NAMES = ("test", "validation", "valid", "val")
STRAY = ("__macosx", "thumbs.db", "desktop.ini")
"""Lower-case names of systems' files, besides names that begin with a point or `~$` (Excel's locks)."""
DEEPEST = 8  # maximum depth of folders that are searched
_SPLIT = re.compile(
    r"(?:(?:seg|img|images?|data|dataset)[_ -])?"
    r"(train|trn|test|tst|validation|valid|val|eval|pred)(?:ing|uation|iction)?"
    r"(?:[_ -]?(?:set|split|images?|imgs?|data))?[^a-z]*",
    re.IGNORECASE,
)
_WORD = r"(train|trn|test|tst|validation|valid|val|eval)(?:ing|uation)?(?:[_ -]?(?:set|split|images?|imgs?|data))?"
_ENDS = re.compile(rf"(?i:(.*?[_ .\-\d]){_WORD})")
_BEGINS = re.compile(rf"(?:(?i:{_WORD})([A-Z\d]|(?i:[_ .\-].*)))")
_MASK = re.compile(r"(.+)(?:_mask|_segmentation)(?:_\d+)?")
_TESTS = (*TEST_NAMES, "eval")

Labelled = list[tuple[Path, str]]  # images and the names of their classes


@dataclass(frozen=True)
class Pictures:
    """The labelled images of a folder by split, "train" and possibly "test", notes on the findings, and each image's
    domain or group, if there are such."""

    splits: dict[str, Labelled]
    notes: tuple[str, ...] = ()
    folders: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class _Walked:
    """The images below a folder by their folders, in order, and counts of other entries."""

    images: dict[Parts, list[Path]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)  # folders with no image below them
    others: int = 0  # files that are not images
    masks: int = 0  # beside their pictures
    dangling: int = 0  # links to missing files


def split_of(name: str) -> str | None:
    """The split that a folder's name means, in a usual spelling: train, one of TEST_NAMES, eval, or pred (pictures to
    predict); None: no split."""
    found = _SPLIT.fullmatch(name)
    return _word(found[1]) if found else None


def splits_among(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The folders' names that mean splits: (split, rest of the name, with as few different rests as possible).

    Besides names of `split_of` these are names that begin or end with one, as `brain_train` with `brain_test`, or
    `trainA` and `trainB` with `testA` and `testB`: the same rest occurs for training and for another split.
    """
    found = {name: (split, "") for name in names if (split := split_of(name))}
    rests: dict[str, dict[str, str]] = {}
    for name in names:
        if name not in found and (part := _ENDS.fullmatch(name) or _BEGINS.fullmatch(name)):
            ends = part.re is _ENDS
            word, rest = (part[2], part[1]) if ends else (part[1], part[2])
            rest = re.sub(r"^[\W\d_]+|[\W\d_]+$", "", rest) if re.search(r"[a-zA-Z]", rest) else ""
            rests.setdefault(rest, {})[name] = _word(word)
    for rest, by_name in rests.items():
        if "train" in by_name.values() and len(set(by_name.values())) > 1:
            found |= {name: (split, rest) for name, split in by_name.items()}
    several = len({rest for _, rest in found.values()}) > 1
    return {name: (split, rest if several else "") for name, (split, rest) in found.items()}


def _word(text: str) -> str:
    """The canonical name of a split."""
    return {"trn": "train", "tst": "test"}.get(text.lower(), text.lower())


def labelled_images(folder: Path, only_test: bool = False, apart: bool = True) -> Pictures | None:
    """The labelled images below a folder, the test split as "train" if `only_test`; None if there are none.

    Images lie in `<class>/`, in `<domain>/<class>/` if most classes are in several domains, in `<group>/<class>/` if
    there are more groups than classes, or in `<class>/<group>/` if no group is in two classes. Without a test split, a
    fixed fifth of the groups, such as patients, is for testing, unless they need not be kept `apart`. No group may be
    in two splits. A folder in a class's folder with a single series of DICOM slices is one image, a volume. A single
    outer folder is skipped. Folders called `train`, `test`, `val` or similar name the split; the first of TEST_NAMES is
    for testing. Folders beside these and folders called images have no meaning. Tiny-ImageNet's `val/` may have its
    `val_annotations.txt`. Raises UserError if splits and classes are ambiguous, for images beside masks, and for an
    ambiguous layout.
    """
    walked = _walked(folder)
    splits, passed = _by_split(folder, walked)
    train = splits.pop("train", {})
    tests = [name for name in _TESTS if name in splits]
    test = splits[tests[0]] if tests else {}
    passed += [(f"pictures in {name}/", sum(map(len, splits[name].values()))) for name in tests[1:]]
    if only_test:
        train, test = test, {}
    if not train:
        return None
    there = {"train": train, **({tests[0]: test} if test else {})}
    read = meaning(folder, there)
    found = {split: _labelled(read, places) for split, places in zip(("train", "test"), there.values(), strict=False)}
    groups = f"; {read.note}" if read.note else ""
    if read.groups and apart and not test and not only_test:
        found = _split_by_group(folder, read, train)
        groups += f": of {len({*_group_of(read, train)})} groups each is for training or for testing"
    classes = sorted({name for _, name in found["train"]})
    note = f"{len(found['train'])} pictures of {len(classes)} class{'es' * (len(classes) > 1)} for training"
    if "test" in found:
        note += f", {len(found['test'])} for testing" + (f" ({tests[0]})" if test else "")
    elif only_test:
        note = note.replace("for training", f"for testing ({tests[0]})")
    else:
        note += " and, of each class a fifth, for testing"
    note += f"; called by their folders: {listed(classes, SHOWN)}{groups}"
    above = read.domains or read.groups
    of = {path: name for parts, name in above.items() for each in there.values() for path in each.get(parts, ())}
    folders = {split: [of[path] for path, _ in pairs] for split, pairs in found.items()} if of else {}
    return Pictures(found, (note + _skipped(walked, passed),), folders)


def holds_classes(folder: Path) -> bool:
    """Whether a folder has labelled images as `<class>/<image>`, or in splits."""
    inside = [*subfolders(folder), *subfolders(folder / "images")]
    splits = splits_among([place.name for place in inside])
    return any(split == "train" for split, _ in splits.values()) or any(
        _images(place) or _images(place / "images") for place in inside if place.name.lower() != "images"
    )


def subfolders(folder: Path) -> list[Path]:
    """The subfolders that are not hidden or stray, in order; none if the folder is missing."""
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if not is_stray(entry) and entry.is_dir())


def is_stray(path: Path) -> bool:
    """Whether a file or folder is hidden, or the system's: `.DS_Store`, `._x.csv`, `__MACOSX`, `~$x.xlsx`."""
    return path.name.startswith((".", "~$")) or path.name.lower() in STRAY


def holds_files(folder: Path) -> bool:
    """Whether a file that is not stray lies in a folder, or in one of its subfolders that are not links."""
    inside = [entry for entry in folder.iterdir() if not is_stray(entry)]
    return any(entry.is_file() or entry.is_symlink() for entry in inside) or any(
        holds_files(entry) for entry in inside if entry.is_dir()
    )


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Raises UserError for a path of a data set in `folder` that is, or is behind, a link out of it, and for pipes and
    devices. The folder itself may be a link, and links within FEWBYTES_DATA are allowed.
    """
    paths, data = list(paths), os.environ.get("FEWBYTES_DATA")
    roots = [folder.resolve(), *([Path(data).expanduser().resolve()] if data else [])]
    links = [path for path in paths if path.is_symlink()]
    for place in (*sorted({path.parent for path in paths}), *links):
        target = place.resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise UserError(
                f"{place} leads out of the data folder {folder}, to {target}: copy what is there into the folder, or "
                "have both below the folder that FEWBYTES_DATA names",
                public="a link leads out of the folder of data",
            )
    for path in paths:
        if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise UserError(
                f"{path} is a pipe or a device, not a file: remove it", public="a pipe or a device is among the data"
            )
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"{path} is a link to a file that is not there: remove it",
                public="a link among the data leads to a file that is not there",
            )


# Contents of a folder -------------------------------------------------------------------------------------------------


def _walked(folder: Path) -> _Walked:
    walked = _Walked()

    def walk(place: Path, parts: Parts) -> bool:
        """Whether the folder contains an image."""
        with os.scandir(place) as found:
            dangling = {Path(each) for each in found if each.is_symlink() and not os.path.exists(each)}
        entries = sorted(entry for entry in place.iterdir() if entry not in dangling)
        walked.dangling += len(dangling)
        folders = [entry for entry in entries if entry.is_dir()]
        images = [entry for entry in entries if entry not in folders and _is_image(entry)]
        walked.others += len(entries) - len(folders) - len(images)
        masks = _masks(images)
        walked.masks += len(masks)
        images = [image for image in images if image not in masks]
        if len(parts) > 1 and is_series(images):
            check_inside(folder, images)
            walked.images.setdefault(parts[:-1], []).append(place)
        elif images:
            walked.images.setdefault(parts, []).extend(images)
        empty = []
        for inside in folders:
            deeper = parts if inside.name.lower() == "images" else (*parts, inside.name)
            if is_stray(inside):
                empty.append(inside)
                continue
            if inside.is_symlink():
                check_inside(folder, [inside])
            if len(inside.relative_to(folder).parts) > DEEPEST or not walk(inside, deeper):
                empty.append(inside)
        check_no_masks(place, [inside.name for inside in folders if inside not in empty])
        if len(empty) < len(folders) or images or place == folder:  # else the folder itself is listed
            walked.without += [str(inside.relative_to(folder)) for inside in empty]
        return len(empty) < len(folders) or bool(images)

    if folder.is_dir():
        walk(folder, ())
    return walked


def _is_image(path: Path) -> bool:
    return path.name.lower().endswith((*SUFFIXES, *dicom.SUFFIXES, *nifti.SUFFIXES)) and not is_stray(path)


def _masks(images: Sequence[Path]) -> set[Path]:
    """The images that are masks of a picture beside them: `x_mask.png` or `x_mask_1.png` beside `x.png`."""
    stems = {path: path.name.lower().removesuffix(".gz").rpartition(".")[0] for path in images}
    names = {*stems.values()}
    return {path for path, stem in stems.items() if (found := _MASK.fullmatch(stem)) and found[1] in names}


def _images(folder: Path) -> bool:
    return folder.is_dir() and any(_is_image(path) for path in folder.iterdir())


def _skipped(walked: _Walked, pictures: Sequence[tuple[str, int]]) -> str:
    note = [f"{count} {what}" for what, count in pictures if count]
    if walked.masks:
        note.append(f"{walked.masks} masks of pictures")
    if walked.without:
        note.append(f"folders without pictures: {listed(walked.without, 3)}")
    if walked.dangling:
        note.append(f"{walked.dangling} links to missing files")
    if walked.others:
        note.append(f"{walked.others} files that are not pictures")
    return f"; skipped: {', '.join(note)}" if note else ""


# Meaning of the folders -----------------------------------------------------------------------------------------------


def _by_split(folder: Path, walked: _Walked) -> tuple[dict[str, Places], list[tuple[str, int]]]:
    """Images by split and by their remaining folders, and the numbers of skipped ones by description."""
    described: dict[str, Places] = {}
    for place in subfolders(folder):
        name, lines = split_of(place.name), place / f"{place.name}_annotations.txt"
        if name is not None and lines.is_file():
            for path, label in _listed(lines):
                described.setdefault(name, {}).setdefault((label,), []).append(path)
            walked.images = {parts: paths for parts, paths in walked.images.items() if parts[:1] != (place.name,)}
    splits, unlabelled, beside = described, 0, 0
    levels = _split_levels(folder, walked.images)
    if not levels and described:
        return described, []
    for parts, paths in walked.images.items():
        means = [among.get(parts[k], ("", "")) if k < len(parts) else ("", "") for k, among in levels.items()]
        names = {split for split, _ in means} or {"train"}
        rests = dict(zip(levels, (rest for _, rest in means), strict=True))
        rest = tuple(rests.get(k, name) for k, name in enumerate(parts) if rests.get(k, name))
        if "" in names or "pred" in names:
            beside += len(paths)
        elif not rest:
            unlabelled += len(paths)
        elif len(names) > 1:
            raise UserError(
                f"{folder} has pictures in {'/'.join(parts)}/, of two splits at once: name one on the way to each",
                public="folders of pictures name two splits at once",
            )
        else:
            splits.setdefault(names.pop(), {}).setdefault(rest, []).extend(paths)
    return splits, [("pictures of no class", unlabelled), ("pictures beside the splits", beside)]


def _split_levels(folder: Path, places: Iterable[Parts]) -> dict[int, dict[str, tuple[str, str]]]:
    """The levels of folders that name splits, with the names' meanings: all names do, or one for training that contains
    folders, or two that differ only in the split."""
    places = list(places)
    levels: dict[int, dict[str, tuple[str, str]]] = {}
    odd: list[str] = []
    for k in range(max(map(len, places), default=0)):
        names = {parts[k] for parts in places if len(parts) > k}
        above = {parts[k] for parts in places if len(parts) > k + 1}
        among = splits_among(names)
        trains = any(split == "train" for name, (split, _) in among.items() if name in above)
        if len(among) == len(names) or (not levels and trains):
            levels[k] = among
        else:
            odd += sorted(among)
    if odd and not levels:
        raise UserError(
            f"{folder} has folders named as splits are ({listed(odd)}) beside others: keep to train/<class>/ and "
            "test/<class>/, or give a class another name",
            public="folders of pictures are named as splits are, beside others that are not",
        )
    return levels


def _labelled(read: Reading, places: Places) -> Labelled:
    return [(path, read.classes[parts]) for parts, paths in places.items() for path in paths]


def _group_of(read: Reading, places: Places) -> list[str]:
    """The group of each image."""
    return [read.groups[parts] for parts, paths in places.items() for _ in paths]


def _split_by_group(folder: Path, read: Reading, places: Places) -> dict[str, Labelled]:
    whole = _labelled(read, places)
    tested = rows_for_testing(np.array([name for _, name in whole]), _group_of(read, places))
    if not tested.any():
        raise UserError(
            f"{folder} has one group (folder in a class) for each class, which cannot be both for training and for "
            "testing: give a test split, or <class>/<image>",
            public="there is one group for each class, which cannot be both for training and for testing",
        )
    return {
        split: [pair for pair, is_test in zip(whole, tested, strict=True) if is_test == (split == "test")]
        for split in ("train", "test")
    }


def _listed(path: Path) -> Labelled:
    """Images of `images/` from Tiny-ImageNet's list: a line with name, class and more each, separated by tabs."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} cannot be read as text", public="a list of images cannot be read as text") from None
    found = []
    for number, line in enumerate(lines, 1):
        image, *more = line.split("\t")
        place = path.parent / "images" / image
        if not more or Path(image).name != image or not place.is_file():
            raise UserError(
                f"{path}, line {number}: no image of images/ and its class, with a tab between: correct it",
                public="a line of a list of images is not an image and its class",
            )
        found.append((place, more[0]))
    return found
