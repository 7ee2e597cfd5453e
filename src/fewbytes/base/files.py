"""Files that are never half-written; folders of this account that one process uses at a time and that are removed."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fewbytes.base.errors import UserError

if sys.platform != "win32":  # without locks
    import fcntl


SIDE_BY_SIDE = 16  # number of files synced at the same time


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[BinaryIO]:
    """A file to write that replaces `path` when the block succeeds, and is removed when it fails.

    Only the owner can read it in a folder that only its owner can enter. `sync`: survive a power failure too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        mode = 0o666 if path.parent.stat().st_mode & 0o077 else 0o600
        temporary.unlink(missing_ok=True)  # left by a process that had the same id; whatever it is, never write to it
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
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
    """Make these files, and the names in these folders, survive a power failure."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        for each in begin_syncing(paths, threads):
            each.result()


def begin_syncing(paths: Iterable[Path], threads: ThreadPoolExecutor) -> list[Future[None]]:
    """Start syncing these files and the names in these folders in parallel: a file system commits simultaneous requests
    together. Each future raises OSError, with its path, on failure."""
    return [threads.submit(_sync, path) for path in paths]


def make_all_durable(folder: Path) -> None:
    """`make_durable` for a folder, its name, and everything in it."""
    inside = (path for path in folder.rglob("*") if path.is_dir() or path.is_file())
    make_durable(folder.parent, folder, *inside)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(opened)


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files of terminated processes in a folder and its subfolders."""
    for path in folder.rglob(".*.tmp"):
        number = path.suffixes[-2][1:] if len(path.suffixes) > 1 else ""
        if number.isdecimal() and not _running(int(number)):
            path.unlink(missing_ok=True)


def _running(number: int) -> bool:
    """Whether a process with this id runs on this machine."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another account
        return True
    return True


def check_writable(folder: Path) -> None:
    """Make a folder, if it is not there, and write a file in it that is removed again. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"fewbytes")
            file.flush()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write there: {error.strerror}; a node keeps its client's state in it"
        ) from None


def private_folder(path: Path) -> None:
    """`make_folder` that only its owner can enter. Raises UserError for a link or another account's folder.

    Accepts another account's folder if nobody else can enter it: some file systems report one owner for all files.
    """
    make_folder(path, mode=0o700)
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        raise UserError(f"{path} is a link, where a folder of this account's is wanted: remove it")
    if about.st_mode & 0o077 and sys.platform != "win32":
        if about.st_uid not in (os.geteuid(), 0):
            raise UserError(f"{path} belongs to another account: remove it, or choose another folder")
        with suppress(OSError):  # a file system without modes
            path.chmod(0o700)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents where they are missing; new folders survive a power failure."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
    for each in missing:
        _sync(each.parent)


def check_own(folder: Path) -> None:
    """Raises UserError for a link that leads out of a run's folder, and for a pipe or device in it. An untrusted folder
    may have them; so nothing is read or written elsewhere, or blocks. `folder` itself may be a link, or missing."""
    root = folder.resolve()
    for place, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(place, name)
            kind = path.lstat().st_mode
            if stat.S_ISLNK(kind) and not (target := Path(os.path.realpath(path))).is_relative_to(root):
                raise UserError(f"{path} leads out of the folder {folder}, to {target}: replace the link by a copy")
            if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                raise UserError(f"{path} is a pipe or a device, which no run leaves: remove it")


def open_plain(path: str, flags: int) -> int:
    """An `opener` for `open`: creates and opens a regular file at exactly this path, without blocking.

    Raises UserError for a link, pipe, socket or device, which other users may put into a shared folder.
    """
    try:
        wanted = flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        opened = os.open(path, wanted, 0o600)
    except OSError:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise UserError(_NO_FILE.format(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UserError(_NO_FILE.format(path))
    return opened


_NO_FILE = "{} is a link, a pipe or a device, where a file of this program's is wanted: remove it"


def lock(path: Path, wait: bool = False) -> BinaryIO | None:
    """Lock the file at `path` until the returned file is closed, or this process and its children have ended.

    Returns None if another process has the lock, unless `wait`. Raises UserError if `path` is not a regular file.
    """
    file = open(path, "ab", opener=open_plain)  # noqa: SIM115 (open as long as it is locked)
    try:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        return None
    return file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file at `path`, waiting for other processes. Raises UserError if it is not a regular file."""
    handle = lock(path, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()


class ScratchFolder:
    """A temporary folder of one process: `close` removes it, or, after a kill -9, the next one created does.

    It is created in `parent` (default: the system's folder for temporary files), with `kind` in its name. All accounts
    share that folder: a leftover is touched only if nobody but this account can have created and filled it.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for left in parent.glob(f"fewbytes-{kind}-*/lock"):
            with suppress(OSError, UserError):
                handle = lock(left) if _is_mine(left.parent) else None
                if handle is not None:
                    shutil.rmtree(left.parent, ignore_errors=True)
                    handle.close()
        self.path = Path(tempfile.mkdtemp(prefix=f"fewbytes-{kind}-", dir=parent))
        self._lock = lock(self.path / "lock")

    def close(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _is_mine(folder: Path) -> bool:
    """Whether this is a folder (not a link) of this account that no other account can enter."""
    about = folder.lstat()
    alone = sys.platform == "win32" or (about.st_uid == os.geteuid() and not about.st_mode & 0o077)
    return stat.S_ISDIR(about.st_mode) and alone


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as file:
        file.write(text.encode())
