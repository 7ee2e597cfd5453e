"""What a run leaves, to be compared with what another one leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

import fewbytes as fb
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.running.checkpoint import Checkpoints, read_checkpoint

ROUNDS = 4
PATIENCE = 600
"""Seconds after which a test no longer waits for what must come: only a failure takes that long, on any machine."""
TIMES = ("seconds", "seconds_scoring", "time", "peak_memory_bytes")


def timeless(value):
    """JSON without what may differ between equal runs."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def fingerprint(folder: Path) -> dict:
    """Everything a run leaves, but for times: result, rounds, ledger, server's and clients' states, models, gallery."""
    checkpoint = read_checkpoint(folder)
    states = {
        client: (folder / "checkpoint" / "clients" / f"{client}-{version}.state").read_bytes()
        for client, version in checkpoint.named().items()
        if version
    }
    models = {p.name: load_file(p) for p in sorted((folder / "models").glob("*.safetensors"))}
    return {
        "result": timeless(json.loads((folder / "result.json").read_text())),
        "rounds": [timeless(json.loads(line)) for line in (folder / "rounds.jsonl").read_text().splitlines()],
        "ledger": Checkpoints(folder).ledger.read(checkpoint.ledger),
        "server": checkpoint.server,
        "states": states,
        "models": {name: {k: v.numpy().tobytes() for k, v in state.items()} for name, state in models.items()},
        "gallery": {p.name: p.read_bytes() for p in (folder / "gallery").glob("*")},
    }


class StopAfter(fb.Watcher):
    """Stops a run after a round, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def scored(self, row: dict) -> None:
        if row["round"] == self.after:
            raise KeyboardInterrupt


def until(holds: Callable[[], object], seconds: float = PATIENCE, every: float = 0.1) -> bool:
    """Whether something holds within so many seconds; it is asked `every` so many."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def lines(folder: Path, pattern: str = "*/rounds.jsonl") -> int:
    """How many rounds the run below a folder has done."""
    return max((len(path.read_text().splitlines()) for path in folder.glob(pattern)), default=0)


def configured(folder: Path, method: str, **settings) -> Path:
    """A run folder as the command line makes it of these settings."""
    experiment = make_experiment({"method": method, "workers": 1, **settings})
    run_with(find(experiment).run(folder, False, fb.Watcher()))
    return folder


def tensorboard_scalars(place: Path) -> dict[str, list[tuple[int, float]]]:
    """By name, the steps and values that a folder of TensorBoard's event files holds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@dataclass(frozen=True)
class Run:
    """A run that is made once and looked at by many tests, which change nothing in its folder."""

    result: fb.Result
    folder: Path
    left: dict  # its fingerprint
