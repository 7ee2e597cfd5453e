"""Files written at once: who can read them, and what is left of processes that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from cases import CASES, tiny_task

import fewbytes as fb
from fewbytes.base.files import private_folder, remove_leftovers, replacing


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
