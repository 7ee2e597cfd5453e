"""NIfTI: volumes with axes in the body's order, and values scaled by slope and intercept."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.extras import is_installed
from fewbytes.base.unfolded import check_unfolded

SUFFIXES = (".nii", ".nii.gz")


def is_nifti(path: Path) -> bool:
    """Whether a file has NIfTI's suffix."""
    return path.name.lower().endswith(SUFFIXES)


def read_nifti(path: Path) -> NDArray[np.float32]:
    """A volume (x, y, z, channels) of scaled values, with axes from left to right, back to front and down to up,
    whatever the file's order. Raises UserError, without the file's name."""
    if not is_installed("nibabel"):
        raise UserError("is NIfTI, which needs nibabel: pip install 'fewbytes[medical]'")
    nibabel: Any = importlib.import_module("nibabel")

    try:
        image = nibabel.load(path)
        check_unfolded(path, int(np.prod(image.shape)) * image.get_data_dtype().itemsize)
        values = np.asarray(nibabel.as_closest_canonical(image).dataobj, dtype=np.float32)
    except UserError:
        raise
    except Exception as error:  # the library raises many types
        raise UserError(f"is NIfTI that cannot be read ({type(error).__name__})") from error
    return np.ascontiguousarray(values if values.ndim == 4 else values[..., None])
