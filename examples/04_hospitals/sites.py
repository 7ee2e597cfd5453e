"""Makes three hospitals' folders of images, of uneven classes, and the server's test set, from a data set by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fewbytes.data import Partition, Split, federate, load_dataset

SITES = ("east", "north", "south")


def make_sites(folder: Path, dataset: str = "digits", part: float = 1.0, alpha: float = 0.5) -> dict[str, int]:
    """Write `<site>/scans/train/<class>/<image>.png` and `server/scans/test/…`; how many images each site has.

    A site's classes are as uneven as Dirichlet's `alpha` is small; some it may lack altogether.
    """
    data = load_dataset(dataset).part(part, seed=0)
    split = federate(data, Partition(clients=len(SITES), alpha=alpha), seed=1)
    write(folder / "server" / "scans" / "test", data.test, data.classes)
    for name, client in zip(SITES, split.clients, strict=True):
        write(folder / name / "scans" / "train", client.train, data.classes)
    return {name: len(client.train) for name, client in zip(SITES, split.clients, strict=True)}


def write(folder: Path, images: Split, classes: tuple[str, ...]) -> None:
    """A PNG for each image, in a folder for each class."""
    x, labels = images.load()
    pixels = (x * 255).round().numpy().astype(np.uint8).transpose(0, 2, 3, 1)
    for i, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        place = folder / classes[label] / f"{i:05}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).save(place)
