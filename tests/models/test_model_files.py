"""Saved models: what is damaged is told in one line, whatever was damaged; files of older versions load."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fewbytes as fb
from fewbytes.models import build_model
from fewbytes.models.files import load_model, save_model

ABOUT = {"model": "mlp:hidden=4", "sample_shape": [1, 2, 2], "classes": 3}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small model's file in a run folder."""
    path = tmp_path / "models" / "global.safetensors"
    save_model(build_model("mlp:hidden=4", (1, 2, 2), 3), path, ABOUT)
    return path


def refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(fb.UserError) as told:
        load_model(path.parent.parent)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)


def test_every_flipped_bit_is_told(file: Path) -> None:
    good = file.read_bytes()
    for i in range(len(good)):
        for bit in range(8) if i % 7 == 0 or i < 8 else [i % 8]:
            refused(file, good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :])


def test_every_truncation_and_other_damage_is_told(file: Path) -> None:
    good, rng = file.read_bytes(), random.Random(0)
    for length in range(0, len(good), 3):
        refused(file, good[:length])
    for _ in range(200):
        i, j = rng.randrange(len(good)), rng.randrange(len(good))
        for hole in (bytes(min(64, len(good) - i)), good[j : j + 16]):
            damaged = good[:i] + hole + good[i + len(hole) :]
            if damaged != good:
                refused(file, damaged)


def test_files_of_older_versions_load(file: Path) -> None:
    with safe_open(file, "pt") as there:
        state = {name: there.get_tensor(name) for name in there.keys()}  # noqa: SIM118 (not a dict)
        about = there.metadata()["fewbytes"]
    loaded = load_model(file.parent.parent)
    save_file(state, file, {"fewbytes": about[about.index("{") :]})
    old = load_model(file.parent.parent)
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_the_same_model_is_the_same_file(file: Path) -> None:
    first = file.read_bytes()
    for _ in range(8):
        save_model(load_model(file.parent.parent), file, ABOUT)
        assert file.read_bytes() == first
