"""Files compressed by gzip, zip or Zstandard, decompressed within a limit of memory."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path
from typing import Protocol

import zstandard

from fewbytes.base.unfolded import check_unfolded
from fewbytes.data.schema import refused

PACKED = (".gz", ".zip", ".zst")
PIECE = 1 << 22


def unpacked(path: Path) -> bytes:
    """The content of a compressed file, for zip of its only file. Raises UserError for a file that is none, is damaged
    or expands too much."""
    try:
        match path.suffix.lower():
            case ".gz":
                with gzip.open(path) as file:
                    return _read(path, file)
            case ".zst":
                with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as file:
                    return _read(path, file)
        with zipfile.ZipFile(path) as archive:
            names = [each for each in archive.namelist() if not each.endswith("/") and "__MACOSX" not in each]
            if len(names) != 1:
                what = f"holds {len(names)} files"
                raise refused(str(path), what, "pack one table alone")
            with archive.open(names[0]) as file:
                return _read(path, file)
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        zlib.error,
        zipfile.BadZipFile,
        zstandard.ZstdError,
    ):
        what = f"cannot be unpacked as {path.suffix.lower()[1:]}"
        raise refused(str(path), what, "write it again") from None


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def _read(path: Path, file: _Readable) -> bytes:
    pieces, size = [], 0
    while piece := file.read(PIECE):
        pieces.append(piece)
        size += len(piece)
        check_unfolded(path, size)
    return b"".join(pieces)
