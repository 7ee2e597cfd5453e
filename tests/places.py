"""Folders of images that clients have of their own, each on a host of its own or all on one machine."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SITES = {"east": {"benign": 20, "malignant": 15}, "north": {"malignant": 45}, "south": {"benign": 15, "malignant": 25}}
TRAIN = [[16, 12], [0, 36], [12, 20]]  # of SITES; a fifth of each class is for testing
TEST = [[4, 3], [0, 9], [3, 5]]


def images(folder: Path, split: str, classes: dict[str, int], seed: int, side: int = 8) -> None:
    rng = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / split / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 120, (side, side)) + 100 * (name == "malignant")
            Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{i}.png")


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """120 images of three clients, as one machine has them in `sites`, and three hosts each as its `cells`.

    The server's own `cells` are a test set.
    """
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path / "server"))
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    images(tmp_path / "server" / "cells", "test", {"benign": 5, "malignant": 5}, 9)
    for seed, (name, classes) in enumerate(SITES.items()):
        images(tmp_path / "sites" / name, "train", classes, seed)
        (tmp_path / name).mkdir()
        (tmp_path / name / "cells").symlink_to(tmp_path / "sites" / name)
    return tmp_path


def options(places: Path) -> list[str | Path]:
    return ["--dataset", "cells", "--partition", "local", "--client-data", places / "sites", "--set", "batch=10"]
