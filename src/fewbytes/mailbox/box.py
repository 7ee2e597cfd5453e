"""A folder of files, on this machine's disks or in an object store (s3://…), through fsspec."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewbytes.base.errors import FewbytesError, UserError, one_line
from fewbytes.base.extras import is_installed
from fewbytes.base.files import open_plain, replacing
from fewbytes.mailbox.sealed import NotAccepted

LARGEST = 1 << 32  # bytes of a file
LOCAL = ("file", "local")


class BoxError(FewbytesError):
    """A box cannot be reached, or refuses access."""


class Box:
    """The files of one folder. `place`: a path, or an address such as s3://bucket/folder.

    A file is never half-written. Raises UserError for a place that no installed package can reach; every method raises
    BoxError if it cannot be reached.
    """

    def __init__(self, place: str) -> None:
        kind = place.partition("://")[0] if "://" in place else ""
        for package, wanted in (("fsspec", True), ("s3fs", kind == "s3")):
            if wanted and not is_installed(package):
                raise UserError(f"{place} needs {package}: pip install 'fewbytes[mailbox]'")
        import fsspec.core

        self.place = place if kind else os.path.abspath(place)
        options: dict[str, Any] = {} if kind in ("", *LOCAL) else {"use_listings_cache": False}
        try:
            self._files, self._path = fsspec.core.url_to_fs(self.place, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"{place} is not a place for files: {one_line(error, 300)}") from None
        self.is_local = kind in ("", *LOCAL)

    def below(self, *names: str) -> Box:
        """The box of a folder in this one."""
        return Box("/".join((self.place.rstrip("/"), *names)))

    def is_there(self) -> bool:
        """Whether its folder exists."""
        with self._reached():
            return bool(self._files.isdir(self._path))

    def make(self) -> None:
        """Make the folder, if it is not there; an object store needs none."""
        if self.is_local:
            with self._reached():
                self._files.makedirs(self._path, exist_ok=True)

    def names(self, end: str) -> list[str]:
        """The names of the files that end so, in ascending order; none without the folder."""
        with self._reached(missing_ok=True):
            found = self._files.ls(self._path, detail=False)
            names = (path.rstrip("/").rpartition("/")[2] for path in found)
            return sorted(name for name in names if name.endswith(end) and not name.startswith("."))
        return []

    def read(self, name: str) -> bytes:
        """A file's content; empty if it has gone. Raises NotAccepted for one above LARGEST, and on disks for a link, a
        pipe or a device, which others may have put there."""
        with self._reached(missing_ok=True):
            path = self._of(name)
            if self._files.size(path) > LARGEST:
                raise NotAccepted(f"it has more than {LARGEST:,} bytes")
            if not self.is_local:
                content: bytes = self._files.cat_file(path)
                return content
            try:
                with open(path, "rb", opener=open_plain) as file:
                    return file.read()
            except UserError:
                raise NotAccepted("it is a link, a pipe or a device") from None
        return b""

    def write(self, name: str, content: bytes) -> None:
        """Write a file, in place of one with that name."""
        with self._reached():
            if self.is_local:
                with replacing(Path(self._of(name))) as file:
                    file.write(content)
            else:  # a store shows an object once it is whole
                self._files.pipe_file(self._of(name), content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._reached(missing_ok=True):
            self._files.rm_file(self._of(name))

    def rename(self, name: str, new: str) -> None:
        """Rename a file, if it is there."""
        with self._reached(missing_ok=True):
            self._files.mv(self._of(name), self._of(new))

    def _of(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    @contextmanager
    def _reached(self, missing_ok: bool = False) -> Iterator[None]:
        """Raises BoxError for an error of the file system or store, whose packages raise errors of their own.
        `missing_ok`: a file or folder that is not there is no error, and ends the block."""
        try:
            yield
        except NotAccepted:
            raise
        except Exception as error:
            if missing_ok and isinstance(error, FileNotFoundError):
                return
            raise BoxError(f"{self.place} cannot be used: {one_line(error, 300)}") from None
