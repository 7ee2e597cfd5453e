"""DICOM: pictures and volumes as a viewer shows them, and a series of slices as one volume."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.extras import is_there

SUFFIXES = (".dcm", ".dicom")
NEEDS = "needs pydicom: pip install 'fewbytes[medical]'"


def read_dicom(path: Path) -> NDArray[np.float32]:
    """A picture (height, width, 1 or 3), a volume (slices, height, width, 1 or 3) of a file of several frames, or of
    a folder of slices, in the order in which they lie in the body.

    Stored values become those that slope and intercept say. Where the file names a window they are cut to it and scaled
    to 0..1; without one those that nothing rescales are divided by the highest that their bits hold, and rescaled ones
    (of a CT, Hounsfield units) are as they are. Where the lowest value is white (MONOCHROME1) they are turned about.
    Raises UserError, without the file's name.
    """
    if path.is_dir():
        slices = sorted((each for each in path.iterdir() if each.suffix.lower() in SUFFIXES), key=_depth)
        pictures = [read_dicom(each) for each in slices]
        if len({picture.shape for picture in pictures}) != 1:
            raise UserError("has slices that differ in size: give each series a folder of its own")
        return np.stack(pictures)
    pydicom, how = _library(), importlib.import_module("pydicom.pixels")

    try:
        file = pydicom.dcmread(path)
        pixels = file.pixel_array
        meaning = str(file.get("PhotometricInterpretation", "MONOCHROME2"))
        if meaning.startswith(("YBR", "PALETTE")):
            if meaning.startswith("PALETTE"):
                pixels = how.apply_color_lut(pixels, file)
            elif file.file_meta.TransferSyntaxUID.is_compressed is False:
                pixels = how.convert_color_space(pixels, meaning, "RGB", per_frame=True)
            meaning = "RGB"
        if meaning == "RGB":
            return np.asarray(pixels / np.iinfo(pixels.dtype).max, dtype=np.float32)
        rescaled = "RescaleSlope" in file or "ModalityLUTSequence" in file
        values = np.asarray(how.apply_modality_lut(pixels, file), dtype=np.float64)
        if "WindowCenter" in file and "WindowWidth" in file:
            low, high = 0.0, float((1 << int(file.BitsStored)) - 1)
            if rescaled or file.get("PixelRepresentation", 0):
                ends = _ends(file, how.apply_modality_lut)
                low, high = float(ends.min()), float(ends.max())
            values = (np.asarray(how.apply_windowing(values, file), dtype=np.float64) - low) / ((high - low) or 1.0)
        elif not rescaled:
            values = values / ((1 << (int(file.BitsStored) - int(file.get("PixelRepresentation", 0)))) - 1)
    except UserError:
        raise
    except Exception as error:  # the library's are many, and its decoders'
        raise UserError(f"is DICOM that cannot be read ({type(error).__name__})") from error
    if meaning == "MONOCHROME1":
        values = values.max() + values.min() - values if rescaled and "WindowCenter" not in file else 1 - values
    return values.astype(np.float32)[..., None]


def _ends(file: Any, apply: Any) -> NDArray[np.float64]:
    """The lowest and the highest value that the stored bits can hold, rescaled: what a window is scaled to."""
    bits, signed = int(file.BitsStored), int(file.get("PixelRepresentation", 0))
    ends = np.array([-(1 << (bits - 1)), (1 << (bits - 1)) - 1] if signed else [0, (1 << bits) - 1])
    return np.asarray(apply(ends, file), dtype=np.float64)


def is_series(files: Sequence[Path]) -> bool:
    """Whether files are the slices of one series, two or more."""
    if len(files) < 2 or any(path.suffix.lower() not in SUFFIXES for path in files):
        return False
    heads = [_head(path) for path in files]
    series = {str(head.get("SeriesInstanceUID", "")) for head in heads}
    return len(series) == 1 and "" not in series and all("ImagePositionPatient" in head for head in heads)


def _head(path: Path) -> Any:
    pydicom = _library()
    try:
        return pydicom.dcmread(path, stop_before_pixels=True)
    except Exception as error:  # the library's are many
        raise UserError(f"{path} is DICOM that cannot be read", told="DICOM that cannot be read") from error


def _depth(path: Path) -> tuple[float, int, str]:
    """Where a slice lies along the series' normal, or which of its slices it is."""
    head = _head(path)
    if "ImagePositionPatient" in head and "ImageOrientationPatient" in head:
        along = np.cross(*np.reshape(np.asarray(head.ImageOrientationPatient, dtype=float), (2, 3)))
        return float(np.dot(along, np.asarray(head.ImagePositionPatient, dtype=float))), 0, path.name
    return 0.0, int(head.get("InstanceNumber", 0) or 0), path.name


def _library() -> Any:
    if not is_there("pydicom"):
        raise UserError(f"is DICOM, which {NEEDS}", told=f"DICOM {NEEDS}")
    return importlib.import_module("pydicom")
