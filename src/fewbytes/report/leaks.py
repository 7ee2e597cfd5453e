"""Shows what `fewbytes attack` made of images again: the figures of every attacked run, and its picture.

The picture may be a stranger's: its pixels are decoded and encoded again.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.report.folder import Attack, RunFolder
from fewbytes.report.table import decibels

_FILE_BYTES = 1 << 24  # a larger picture is not shown


@dataclass(frozen=True)
class Leak:
    """What is shown of a run: the share of the network's values seen; its picture, PNG in base64, and words."""

    label: str
    attack: Attack
    seen: float
    picture: str | None
    words: str


def section(runs: Sequence[RunFolder]) -> list[Leak]:
    """Every run that was attacked. Raises UserError for a damaged picture."""
    return [_leak(run, run.attack) for run in runs if run.attack]


def _leak(run: RunFolder, attack: Attack) -> Leak:
    words = ", ".join(f"sample {row['sample']}: {decibels(row['psnr'])}" for row in attack["attacked"])
    return Leak(run.label, attack, attack["observed_values"] / max(1, attack["values"]), _picture(run), words)


def _picture(run: RunFolder) -> str | None:
    """The run's picture, nothing where it has none."""
    path = run.path / "attack.png"
    if not path.is_file():
        return None
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if path.stat().st_size > _FILE_BYTES:
                raise ValueError("it is too large")
            with Image.open(path, formats=["PNG"]) as image:
                image.convert("RGB").save(file, "PNG")
    except Exception as error:  # a stranger's file may fail a decoder in any way
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return base64.b64encode(file.getvalue()).decode()
