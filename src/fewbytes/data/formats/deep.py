"""Pictures of which Pillow keeps 8 bits a colour, or reads none: coloured PNG of 16 bits, and TIFF of any numbers."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.extras import is_there


def deep_png(data: bytes) -> NDArray[Any]:
    """A PNG's pixels (height, width, channels), uint16. Raises UserError without imagecodecs, and for one that is
    damaged."""
    if not is_there("imagecodecs"):
        raise UserError("has colours of 16 bits, which need imagecodecs: pip install 'fewbytes[pictures]'")
    import imagecodecs

    try:
        return np.asarray(imagecodecs.png_decode(data))
    except Exception as error:  # the library's own
        raise UserError("is a PNG that cannot be read") from error


def deep_tiff(data: bytes) -> NDArray[Any]:
    """The pixels of a TIFF of one page, (height, width) or (height, width, channels), in the file's type.

    Raises UserError without tifffile, for several pages, and for what it cannot read.
    """
    if not is_there("tifffile"):
        raise UserError(
            "is a TIFF of more than 8 bits a colour, which needs tifffile: pip install 'fewbytes[pictures]'"
        )
    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            pages = [page for page in file.pages if not getattr(page, "is_reduced", False)]
            if len(pages) != 1:
                raise UserError(f"has {len(pages)} pages: give each image a file of its own")
            pixels = np.asarray(pages[0].asarray())
            planar = getattr(pages[0], "planarconfig", 1) == 2
    except UserError:
        raise
    except Exception as error:  # the library's are many
        raise UserError("is a TIFF that cannot be read") from error
    return pixels.transpose(1, 2, 0) if planar and pixels.ndim == 3 else pixels
