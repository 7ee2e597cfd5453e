"""A method run on a task: `fewbytes.run`, and which engine does it."""

from __future__ import annotations

from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.extras import needs
from fewbytes.core.method import Method, option_of
from fewbytes.core.policy import Policy
from fewbytes.core.task import Task
from fewbytes.engines.local import local_engine
from fewbytes.running.drive import drive
from fewbytes.running.result import Result
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings


def run(method: Method, task: Task, *, policy: Policy | None = None, **settings: Any) -> Result:
    """Run a method on a task on this machine; returns when all rounds are done.

    `policy`: how many clients must reply with finite numbers, and how long Flower waits for whom.

    `settings`, by name, the fields of `fewbytes.running.settings.Settings`. Of the experiment:

    - `rounds` (20), `evaluate_every` (1): the method may have a number of rounds of its own.
    - `budget`: most uplink bytes of the run, all clients together; it ends before a round that would exceed them.
    - `stop_when`: ends the run where a score is reached, "global>=0.9", or none was better for so many scored rounds,
      "patience=5".
    - `speeds`: simulated seconds that each client takes for an exchange, "1,1,10" or "10x".
    - `aggregate`: what the server takes in place of the mean. `dp`: what is promised of whose privacy.
    - `uplink_bits` or `uplink_step`, `downlink_bits`: how finely clients, or the server, round what they send.

    Of how it is run:

    - `engine`: "local", or "flower-simulation" on Ray, with the same results, bit for bit. `ray_address`: a cluster to
      run on. `workers`: one a core.
    - `coded` (True): lossless coding of what travels. `keep_frames`, `keep_checkpoints` (2), `save_models`: what stays.
    - `out`: the run folder; without one, a temporary folder that lives as long as the result.
    - `resume`: go on from the last checkpoint in `out`. `from_round`: from the one after that round, if it is kept.
    - `durable`: a loss of power costs the run in `out` its last finished round at most.
    - `watcher`: a `Watcher`, a function that is called with each line of rounds.jsonl, or a list of such.
    - `config`: text of config.toml; without it, the method's parameters. `about`: entries for result.json.

    Raises UserError for a setting that cannot be and a folder that cannot be used, MethodError when a handler fails,
    TooFewReplies by the `policy`; a KeyboardInterrupt leaves the folder ready to be resumed.

    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))] * 2, test=(x, y))
    >>> result = fb.run(fb.FedAvg(epochs=5, lr=1.0, batch=2), task, rounds=3)
    >>> result.accuracy, result.ledger.totals()["uplink_nominal_bytes"]
    (1.0, 480)
    """
    return run_with(Run.of(method, task, Settings.of(settings, option_of(method)), policy))


def run_with(run: Run) -> Result:
    """`run` of what is made already."""
    settings = run.settings
    if settings.engine == "flower-simulation":
        needs("Flower's simulation", "simulation", "flwr", "ray")
        from fewbytes.flower.simulation import simulate

        return simulate(run)
    if settings.engine != "local":
        raise UserError("a deployment is started, and gone on with, by `fewbytes deploy`")

    return drive(run, lambda terms, origin: local_engine(terms, origin, settings.workers))
