"""A method run on a task: `fewbytes.run`, and which engine does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError, named
from fewbytes.core.method import Method
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Task
from fewbytes.engines.local import LocalEngine
from fewbytes.running.checkpoint import Checkpoint
from fewbytes.running.loop import drive
from fewbytes.running.result import Result
from fewbytes.running.settings import Settings


def run(method: Method, task: Task, *, policy: Policy | None = None, **settings: Any) -> Result:
    """Run a method on a task on this machine; returns when all rounds are done.

    `settings`: the fields of `fewbytes.running.settings.Settings`. The first are an experiment's, with its defaults:
    `rounds` (20), `budget` (most uplink bytes of the whole run, all clients together; it ends before a round that would
    exceed it, see `within`, unless the method has a number of rounds of its own), `stop_when` (likewise ends it where a
    score is reached, "global>=0.9", or none was better for so many scored rounds, "patience=5": see `StopWhen`),
    `speeds` (simulated seconds that each client takes for an exchange, "1,1,10" or "10x": see `Speeds`),
    `aggregate` (what the server takes in place of the mean), `dp` (what is promised of whose privacy),
    `uplink_bits` or `uplink_step` (to about how many bits a value, or what steps, clients round what they send) and
    `downlink_bits` (the server: see docs/lossy.md),
    `engine` ("local", or "flower-simulation" on Ray: the same results, bit for bit), `ray_address` (with it, a
    Ray cluster to run on), `workers` (one per core),
    `evaluate_every` (1), `coded` (lossless coding of what travels), `keep_frames`, `keep_checkpoints` (2) and
    `save_models`. The others are `out`, the run folder (default: a temporary one that lives as long as the result),
    `resume` (go on from the last checkpoint in `out`), `from_round` (or from the one after that round, if it is kept),
    `durable` (a loss of power loses no round of the run in `out`), `config` (text of config.toml; default: the method's
    parameters), `about` (entries for result.json) and `watcher` (a `Watcher`, a function that is called with each line
    of rounds.jsonl, or a list of such).
    `policy`: how many clients must reply with finite numbers, and how long Flower waits for whom.
    Raises UserError for a setting that cannot be and a folder that cannot be used, MethodError when a handler fails,
    TooFewReplies by the `policy`; a KeyboardInterrupt leaves the folder ready to be resumed.
    """
    return run_with(method, task, Settings.of(settings), policy or Policy())


def run_with(method: Method, task: Task, settings: Settings, policy: Policy) -> Result:
    """`run` for settings that are made already."""
    if not isinstance(method, Method):
        raise UserError(f"a method is an object like FedAvg(), not {method!r}")
    if not isinstance(task, Task):
        raise UserError(f"a task is made by Task.of(…) or Task.on(…), not {named(task)}")
    policy.check(len(task.problem.clients))
    speeds = settings.clock(len(task.problem.clients), settings.engine != "local")
    task = method.promising(method.adapted(task), settings.dp, method.planned_rounds(settings.rounds))
    if settings.engine == "flower-simulation":
        from fewbytes.flower.simulation import simulate

        return simulate(method, task, settings, policy)
    if settings.engine != "local":
        raise UserError("a deployment is started, and gone on with, by `fewbytes deploy`")

    def connect(folder: Path, checkpoint: Checkpoint | None) -> LocalEngine:
        frames = folder / "frames" if settings.keep_frames else None
        resumed = None if checkpoint is None else checkpoint.resumed()
        store = folder / "checkpoint" / "clients"
        return LocalEngine(
            method,
            task,
            store,
            settings.workers,
            policy,
            settings.coded,
            frames,
            resumed,
            speeds,
            settings.uplink(),
            settings.downlink(),
        )

    return drive(method, task, settings, connect)
