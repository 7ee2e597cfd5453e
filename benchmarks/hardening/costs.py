"""What guarding a run costs: seconds and bytes a round, beside a plain round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import Figure

import fewbytes as fb
from fewbytes.core.admission import Expected, admit, finite_norm
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.models import build_model
from fewbytes.wire import pack, unpack
from fewbytes.wire.schema import leaves_of

ROUNDS, CLIENTS = 5, 20
RULES = ("median", "trimmed-mean", "krum=2", "multi-krum=2", "norm-clip", "geometric-median")
TERMS: dict[str, Any] = {"epochs": 2, "lr": 0.2, "batch": 20}
PROMISE = "epsilon=8,delta=1e-5,clip=1.0,noise=seeded"


def rounds(repeats: int) -> list[Figure]:
    """Runs of five rounds on digits, twenty clients, one process, so many of each kind in turn; the medians."""
    plain = {"fedavg": fb.FedAvg(**TERMS), "fedpurin": fb.FedPURIN(**{**TERMS, "lr": 0.1})}
    kinds: dict[tuple[str, str], dict[str, Any]] = {
        ("fedavg", "plain"): {},
        **{("fedavg", f"--aggregate {rule}"): {"aggregate": rule} for rule in RULES},
        ("fedavg", "--dp of clients"): {"dp": PROMISE},
        ("fedavg", "--dp of samples"): {"dp": f"of=samples,{PROMISE}"},
        ("fedpurin", "plain"): {},
        ("fedpurin", "--aggregate norm-clip"): {"aggregate": "norm-clip"},
    }
    took: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    sent: dict[tuple[str, str], tuple[float, float]] = {}
    _run(plain["fedavg"], {})  # what is loaded once
    for _ in range(repeats):
        for kind, how in kinds.items():
            summary = _run(plain[kind[0]], how).summary
            took[kind].append(summary["seconds"] / ROUNDS)
            sent[kind] = summary["uplink_bytes_per_client_round"], summary["downlink_bytes_per_client_round"]
    found = []
    for method, name in kinds:
        seconds, beside = (statistics.median(took[method, each]) for each in (name, "plain"))
        up, down = sent[method, name]
        figure = f"{seconds:.3f} s a round ({seconds / beside:.2f} times), {up:,.0f} B up, {down:,.0f} B down a client"
        found.append(Figure(f"{method}, {name}", figure, "", None))
    return found


def privacy(_: int) -> list[Figure]:
    """Twenty rounds on digits without --dp and at epsilon 8 and 2, of 200 clients and of the samples of five."""
    found = []
    for of, clients, terms in (("clients", 200, {"lr": 0.2, "batch": 5}), ("samples", 5, {"lr": 0.5, "batch": 20})):
        for epsilon in (0, 8, 2):
            dp = f"of={of},epsilon={epsilon},delta=1e-5,clip=1.0,noise=seeded" if epsilon else None
            result = _run(fb.FedAvg(epochs=2, **terms), {"dp": dp}, clients, 20)
            up, down = (result.summary[f"{way}_bytes_per_client_round"] for way in ("uplink", "downlink"))
            took = f"{result.summary['seconds'] / 20:.2f} s a round"
            figure = f"{result.accuracy:.1%}, {took}, {up:,.0f} B up, {down:,.0f} B down"
            promise = f"--dp of {of}, epsilon {epsilon}" if epsilon else "without --dp"
            found.append(Figure(f"fedavg, {clients} clients, {promise}", figure, "", None))
    return found


def _run(method: fb.Method, how: dict[str, Any], clients: int = CLIENTS, rounds: int = ROUNDS) -> fb.Result:
    data = load_dataset("digits")
    dealt = federate(data, Partition("iid", clients=clients), seed=0)
    task = fb.Task.on(dealt, lambda: build_model("mlp", data.train.shape, len(data.classes)), seed=0)
    usual = {"rounds": rounds, "evaluate_every": rounds, "workers": 1, "save_models": False}
    return fb.run(method, task, **usual, **how)


def admission(repeats: int) -> list[Figure]:
    """Row 4: what checks of a reply of 11 million values (ResNet-18) take, beside its decoding; so many times."""
    torch.set_num_threads(1)
    model = build_model("resnet18", (3, 32, 32), 10)
    state = fb.state_of(model)
    problem = fb.Task.on(
        federate(load_dataset("digits"), Partition("iid", clients=2), seed=0), lambda: model
    ).problem  # fmt: skip
    known = Expected(problem.layout(0), problem.statistics(0), Model(fb.Dense(state)), state, 100, None, 1e3, 1e9)
    frame = bytes(pack(Trained(fb.Dense(state), 100)))
    decoded = unpack(Trained, frame, layout=known.layout)

    def seconds(of: Callable[[], Any]) -> float:
        started = time.perf_counter()
        of()
        return time.perf_counter() - started

    def checks() -> None:
        leaves = leaves_of(decoded)
        admit(leaves, finite_norm(leaves, ""), known)

    decodes = [seconds(lambda: unpack(Trained, frame, layout=known.layout)) for _ in range(repeats)]
    part = statistics.median(seconds(checks) for _ in range(repeats)) / statistics.median(decodes)
    return [
        Figure("checks of a reply of 11 million values, relative to its decoding", f"{part:.0%}", "10 %", part <= 0.1)
    ]
