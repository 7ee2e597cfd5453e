"""Frames kept in git still say what they said: the format cannot change unseen.

`python tests/wire/test_frames.py --write` writes them anew. Do that only with a new format version, or for an example.
"""

from __future__ import annotations

import sys

import pytest
from assembling import take_apart
from golden_frames import FOLDER, examples, held_by, stored
from test_wire import same

from fewbytes.wire import unpack
from fewbytes.wire.frame import FORMAT

VERSIONS = (1, 2, FORMAT)
"""Of the format: all that are read, the last of them written."""
NAMES = list(examples())
FRAMES = [(int(path.parent.name), path.stem) for path in sorted(FOLDER.glob("*/*.frame"))]


def test_every_example_has_its_frame_and_every_frame_its_example() -> None:
    assert sorted(int(path.name) for path in FOLDER.iterdir()) == sorted(VERSIONS)
    for version in VERSIONS:
        files = list((FOLDER / str(version)).iterdir())
        assert all(path.suffix == ".frame" and path.stat().st_size < 8192 for path in files)
        assert {path.stem for path in files} <= set(NAMES)
    assert sorted(name for version, name in FRAMES if version == FORMAT) == sorted(NAMES)


@pytest.mark.parametrize(("version", "name"), FRAMES)
def test_stored_frames_still_hold_their_values(version: int, name: str) -> None:
    example = examples()[name]
    value = unpack(type(example.value), stored(name, version), layout=example.layout, base=held_by(name, version))
    assert same(value, example.value)
    assert take_apart(stored(name, version))[3]["major"] == version


@pytest.mark.parametrize("name", NAMES)
def test_the_format_is_as_it_was(name: str) -> None:
    """What is not coded is the same to the byte; zstandard and WebP may compress otherwise in other versions."""
    example, was = examples()[name], stored(name)
    now = bytes(example.pack())
    if not example.coded:
        assert now == was
    assert now[:8] == was[:8]
    assert (take_apart(now)[0], take_apart(now)[3]) == (take_apart(was)[0], take_apart(was)[3])


def test_the_frames_show_every_coding() -> None:
    numbers, masks = set(), set()
    for version, name in FRAMES:
        kind, fields, _, _ = take_apart(stored(name, version))
        groups = fields[0][1] if kind == "Model" else [fields[1][2]] if kind == "Update" else []
        for coding in groups:
            at = {1: 1, 2: 1, 4: 2}.get(coding[0])
            flags = list(coding[1]) if coding[0] == 3 else [] if at is None else [min(flag, 2) for flag in coding[at]]
            numbers |= {(version > 2, coding[0], flag) for flag in [None, *flags]}
        numbers |= {(4, "mask", coding[1][0]) for coding in groups if coding[0] == 4}
        masks |= {tuple(fields[1][1][:2])} if kind == "Update" else set()
    assert [len(take_apart(stored(f"few{n}"))[1][0][2]) for n in ("", "-coded", "-most", "-even")] == [4, 3, 3, 4]
    assert [take_apart(stored(f"images{n}"))[1][0][1] for n in ("", "-coded", "-grey", "-none")] == [
        [0],
        None,
        None,
        [0],
    ]
    either = (False, True)
    plain = {(new, 0, None) for new in either} | {(new, 1, flag) for new in either for flag in (None, 0, 1)}
    before = {(False, 2, flag) for flag in (None, 0, 1)} | {(False, 3, way) for way in (None, 0, 1, 2)}
    changes = {(new, 4, flag) for new in either for flag in (None, 0, 1)} | {(4, "mask", 0), (4, "mask", 2)}
    assert numbers == plain | before | changes | {(True, 1, 2), (True, 4, 2), (True, 6, None)}
    assert masks == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    folder = FOLDER / str(FORMAT)
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.frame"):
        path.unlink()
    for name, example in examples().items():
        (folder / f"{name}.frame").write_bytes(bytes(example.pack()))
