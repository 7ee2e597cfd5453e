"""A simulation over the hosts of a Ray cluster.

Run folder, client states and frames are on the server's host, where nodes use them directly. For nodes on other hosts,
a keeper, which is an actor on the server's host, transfers them through Ray's object store.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.files import ScratchFolder, private_folder, replacing
from fewbytes.core.method import Method
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.engines.frames import FrameFolder, FramePlace
from fewbytes.engines.handlers import Done
from fewbytes.engines.store import SECRET, TRAINED, ClientStore
from fewbytes.flower.node import Node, Order
from fewbytes.flower.private.programs import QUIET
from fewbytes.flower.private.ray_cluster import ray_cluster
from fewbytes.running.checkpoint import VERSION
from fewbytes.wire import Frame

HOST_SECONDS = 180  # timeout for a host to report its version of this package


class Home(NamedTuple):
    """The server's host, as nodes on any host know it."""

    host: str  # Ray's id of it
    keeper: Any  # Ray's handle of a Keeper there

    def reach(self, folder: FrameFolder) -> FramePlace:
        """This process's access, on any host, to a folder of frames on the server's host."""
        import ray

        return folder if ray.get_runtime_context().get_node_id() == self.host else FarFrames(self.keeper)


def connect(address: str) -> int:
    """Join the Ray cluster at an address, until `ray.shutdown`; returns its number of processors.

    Raises UserError if none is there, or a host of it has another version of this package.
    """
    place = ray_cluster(address)
    import ray

    try:
        environment = {"env_vars": dict(QUIET)}
        ray.init(place, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"this host cannot join the Ray cluster at {address}: {one_line(error, 300)}") from None
    try:
        _check_versions()
        cores = int(ray.cluster_resources().get("CPU", 0))
        if not cores:
            raise UserError(f"the Ray cluster at {address} has no processors to work with (--num-cpus of `ray start`)")
    except BaseException:
        ray.shutdown()
        raise
    return cores


def _check_versions() -> None:
    """Raises UserError for a host without this version of the package."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def found() -> str:  # travels by value, so that a host without the package can say so
        try:
            from fewbytes.running.checkpoint import VERSION
        except ImportError as error:
            return f"no fewbytes ({error})"
        return f"fewbytes {VERSION}"

    ask = ray.remote(found)
    hosts = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = [
        ask.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in hosts
    ]
    for node, answer in zip(hosts, asked, strict=True):
        try:
            there = ray.get(answer, timeout=HOST_SECONDS)
        except ray.exceptions.RayError as error:
            there = f"no answer ({one_line(error, 200)})"
        if there != f"fewbytes {VERSION}":
            raise UserError(
                f"the Ray host {node['NodeManagerAddress']} has {there}, this one fewbytes {VERSION}: install the same "
                "on every host of the cluster"
            )


def start_keeper(folder: Path, frames: FrameFolder) -> Home:
    """Start a Keeper on this host, for a folder of run folders and one of frames."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(host, soft=False)
    return Home(host, ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=here).remote(folder, frames))


class Keeper:
    """Transfers files and frames between the server's host, where it runs, and nodes on other hosts."""

    def __init__(self, folder: Path, frames: FrameFolder) -> None:
        self.folder, self.frames = folder, frames
        self._sent: dict[str, Any] = {}  # frames in Ray's store, by name: a host fetches each once

    def get(self, name: str) -> list[Any]:
        """A frame, as Ray's reference to it. Raises FrameError if there is none."""
        for gone in [each for each in self._sent if not (self.frames.folder / each).exists()]:
            del self._sent[gone]
        if name not in self._sent:
            import ray

            self._sent[name] = ray.put(_array(self.frames.get(name)))
        return [self._sent[name]]  # in a list, or Ray would send what it refers to

    def put(self, frame: Any) -> str:
        """Store a frame; returns its name."""
        return self.frames.put(memoryview(frame))

    def lend(self, run: str, client: Id, version: int) -> dict[str, Any]:
        """The files that a client's handler reads, by their names below the run folder."""
        store = self._store(run)
        store.secret()  # so that no two hosts make one
        there = [path for path in client_files(store, client, version) if path.exists()]
        return {str(path.relative_to(self.folder / run)): _array(path.read_bytes()) for path in there}

    def keep(self, run: str, client: Id, files: dict[str, Any], versions: range) -> None:
        """Store a client's changed files, and keep only these versions of its state."""
        for name, content in files.items():
            path = self.folder / run / name
            private_folder(path.parent)
            with replacing(path, sync=path.suffix == TRAINED) as file:
                file.write(content)
        self._store(run).keep_only_of(client, versions)

    def _store(self, run: str) -> ClientStore:
        return ClientStore(self.folder / run / "checkpoint" / "clients")


class FarFrames:
    """The folder of frames on the server's host, accessed from another host."""

    def __init__(self, keeper: Any) -> None:
        self.keeper = keeper

    def put(self, frame: Frame | bytes) -> str:
        """Store a frame; returns its name."""
        import ray

        return str(ray.get(self.keeper.put.remote(_array(bytes(frame)))))

    def get(self, name: str) -> memoryview:
        """A stored frame, as a view into this host's part of Ray's store. Raises FrameError if there is none."""
        import ray

        return memoryview(ray.get(ray.get(self.keeper.get.remote(name))[0]))


class FarNode(Node):
    """A node on another host than the server's: it works on copies of its clients' files.

    Changed files are sent back before the reply, so that losing this host loses nothing.
    """

    def __init__(self, method: Method, task: Task, keeper: Any, run: str) -> None:
        scratch = ScratchFolder("node")
        super().__init__(method, task, scratch.path, run, allows=None)
        self._keeper = keeper
        weakref.finalize(self, scratch.close)

    def answer(self, order: Order, frames: Sequence[memoryview]) -> tuple[Done, bytes]:
        """As in `Node`."""
        with self._borrowed(order):
            return super().answer(order, frames)

    def save_model(self, order: Order, about: dict[str, Any]) -> Done:
        """As in `Node`."""
        with self._borrowed(order):
            return super().save_model(order, about)

    @contextmanager
    def _borrowed(self, order: Order) -> Iterator[None]:
        """Copy the files of the order's client here, and send changes back at the end."""
        import ray

        client, version = order.job.client, order.job.version
        lent = ray.get(self._keeper.lend.remote(order.run, client, version))
        for name, content in lent.items():
            (self.folder / name).write_bytes(content)
        model = self.folder / "models" / f"client-{client}.safetensors"
        yield
        written = [
            path
            for path in (*client_files(self.store, client, version + 1), model)
            if path.exists() and path.name != SECRET
        ]
        files = {str(path.relative_to(self.folder)): _array(path.read_bytes()) for path in written}
        kept = range(min(order.kept, version), version + 2)
        ray.get(self._keeper.keep.remote(order.run, client, files, kept))
        for path in (*written, self.store.path(client, version)):
            path.unlink(missing_ok=True)


def client_files(store: ClientStore, client: Id, version: int) -> list[Path]:
    """The files that a handler of the client uses, with its state of this version."""
    names = (SECRET, f"{client}{TRAINED}", f"{client}.reply")
    return [store.path(client, version), *(store.folder / name for name in names)]


def _array(content: bytes | memoryview) -> Any:
    """Bytes as an array, which Ray hands over without copying them."""
    return np.frombuffer(content, np.uint8)
