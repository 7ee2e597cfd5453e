"""Flower as the engine: the same method object as a ServerApp and a ClientApp.

A call of a handler is the message `train.handler`; payloads are frames, which travel as one blob. The server's state
and the ledger are checkpointed by the run's loop, a client's state by its node (`fewbytes.flower.node`): Flower keeps
neither.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fewbytes.base.errors import FrameError, UserError
from fewbytes.base.named import only_allowed
from fewbytes.core.method import Method, option_of
from fewbytes.core.policy import Policy
from fewbytes.core.site_policy import SitePolicy
from fewbytes.core.task import Task
from fewbytes.engines.frames import FrameFolder, FramePlace
from fewbytes.engines.handlers import Done
from fewbytes.engines.results import unable
from fewbytes.engines.workers import keep_memory
from fewbytes.flower.allowance import Allowed, Allows
from fewbytes.flower.cluster import FarFrames, FarNode, Home
from fewbytes.flower.gate import Gate
from fewbytes.flower.link import Exchange
from fewbytes.flower.logged import Logged
from fewbytes.flower.messages import decoded, read_content, sealed, split_frames, write_content
from fewbytes.flower.network import grid_engine
from fewbytes.flower.node import DIFFERENT, TELL, Node, Order, encoded
from fewbytes.flower.versions import differing, refusal, unpacked
from fewbytes.running.drive import drive
from fewbytes.running.result import Result
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

FOLDERS = re.compile(r"(?<![\w.>])(?:~|\.{1,2})?/(?:[^\s/'\"()<>,;:]+/)*(?=[^\s/])")
"""The folders of a path, up to its last part."""
_gates: dict[tuple[str, Any], Gate] = {}
"""This process's gates, by folder and the client whose data are here."""
_nodes: dict[tuple[str, str, str, Any], Node] = {}
"""This process's nodes, by app, folder, run, and the client whose privacy is counted."""


class Served(NamedTuple):
    """What a client app serves; `key` identifies it in this process."""

    key: str
    method: Method
    task: Task
    allowed: tuple[str, ...] | None = None  # code that the server may name (`only_allowed`); None: none
    settings: str = ""  # the settings that the server sends


def client_app(
    method: Method,
    task: Task | Callable[[Context], Task],
    folder: Path | str | None = None,
    app: ClientApp | None = None,
) -> ClientApp:
    """The method's client half as a Flower ClientApp, or added to an `app` of yours.

    `task`: with the data of this node's client (at least), or a function that makes it from Flower's context, called
    once in a process, and once a node where a process serves several, as in Flower's simulation. A node's configuration
    may say `partition-id` (which client's data are here), `folder` (where run folders go; default `folder`, or
    .fewbytes/nodes in the home directory), `threads` (of torch; default 1), `tell` (what the server learns of data
    it does not have: `sizes`, the default, `labels` or `nothing`), `max-runs` (how many run folders it makes; default
    100), `privacy-in-all` (what all runs together may spend of the samples' privacy, `epsilon=8,delta=1e-5`, or `any`;
    default: what the first run promises) and `max-drift` (how far a unit of the first layer of a model may have turned
    from the agreed first model's: 1 minus the cosine, 0 to 2; where it is set, methods that send anything but the model
    are refused; default: any distance). The site's policy (`fewbytes.core.site_policy`) is read from
    there, too; `key` is the file of the private key that signs the record of what left.
    """
    return _register(_Shared(_Client(method, task, folder)), app)


def simulated_client_app(
    method: Method, task: Task, folder: Path, frame_folder: FrameFolder, home: Home | None = None
) -> ClientApp:
    """As `client_app`, for a simulation, whose server and nodes end together. Frames are exchanged in a folder, on
    `home` if there are several hosts."""
    return _register(_Shared(_Client(method, task, folder, frame_folder, home)))


@dataclass
class _Client:
    """The parts of a client app. `frame_folder`: where a simulation exchanges frames, on `home`."""

    method: Method
    task: Task | Callable[[Context], Task]
    folder: Path | str | None
    frame_folder: FrameFolder | None = None
    home: Home | None = None


def _register(shared: _Shared, app: ClientApp | None = None) -> ClientApp:
    client = shared.value
    tasks: dict[Any, Task] = {}  # by node

    def find(context: Context) -> Served:
        me = None if isinstance(client.task, Task) else context.node_config.get("partition-id")
        if me not in tasks:
            task = client.task if isinstance(client.task, Task) else client.task(context)
            tasks[me] = client.method.adapted(task)
        return Served(f"{shared.key} {me}", client.method, tasks[me])

    app = _SharedApp(shared) if app is None else app
    place: FramePlace | None = client.frame_folder
    if client.home is not None and client.frame_folder is not None:
        place = client.home.reach(client.frame_folder)
    return make_client_app(find, client.folder, place, app)


def make_client_app(
    find: Callable[[Context], Served],
    folder: Path | str | None = None,
    frame_folder: FramePlace | None = None,
    app: ClientApp | None = None,
) -> ClientApp:
    """A ClientApp that serves the handlers of the method that `find` finds for a context."""
    app = ClientApp() if app is None else app

    def serve(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.hello":
            here = context.node_config.get("partition-id")
            return Message(write_content(msgspec.msgpack.encode(-1 if here is None else int(here))), reply_to=message)
        text, frame = read_content(message.content, frame_folder)
        order = decoded(text, Order)
        kind = message.metadata.message_type
        try:
            if kind == "query.data" and (why := refusal(unpacked(frame))):  # before what other versions may change
                done, reply = Done(order.job.number, error=why), b""
            else:
                done, reply = _served(order, frame, kind, context, find, folder, frame_folder)
        except Exception as error:  # Flower would send the server paths and lines
            done, reply = _public(unable(order.job, error)), b""
        answer = encoded(done)
        name = frame_folder.put(reply) if frame_folder is not None and reply else ""
        return Message(write_content(answer, reply, name, sealed(text, answer, reply)), reply_to=message)

    app.train("handler")(serve)
    app.evaluate("score")(serve)
    app.query("save")(serve)
    app.query("hello")(serve)
    app.query("data")(serve)
    return app


def _served(
    order: Order,
    frame: memoryview,
    kind: str,
    context: Context,
    find: Callable[[Context], Served],
    folder: Path | str | None,
    frame_folder: FramePlace | None,
) -> tuple[Done, bytes]:
    job, here = order.job, context.node_config.get("partition-id")
    if here is not None and int(here) != job.client:
        wrong = f"this node holds client {int(here)}, it was asked as client {job.client}: its partition-id is wrong"
        return Done(job.number, error=wrong), b""
    if here is None and "member" in context.node_config:  # its key says who it is: the server numbers members
        context.node_config = {**context.node_config, "partition-id": job.client}
    key, method, task, allowed, settings = find(context)
    base = node_folder(context.node_config, folder)
    counted = here if frame_folder is None and task.problem.privacy is not None else None
    where = (key, str(base), order.run, counted)
    if where not in _nodes:
        for old in [place for place in _nodes if place[2] != order.run]:  # one run at a time
            del _nodes[old]
        if isinstance(frame_folder, FarFrames):
            _nodes[where] = FarNode(method, task, frame_folder.keeper, order.run)
        else:
            allows = _allows(context.node_config, None if here is None else int(here)) if frame_folder is None else None
            _nodes[where] = Node(method, task, base, order.run, settings, allows)
        torch.set_num_threads(int(context.node_config.get("threads", 1)))  # equal bit for bit only at 1
        keep_memory()
    node = _nodes[where]
    if frame_folder is None:
        node.gate = _gate(base, here, context.node_config)
    with nullcontext() if allowed is None else only_allowed(*allowed, anywhere=False):
        if kind == "query.data":
            done = node.sample_counts(order, str(context.node_config.get("tell", TELL[0])))
            done = done if done.error else msgspec.structs.replace(done, versions=differing(unpacked(frame)))
            return node.recorded(order, [], _public(done), b"")
        if kind == "query.save":
            return _public(node.save_model(order, msgspec.json.decode(frame, type=dict[str, Any]))), b""
        if frame_folder is not None:
            done, reply = node.answer(order, [frame_folder.get(part.at) for part in job.parts])
            return _public(done), reply
        frames = split_frames(frame, [part.length for part in job.parts])
        done, reply = node.answer(order, frames)
        return node.recorded(order, frames, _public(done), reply)


def _gate(folder: Path, here: Any, config: Mapping[str, Any]) -> Gate:
    """The gate of a node with this configuration, one in this process."""
    place, key = (str(folder), here), config.get("key")
    policy = SitePolicy.read(config, others=True)
    if place not in _gates or _gates[place].policy != policy:
        _gates[place] = Gate(
            folder, None if here is None else int(here), policy, None if key is None else Path(str(key))
        )
    return _gates[place]


def _allows(config: Mapping[str, Any], here: int | None) -> Allows:
    """The limits in the configuration of a node that holds the client `here` (None: any). Raises UserError for invalid
    numbers."""
    usual = Allows()
    runs, drift = config.get("max-runs", usual.run_folders), config.get("max-drift", usual.drift)
    in_all = str(config.get("privacy-in-all", ""))
    with suppress(ValueError, OverflowError):
        if float(drift) >= 0:  # which NaN is not
            return Allows(
                int(runs), Allowed.read(in_all) if in_all else None, float(drift), None if here is None else int(here)
            )
    raise UserError(f"max-runs and max-drift are numbers in this node's configuration, not {runs!r}, {drift!r}")


def _public(done: Done) -> Done:
    """What the server may see: of an error only its `public_text`, no folders but those under FEWBYTES_DATA, and no
    trace. The full error goes to this node's log."""
    if not done.error or done.declined or done.error.startswith(DIFFERENT):
        return done
    print(f"ERROR: {done.error}\n{done.trace}".rstrip(), file=sys.stderr, flush=True)
    root = os.environ.get("FEWBYTES_DATA")
    error = (done.public or done.error).replace("\n", " ")
    error = error.replace(f"{root.rstrip('/')}/", "") if root else error
    return msgspec.structs.replace(done, error=FOLDERS.sub("", error), public="", trace="")


def node_folder(config: Mapping[str, Any], folder: Path | str | None = None) -> Path:
    """Where run folders go at a node with this configuration; by default to `folder`."""
    return Path(str(config.get("folder") or folder or default_folder() / "nodes"))


def failure(reply: Message) -> str:
    """Why a node did not carry out an order, by its reply, as the server reads it; empty if it did."""
    if reply.has_error():
        return str(reply.error.reason)
    with suppress(FrameError):
        why = decoded(read_content(reply.content)[0], Done).error
        return "it differs from the server, whose log has the details" if why.startswith(DIFFERENT) else why
    return ""  # the answer to another kind of message


def default_folder() -> Path:
    """The default place of run folders: FEWBYTES_HOME, or .fewbytes in the home directory."""
    return Path(os.environ.get("FEWBYTES_HOME") or Path.home() / ".fewbytes")


class _Shared:
    """A value that each of Ray's actors gets once, not with every message; `key` identifies it in all processes."""

    def __init__(self, value: Any, key: str = "", stored: Any = None) -> None:
        self.value = value
        self.key = key or f"{os.getpid()}-{id(self)}-{time.time_ns()}"
        self._stored = stored

    def __reduce__(self) -> Any:
        import ray

        if self._stored is None:
            self._stored = ray.put(self.value)
        return _shared, (self.key, self._stored)


@functools.cache
def _shared(key: str, stored: Any) -> _Shared:
    import ray

    return _Shared(ray.get(stored), key, stored)


class _SharedApp(ClientApp):
    """A ClientApp that travels to Ray's actors as a name: its functions would be pickled with every message."""

    def __init__(self, shared: _Shared) -> None:
        super().__init__()
        self._shared = shared

    def __reduce__(self) -> Any:
        return _shared_app, (self._shared,)


_apps: dict[str, ClientApp] = {}  # of this process


def _shared_app(shared: _Shared) -> ClientApp:
    if shared.key not in _apps:
        _apps[shared.key] = _register(shared)
    return _apps[shared.key]


def server_app(method: Method, task: Task, **arguments: Any) -> ServerApp:
    """The method's server half as a Flower ServerApp; `arguments` are those of `serve`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, method, task, **arguments)

    return app


def make_server_app(main: Callable[[Callable[..., Result], Mapping[str, Any]], object]) -> ServerApp:
    """A ServerApp that calls `main` with `serve_run` over its grid, and the run config."""
    app = ServerApp()

    @app.main()
    def start(grid: Grid, context: Context) -> None:
        main(functools.partial(serve_run, grid), context.run_config)

    return app


def serve(
    grid: Grid,
    method: Method,
    task: Task,
    *,
    out: Path | str,
    policy: Policy | None = None,
    names: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Run the method's server half over a Flower grid, from a ServerApp's main; leaves a run folder at `out`.

    `task`: clients' data may lie elsewhere. `names`: the registered name of each client's node, in the order of the
    clients; without names (no authentication) a node is asked for its partition-id. `settings`: the other fields of
    `fewbytes.running.settings.Settings`, such as `rounds` and `resume`; without a `watcher`, each round is a line in
    Flower's log. Raises what `fewbytes.run` does.
    """
    checked = Settings.of({"out": out, "watcher": Logged(), **settings}, option_of(method))
    return serve_run(grid, Run.of(method, task, checked, policy), names)


def serve_run(grid: Grid | None, run: Run, names: Sequence[str] = (), exchange: Exchange | None = None) -> Result:
    """`serve` for a checked run. `exchange`: how messages are exchanged; `grid`: None if its link needs none."""
    run.settings.check_on_flower()
    how = exchange or Exchange()
    return drive(run, lambda terms, origin, watcher: grid_engine(grid, terms, origin, names, how, watcher))
