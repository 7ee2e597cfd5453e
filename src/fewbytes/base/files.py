"""Files that are never half-written, folders that are never left behind, used twice at once or somebody else's."""

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

if sys.platform != "win32":  # nothing is locked there
    import fcntl


SIDE_BY_SIDE = 16  # files that are synced at once


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes `path`'s place when the block ends well, and leaves nothing when it does not.

    In a folder that only its owner can enter it is its owner's to read. `sync`: survive a loss of power too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        mode = 0o666 if path.parent.stat().st_mode & 0o077 else 0o600
        temporary.unlink(missing_ok=True)  # of a process that had this number; whatever it is, it is not written to
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
    """Have these files and the names in these folders survive a loss of power."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        for each in begin_syncing(paths, threads):
            each.result()


def begin_syncing(paths: Iterable[Path], threads: ThreadPoolExecutor) -> list[Future[None]]:
    """Begin to make these files and the names in these folders durable, side by side: a file system commits together
    what is asked for at once. Each raises OSError, with its path, where that fails."""
    return [threads.submit(_sync, path) for path in paths]


def make_all_durable(folder: Path) -> None:
    """As `make_durable`, of a folder, its name, and all that is in it."""
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
    """`make_folder`, of one that only its owner can enter. Raises UserError for a link or another account's folder.

    Another account's counts as ours if nobody else can enter it: some file systems give all files one owner.
    """
    make_folder(path, mode=0o700)
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        raise UserError(f"{path} is a link, where a folder of this account's is wanted: remove it")
    if about.st_mode & 0o077 and sys.platform != "win32":
        if about.st_uid not in (os.geteuid(), 0):
            raise UserError(f"{path} belongs to another account: remove it, or choose another folder")
        with suppress(OSError):  # a file system that knows no modes
            path.chmod(0o700)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless they are there; what was made survives a loss of power."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
    for each in missing:
        _sync(each.parent)


def check_own(folder: Path) -> None:
    """Raises UserError for a link out of a folder of ours, and for a pipe or a device in it, as a stranger's may have:
    nothing is read or written elsewhere, or waited for. The folder may be a link itself, or absent."""
    root = folder.resolve()
    for place, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(place, name)
            kind = path.lstat().st_mode
            if stat.S_ISLNK(kind) and not (target := Path(os.path.realpath(path))).is_relative_to(root):
                raise UserError(f"{path} leads out of the folder {folder}, to {target}: put that in its place")
            if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                raise UserError(f"{path} is a pipe or a device, which no run leaves: remove it")


def open_plain(path: str, flags: int) -> int:
    """An `opener` for `open`: makes and opens a regular file at this very place, without waiting for anybody.

    Raises UserError for a link, a pipe, a socket or a device, as others can put in a folder that they share.
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
    """Hold the file at `path` until what is returned is closed, or this process and its children are gone.

    None if somebody else holds it, unless `wait`. Raises UserError for what is no file.
    """
    file = open(path, "ab", opener=open_plain)  # noqa: SIM115 (open as long as the lock is held)
    try:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        return None
    return file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file at `path`, once nobody else does. Raises UserError for what is no file."""
    handle = lock(path, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()


class ScratchFolder:
    """A temporary folder that goes with its process: `close` removes it, or, after a kill -9, the next one made.

    It is made in `parent`, by default the system's folder for temporary files, with `kind` in its name. All accounts
    share that one: what looks like a folder left there is touched only if this account alone can have made and filled
    it.
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
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _is_mine(folder: Path) -> bool:
    """Whether this is a folder, no link to one, of this account's that no other can enter."""
    about = folder.lstat()
    alone = sys.platform == "win32" or (about.st_uid == os.geteuid() and not about.st_mode & 0o077)
    return stat.S_ISDIR(about.st_mode) and alone


def write_text(path: Path, text: str) -> None:
    """Write a text file at once, or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
