"""NIfTI: volumes, their axes turned to the body's, their values as slope and intercept say."""

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
    """Whether a file is called as NIfTI."""
    return path.name.lower().endswith(SUFFIXES)


def read_nifti(path: Path) -> NDArray[np.float32]:
    """A volume (x, y, z, channels) of the values as they are, its axes from left to right, back to front and down to
    up, whatever order the file has them in. Raises UserError, without the file's name."""
    if not is_installed("nibabel"):
        raise UserError("is NIfTI, which needs nibabel: pip install 'fewbytes[medical]'")
    nibabel: Any = importlib.import_module("nibabel")

    try:
        image = nibabel.load(path)
        check_unfolded(path, int(np.prod(image.shape)) * image.get_data_dtype().itemsize)
        values = np.asarray(nibabel.as_closest_canonical(image).dataobj, dtype=np.float32)
    except UserError:
        raise
    except Exception as error:  # the library's are many
        raise UserError(f"is NIfTI that cannot be read ({type(error).__name__})") from error
    return np.ascontiguousarray(values if values.ndim == 4 else values[..., None])
