"""A run on Flower's simulation."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbytes.base.cores import available_cores
from fewbytes.base.errors import UserError
from fewbytes.base.files import ScratchFolder
from fewbytes.engines.frames import FrameFolder, shared_memory
from fewbytes.flower.apps import make_server_app, simulated_client_app
from fewbytes.flower.cluster import connect, start_keeper
from fewbytes.flower.link import Exchange
from fewbytes.flower.private.pool import lasting_pool
from fewbytes.flower.private.programs import LOGGER
from fewbytes.running.result import Result
from fewbytes.running.run import Run
from fewbytes.running.signals import terminating

AHEAD = 16  # messages a worker of the simulation has waiting: its dispatcher looks every 0.1 s, and looks at each


def simulate(run: Run) -> Result:
    """Run on Flower's simulation: each worker is a Ray actor, each client a node. Raises UserError without Ray, or
    without a cluster at the settings' `ray_address`."""
    settings, clients = run.settings, len(run.task.problem.clients)
    if importlib.util.find_spec("ray") is None:
        raise UserError("Flower's simulation needs Ray: pip install 'fewbytes[simulation]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation

    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    address = None if settings.ray_address == "local" else settings.ray_address
    cores = available_cores() if address is None else connect(address)
    count = min(settings.workers or cores, clients)
    lasting_pool(count)
    scratch = ScratchFolder("run") if settings.out is None else None
    folder = Path(settings.out or "") if scratch is None else scratch.path / "run"
    placed = replace(run, settings=replace(settings, out=folder))
    frames = ScratchFolder("exchange", shared_memory())
    frame_folder = FrameFolder(frames.path)
    stop, ended = threading.Event(), threading.Event()
    outcome: list[Result | BaseException] = []
    home = None if address is None else start_keeper(folder.absolute().parent, frame_folder)

    def main(serve: Callable[..., Result], _: Mapping[str, Any]) -> None:
        try:
            exchange = Exchange(poll=0.01, ahead=AHEAD * count, frame_folder=frame_folder, stop=stop)
            outcome.append(serve(placed, exchange=exchange))
        except BaseException as error:  # raised by the thread that waits
            outcome.append(error)
        finally:
            ended.set()

    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"address": "local", "num_cpus": count, "log_to_driver": False, "logging_level": logging.ERROR},
    }
    with terminating(stop):  # an interrupt inside Flower would shut Ray down while its threads use it: a crash
        try:
            client = simulated_client_app(run.method, run.task, folder.absolute().parent, frame_folder, home)
            run_simulation(make_server_app(main), client, clients, backend_config=backend)
        except KeyboardInterrupt:  # the second
            ended.wait(30)
        finally:
            frames.close()
    ending = outcome[0] if outcome else KeyboardInterrupt()
    if isinstance(ending, BaseException):
        if scratch is not None:
            scratch.close()
        raise ending
    if scratch is not None:
        weakref.finalize(ending, scratch.close)
    return ending
