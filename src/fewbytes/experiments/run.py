"""`fewbytes.run`: runs a method on a task, on the engine of the settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.extras import needs
from fewbytes.base.python_words import in_python
from fewbytes.core.method import Method, option_of
from fewbytes.core.policy import Policy
from fewbytes.core.task import Task
from fewbytes.engines.local import local_engine
from fewbytes.running.drive import drive
from fewbytes.running.line import line_for
from fewbytes.running.result import Result
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings


def run(method: Method, task: Task, *, policy: Policy | None = None, **settings: Any) -> Result:
    """Run a method on a task on this machine; returns when all rounds are done.

    `policy`: how many clients must reply, which replies are refused, and how long Flower waits.

    `settings`: fields of `fewbytes.running.settings.Settings`, by name. For the experiment:

    - `rounds` (20): number of rounds; some methods set their own. `evaluate_every` (1): rounds between evaluations.
    - `budget`: maximum upload of all clients together, in bytes; the run ends before a round that would exceed it.
    - `stop_when`: end the run at a score, "global>=0.9", or after a number of scored rounds without improvement,
      "patience=5".
    - `speeds`: simulated seconds per exchange and client, "1,1,10" or "10x".
    - `aggregate`: aggregation rule instead of the mean. `dp`: differential privacy.
    - `uplink_bits` or `uplink_step`, `downlink_bits`: rounding of uploads and downloads.

    For its execution:

    - `engine`: "local", or "flower-simulation" on Ray, with the same results, bit for bit. `ray_address`: a cluster to
      run on. `workers`: number of processes (default: one per core).
    - `coded` (True): lossless compression of messages. `keep_frames`, `keep_checkpoints` (2), `save_models`: files to
      keep.
    - `out`: the run folder; without one, a temporary folder that lives as long as the result.
    - `resume`: resume from the last checkpoint in `out`, if it holds a run; a finished run is read. `from_round`:
      resume after that earlier round, if it is kept.
    - `durable`: a power failure costs the run in `out` at most its last finished round.
    - `watcher`: a `Watcher`, a function that is called with each line of rounds.jsonl, or a list of these. Without one,
      a terminal and a notebook show one updating line; `watcher=[]` shows nothing.
    - `config`: text of config.toml; without it, the method's parameters. `about`: entries for result.json.

    Raises UserError for invalid settings and an unusable folder, MethodError when a handler fails, TooFewReplies as the
    `policy` requires. After a KeyboardInterrupt the run can be resumed.

    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))] * 2, test=(x, y))
    >>> result = fb.run(fb.FedAvg(epochs=5, lr=1.0, batch=2), task, rounds=3)
    >>> result.accuracy, result.ledger.totals()["uplink_nominal_bytes"]
    (1.0, 480)
    """
    with in_python():
        asked = Settings.of(settings, option_of(method))
        if asked.resume and asked.from_round is None and not (Path(asked.out or "") / "config.toml").exists():
            asked = replace(asked, resume=False)  # so that the same lines can run again and again
        checked = Run.of(method, task, asked, policy)
        if "watcher" not in settings:
            line = line_for(method.method_name, method.promises.headline)
            checked = replace(checked, settings=replace(checked.settings, watcher=line))
        return run_with(checked)


def run_with(run: Run) -> Result:
    """Run a checked `Run` on the engine of its settings."""
    settings = run.settings
    check_engine(settings.engine)
    if settings.engine == "flower-simulation":
        from fewbytes.flower.simulation import simulate

        return simulate(run)
    if settings.engine != "local":
        raise UserError("use `fewbytes deploy` to start or resume a deployment")

    settings.check_in_process()
    return drive(run, lambda terms, origin, _: local_engine(terms, origin, settings.workers))


def check_engine(engine: str) -> None:
    """Raises UserError if an engine's packages are not installed."""
    if engine == "flower-simulation":
        needs("Flower's simulation", "simulation", "flwr", "ray")
