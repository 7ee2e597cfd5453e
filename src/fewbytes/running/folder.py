"""The folder of a run: locked by one process at a time, created once, cleaned when a run goes back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.base.files import lock, private_folder, remove_leftovers, write_text
from fewbytes.core.method import Method

EVALUATION = ("evaluation.json", "evaluation.html")
"""Files of `fewbytes evaluate` in a run folder."""
BASELINES = "evaluation"  # the folder of runs that it compares with


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it against other processes. Raises UserError if one runs in it."""
    try:
        private_folder(folder / "checkpoint")
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{folder} cannot be a run folder: a file is in the way") from None
    mine = lock(folder / "checkpoint" / "lock")
    if mine is None:
        raise UserError(f"another process is running in {folder}: wait for it, or choose another folder")
    with mine:
        remove_leftovers(folder)
        yield


def begin_folder(folder: Path, method: Method, rounds: int, seed: int, config: str | None) -> None:
    """Write the first files of a run; `config`: text of config.toml, by default the method's parameters. Raises
    UserError if the folder holds a run."""
    if (folder / "config.toml").exists():
        raise UserError(f"{folder} already holds a run: choose another folder, or resume it with resume=True")
    if (folder / "gallery").exists():
        raise UserError(f"{folder} already holds a gallery, of another run: choose another folder")
    if config is None:
        head = {"method": method.method_name, "rounds": rounds, "seed": seed}
        config = msgspec.toml.encode(head | {"parameters": method.parameters}).decode()
    write_text(folder / "config.toml", config)
    write_text(folder / "rounds.jsonl", "")


def forget_result(folder: Path) -> None:
    """Remove results of rounds that will be repeated."""
    of_later = [folder / name for name in ("result.json", "ledger.parquet", "report.html", *EVALUATION)]
    for file in (*of_later, *(folder / "models").rglob("*.safetensors")):
        file.unlink(missing_ok=True)
    shutil.rmtree(folder / BASELINES, ignore_errors=True)
