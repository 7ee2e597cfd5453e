"""Runs the command line: in a process forked from the tests', where what they have imported is there already, or in
theirs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest
from runs import PATIENCE

from fewbytes.__main__ import main

for name in ("analysis.attack", "analysis.probe", "experiments.compare", "experiments.plan", "reproduce"):
    importlib.import_module(f"fewbytes.{name}")  # once, and not in every command


def fewbytes(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """`fewbytes ARGUMENTS` in the folder `cwd`, with `env` over the environment. Raises TimeoutError (seconds)."""
    words = [str(argument) for argument in arguments]
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        process = get_context("fork").Process(target=_command, args=(words, cwd, env or {}, out, errors))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: none computes here
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"fewbytes {' '.join(words)}: not done after {timeout:g} s")
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, process.exitcode, out.read(), errors.read())


def ended(capsys, monkeypatch, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of a command, run in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["fewbytes", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def _command(words: list[str], cwd: Path | None, env: dict[str, str], out: IO[str], errors: IO[str]) -> None:
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    for file, number in ((out, 1), (errors, 2)):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = out, errors
    sys.argv = ["fewbytes", *words]
    main()
