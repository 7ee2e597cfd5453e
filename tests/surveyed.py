"""Three made hospitals, whose tables differ in units and categories, and whose pictures differ in size and depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

SITES = ("north", "south", "west")
ROWS = {"north": 400, "south": 300, "west": 250}


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """By site: age, glucose (at south in mg/dL, of which values are missing), smoker (spelt otherwise at west), an
    identifier, and ill, the target, of which west has no severe case."""
    rng, found = np.random.default_rng(seed), {}
    for site, rows in ROWS.items():
        ill = rng.choice(["no", "mild", "severe"] if site != "west" else ["no", "mild"], rows)
        glucose = rng.normal(5.5, 1.0, rows) + 1.5 * (ill != "no")
        glucose[rng.permutation(rows)[:30]] = np.nan
        smoker = rng.choice(["never", "former", "current"], rows)
        found[site] = pd.DataFrame(
            {
                "patient_id": np.arange(rows) + 7000,
                "age": rng.integers(20, 90, rows) + (15 if site == "west" else 0),
                "glucose": glucose * (18.016 if site == "south" else 1.0),
                "smoker": np.char.capitalize(smoker) if site == "west" else smoker,
                "ill": ill,
            }
        )
    return found


def write_tables(folder: Path, frames: dict[str, pd.DataFrame]) -> Path:
    """Write a folder with a table for each site; the folder."""
    for site, frame in frames.items():
        (folder / site).mkdir(parents=True)
        frame.to_csv(folder / site / "train.csv", index=False)
    return folder


def write_pictures(folder: Path, seed: int = 0) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Write a folder of pictures for each site, of two classes; by site all pixels. South's are larger and 16 bits
    deep, and two of north's are at west, too."""
    rng, found = np.random.default_rng(seed), dict[str, list[np.ndarray[Any, Any]]]()
    for site in SITES:
        found[site] = []
        for i in range(40):
            size, most = ((24, 32), 65535) if site == "south" else ((16, 16), 255)
            pixels = rng.integers(0, most + 1, size).astype(np.uint16 if site == "south" else np.uint8)
            if site == "west" and i < 2:
                pixels = found["north"][i]
            found[site].append(pixels)
            place = folder / site / ("benign" if i % 2 else "malignant") / f"{i:03}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place)
    return found


def patients(n: int, shift: float, seed: int) -> pd.DataFrame:
    """Patients of a hospital whose ages are shifted by years; `ill` follows from age, mass and dose."""
    rng = np.random.default_rng(seed)
    age, mass, dose = rng.normal(60 + shift, 12, n).round(), rng.normal(25, 4, n).round(1), rng.normal(size=n).round(3)
    ill = 0.08 * (age - 60) + 0.15 * (mass - 25) + 1.2 * dose + rng.logistic(size=n) * 0.6 > 0
    sex = rng.choice(["f", "m"], n)
    return pd.DataFrame({"age": age, "mass": mass, "dose": dose, "sex": sex, "ill": np.where(ill, "yes", "no")})
