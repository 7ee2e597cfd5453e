"""Total bytes until dense FedAvg's accuracy less half a point: rounding both ways, NNCodec alike, other methods.

    FEWBYTES_DATA=… python benchmarks/paper/equal_accuracy.py --out runs/equal [--dataset mnist] [--peers-python PATH]

All see the same clients, first weights and terms of local training, for the same rounds. `+0.5` rounds both directions
(`bits=0.5`); `nncodec` is FedAvg with both directions coded by NNCodec, with error feedback at both ends: clients'
changes, and the server's from the model as clients have it, of which a client gets those it missed. Its quantisation
parameters are so many above that of a step of the change's root mean square (4 double it); batch-norm statistics stay
as they are. Accuracies are means over the seeds and the last three scored rounds, ± the seeds' standard deviation; the
target, FedAvg's less half a point, is reached where that of the rounds so far is. Bytes are those of the frames, in
MB = 10^6, of all clients together, the mean over the seeds; the factor is FedAvg's total over a row's, each until the
target. A run that is finished in --out is not run again.

PATH is a Python that has `pip install nncodec` (it needs numpy below 2); without it that row is left out.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import math
import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.ranges import Samples, Share
from fewbytes.base.state import State
from fewbytes.core.problem import Problem
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.experiments.settings import make_method
from fewbytes.methods.parts import compressed
from fewbytes.methods.parts.averaging import Model, outer_step
from fewbytes.methods.parts.compressed import Residual
from fewbytes.models.build import ModelBuilder

HERE = Path(__file__).resolve().parent
MODELS = {"cifar10": "resnet8:width=16"}  # else mlp
OUTER = "server_lr=0.7,server_momentum=0.6,nesterov=true"
METHODS = [
    "fedavg", "fedavg+0.5", "fedavg+0.3", f"fedavg:{OUTER}", f"fedavg:{OUTER}+0.5", "nncodec:above=6",
    "nncodec:above=8", "fedcom:bits=8", "dgc:momentum=0",
]  # fmt: skip
LAST = 3  # scored rounds that an accuracy is the mean of
ALLOWED = 0.005  # of accuracy, that may be lost


@fb.payload
class Changes:
    """Server to client: the first weights, NNCodec's bitstreams of the changes since, and the batch-norm statistics."""

    first: fb.Dense
    changes: list[bytes]
    known: int  # changes that the client has already
    buffers: fb.Dense


@fb.payload
class Coded:
    """Client to server: NNCodec's bitstream of the change, the batch-norm statistics, and on how many samples."""

    change: bytes
    buffers: fb.Dense
    samples: Samples


@dataclass
class CodedServer:
    """The server's state: the model, the model as clients have it, the changes that led there, who has how many, and
    the velocity of the outer step."""

    theta: State
    buffers: State
    held: State
    changes: list[bytes]
    has: dict[int, int]
    velocity: State


@dataclass
class CodedClient:
    """A client's state: its error, and the server's parameters as it has them."""

    error: State
    held: State


@dataclass(frozen=True)
class NNCodec(fb.Method):
    """FedAvg with both directions coded by NNCodec, and error feedback; `server_lr`, `server_momentum`: as of FedAvg,
    with Nesterov's momentum."""

    python: str = ""  # which has NNCodec
    above: int = 6  # of the quantisation parameter, over that of a step of the root mean square
    fraction: Share = 1.0
    local: Local = Local()
    server_lr: float = 1.0
    server_momentum: float = 0.0

    def server(self, problem: Problem) -> CodedServer:
        first = compressed.first_server_model(problem)
        return CodedServer(first.theta, first.buffers, first.theta, [], {}, {})

    def client(self, site: Site) -> CodedClient:
        return CodedClient({}, {})

    def round(self, state: CodedServer, net: fb.Network, t: int) -> None:
        if t > 1:
            change = {name: value - state.held[name] for name, value in state.theta.items()}
            state.changes.append(encoded(self.python, change, self.above))
            state.held = self.applied(state.held, state.changes[-1])
        first, cohort = fb.Dense(net.problem.first_state()), net.sample(self.fraction)
        sent = {
            client: Changes(first, state.changes[state.has.get(client, 0) :], state.has.get(client, 0), buffers)
            for buffers in [fb.Dense(state.buffers)]
            for client in cohort
        }
        mean = net.mean(state.theta | state.buffers)
        for client, reply in net.call(self.train, to=sent):
            state.has[client] = len(state.changes)
            mean.add(decoded(self.python, reply.change, state.theta) | reply.buffers.dense(), weight=reply.samples)
        received = mean()
        state.buffers = {name: received[name] for name in state.buffers}
        # what coding of the message lost stays in the model, and is in its next difference
        change = {name: received[name] for name in state.theta}
        step = self.server_lr, self.server_momentum
        state.theta, state.velocity = outer_step(state.theta, change, state.velocity, *step, nesterov=True)

    def train(self, state: CodedClient, message: Changes, site: Site) -> Coded:
        buffers = message.buffers.dense()
        if not message.known:
            state.held = {name: value for name, value in message.first.dense().items() if name not in buffers}
        for change in message.changes:
            state.held = self.applied(state.held, change)
        change, after = compressed.trained_change(Model(fb.Dense(state.held | buffers)), site, self.local)
        memory = Residual(state.error)
        wanted = memory.added(change)
        sent = encoded(self.python, wanted, self.above)
        memory.keep(wanted, decoded(self.python, sent, wanted))
        state.error = memory.error
        return Coded(sent, after, len(site.train))

    def applied(self, held: State, change: bytes) -> State:
        return compressed.moved(held, decoded(self.python, change, held))

    def global_model(self, state: CodedServer, problem: Problem) -> nn.Module:
        return problem.first_model(state.theta | state.buffers)


@cache
def peer(python: str, process: int) -> subprocess.Popen[bytes]:
    """NNCodec, behind a pipe; one for each process, as forked ones must not share it."""
    started = subprocess.Popen(
        [python, HERE / "nncodec_pipe.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    atexit.register(started.kill)
    return started


def asked(python: str, request: dict[str, Any], data: bytes) -> bytes:
    """What NNCodec answers."""
    there = peer(python, os.getpid())
    assert there.stdin is not None
    assert there.stdout is not None
    there.stdin.write(json.dumps(request).encode() + b"\n" + data)
    there.stdin.flush()
    head = there.stdout.read(8)
    if len(head) < 8:
        raise RuntimeError(f"NNCodec ended under {python}")
    return there.stdout.read(struct.unpack("<q", head)[0])


def encoded(python: str, tensors: State, above: int) -> bytes:
    flat = np.concatenate([value.numpy().reshape(-1) for value in tensors.values()])
    scale = math.sqrt(float(np.square(flat, dtype=np.float64).mean())) or 1.0
    request = {"encode": [list(value.shape) for value in tensors.values()], "qp": round(4 * math.log2(scale)) + above}
    return asked(python, request, flat.tobytes())


def decoded(python: str, data: bytes, like: State) -> dict[str, Tensor]:
    values = asked(python, {"decode": len(data), "count": len(like)}, data)
    parts = torch.from_numpy(np.frombuffer(values, np.float32).copy()).split([v.numel() for v in like.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", help=f"default: {MODELS}, else mlp")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the clients, a round")
    parser.add_argument("--alpha", type=float, default=0.5, help="of the Dirichlet partition")
    parser.add_argument("--samples", type=int, default=300, help="training images of a client")
    parser.add_argument("--test", type=int, default=5000, help="test images of the server")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=int, default=2, help="rounds that one is scored of")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.05, help="at first; it falls to 0 as a cosine")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help="name[:key=value,…][+bits a value, both ways]; fedavg first"
    )
    parser.add_argument("--peers-python", type=Path, help="which has nncodec")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.model = args.model or MODELS.get(args.dataset, "mlp")
    if args.methods[0] != "fedavg":
        parser.error("the first method is fedavg: the others are measured by it")
    if args.rounds < LAST * args.every:
        parser.error(f"accuracies are means of {LAST} scored rounds: more rounds, or a smaller --every")
    if args.peers_python is None and any(spec.startswith("nncodec") for spec in args.methods):
        print("left out: nncodec (--peers-python names a Python that has it)")
        args.methods = [spec for spec in args.methods if not spec.startswith("nncodec")]
    return args


def make_task(args: argparse.Namespace, seed: int) -> fb.Task:
    dataset = load_dataset(args.dataset)
    data = federate(dataset, Partition("dirichlet", args.clients, alpha=args.alpha, samples=(args.samples, 50)), seed)
    data = replace(data, test=data.test.take(range(min(args.test, len(data.test)))))
    return fb.Task.on(data, ModelBuilder(args.model, dataset.train.shape, len(dataset.classes)), seed=seed)


def make(args: argparse.Namespace, spec: str) -> tuple[fb.Method, dict[str, Any]]:
    """A method, and the run's settings that are its row's."""
    method, _, bits = spec.partition("+")
    name, _, given = method.partition(":")
    own = dict(part.split("=", 1) for part in given.split(",") if part)
    terms = {"epochs": args.epochs, "lr": args.lr, "batch": args.batch, "momentum": 0.9, "lr_rounds": args.rounds}
    settings = {"bits": float(bits)} if bits else {}
    if name == "nncodec":
        above, outer = int(own.pop("above", NNCodec.above)), {name: float(value) for name, value in own.items()}
        return NNCodec(str(args.peers_python), above, args.fraction, Local(**terms), **outer), settings
    return make_method(name, terms | {"fraction": args.fraction} | own), settings


def rows_of(args: argparse.Namespace, spec: str, seed: int) -> list[dict[str, Any]]:
    """Run a method, or read what an earlier run found: the lines of rounds.jsonl."""
    terms = [
        args.dataset, args.model, args.clients, args.fraction, args.alpha, args.samples, args.test, args.rounds,
        args.every, args.epochs, args.batch, args.lr,
    ]  # fmt: skip
    folder = args.out / "-".join(map(str, [*terms, spec, f"seed{seed}"])).replace(":", "_")
    result = folder / "result.json"
    if not result.exists() or json.loads(result.read_text())["status"] != "done":
        method, settings = make(args, spec)
        fb.run(
            method, make_task(args, seed), rounds=args.rounds, evaluate_every=args.every, out=folder,
            workers=args.workers, resume=any((folder / "checkpoint").glob("*.state")), save_models=False, **settings,
        )  # fmt: skip
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Course:
    """What a method did, by scored round: accuracy (seeds, rounds), bytes each way until then, means over seeds."""

    rounds: list[int]
    accuracies: np.ndarray
    up: np.ndarray
    down: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[list[dict[str, Any]]], kind: str) -> Course | None:
        """None if its models are not of that kind."""
        scored = [i for i, row in enumerate(runs[0]) if kind in (row["scores"] or {}).get("accuracy", {})]
        if not scored:
            return None
        accuracies = [[run[i]["scores"]["accuracy"][kind] for i in scored] for run in runs]
        up, down = (
            np.mean([np.cumsum([row[f"{way}link_bytes"] for row in run])[scored] for run in runs], 0)
            for way in ("up", "down")
        )
        return cls([runs[0][i]["round"] for i in scored], np.array(accuracies), up, down)

    @property
    def final(self) -> list[float]:
        """Of each seed."""
        return [fmean(of_seed[-LAST:]) for of_seed in self.accuracies]

    def reached(self, target: float) -> int | None:
        """The first scored round at which that is reached, from 0."""
        curve = self.accuracies.mean(0)
        return next((i for i in range(LAST - 1, len(curve)) if curve[i - LAST + 1 : i + 1].mean() >= target), None)


def table(args: argparse.Namespace, found: dict[str, list[list[dict[str, Any]]]], kind: str) -> None:
    dense = Course.of(found["fedavg"], kind)
    assert dense is not None
    target = fmean(dense.final) - ALLOWED
    at_dense = dense.reached(target)
    assert at_dense is not None
    print(f"\n{kind}: until {100 * target:.2f} %")
    sizes = "MB up | MB down | MB both | times fewer bytes than fedavg, both | bytes a reply"
    print(f"| method | accuracy | rounds | {sizes} |\n{'| --- ' * 8}|")
    for spec, runs in found.items():
        course = Course.of(runs, kind)
        if course is None:
            continue
        at = course.reached(target)
        cells = [spec, f"{100 * fmean(course.final):.1f} ± {100 * pstdev(course.final):.1f} %"]
        if at is None:
            cells += ["not reached", "", "", "", ""]
        else:
            up, down = (each[at] / 1e6 for each in (course.up, course.down))
            times = (dense.up[at_dense] + dense.down[at_dense]) / 1e6 / (up + down)
            cells += [str(course.rounds[at]), f"{up:.3f}", f"{down:.3f}", f"{up + down:.3f}", f"{times:.1f}"]
        replies = args.rounds * max(1, round(args.fraction * args.clients))
        print(f"| {' | '.join(cells)} | {course.up[-1] / replies:,.0f} |", flush=True)


def main() -> None:
    args = parse()
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for spec in args.methods:
        found[spec] = [rows_of(args, spec, seed) for seed in args.seeds]
    print(f"{args.dataset}, {args.model}, {args.clients} clients of {args.samples} samples, {args.rounds} rounds")
    table(args, found, "global")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
