"""Reads run folders.

A run folder holds `config.toml` and `rounds.jsonl`. A killed run lacks `ledger.parquet`, `partition.json` and
`result.json`; their contents are then derived from the other files or left out, and `status.json` states why the run
failed. `fewbytes probe` adds `probe.json`; `fewbytes attack` adds `attack.json` and `attack.png`, `membership.json`
with --membership, and `poison.json` with --poison; `fewbytes reproduce` adds `local.json` if it needs it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from fewbytes.base.errors import UserError
from fewbytes.base.files import check_own
from fewbytes.base.parquet import check_parquet
from fewbytes.report.folder import Row, RunFolder, distinctly_labelled
from fewbytes.report.records import Attack, Local, Membership, Partition, Poison, Probe, Result, Round

T = TypeVar("T")

_COLUMNS = ["round", "client", "bytes_down", "bytes_up"]  # of the ledger, read for a report
_WORDS = ["handler", "outcome"]  # also read, if the ledger has outcomes


def read_run(path: Path | str) -> RunFolder:
    """Read one run folder, labelled with its method's name.

    Raises `UserError` if the folder does not exist, is not a run folder, or has a damaged file.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no run folder {path}")
    missing = [name for name in ("config.toml", "rounds.jsonl") if not (path / name).exists()]
    if missing:
        other = "; `fewbytes report` also reads a folder with a Flower app's bytes.jsonl" if len(missing) == 2 else ""
        raise UserError(f"{path} is not a run folder: it has no {' and no '.join(missing)}{other}")
    check_own(path)
    config = _read(path / "config.toml", _config)
    result = _read(path / "result.json", _result)
    run = RunFolder(
        path=path,
        label="",
        rounds=_read(path / "rounds.jsonl", _rounds) or [],
        ledger=_read(path / "ledger.parquet", _ledger),
        partition=_read(path / "partition.json", _partition),
        result=result,
        config=config or "",
        probe=_read(path / "probe.json", _probe),
        local=_read(path / "local.json", _local),
        attack=_read(path / "attack.json", _attack),
        membership=_read(path / "membership.json", _membership),
        poison=_read(path / "poison.json", _poison),
        failure=(_read(path / "status.json", _failure) or "") if result is None else "",
    )
    return replace(run, label=run.method)


def read_runs(paths: Iterable[Path | str]) -> list[RunFolder]:
    """Read run folders, and run folders inside other folders (sorted by name).

    Labels are unique: runs of one method are distinguished by the settings that differ, else by the folder's name.
    Raises `UserError` as `read_run` does, and for a folder that neither is a run folder nor holds any.

    >>> import tempfile
    >>> import fewbytes as fb
    >>> import torch
    >>> from fewbytes.report import read_runs
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))], test=(x, y))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for epochs in (1, 2):
    ...         result = fb.run(fb.FedAvg(epochs=epochs), task, rounds=1, out=f"{folder}/{epochs}")
    ...     runs = read_runs([folder])
    >>> [run.label for run in runs], runs[0].status
    (['fedavg (epochs=1)', 'fedavg (epochs=2)'], 'done')
    """
    folders: dict[Path, Path] = {}  # resolved -> as given, to read each only once
    for path in map(Path, paths):
        inside = sorted(child for child in path.iterdir() if _is_run(child)) if path.is_dir() else []
        if inside and not _is_run(path):
            folders |= {Path(os.path.realpath(child)): child for child in inside}
        else:
            folders.setdefault(Path(os.path.realpath(path)), path)
    runs = [read_run(path) for path in folders.values()]
    return [replace(run, label=label) for run, label in zip(runs, distinctly_labelled(runs), strict=True)]


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and (path / "rounds.jsonl").is_file()


def _read(file: Path, parse: Callable[[Path], T]) -> T | None:
    """The parsed file, or None if it is missing; errors name the file."""
    try:
        return parse(file) if file.exists() else None
    except (ValueError, TypeError, KeyError, OSError, RecursionError, pa.ArrowException) as error:
        raise UserError(f"{file} is damaged: {' '.join(str(error).split())}") from error


def _config(file: Path) -> str:
    text = file.read_text("utf-8")
    if not isinstance(tomllib.loads(text).get("parameters", {}), dict):
        raise ValueError("its parameters are not a table")
    return text


def _rounds(file: Path) -> list[Row]:
    rows: list[Row] = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line.strip()]
    msgspec.convert(rows, list[Round])
    return rows


def _result(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text("utf-8"))
    msgspec.convert(result, Result)
    return result


def _failure(file: Path) -> str:
    status = json.loads(file.read_text("utf-8"))
    return str(status["why"]) if status["state"] == "stopped" else ""


def _ledger(file: Path) -> pa.Table:
    check_parquet(file)
    table = pq.ParquetFile(file).read(columns=[*_COLUMNS, *_WORDS])
    types = {field.name: field.type for field in table.schema}
    if not all(name in types and pa.types.is_integer(types[name]) for name in _COLUMNS):
        raise ValueError(f"it needs the integer columns {', '.join(_COLUMNS)}")
    if "outcome" in types and {types.get(name) for name in _WORDS} != {pa.string()}:
        raise ValueError(f"it needs words in the columns {' and '.join(_WORDS)}")
    return table


def _partition(file: Path) -> Partition:
    partition = msgspec.convert(json.loads(file.read_text("utf-8")), Partition)
    rows = partition["train"] + partition["test"]
    widths = {len(row) for row in rows if isinstance(row, list)}
    named = len(partition.get("names", [])) in (0, len(partition["train"]))
    if len(partition["train"]) != len(partition["test"]) or not named or widths - {len(partition["classes"])}:
        raise ValueError("its counts do not match its classes and clients")
    return partition


def _probe(file: Path) -> Probe:
    return msgspec.json.decode(file.read_bytes(), type=Probe)


def _local(file: Path) -> list[Local]:
    return msgspec.json.decode(file.read_bytes(), type=list[Local])


def _attack(file: Path) -> Attack:
    return msgspec.json.decode(file.read_bytes(), type=Attack)


def _membership(file: Path) -> Membership:
    return msgspec.json.decode(file.read_bytes(), type=Membership)


def _poison(file: Path) -> Poison:
    return msgspec.json.decode(file.read_bytes(), type=Poison)
