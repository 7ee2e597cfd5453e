"""Files that are never half-written, folders that are never left behind or used twice at once."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":  # nothing is locked there
    import fcntl


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes `path`'s place when the block ends well, and leaves nothing when it does not.

    In a folder that only its owner can enter it is its owner's to read. `sync`: survive a loss of power too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        mode = 0o666 if path.parent.stat().st_mode & 0o077 else 0o600
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        _sync(path.parent)


def make_durable(*paths: Path) -> None:
    """Have these files and the names in these folders survive a loss of power.

    Asked for side by side: a file system commits together what is asked for at once.
    """
    with ThreadPoolExecutor(max(1, min(16, len(paths)))) as threads:
        list(threads.map(_sync, paths))


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that are gone have left half-written in a folder and those below it."""
    for path in folder.rglob(".*.tmp"):
        number = path.suffixes[-2][1:] if len(path.suffixes) > 1 else ""
        if number.isdecimal() and not _running(int(number)):
            path.unlink(missing_ok=True)


def _running(number: int) -> bool:
    """Whether a process of that number runs on this machine."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def private_folder(path: Path) -> None:
    """`make_folder`, of one that only its owner can enter."""
    make_folder(path, mode=0o700)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless they are there; what was made survives a loss of power."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
    for each in missing:
        _sync(each.parent)


def lock(path: Path, wait: bool = False) -> BinaryIO | None:
    """Hold the file at `path` until what is returned is closed, or this process and its children are gone.

    None if somebody else holds it, unless `wait`.
    """
    file = open(path, "ab")  # noqa: SIM115 (open as long as the lock is held)
    try:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        return None
    return file


class ScratchFolder:
    """A temporary folder that goes with its process: `close` removes it, or, after a kill -9, the next one made.

    It is made in `parent`, by default the system's folder for temporary files, with `kind` in its name.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for left in parent.glob(f"fewbytes-{kind}-*/lock"):
            with suppress(OSError):
                held = lock(left)
                if held is not None:
                    shutil.rmtree(left.parent, ignore_errors=True)
                    held.close()
        self.path = Path(tempfile.mkdtemp(prefix=f"fewbytes-{kind}-", dir=parent))
        self._lock = lock(self.path / "lock")

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def write_text(path: Path, text: str) -> None:
    """Write a text file at once, or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
