"""DICOM: pictures and volumes as a viewer shows them, and a series of slices as one volume."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.extras import is_installed

SUFFIXES = (".dcm", ".dicom", ".ima")
GREY = ("MONOCHROME1", "MONOCHROME2")
NEEDS = "needs pydicom: pip install 'fewbytes[medical]'"
UNITS = ("CT", "PT")
"""Modalities whose rescaled values are comparable everywhere, whether a file has slope and intercept (else 1, 0) or
not."""
Scale = Literal["window", "units", "stored"]
"""The scale of values: 0..1 by the file's window; rescaled by slope and intercept (in CT Hounsfield units); or stored
values divided by the maximum of their bits."""
WORDS: dict[Scale, str] = {
    "window": "cut to the window that each file names, 0 to 1",
    "units": "as slope and intercept say (in CT Hounsfield units); no file names a window",
    "stored": "stored values, as parts of the highest that their bits hold; no file names a window, and none rescales",
}


def scale_of(paths: Sequence[Path]) -> tuple[Scale | None, str]:
    """The common scale of all grey DICOM files among these, including those in folders of slices, and a note; (None,
    "") without any. Raises UserError if some files name a window and others do not."""
    series = [path for path in paths if path.is_dir()]
    slices = [each for path in series for each in sorted(path.iterdir())]
    files = [path for path in (*slices, *(p for p in paths if p not in series)) if path.suffix.lower() in SUFFIXES]
    heads = [head for head in map(_head_of, files) if str(head.get("PhotometricInterpretation", "")) in GREY]
    if not heads:
        return None, ""
    scale = _common_scale(heads)
    notes = [f"DICOM: {WORDS[scale]}"]
    notes += [f"{len(series)} folders of slices are volumes"] if series else []
    turned = sum(head.PhotometricInterpretation == "MONOCHROME1" for head in heads)
    notes += [f"{turned} in which the lowest value is white turned about"] if turned else []
    return scale, "; ".join(notes)


def _common_scale(heads: Sequence[Any]) -> Scale:
    windowed = sum(_window(head) is not None for head in heads)
    if 0 < windowed < len(heads):
        remedy = "write one into all, or remove it from all"
        raise UserError(
            f"{windowed} of {len(heads)} DICOM files name a window (WindowCenter, WindowWidth) and the others do not, "
            f"so that their values would have different scales: {remedy}",
            public=f"some DICOM files name a window and others do not: {remedy}",
        )
    return "window" if windowed else "units" if any(map(_has_units, heads)) else "stored"


def read_dicom(path: Path, scale: Scale | None = None) -> NDArray[np.float32]:
    """A picture (height, width, 1 or 3), a volume (slices, height, width, 1 or 3) of a file of several frames, or of a
    folder of slices, in the order of their position in the body.

    Grey values are on a `scale`, the data set's (None: this file's or folder's); colours are divided by the maximum of
    their bits. If the lowest value is white (MONOCHROME1), values are inverted within the range of the stored bits.
    Raises UserError, without the file's name.
    """
    if path.is_dir():
        slices = sorted((each for each in path.iterdir() if each.suffix.lower() in SUFFIXES), key=_depth)
        scale = scale or _common_scale([_head(each) for each in slices])
        pictures = [read_dicom(each, scale) for each in slices]
        if len({picture.shape for picture in pictures}) != 1:
            raise UserError("has slices that differ in size: give each series a folder of its own")
        return np.stack(pictures)
    pydicom, how = _library(), importlib.import_module("pydicom.pixels")

    try:
        file = pydicom.dcmread(path)
        pixels = file.pixel_array
        meaning = str(file.get("PhotometricInterpretation", "MONOCHROME2"))
        if meaning in GREY:
            return _grey(file, pixels, scale or _common_scale([file])).astype(np.float32)[..., None]
        if meaning.startswith("PALETTE"):
            pixels = how.apply_color_lut(pixels, file)
            return np.asarray(pixels / np.iinfo(pixels.dtype).max, dtype=np.float32)
        if meaning.startswith("YBR") and file.file_meta.TransferSyntaxUID.is_compressed is False:
            pixels = how.convert_color_space(pixels, meaning, "RGB", per_frame=True)
        return np.asarray(pixels / ((1 << int(file.BitsStored)) - 1), dtype=np.float32)
    except Exception as error:  # the library and its decoders raise many types
        raise UserError(f"is DICOM that cannot be read ({type(error).__name__})") from error


def _grey(file: Any, pixels: NDArray[Any], scale: Scale) -> NDArray[np.float64]:
    """Stored values converted to `scale`."""
    bits, signed = int(file.BitsStored), int(file.get("PixelRepresentation", 0))
    ends = np.array([-(1 << (bits - 1)), (1 << (bits - 1)) - 1] if signed else [0, (1 << bits) - 1])
    turned = file.get("PhotometricInterpretation") == "MONOCHROME1"
    if scale == "window":
        shown = _windowed(_rescaled(file, pixels), file)
        return 1 - shown if turned else shown
    if scale == "units":
        pixels, ends = _rescaled(file, pixels), _rescaled(file, ends)
    values = ends.sum() - pixels.astype(np.float64) if turned else pixels.astype(np.float64)
    return values if scale == "units" else values / ends[1]


def _rescaled(file: Any, values: NDArray[Any]) -> NDArray[np.float64]:
    if "ModalityLUTSequence" in file:
        apply = importlib.import_module("pydicom.pixels").apply_modality_lut
        return np.asarray(apply(values, file), dtype=np.float64)
    return values * _slope(file) + float(file.get("RescaleIntercept") or 0)


def _slope(file: Any) -> float:
    return float(file.get("RescaleSlope") or 1)


def _has_units(file: Any) -> bool:
    """Whether values must be rescaled: slope and intercept change something, or the modality requires it."""
    changed = _slope(file) != 1 or float(file.get("RescaleIntercept") or 0) != 0 or "ModalityLUTSequence" in file
    return changed or str(file.get("Modality", "")) in UNITS or str(file.get("RescaleType", "")) == "HU"


def _window(file: Any) -> tuple[float, float] | None:
    """Centre and width of the file's first window, if it has one."""
    found = []
    for name in ("WindowCenter", "WindowWidth"):
        value = file.get(name)
        value = value[0] if isinstance(value, Sequence) and not isinstance(value, str) and len(value) else value
        found.append(None if value in (None, "") or value == [] else float(value))
    centre, width = found
    return None if centre is None or width is None or width <= 0 else (centre, width)


def _windowed(values: NDArray[np.float64], file: Any) -> NDArray[np.float64]:
    """Values mapped to 0..1 by the file's window (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    centre, width = _window(file) or (0.5, 1.0)
    kind = str(file.get("VOILUTFunction") or "LINEAR")
    if kind == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(-4 * (values - centre) / width)))
    if kind == "LINEAR_EXACT":
        return np.clip((values - centre) / width + 0.5, 0, 1)
    if width <= 1:
        return (values > centre - 0.5).astype(np.float64)
    return np.clip((values - (centre - 0.5)) / (width - 1) + 0.5, 0, 1)


def is_series(files: Sequence[Path]) -> bool:
    """Whether files are two or more slices of one series."""
    if len(files) < 2 or any(path.suffix.lower() not in SUFFIXES for path in files):
        return False
    heads = [_head_of(path) for path in files]
    series = {str(head.get("SeriesInstanceUID", "")) for head in heads}
    return len(series) == 1 and "" not in series and all("ImagePositionPatient" in head for head in heads)


def _head_of(path: Path) -> Any:
    """A file's tags. Raises UserError with its name."""
    try:
        return _head(path)
    except UserError as error:
        raise UserError(f"{path} {error}", public=error.public or f"an image {error}") from None


def _head(path: Path) -> Any:
    pydicom = _library()
    try:
        return pydicom.dcmread(path, stop_before_pixels=True)
    except Exception as error:  # the library raises many types
        raise UserError("is DICOM that cannot be read") from error


def _depth(path: Path) -> tuple[float, int, str]:
    """A slice's position along the series' normal, or its number in the series."""
    head = _head(path)
    if "ImagePositionPatient" in head and "ImageOrientationPatient" in head:
        along = np.cross(*np.reshape(np.asarray(head.ImageOrientationPatient, dtype=float), (2, 3)))
        return float(np.dot(along, np.asarray(head.ImagePositionPatient, dtype=float))), 0, path.name
    return 0.0, int(head.get("InstanceNumber", 0) or 0), path.name


def _library() -> Any:
    if not is_installed("pydicom"):
        raise UserError(f"is DICOM, which {NEEDS}", public=f"DICOM {NEEDS}")
    return importlib.import_module("pydicom")
