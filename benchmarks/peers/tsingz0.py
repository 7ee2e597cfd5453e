"""Runs PFLlib and HtFLlib, which have one structure, on our splits and first weights, by their own main.py.

Nothing of theirs is copied or changed on disk: functions are replaced in the running process. Replaced are the reading
of data, the model that they build, the writing of results, and, for equal numbers, the shuffling of batches.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import random
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import BATCH, CLIENTS, LR, Net, Outcome, Row, copy_into, first_clients, pooled, tensors
from torch import nn
from torch.utils.data import DataLoader

import fewbytes as fb
from fewbytes.base.state import State
from fewbytes.core.training import prepared

FIRST = ["-dev", "cpu", "-nc", str(CLIENTS), "-lbs", str(BATCH), "-lr", str(LR), "-ls", "1", "-data", "MNIST"]
"""Their options for all methods. The data set's name only chooses the branch that builds our model."""

UNUSED = ("calmsize", "cvxpy", "higher", "torch_utils")
"""Packages that main.py imports for methods which are not compared, and for a report of memory."""


class Finished(Exception):
    """Raised when the round after the last begins."""


class Watch:
    """Sees the peer's server and clients: gives them our first weights, and takes scores and models at two moments.

    `same`: batches are those of fewbytes.
    """

    def __init__(self, row: Row, task: fb.Task, rounds: int, seed: int, same: bool) -> None:
        self.row, self.task, self.rounds, self.seed, self.same = row, task, rounds, seed, same
        self.server: Any = None
        self.trained: dict[int, tuple[float, State]] = {}

    def begin(self, server: Any) -> None:
        """Called when the server has been made, before it trains."""
        self.server = server
        for client, (state, extra) in zip(server.clients, first_clients(self.row.ours, self.task), strict=True):
            self.give(client, state, extra)
            client.train = self.watched(client, client.train)
            if hasattr(client, "ptrain"):  # Ditto's, which comes before
                client.ptrain = self.unless_finished(client, client.ptrain)
        server.train_metrics_personalized = server.train_metrics  # Ditto's, pFedMe's; all are only printed
        self.give_server(server)
        if self.same and self.row.adjust is not None:
            self.row.adjust(server)
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)

    def give(self, client: Any, state: State, extra: Any) -> None:
        copy_into(client.model, state)
        if hasattr(client, "W_h"):
            copy_into(client.W_h, extra.w)

    def give_server(self, server: Any) -> None:
        """Its own models have our first weights since they were built."""

    def watched(self, client: Any, train: Callable[[], None]) -> Callable[[], None]:
        done = 0

        def call() -> None:
            nonlocal done
            train()
            done += 1
            if done == self.rounds:
                self.trained[client.id] = self.accuracy(client), copied(self.model_of(client))

        return self.unless_finished(client, call)

    def unless_finished(self, client: Any, train: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if client.id in self.trained:
                raise Finished
            train()

        return call

    def model_of(self, client: Any) -> nn.Module:
        """The client's own model."""
        model: nn.Module = getattr(client, "model_per", client.model)
        return model

    def accuracy(self, client: Any) -> float:
        """By the peer's own scoring of a client."""
        correct, tested, *_ = getattr(client, "test_metrics_personalized", client.test_metrics)()
        return float(correct / tested)

    def outcome(self) -> Outcome:
        """Called when the round after the last begins, with all of the last round sent."""
        sent = pooled([self.accuracy(client) for client in self.server.clients], self.task)
        said = getattr(self.server, "rs_test_acc_per", self.server.rs_test_acc)[-1]
        if abs(sent - said) > 1e-6:
            raise SystemExit(f"the peer's own score is {said}, not {sent}")
        order = sorted(self.trained)
        # fewbytes keeps such models with what was sent last in them
        received = self.row.sent == "combined" and not self.row.begins
        models = [copied(self.model_of(c)) if received else self.trained[c.id][1] for c in self.server.clients]
        shared = getattr(self.server, "global_model", None)
        server = copied(shared) if self.row.sent == "global" or isinstance(self.row.ours, fb.Ditto) else None
        return Outcome(sent, fmean(self.trained[i][0] for i in order), models, server)


def copied(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def commit_of(checkout: Path, program: str = "system/main.py") -> str:
    """The checkout's commit. Exits if it is not a checkout."""
    if not (checkout / program).is_file():
        raise SystemExit(f"{checkout} has no {program}: give the folder of a git checkout of the peer")
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout} is not a git checkout, so its version is unknown: clone the peer with git")
    return done.stdout.strip()


def run_theirs(
    checkout: Path, watch: Watch, options: Sequence[str], patches: Callable[[Watch], Iterator[Any]]
) -> Outcome:
    """The peer's side, by its own command line. `patches`: further replacements, as `mock.patch` makes them."""
    row, task = watch.row, watch.task
    rounds = ["-gr", str(watch.rounds), "-eg", str(watch.rounds)]
    command = [*FIRST, *rounds, "-algo", row.algorithm, *row.options, *options]
    system = (checkout / "system").resolve()
    with as_a_program(system, command, UNUSED) as stack:
        for patch in (*data_patches(watch), *model_patches(task, row), *patches(watch)):
            stack.enter_context(patch)
        stack.enter_context(begun(watch))
        try:
            runpy.run_path(str(system / "main.py"), run_name="__main__")
        except Finished:
            return watch.outcome()
    raise SystemExit(f"{row.algorithm} ended before round {watch.rounds}")


@contextlib.contextmanager
def as_a_program(folder: Path, arguments: Sequence[str], unused: Sequence[str]) -> Iterator[contextlib.ExitStack]:
    """Inside the block, a peer's main.py in `folder` can run with these arguments: in an empty working folder, without
    output. `unused`: packages that it imports and that need not be installed. The stack takes further replacements."""
    for name in unused:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = mock.MagicMock()
    place = Path.cwd()
    with contextlib.ExitStack() as stack:
        empty = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(os.chdir, place)
        os.chdir(empty)
        stack.enter_context(mock.patch.object(sys, "argv", ["main.py", *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield stack


def read(watch: Watch, dataset: str, client: int, is_train: bool = True, few_shot: int = 0) -> list[Any]:
    """A client's samples, in place of the peer's files."""
    data = watch.task.data.clients[client]
    return list(zip(*tensors(data.train if is_train else data.test), strict=True))


def data_patches(watch: Watch) -> Iterator[Any]:
    """Our splits in place of files; for equal batches, these are in the order of the data."""

    def loader(data: Any, batch: int, drop_last: bool, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(data, batch, drop_last=drop_last, shuffle=shuffle and not watch.same)

    clients, servers = (
        importlib.import_module(f"flcore.{name}") for name in ("clients.clientbase", "servers.serverbase")
    )
    yield mock.patch.object(clients, "read_client_data", partial(read, watch))
    yield mock.patch.object(servers, "read_client_data", partial(read, watch))
    yield mock.patch.object(clients, "DataLoader", loader)
    for name in ("save_results", "train_metrics"):
        yield mock.patch.object(servers.Server, name, return_value=([0], [1], [0], [0]))


@contextlib.contextmanager
def begun(watch: Watch) -> Iterator[None]:
    """Calls `watch.begin` when a server begins to train; every server's class has its own `train`."""
    servers = importlib.import_module("flcore.servers.serverbase")
    made = servers.Server.__getattribute__

    def looked_up(server: Any, name: str) -> Any:
        if name == "train" and watch.server is None:
            watch.begin(server)
        return made(server, name)

    with mock.patch.object(servers.Server, "__getattribute__", looked_up):
        yield


def model_patches(task: fb.Task, row: Row) -> Iterator[Any]:
    """Our model, with the task's first weights, in place of the peer's CNN. Its layout in memory is ours: with another
    one, convolutions round otherwise, and a pooling over equal pixels may pass its gradient to another of them."""

    def build(*shape: Any, **named: Any) -> nn.Module:
        model = prepared(Net(row.norm))
        copy_into(model, task.problem.first_state())
        return model

    yield mock.patch.object(importlib.import_module("flcore.trainmodel.models"), "FedAvgCNN", build)
