"""Interprets the folders of images as classes, domains above them, or groups such as patients, above or below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fewbytes.base.errors import UserError, listed

Parts = tuple[str, ...]  # the names of an image's folders, except images/
Places = dict[Parts, list[Path]]  # the images in these folders
SHOWN = 3  # maximum number of class names in a note
DIGITS = set("0123456789")
KINDS = re.compile(r"(class|grade|stage|type|level|category|label|digit)e?s?[ _-]?\d+", re.IGNORECASE)
"""Such names with a number are classes, not patients."""
DOMAINS = re.compile(
    r"(site|hospital|cent(er|re)|clinic|institution|domain|client|scanner|camera|device)s?[ _-]?\w{1,3}", re.IGNORECASE
)
"""Such names are domains."""

IMAGES = re.compile(r"(images?|imgs?|jpegimages)(_?(tr|ts|train|test|val))?", re.IGNORECASE)
MASKS = re.compile(
    r"(masks?|labels?|annotations?|segmentations?|segmentationclass|gts?|ground_?truths?)(_?(tr|ts|train|test|val))?",
    re.IGNORECASE,
)
REMEDY = "give classes the same name in all domains, or each group a name of its own"


@dataclass(frozen=True)
class Reading:
    """The class of each folder, its group or its domain if there are such, and a note on the meaning of the levels."""

    classes: dict[Parts, str]
    groups: dict[Parts, str] = field(default_factory=dict)
    note: str = ""
    domains: dict[Parts, str] = field(default_factory=dict)


def check_no_masks(folder: Path, names: Sequence[str]) -> None:
    """Raises UserError for folders of images beside folders of masks, which are no classes."""
    images, masks = (next(filter(pattern.fullmatch, names), None) for pattern in (IMAGES, MASKS))
    if images and masks:
        layout = "for a class of every pixel have train/images/<name> and train/masks/<name>.png"
        raise UserError(
            f"{folder} has pictures in {images}/ and in {masks}/, which are no classes: {layout}; for a class of every "
            f"image give the folder {images} alone",
            public=f"folders of images lie beside folders of masks, which are no classes: {layout}",
        )


def meaning(folder: Path, splits: Mapping[str, Places]) -> Reading:
    """The meaning of the folders, the same in all splits. Raises UserError if it is ambiguous, and for images at
    several depths."""
    places = list(dict.fromkeys(parts for split in splits.values() for parts in split))
    short = {parts: parts for parts in places}
    while len({parts[0] for parts in short.values()}) == 1 and min(map(len, short.values())) > 1:
        short = {parts: rest[1:] for parts, rest in short.items()}
    depths = sorted({len(rest) for rest in short.values()})
    if depths == [1]:
        return Reading({parts: rest[0] for parts, rest in short.items()})
    if depths != [2]:
        _refuse_depths(folder, splits, short)
    above, below = ({rest[k] for rest in short.values()} for k in (0, 1))
    holders = Counter(b for _, b in set(short.values()))
    shared = sum(count > 1 for count in holders.values())
    if not shared:
        read = Reading(
            {parts: rest[0] for parts, rest in short.items()},
            {parts: rest[1] for parts, rest in short.items()},
            "folders in those of classes are groups",
        )
        _check_apart(folder, splits, read)
        return read
    if 2 * shared <= len(holders):
        once, twice = (next(b for b, count in holders.items() if (count > 1) == several) for several in (False, True))
        raise UserError(
            f"{folder} could be <domain>/<class>/<image> as {twice}/ is in several folders, or <class>/<group>/<image> "
            f"as {once}/ is in one only: {REMEDY}",
            public="folders of pictures could be domains with classes, or classes with groups",
        )
    domains = all(map(DOMAINS.fullmatch, above))
    groups_above = not domains and len(above) > len(below) and (_numbered(above) or not _numbered(below))
    digits = below == DIGITS and set(holders.values()) == {len(above)}  # as in mnist/0 to 9 beside usps/0 to 9
    if _numbered(below) and not groups_above and not digits and not domains:
        raise UserError(
            f"{folder} could be <domain>/<class>/<image> or <class>/<group>/<image>: folders in "
            f"{listed(sorted(above), 2)} are called by numbers ({listed(sorted(below), SHOWN)}): if these are groups, "
            "such as patients, give each a name of its own, in one class alone; if classes, name them with words",
            public="folders of pictures are called by numbers, and could be classes in domains, or groups in classes",
        )
    classes = {parts: rest[1] for parts, rest in short.items()}
    groups = {parts: rest[0] for parts, rest in short.items()}
    shown = listed(sorted(above), SHOWN)
    if not groups_above or (len(splits) > 1 and not _numbered(above)):
        return Reading(classes, note=f"folders above those of classes ({shown}) are domains", domains=groups)
    read = Reading(classes, groups, f"folders above those of classes ({shown}) are groups")
    _check_apart(folder, splits, read)
    return read


def _numbered(names: set[str]) -> bool:
    """Whether names differ only in their numbers, as those of patients may."""
    if all(map(KINDS.fullmatch, names)):
        return False
    return all(re.search(r"\d", name) for name in names) and len({re.sub(r"\d+", "", name) for name in names}) == 1


def _check_apart(folder: Path, splits: Mapping[str, Places], read: Reading) -> None:
    """Raises UserError for groups that are in several splits."""
    names = [{read.groups[parts] for parts in split} for split in splits.values()]
    if both := sorted(set.intersection(*names)) if len(names) > 1 else []:
        raise UserError(
            f"{folder} has the same groups, such as patients, in {' and '.join(splits)} ({listed(both, SHOWN)}): "
            "keep each in one, or give each a name of its own",
            public=f"the same groups of pictures are in training and in test ({len(both)} of them): keep each in one",
        )


def _refuse_depths(folder: Path, splits: Mapping[str, Places], short: Mapping[Parts, Parts]) -> None:
    """Raise the error for images at several depths, or too deep."""
    depths = sorted({len(rest) for rest in short.values()})
    where = [next(p for p, rest in short.items() if len(rest) == depth) for depth in (depths[0], depths[-1])]
    first, last = (next(split[parts][0] for split in splits.values() if parts in split) for parts in where)
    layouts = "<class>/<image>, <class>/<group>/<image> or <domain>/<class>/<image>"
    raise UserError(
        f"{folder} has images in its folders ({first}) and in folders of these ({last}): keep to one of {layouts}"
        if len(depths) > 1
        else f"{folder} has images {depths[0]} folders deep ({first}): keep to {layouts}",
        public="images lie at several depths of folders, or too deep",
    )
