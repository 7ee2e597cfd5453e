"""Watchers that log a run's numbers to TensorBoard, MLflow or Trackio.

All write the same names, a value a round: `accuracy/personalised` and so on (metric and kind), `loss/train`,
`measured/<name>`, `uplink_MB/round`, `uplink_MB/total`, the same of `downlink_MB`, `clients` and `seconds`; the step is
the round, one more for the finish. At the end of a run, `result/<name>` are its results. Characters that some stores do
not accept in names are written `_`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import time
import tomllib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.running.watcher import Recorder

LAST = "seconds"  # the number of a round that is written last
STATUS = {"done": "FINISHED", "interrupted": "KILLED"}  # what MLflow calls them; else FAILED


class _ByRound(Recorder):
    """Writes each round once, also after a resumption: the store knows which rounds it has."""

    _folder: Path | None = None  # of the run, once it has begun

    def started(self, folder: Path, rounds: int, done: int) -> None:
        """Open the store, and write the rounds it lacks."""
        config = tomllib.loads((folder / "config.toml").read_text())
        self._folder, self._new = folder, False
        rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        so_far = max((row["round"] for row in rows if row["phase"] in ("round", "finish")), default=0)
        self._last = min(self._open(folder, dict(_flat(config)), so_far), so_far)
        self._write_new(folder)

    def scored(self, row: dict[str, Any]) -> None:
        """Write the round."""
        if self._folder is not None:
            self._write_new(self._folder)

    def ended(self, result: dict[str, Any]) -> None:
        """Write the run's results, and close the store."""
        if self._folder is not None:
            if result["status"] == "done" and self._new:
                self._write(self._last, _of_result(result))
            self._close(result["status"])
            self._folder = None

    def _write_new(self, folder: Path) -> None:
        """Write the rounds of rounds.jsonl that the store lacks; bytes add up over its lines that are of no round."""
        moved = {"uplink_MB": 0.0, "downlink_MB": 0.0}
        for line in (folder / "rounds.jsonl").read_text().splitlines():
            row = json.loads(line)
            here = {"uplink_MB": row["uplink_bytes"] / 1e6, "downlink_MB": row["downlink_bytes"] / 1e6}
            moved = {way: moved[way] + here[way] for way in moved}
            if row["phase"] in ("round", "finish") and row["round"] > self._last:
                self._write(row["round"], _of_row(row, here, moved))
                self._last, self._new = row["round"], True

    @abstractmethod
    def _open(self, folder: Path, config: dict[str, Any], so_far: int) -> int:
        """Open the store for a run with `so_far` rounds; returns the last round in the store, 0 if there is none."""

    @abstractmethod
    def _write(self, t: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers, in their order."""

    @abstractmethod
    def _close(self, status: str) -> None:
        """The run is over."""


class TensorBoard(_ByRound):
    """Writes TensorBoard's event files into `place`, by default the folder `tensorboard` of the run.

    Raises UserError if the package is missing.
    """

    def __init__(self, place: Path | str | None = None) -> None:
        self._place = place
        needed("tensorboard")
        self._module = importlib.import_module("torch.utils.tensorboard")

    def place(self) -> str:
        """Its name."""
        return "TensorBoard"

    def _open(self, folder: Path, config: dict[str, Any], so_far: int) -> int:
        place = str(self._place or folder / "tensorboard")
        last = min(_last_event(place), so_far) if so_far and Path(place).is_dir() else 0
        self._writer = self._module.SummaryWriter(place, purge_step=last + 1 if so_far else None)
        if not last:
            listed = "\n".join(f"    {key} = {value}" for key, value in config.items())
            self._writer.add_text("config", listed)
        return last

    def _write(self, t: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, t)
        self._writer.flush()

    def _close(self, status: str) -> None:
        self._writer.close()


def _last_event(place: str) -> int:
    """The last whole round in a folder of event files."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(place, size_guidance={"scalars": 1}).Reload()
    return int(events.Scalars(LAST)[-1].step) if LAST in events.Tags()["scalars"] else 0


class MLflow(_ByRound):
    """Writes to an MLflow store: the configuration as parameters, each round's numbers as metrics.

    `uri`: a server's, a database's, or an SQLite file; by default what MLflow itself takes, MLFLOW_TRACKING_URI or
    mlflow.db in the current folder. `name`: of the run (default: of its folder). Raises UserError if the package is
    missing.
    """

    def __init__(self, uri: str | None = None, experiment: str = "fewbytes", name: str | None = None) -> None:
        for key, value in (
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("MLFLOW_LOGGING_LEVEL", "WARNING"),
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),  # a server that is gone keeps no run waiting for minutes
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "20"),  # seconds
        ):
            os.environ.setdefault(key, value)
        needed("mlflow")
        self._module = importlib.import_module("mlflow")
        self._uri = f"sqlite:///{Path(uri).absolute()}" if uri is not None and ":" not in uri else uri
        self._experiment, self._name = experiment, name

    def place(self) -> str:
        """Its name, and its address if given."""
        return f"MLflow ({self._uri})" if self._uri else "MLflow"

    def _open(self, folder: Path, config: dict[str, Any], so_far: int) -> int:
        self._client = client = self._module.MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        tag = {"fewbytes.run_folder": str(folder.absolute())}
        if so_far:
            quote = "'" if '"' in str(folder) else '"'
            here = f"tags.`fewbytes.run_folder` = {quote}{folder.absolute()}{quote}"
            begun = client.search_runs([experiment], here, max_results=1)  # the newest
            if begun and tag.items() <= begun[0].data.tags.items():  # a folder's name may hold more than a name
                self._run = begun[0].info.run_id
                client.update_run(self._run, status="RUNNING")
                return max((each.step for each in client.get_metric_history(self._run, LAST)), default=0)
        self._run = client.create_run(experiment, run_name=self._name or folder.absolute().name, tags=tag).info.run_id
        parameters = [self._module.entities.Param(_clean(key), str(value)[:6000]) for key, value in config.items()]
        for start in range(0, len(parameters), 100):  # no more at once
            client.log_batch(self._run, params=parameters[start : start + 100])
        return 0

    def _write(self, t: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._module.entities.Metric(name, value, now, t) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def _close(self, status: str) -> None:
        self._client.set_terminated(self._run, STATUS.get(status, "FAILED"))


class Trackio(_ByRound):
    """Writes to Trackio, which has the interface of wandb and keeps its projects on this machine (TRACKIO_DIR).

    `name`: of the run (default: of its folder); a resumed run is the project's latest of that name. Raises
    UserError if the package is missing.
    """

    def __init__(self, project: str = "fewbytes", name: str | None = None) -> None:
        needed("trackio")
        self._module = importlib.import_module("trackio")
        self._project, self._name = project, name

    def place(self) -> str:
        """Its name."""
        return "Trackio"

    def _open(self, folder: Path, config: dict[str, Any], so_far: int) -> int:
        name = self._name or folder.absolute().name
        with contextlib.redirect_stdout(io.StringIO()):  # it greets
            self._run = self._module.init(
                self._project, name, config=config, resume="allow" if so_far else "never", embed=False,
                auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip
        stored = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        return stored.get_max_step_for_run(self._project, name, run_id=self._run.id) or 0

    def _write(self, t: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=t)

    def _close(self, status: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._module.finish()


def watcher_of(text: str, name: str) -> Recorder:
    """The recorder that `--watch` names: `tensorboard`, `mlflow` or `trackio`, optionally with a colon and a place: a
    folder of runs' folders, a store's address or SQLite file, a project. `name`: the run's. Raises UserError."""
    kind, colon, place = text.partition(":")
    if colon and not place:
        raise UserError(f"--watch {text}: say where after the colon, or leave it out")
    match kind:
        case "tensorboard":
            return TensorBoard(Path(place) / name if place else None)
        case "mlflow":
            return MLflow(place or None, name=name)
        case "trackio":
            return Trackio(place or "fewbytes", name)
    raise UserError(f"--watch takes tensorboard, mlflow or trackio, and :PLACE if you like, not {text!r}")


def needed(package: str) -> None:
    """Raises UserError if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"watching by {package} needs a package: pip install 'fewbytes[watch]'")


def _flat(table: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """A table's values by their keys, tables' in it as `table.key`."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        pairs += _flat(value, f"{above}{key}.") if isinstance(value, dict) else [(f"{above}{key}", value)]
    return pairs


def _of_row(row: dict[str, Any], here: Mapping[str, float], moved: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a line of rounds.jsonl, and MB this round and so far."""
    found = {f"{metric}/{kind}": value for metric, kinds in row["scores"].items() for kind, value in kinds.items()}
    found |= {f"loss/{name}": value for name, value in row["loss"].items()}
    found |= {f"measured/{name}": value for name, value in row.get("measured", {}).items()}
    for way, megabytes in here.items():
        found |= {f"{way}/round": megabytes, f"{way}/total": moved[way]}
    found |= {"clients": row["cohort"], LAST: row["seconds"]}
    return {_clean(name): float(value) for name, value in found.items()}


def _of_result(result: Mapping[str, Any]) -> dict[str, float]:
    """The main numbers of result.json."""
    found = {name: result["score"][name] for name in ("final", "best", "best_round")}
    found |= {f"{way}_MB": result[f"{way}_bytes"] / 1e6 for way in ("uplink", "downlink")}
    found |= {name: result[name] for name in ("rounds", "seconds", "left_out")}
    return {f"result/{name}": float(value) for name, value in found.items() if value is not None}


def _clean(name: str) -> str:
    return re.sub(r"[^-/\w.]", "_", name, flags=re.ASCII)
