"""Flower as the engine: the same method object as a ServerApp and a ClientApp, simulated on Ray or deployed over TLS.

A handler is the message `train.<name>`; a payload is one frame, which travels as one blob. The server's state and the
ledger are checkpointed by the run's loop, a client's state by its node (`fewbytes.engines.node`): Flower keeps neither.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower phones home unless told not to before it is imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fewbytes.checkpoint import Checkpoint
from fewbytes.engines.grid import FlowerNetwork, read_content, write_content
from fewbytes.engines.handlers import Done, handlers_of
from fewbytes.engines.local import available_cores
from fewbytes.engines.node import Node, Order
from fewbytes.errors import UserError
from fewbytes.files import ScratchFolder
from fewbytes.method import Method, Task
from fewbytes.net import Policy
from fewbytes.run import Result, Settings, carried_on, drive, terminating

Found = tuple[str, Method, Task]
"""What a client app runs: a key that names it in this process, the method, the task."""

_nodes: dict[tuple[str, str, str], Node] = {}  # of this process, by what runs, where, and the run's name


def client_app(
    method: Method,
    task: Task | Callable[[Context], Task],
    folder: Path | str | None = None,
    app: ClientApp | None = None,
) -> ClientApp:
    """The method's client half as a Flower ClientApp, or added to an `app` of yours.

    `task`: with the data of this node's client (at least), or a function that makes it from Flower's context, called
    once in a process. A node's configuration may say `partition-id` (which client's data are here), `folder` (where
    run folders go; default `folder`, or .fewbytes in the home directory) and `threads` (of torch; default 1).
    """
    shared = _Shared((method, task))

    def find(context: Context) -> Found:
        if not isinstance(shared.value[1], Task):
            shared.value = (shared.value[0], shared.value[1](context))
        return (shared.key, *shared.value)

    return make_client_app(handlers_of(type(method)), find, folder, app)


def make_client_app(
    names: Sequence[str],
    find: Callable[[Context], Found],
    folder: Path | str | None = None,
    app: ClientApp | None = None,
) -> ClientApp:
    """A ClientApp that serves handlers of these names, of the method that `find` finds for a context."""
    app = ClientApp() if app is None else app

    def serve(message: Message, context: Context) -> Message:
        return Message(_served(message, context, find, folder), reply_to=message)

    for name in names:
        app.train(name)(serve)
    app.evaluate("score")(serve)
    app.query("save")(serve)
    app.query("hello")(serve)
    return app


def _served(message: Message, context: Context, find: Callable[[Context], Found], folder: Path | str | None) -> Any:
    here = context.node_config.get("partition-id")
    if message.metadata.message_type == "query.hello":
        return write_content(msgspec.msgpack.encode(-1 if here is None else int(here)), None)
    text, frame = read_content(message.content)
    order = msgspec.msgpack.decode(text, type=Order)
    client = order.job.client
    if here is not None and int(here) != client:
        error = f"this node holds client {int(here)}, it was asked as client {client}: its partition-id is wrong"
        return write_content(msgspec.msgpack.encode(Done(order.job.number, error=error)), None)
    key, method, task = find(context)
    base = Path(str(context.node_config.get("folder") or folder or default_folder()))
    where = (key, str(base), order.run)
    if where not in _nodes:
        _nodes.clear()  # one run at a time
        _nodes[where] = Node(method, task, base, order.run, int(context.node_config.get("threads", 1)))
    node = _nodes[where]
    if message.metadata.message_type == "query.save":
        job = order.job
        node.runner.save_model(client, job.version, job.round, node.folder / "models", msgspec.json.decode(frame))
        return write_content(msgspec.msgpack.encode(Done(job.number)), None)
    done, reply = node.answer(order, frame if len(frame) else None)
    return write_content(msgspec.msgpack.encode(done), reply)


def default_folder() -> Path:
    """Where run folders go that nobody gave a place: FEWBYTES_HOME, or .fewbytes in the home directory."""
    return Path(os.environ.get("FEWBYTES_HOME") or Path.home() / ".fewbytes")


class _Shared:
    """A value that Ray's actors get once each, not with every message."""

    _made: dict[str, Any] = {}  # noqa: RUF012 (of the process: what actors keep between messages)

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = f"{os.getpid()}-{id(self)}-{time.time_ns()}"
        self._stored: Any = None

    def __reduce__(self) -> Any:
        import ray

        if self._stored is None:
            self._stored = ray.put(self.value)
        return _shared, (self.key, self._stored)


def _shared(key: str, stored: Any) -> _Shared:
    import ray

    if key not in _Shared._made:
        made = _Shared(ray.get(stored))
        made.key, made._stored = key, stored
        _Shared._made[key] = made
    shared: _Shared = _Shared._made[key]
    return shared


def server_app(method: Method, task: Task, **arguments: Any) -> ServerApp:
    """The method's server half as a Flower ServerApp; `arguments` are those of `serve`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, method, task, **arguments)

    return app


def serve(
    grid: Grid,
    method: Method,
    task: Task,
    *,
    rounds: int,
    out: Path | str,
    policy: Policy | None = None,
    names: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Run the method's server half over a Flower grid, from a ServerApp's main; leaves a run folder at `out`.

    `task`: clients' data may lie elsewhere. `names`: the registered name of each client's node, in the order of the
    clients; without names (no authentication) a node is asked for its partition-id. `settings`: the other fields of
    `fewbytes.run.Settings`, such as `resume`. Raises what `fewbytes.run` does, and TooFewReplies.
    """
    return serve_run(grid, method, task, Settings(rounds, Path(out), **settings), policy or Policy(), names)


def serve_run(
    grid: Grid,
    method: Method,
    task: Task,
    settings: Settings,
    policy: Policy,
    names: Sequence[str] = (),
    poll: float = 0.1,
    stop: threading.Event | None = None,
) -> Result:
    """`serve` for settings that are made already. `poll`: seconds between looks for replies; `stop` is Ctrl-C."""

    def connect(folder: Path, checkpoint: Checkpoint | None) -> FlowerNetwork:
        return FlowerNetwork(
            grid, method, task, folder.resolve().name, policy, names, poll, stop or threading.Event(),
            coded=settings.coded, frames=folder / "frames" if settings.keep_frames else None, **carried_on(checkpoint),
        )  # fmt: skip

    return drive(method, task, settings, connect)


def simulate(method: Method, task: Task, settings: Settings, workers: int | None, policy: Policy) -> Result:
    """Run on Flower's simulation: a Ray actor a worker, every client a node. Raises UserError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("Flower's simulation needs Ray: pip install 'fewbytes[simulation]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    scratch = ScratchFolder("run") if settings.out is None else None
    folder = settings.out or (scratch.path / "run" if scratch else Path())
    settings = replace(settings, out=folder)
    stop, ended = threading.Event(), threading.Event()
    outcome: list[Result | BaseException] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            outcome.append(serve_run(grid, method, task, settings, policy, poll=0.02, stop=stop))
        except BaseException as error:  # told by the thread that waits
            outcome.append(error)
        finally:
            ended.set()

    count = min(workers or available_cores(), len(task.clients))
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": count, "log_to_driver": False, "logging_level": logging.ERROR},
    }
    with terminating():
        try:
            app_there = client_app(method, task, folder.absolute().parent)
            run_simulation(app, app_there, len(task.clients), backend_config=backend)
        except KeyboardInterrupt:
            stop.set()
            ended.wait(30)
    ending = outcome[0] if outcome else KeyboardInterrupt()
    if isinstance(ending, BaseException):
        if scratch is not None:
            scratch.close()
        raise ending
    if scratch is not None:
        weakref.finalize(ending, scratch.close)
    return ending
