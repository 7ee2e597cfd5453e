"""Flower's own FedAvg on Flower's simulation, as a careful Flower user would write it: the peer in speed.py.

The same model, client data, epochs, batches and SGD as `fewbytes.FedAvg` in benchmarks/speed/engine.py, channels-last
images too. Ray runs one actor per core, each with one torch thread; an actor opens the data once and keeps one model.
A client's 100 samples become floats anew for every message, which takes under 1 ms and is what our engine does.

To be imported, not run: Ray's actors find `client_app` by this module's name.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ.setdefault("FLWR_HOME", tempfile.gettempdir() + "/flwr-home")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

WORK = {  # name: data set, clients, samples each, epochs, batch, lr; the name is the model's
    "cnn4": ("cifar10", 100, 100, 1, 10, 0.005),
    "mlp": ("mnist", 100, 100, 1, 10, 0.005),
}


def make_task(workload: str) -> fb.Task:
    """The model and the clients' data of a workload; the images stay on disk until they are used."""
    dataset, clients, samples, *_ = WORK[workload]
    loaded = load_dataset(dataset)
    data = federate(loaded, Partition("dirichlet", clients, alpha=0.1, samples=(samples, samples // 5)), seed=1)
    return fb.Task.on(data, lambda: build_model(workload, loaded.train.shape, len(loaded.classes)), seed=1)


@functools.cache
def opened(workload: str) -> tuple[fb.Task, nn.Module]:
    """The task and a model to train; made once in each actor."""
    torch.set_num_threads(1)
    task = make_task(workload)
    return task, task.problem.model(0).to(memory_format=torch.channels_last)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, lr: float) -> float:
    """Plain SGD over shuffled batches, in place; the mean loss of the last epoch."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    total = torch.zeros(())
    model.train()
    for _ in range(epochs):
        total.zero_()
        batches = torch.randperm(len(y)).split(batch)
        for chosen in batches:
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimiser.step()
            total += loss.detach()
    return float(total) / len(batches)


client_app = ClientApp()


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    workload = message.content["config"]["workload"]
    task, model = opened(workload)
    _, _, _, epochs, batch, lr = WORK[workload]
    x, y = task.data.clients[context.node_config["partition-id"]].train.load()
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(model, x, y, epochs, batch, lr)
    metrics = MetricRecord({"num-examples": len(y), "train-loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class TimedFedAvg(FedAvg):
    """Flower's FedAvg that notes when each round's mean is made."""

    def __init__(self, clients: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self.clients = clients
        self.ended: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = list(replies)
        assert len(received) == self.clients
        assert not any(reply.has_error() for reply in received)
        mean = super().aggregate_train(server_round, received)
        self.ended.append(time.perf_counter())
        return mean


def peer_rounds(workload: str, rounds: int) -> list[float]:
    """Seconds of each of `rounds` rounds, mean to mean. Ray's start and one more round, the first, are not counted."""
    clients = WORK[workload][1]
    strategy = TimedFedAvg(clients)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        first = ArrayRecord(make_task(workload).problem.model(0).state_dict())
        config = ConfigRecord({"workload": workload})
        strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds + 1, train_config=config)

    simulate(server_app, client_app, clients)
    if len(strategy.ended) != rounds + 1:
        raise RuntimeError(f"{len(strategy.ended)} of {rounds + 1} rounds ended; see Flower's log above")
    return [end - start for start, end in itertools.pairwise(strategy.ended)]


def simulate(server_app: ServerApp, client_app: ClientApp, clients: int) -> None:
    """Flower's simulation with one actor per core."""
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": len(os.sched_getaffinity(0))},
    }
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=backend)


class PeakMemory:
    """The most memory a process and its descendants had at once, bytes; shared pages are counted once (PSS).

    Sampled in a thread while the context lasts, for one hundredth of the time.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = 0.1
        while not self._stop.wait(pause):
            started = time.perf_counter()
            self.bytes = max(self.bytes, sum(map(memory_bytes, descendants(self.pid))))
            pause = 100 * (time.perf_counter() - started)


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(name))
    tree = [pid]
    for member in tree:
        tree += children.get(member, [])
    return tree


def memory_bytes(pid: int) -> int:
    """A process's proportional set size; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0
