"""A run whose checkpoint is of the frames' format 2 is resumed and ends the same; one of format 1 is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from assembling import assemble, take_apart
from cases import CASES, task_of
from runs import ROUNDS, StopAfter, fingerprint

import fewbytes as fb
from fewbytes.base.files import replacing
from fewbytes.engines.handlers import Kept
from fewbytes.running.checkpoint import Checkpoint, read_checkpoint
from fewbytes.wire import Parsed, pack_state, unpack_state


def older(frame: bytes, major: int) -> bytes:
    """A stored frame as an earlier format had it, with the frames in it."""
    kind = {each.__name__: each for each in (Checkpoint, Kept)}.get(Parsed(frame, None).kind)
    if kind is not None:
        frame = bytes(pack_state(_older(unpack_state(kind, frame), major)))
    name, fields, sections, hashes = take_apart(frame)
    assert hashes == {"major": 3, "layout": b"", "base": b""}
    return assemble(name, fields, sections, major=major)


def _older(value: Any, major: int) -> Any:
    if isinstance(value, bytes):
        return older(value, major) if value.startswith(b"FEW") else value
    if isinstance(value, dict):
        return {key: _older(each, major) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _older(each, major) for name, each in parts.items()})
    return value


def test_a_ledger_with_other_columns_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fb.run(CASES["fedavg"], task_of("fedavg"), rounds=ROUNDS, out=tmp_path, workers=1, watcher=StopAfter(2))
    for path in (tmp_path / "checkpoint").glob("round-*"):
        found = dataclasses.replace(unpack_state(Checkpoint, path.read_bytes()), columns=10)
        with replacing(path) as file:
            file.write(bytes(pack_state(found)))
    with pytest.raises(fb.UserError, match="whose ledger has 10 columns, not 12: resume with that build"):
        fb.run(CASES["fedavg"], task_of("fedavg"), rounds=ROUNDS, out=tmp_path, workers=1, resume=True)


def stopped(name: str, folder: Path, major: int) -> list[Path]:
    """Leave a run of a case that was stopped, whose checkpoint has an earlier format; return the rewritten files."""
    with pytest.raises(KeyboardInterrupt):
        fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=folder, workers=1, watcher=StopAfter(2))
    files = sorted((folder / "checkpoint").rglob("*.state"))
    for path in files:
        with replacing(path) as file:
            file.write(older(path.read_bytes(), major))
    return files


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedkd"])  # no states, states at both ends, waiting messages
def test_a_checkpoint_of_format_2_is_resumed(name, uninterrupted, tmp_path):
    files = stopped(name, tmp_path / "run", 2)
    assert all(path.read_bytes()[:5] == b"FEWB\2" for path in files)
    assert len(files) > 1 or name == "fedavg"
    fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=tmp_path / "run", workers=1, resume=True)
    assert fingerprint(tmp_path / "run") == uninterrupted(name)


def test_a_checkpoint_of_format_1_is_refused_in_one_line(tmp_path):
    stopped("fedavg", tmp_path / "run", 1)
    with pytest.raises(fb.UserError) as refused:
        read_checkpoint(tmp_path / "run")
    assert "in format 1.0, which cannot be resumed: resume with that version" in str(refused.value)
    assert "\n" not in str(refused.value)
