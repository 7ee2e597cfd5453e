"""Clustered FedAvg: FedAvg inside clusters found once, as GENE-FL and all it compares with have them; after PACFL:
Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity Identification in Clustered
Federated Learning via Principal Angles between Client Data Subspaces", AAAI 2023.

Before round 1 every client sends the first left singular vectors of its samples; the server groups the clients whose
data span alike subspaces and keeps one model for each group. In a round a random cohort trains its group's model, and
the server averages the entries each group sent. A client the run did not know sends its vectors when it comes, gets
what the nearest group shares, draws the rest at random, and trains on with the newcomers nearest to the same group.

With one cluster nothing is found and no vectors are sent: that is the method outside clusters, whose newcomers train on
with everybody.

Which entries travel is a matter of the method; the others are each client's own and persist. A client's model before
training is scored as `combined`, after it as `cohort`.

Bytes per client, before lossless coding: once 4 f d up, for d vectors of f features, if there is more than one cluster;
in a round 4 D down and 4 D up, where D counts the model's values (with batch-norm buffers); a newcomer gets 4 D once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.state import EntryMeans, State, state_of, trained_entries
from fewbytes.base.streams import stream_seed
from fewbytes.core.method import Method
from fewbytes.core.network import Network, Refused
from fewbytes.core.problem import Id, Task
from fewbytes.core.ranges import BelowOne, Count, Positive, Share
from fewbytes.core.site import Site
from fewbytes.methods.fedavg import Model, Trained
from fewbytes.wire import Dense, payload


@payload
class Subspace:
    """Client to server: U_i (f, d), the first left singular vectors of its samples as columns; a sample's shape."""

    vectors: Dense
    shape: list[int]

    @property
    def columns(self) -> Tensor:
        return self.vectors.state[""]


@dataclass
class Clusters:
    """The server's state. Clusters 0 to K - 1 are of the first clients, K to 2 K - 1 of newcomers nearest to them.

    With one cluster there are no subspaces, and of most methods no cluster of newcomers.
    """

    models: list[State]  # Theta_k, what of it travels; empty until the first newcomer comes
    cluster_of: dict[Id, int] = field(default_factory=dict)
    subspaces: dict[Id, Subspace] = field(default_factory=dict)


@dataclass
class Own:
    """A client's state."""

    theta: State  # its whole model; empty before it trains for the first time


@dataclass(frozen=True)
class Clustered(Method):
    """Hyper-parameters that GENE-FL and all it compares with share."""

    clusters: Count = 4  # K; 1: no subspaces are sent, the method as it is outside clusters
    vectors: Count = 5  # d, singular vectors of each client
    similarity: Literal["projections", "vectors"] = "projections"  # of subspaces, or of the vectors as they are
    inherit: Literal["shared", "cluster", "nothing"] = "shared"  # by newcomers: what clients send, all the server has
    fraction: Share = 0.2  # S / N
    epochs: Count = 10  # E_l
    lr: Positive = 0.01
    batch: Count = 64
    momentum: BelowOne = 0.9

    headline: ClassVar[str] = "cohort"
    weighted: ClassVar[bool] = True
    """Whether clients count by their numbers of samples."""

    def server(self, task: Task) -> Clusters:
        self.check(task)
        model = task.first_model()
        names = set(self.shared(model))
        first = {name: value.clone() for name, value in state_of(model).items() if name in names}
        return Clusters([dict(first) for _ in range(self.clusters)] + [{} for _ in range(self.clusters)])

    def check(self, task: Task) -> None:
        """Raises UserError for a task whose clients cannot be clustered so, or have different models."""
        there = len(task.data.present(1))
        if self.clusters > there:
            raise UserError(f"clusters is {self.clusters}, more than the {there} clients there are at first: lower it")
        if self.clusters > 1:
            self.check_samples(task)
        if len({task.architecture(i) for i in task.clients}) > 1:
            name = type(self).__name__
            raise UserError(f"{name} averages models, so all clients need the same one; fedktl and fedproto do not")

    def check_samples(self, task: Task) -> None:
        """Raises UserError for samples whose subspaces cannot be compared."""
        shapes = sorted(
            {task.data.clients[i].train.shape for i in task.data.present(1) if len(task.data.clients[i].train)}
        )
        if len(shapes) > 1:
            raise UserError(f"all clients' samples must have one shape, not {shapes[0]} and {shapes[1]}")
        if shapes and self.vectors > math.prod(shapes[0]):
            raise UserError(f"vectors is {self.vectors}, more than the {math.prod(shapes[0])} features of a sample")

    def client(self, site: Site) -> Own:
        return Own({})

    def shared(self, model: nn.Module) -> list[str]:
        """Names of the model's entries that travel."""
        return list(trained_entries(model))

    def observed(self, model: nn.Module) -> list[str] | None:
        names = set(self.shared(model))
        return [name for name, p in model.named_parameters() if name in names and p.requires_grad]

    def start(self, state: Clusters, net: Network) -> None:
        if self.clusters == 1:
            state.cluster_of = dict.fromkeys(net.clients, 0)
            return
        state.subspaces = dict(net.call(self.describe, to=net.clients))
        if len(state.subspaces) < self.clusters:
            raise UserError(f"clusters is {self.clusters}, but only {len(state.subspaces)} clients are there: lower it")
        clients = sorted(state.subspaces)
        columns = [state.subspaces[i].columns for i in clients]
        first = state.subspaces[clients[0]].shape
        if odd := [i for i in clients if state.subspaces[i].shape != first]:
            raise UserError(
                f"client {odd[0]}'s samples have shape {tuple(state.subspaces[odd[0]].shape)}, client {clients[0]}'s "
                f"{tuple(first)}: they must have one"
            )
        points = (
            embedding(columns) if self.similarity == "projections" else torch.stack([u.T.flatten() for u in columns])
        )
        groups = k_means(points, self.clusters, stream_seed(net.task.seed, "clusters"))
        state.cluster_of = dict(zip(clients, groups, strict=True))

    def round(self, state: Any, net: Network, t: int) -> None:
        for k, mean in self.trained(state, net).items():
            state.models[k] = mean.over(state.models[k])

    def trained(self, state: Any, net: Network) -> dict[int, EntryMeans]:
        """A random cohort trains; by cluster the means of what it sent."""
        means: dict[int, EntryMeans] = {}
        for i, reply in net.call(self.train, to=self.downloads(state, net.sample(self.fraction))):
            weight = reply.samples if self.weighted else 1.0
            means.setdefault(state.cluster_of[i], EntryMeans()).add(reply.theta.dense(), weight)
        return means

    def downloads(self, state: Any, cohort: Sequence[Id]) -> dict[Id, Any]:
        """To each client of the cohort what its cluster sends."""
        made = {k: self.download(state, k) for k in {state.cluster_of[i] for i in cohort}}
        return {i: made[state.cluster_of[i]] for i in cohort}

    def download(self, state: Any, k: int) -> Any:
        """What cluster k sends its clients in a round."""
        return Model(Dense(state.models[k]))

    def join(self, state: Clusters, net: Network, client: Id) -> None:
        found = dict(net.call(self.describe, to=[client])) if self.clusters > 1 else {}
        near = self.nearest(state, found[client]) if self.clusters > 1 else 0
        inherited = self.inheritance(state, near, net.task) if self.inherit != "nothing" else {}
        net.tell(self.begin, to=[client], send=Model(Dense(inherited)))
        k = self.of_newcomers(near)
        if not state.models[k]:
            first = net.task.first_state(client, draw="newcomers")
            state.models[k] = {name: inherited.get(name, first[name]) for name in state.models[near]}
        state.cluster_of[client] = k
        state.subspaces |= found

    def of_newcomers(self, near: int) -> int:
        """The cluster that a newcomer nearest to a cluster trains in: one of newcomers only, but where there is one."""
        return self.clusters + near if self.clusters > 1 else near

    def nearest(self, state: Clusters, subspace: Subspace) -> int:
        """Eq. 12: the cluster nearest to a newcomer. Raises Refused if its samples have another shape."""
        members: dict[int, list[Tensor]] = {}
        for i, k in state.cluster_of.items():
            members.setdefault(k % self.clusters, []).append(state.subspaces[i].columns)
        known = next(iter(state.subspaces.values())).shape
        if subspace.shape != known:
            raise Refused(f"its samples have shape {tuple(subspace.shape)}, the known clients' {tuple(known)}")
        away = {
            k: subspace_distance(subspace.columns, columns, self.similarity) for k, columns in sorted(members.items())
        }
        return min(away, key=lambda k: away[k])

    def inheritance(self, state: Any, near: int, task: Task) -> State:
        """What a newcomer gets of its nearest cluster."""
        model: State = state.models[near]
        return model

    def describe(self, state: Own, message: None, site: Site) -> Subspace:
        x = site.tensors(site.train)[0]
        if not x.isfinite().all():
            raise UserError(f"client {site.me} has samples that are not finite numbers (NaN?): correct or remove them")
        return Subspace(Dense({"": subspace(x, self.vectors)}), list(x.shape[1:]))

    def begin(self, state: Own, message: Model, site: Site) -> None:
        """A newcomer's first model: what it inherits, the rest as all newcomers draw it."""
        state.theta = dict(site.task.first_state(site.me, draw="newcomers")) | message.theta.dense()
        site.accuracy(site.model(state.theta), "inherited")

    def train(self, state: Own, message: Model, site: Site) -> Trained:
        theta = message.theta.dense()
        model = site.model(state.theta | theta)
        site.score("combined", model)
        site.fit(model, epochs=self.epochs, lr=self.lr, batch=self.batch, momentum=self.momentum)
        site.score("cohort", model)
        state.theta = state_of(model)
        return Trained(Dense({name: state.theta[name] for name in self.uploaded(theta, site)}), len(site.train))

    def uploaded(self, received: State, site: Site) -> list[str]:
        """Names of the entries a client sends back of those it received."""
        return list(received)

    def global_model(self, state: Clusters, task: Task) -> nn.Module | None:
        """The model of all clients, where they are in one cluster and share all of it."""
        if self.clusters > 1:
            return None
        model = task.first_model(state.models[0])
        return model if state.models[0].keys() == trained_entries(model).keys() else None

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return site.model(state.theta) if state.theta else None


def subspace(samples: Tensor, vectors: int) -> Tensor:
    """U_i (f, d), float32: the first d left singular vectors of the samples (m, …) as columns of (f, m), uncentred.

    In every column the entry of largest magnitude (the first of equals) is positive. A direction the samples do not
    have (fewer samples than d, or constant features) is a column of zeros, which is like nobody's.
    """
    columns = samples.flatten(1).T.double().cpu()
    u, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    there = sizes > sizes.max().clamp(min=1e-300) * max(columns.shape) * torch.finfo(torch.float64).eps
    u = (u * there)[:, :vectors]
    signs = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    full = torch.zeros(len(columns), vectors, dtype=torch.float64)
    full[:, : u.shape[1]] = u * signs
    return full.to(torch.promote_types(samples.dtype, torch.float32))


def likeness(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """||U_i^T U_j||_F^2 of two lists of subspaces, float64 (n, m): the sum of squared cosines of principal angles."""
    a, b = (torch.stack(list(us)).double() for us in (first, second))
    cosines = a.permute(0, 2, 1).flatten(0, 1) @ b.permute(1, 0, 2).flatten(1)
    return cosines.view(len(a), a.shape[2], len(b), b.shape[2]).square().sum((1, 3))


def embedding(subspaces: Sequence[Tensor]) -> Tensor:
    """Points (n, n) as far from each other as the projections U U^T are, by Frobenius norm."""
    values, directions = torch.linalg.eigh(likeness(subspaces, subspaces))
    points: Tensor = directions * values.clamp(min=0).sqrt()
    return points


def subspace_distance(own: Tensor, members: Sequence[Tensor], similarity: str = "projections") -> float:
    """Eq. 12: from a subspace (f, d) to a cluster's mean, of projections U U^T or of the vectors themselves."""
    if similarity == "vectors":
        return float((own.double() - torch.stack(list(members)).double().mean(0)).norm())
    square = likeness([own], [own]).sum() - 2 * likeness([own], members).mean() + likeness(members, members).mean()
    return float(square.clamp(min=0).sqrt())


def k_means(points: Tensor, clusters: int, seed: int) -> list[int]:
    """The cluster of each point (n, …): k-means++ of 10 starts; clusters are numbered as they first appear."""
    from sklearn.cluster import KMeans  # slow to import
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different points than clusters: some stay empty
        found = KMeans(clusters, n_init=10, random_state=seed % 2**32).fit(points.numpy()).labels_
    order = list(dict.fromkeys(int(k) for k in found))
    return [order.index(int(k)) for k in np.asarray(found)]
