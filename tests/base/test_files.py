"""Files written at once: who can read them, and what is left of processes that were killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cases import CASES, tiny_task

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.base.files import ScratchFolder, lock, private_folder, remove_leftovers, replacing

SOMEBODY = 65534  # another account
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another account")


def puzzle(place: Path, kind: str) -> None:
    """Put there what waits for ever, or leads elsewhere, when it is opened."""
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(place.parents[1] / "made elsewhere")
    else:
        with socket.socket(socket.AF_UNIX) as it:
            it.bind(str(place))


def test_a_file_in_a_private_folder_is_its_owners_alone(tmp_path):
    private_folder(tmp_path / "a" / "private")
    (tmp_path / "open").mkdir()
    for folder in (tmp_path / "open", tmp_path / "a" / "private"):
        with replacing(folder / "file") as file:
            file.write(b"x")
    assert (tmp_path / "a" / "private").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "private" / "file").stat().st_mode & 0o777 == 0o600
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "open" / "file").stat().st_mode & 0o777 == 0o666 & ~mask


def test_what_a_killed_process_left_half_written_goes_when_the_next_run_begins(tmp_path):
    script = (
        "import os, signal; from pathlib import Path; from fewbytes.base.files import replacing\n"
        f"with replacing(Path({str(tmp_path / 'run')!r}) / 'checkpoint' / '1-2.state') as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    fb.run(CASES["fedavg"], tiny_task(), rounds=1, out=tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    (left,) = checkpoint.glob(".*.tmp")
    ours = checkpoint / f".mine.{os.getpid()}.tmp"  # of a process that is there
    ours.touch()
    fb.run(CASES["fedavg"], tiny_task(), rounds=1, out=tmp_path / "run", resume=True)
    assert not left.exists()
    assert ours.exists()
    (tmp_path / ".notes.tmp").touch()
    remove_leftovers(tmp_path)
    assert (tmp_path / ".notes.tmp").exists()  # nobody's number: not ours


@pytest.mark.parametrize("kind", ["pipe", "link", "socket"])
def test_what_is_no_file_is_never_opened_as_a_lock(tmp_path, kind):
    (tmp_path / "folder").mkdir()
    place = tmp_path / "folder" / "lock"
    puzzle(place, kind)
    with pytest.raises(UserError, match="lock is a link"):
        lock(place)
    assert {path.name for path in tmp_path.iterdir()} == {"folder"}  # nothing made where the link leads
    place.unlink()
    held = lock(place)  # control: a file is
    assert held is not None
    assert lock(place) is None
    held.close()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_neighbour_s_folder_in_the_shared_temporary_one_stops_no_run(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trap = tmp_path / "fewbytes-run-abcdefgh"
    trap.mkdir(mode=0o700)
    puzzle(trap / "lock", kind)
    if kind == "link":
        os.mkfifo(tmp_path / "made elsewhere")
    assert len(fb.run(CASES["fedavg"], tiny_task(), rounds=1).rounds) == 1
    assert os.path.lexists(trap / "lock")


def test_only_folders_that_this_account_alone_can_enter_are_removed_as_left_over(tmp_path):
    away = tmp_path / "away"
    for place in (away, *(tmp_path / f"fewbytes-test-{name}" for name in ("mine", "open"))):
        place.mkdir(mode=0o700)
        (place / "lock").touch()
        (place / "kept").touch()
    (tmp_path / "fewbytes-test-open").chmod(0o777)
    (tmp_path / "fewbytes-test-link").symlink_to(away)
    ScratchFolder("test", tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"away", "fewbytes-test-open", "fewbytes-test-link"}
    assert (away / "kept").exists()


@root_only
def test_another_account_s_folder_is_neither_left_over_nor_private(tmp_path):
    theirs = tmp_path / "fewbytes-test-theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "lock").touch()
    os.chown(theirs, SOMEBODY, SOMEBODY)
    ScratchFolder("test", tmp_path).close()
    assert (theirs / "lock").exists()
    theirs.chmod(0o777)
    with pytest.raises(UserError, match=r"theirs .*another account"):
        private_folder(theirs)


def test_a_private_folder_is_no_link_and_is_shut_where_it_was_open(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(UserError, match="link is a link"):
        private_folder(tmp_path / "link")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755
    private_folder(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["pipe", "link", "socket"])
def test_what_lies_where_a_file_is_first_written_is_not_written_to(tmp_path, kind):
    (tmp_path / "folder").mkdir()
    puzzle(tmp_path / "folder" / f".file.{os.getpid()}.tmp", kind)
    with replacing(tmp_path / "folder" / "file") as file:
        file.write(b"x")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
    assert (tmp_path / "folder" / "file").read_bytes() == b"x"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
