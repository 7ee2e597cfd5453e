"""Clustered: any method, run once in each of some clusters of clients; after PACFL: Vahidian, Morafah, Wang,
Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity Identification in Clustered Federated Learning via
Principal Angles between Client Data Subspaces", AAAI 2023.

Before round 1 every client sends the first left singular vectors of its samples; the server groups clients whose data
span similar subspaces. The method then runs in each group as if there were no other clients; each round's cohort is
sampled from all clients. A new client sends its vectors when it joins and is put into the nearest group. With one
cluster, no vectors are sent.

Bytes per client, before lossless coding: 4 f d up once, for d vectors of f features; in each round the method's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.methods.parts.clusters import (
    Grouping,
    Similarity,
    Subspace,
    check_clusters,
    clusters_of,
    described,
    nearest,
    of_one_shape,
    spanned_by,
)
from fewbytes.methods.parts.wrapper import Wrapper, packed, unpacked


@dataclass
class Clusters:
    """The server's state."""

    states: list[bytes]  # the method's state in each cluster, as frames; empty if it has none
    cluster_of: dict[Id, int] = field(default_factory=dict)
    subspaces: dict[Id, Subspace] = field(default_factory=dict)


@dataclass(frozen=True)
class Clustered(Wrapper):
    """The method that runs in each cluster, and how clusters are found.

    >>> import fewbytes as fb
    >>> method = fb.Clustered(fb.FedAvg(epochs=2), clusters=3)
    >>> method.clusters, method.inner.local.epochs
    (3, 2)
    """

    clusters: Count = 4  # K
    vectors: Count = 5  # d, number of singular vectors per client
    similarity: Similarity = "projections"
    grouping: Grouping = "k-means"

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method) or isinstance(self.inner, Wrapper):
            raise UserError(f"clusters need a method without clusters of its own, such as FedAvg(), not {self.inner!r}")
        if self.inner.own_rounds:
            raise UserError(f"{self.inner.method_name} sets its own rounds, so it cannot run in clusters")
        if self.inner.promises.streams:
            raise UserError(
                f"{self.inner.method_name} aggregates replies of all clients as they arrive: leave clusters out"
            )
        super().__post_init__()

    @property
    def promises(self) -> Promises:  # type: ignore[override]  # depends on the inner method
        return replace(super().promises, aggregates=self.inner.promises.aggregates)

    @property
    def method_name(self) -> str:
        return f"{self.inner.method_name} in {self.clusters} cluster{'s' if self.clusters > 1 else ''}"

    def server(self, problem: Problem) -> Clusters:
        check_clusters(problem, self.clusters, self.vectors, self.grouping)
        return Clusters([packed(self.inner.server(problem)) for _ in range(self.clusters)])

    def state_class(self, half: Literal["server", "client"]) -> type[Any] | None:
        return self.inner.state_class(half) if half == "client" else Clusters

    def start(self, state: Clusters, net: Network) -> None:
        if self.clusters > 1:
            state.subspaces = of_one_shape(
                net.call(self.describe, to=net.clients, check=spanned_by(self.vectors)), net.problem
            )
        state.cluster_of = clusters_of(state.subspaces, self.clusters, self.similarity, self.grouping, net)
        for k in range(self.clusters):
            with self.opened(state, k, net) as (inner, members):
                self.inner.start(inner, members)

    def round(self, state: Clusters, net: Network, t: int) -> None:
        missed: list[TooFewReplies] = []
        asked = 0
        for k in range(self.clusters):
            try:
                with self.opened(state, k, net) as (inner, members):
                    if members.sample(getattr(self.inner, "fraction", 1.0)):
                        asked += 1
                        self.inner.round(inner, members, t)
            except TooFewReplies as error:
                missed.append(error)
        if missed:
            if len(missed) == asked:
                raise missed[0]
            net.note("clusters with too few replies stay unchanged", f"{len(missed)} of {self.clusters}")

    def finish(self, state: Clusters, net: Network) -> None:
        for k in range(self.clusters):
            with self.opened(state, k, net) as (inner, members):
                self.inner.finish(inner, members)

    def join(self, state: Clusters, net: Network, client: Id) -> None:
        k = 0
        if self.clusters > 1:
            found = dict(net.call(self.describe, to=[client], check=spanned_by(self.vectors)))
            k = nearest(found[client], state.subspaces, state.cluster_of, self.similarity)
            state.subspaces |= found
        state.cluster_of[client] = k
        with self.opened(state, k, net) as (inner, members):
            self.inner.join(inner, members, client)

    @contextmanager
    def opened(self, state: Clusters, k: int, net: Network) -> Iterator[tuple[Any, Network]]:
        """The method's state in cluster k, saved on exit, and the network restricted to the cluster's clients."""
        inner = unpacked(self.inner.state_class("server"), state.states[k])
        yield inner, net.among([i for i in net.clients if state.cluster_of.get(i) == k], f"cluster {k}")
        state.states[k] = packed(inner)

    def describe(self, state: Any, message: None, site: Site) -> Subspace:
        return described(site, self.vectors)

    def global_model(self, state: Clusters, problem: Problem) -> nn.Module | None:
        """The method's global model if there is only one cluster."""
        if self.clusters > 1:
            return None
        return self.inner.global_model(unpacked(self.inner.state_class("server"), state.states[0]), problem)

    def server_models(self, state: Clusters, problem: Problem) -> dict[str, nn.Module]:
        """With several clusters, each one's model as `cluster-0` and so on."""
        if self.clusters == 1:
            return super().server_models(state, problem)
        kind = self.inner.state_class("server")
        models = [self.inner.global_model(unpacked(kind, frame), problem) for frame in state.states]
        return {f"cluster-{k}": model for k, model in enumerate(models) if model is not None}
