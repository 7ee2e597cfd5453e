"""GENE-FL: Guo, Lv, Wang, Geng, "GENE-FL: Gene-Driven Parameter-Efficient Dynamic Federated Learning", arXiv
2504.14628, 2025, Algorithms 1 and 2.

Clients are clustered once by the subspaces of their data. A client loads its cluster's learnGene into its own model and
trains it with a pull towards the cluster's model (Eq. 4), and a second one on coordinates of low Fisher information
(Eq. 5-8). It scores its layers by how little they changed for their size (Eq. 9), and uploads the gamma best: its
learnGene. The server averages each layer over the clients that sent it (Eq. 10). A newcomer with unseen classes gets
the learnGene of the nearest cluster (Eq. 12) and draws the other layers at random.

A layer is one convolution or linear map with its bias; batch normalisation stays with the client. gamma starts at all
layers, and falls by a fraction of the surplus after every round in which the cluster's accuracy, measured on clients'
test samples, did not drop. Newcomers collaborate among themselves, in clusters that start from the learnGene and those
random layers.

Bytes per client, before lossless coding: 4 f d up once, if there is more than one cluster; per round 4 W down and
4 W(gamma) up, for W values in all layers and W(gamma) in the uploaded ones; a newcomer gets 4 W(gamma) once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.ranges import PART, BelowOne, Count, NotNegative, Share, UpToOne, Whole
from fewbytes.base.state import State, load_state, state_of
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import ENTRY_RULES
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.averaging import Model, Own, first_shared, own_model
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
from fewbytes.models.fisher import fisher_diagonal
from fewbytes.models.layers import batch_norm_of, layers_of
from fewbytes.wire import Dense, payload

Norm = Literal["global", "per_tensor_sum", "squared"]
Score = Literal["cosine", "l1", "l2", "emd"]


@payload
class Cluster:
    """Server to client: Theta_k's layers, and the number of layers to send back."""

    theta: Dense
    gamma: int
    start: list[int]  # layers from which training starts; the client keeps its others


@payload
class LearnGene:
    """Client to server: its gamma best layers, the scores xi of all layers, its accuracy in percent."""

    theta: Annotated[Dense, PART]
    scores: list[float]
    accuracy: Annotated[float, Meta(ge=0, le=100)] | None  # None: it has no test samples


@dataclass
class Schedule:
    """The values that determine a cluster's gamma and learnGene."""

    gamma: int
    senders: list[int]  # N^(l) of the last round
    scores: list[float]  # mean xi of the last round
    best: float = 0.0  # accuracy so far, percent


@dataclass
class Genes:
    """The server's state. Clusters 0 to K - 1 hold the first clients, K to 2 K - 1 the newcomers nearest to them."""

    models: list[State]  # Theta_k; empty until the first newcomer comes
    schedules: list[Schedule]  # by cluster
    cluster_of: dict[Id, int] = field(default_factory=dict)
    subspaces: dict[Id, Subspace] = field(default_factory=dict)


@dataclass(frozen=True)
class GeneFL(Method):
    """Hyper-parameters of GENE-FL: the paper's values except lambda_gen; ours where the paper gives none."""

    clusters: Count = 4  # K; 1: no subspaces are sent
    vectors: Count = 5  # d, number of singular vectors per client
    similarity: Similarity = "projections"  # of subspaces, or of the vectors themselves
    grouping: Grouping = "k-means"  # clustering algorithm
    start_from: Literal["own", "learngene"] = "learngene"  # own: a client's last model, as it is
    inherit: Literal["shared", "cluster", "nothing"] = "shared"  # by newcomers: the learnGene, or all the server has
    fraction: Share = 0.2  # S / N
    local: Local = Local(epochs=10, lr=0.01, batch=64, momentum=0.9)  # E_l
    lambda_gen: NotNegative = 0.05  # lambda_1, weight of L_gen; the paper uses 0.5; 0: without
    lambda_elastic: NotNegative = 0.05  # lambda_2, weight of L_elg; 0: without
    threshold: BelowOne = 0.5  # epsilon, on normalised Fisher information
    gamma: Whole = 0  # minimum number of layers in the learnGene; 0: 16 of 21, as in the paper's ResNet-18
    gamma_step: UpToOne = 0.2  # fraction of the surplus layers removed per round; 0: gamma layers from round 1
    tolerance: NotNegative = 0.5  # percentage points below the best accuracy at which gamma still falls
    score: Score = "cosine"  # or distances, of which the smallest are kept
    order: Literal["descending", "ascending"] = "descending"  # ascending: keeps the layers of the lowest scores
    norm: Norm = "global"  # D of Eq. 4: over all tensors, or a sum over tensors, or squared
    normalise: Literal["global", "per_tensor"] = "global"  # Fisher information, by its smallest and largest value
    elastic: Literal["live", "target"] = "live"  # target: theta' is computed once per round and attracts as a whole
    elastic_step: Literal["joint", "split"] = "joint"  # split: L_elg has one of its own (Alg. 1, line 9), no momentum
    fisher: Literal["empirical", "model"] = "empirical"  # by true labels, or expected over the model's own
    fisher_samples: Whole = 0  # maximum number of samples per client; 0: all
    classifier: Literal["shared", "own"] = "shared"  # own: the last layer stays with the client
    batch_norm: Literal["own", "layer"] = "own"  # own: stays with the client; layer: sent with its layer

    promises = Promises(sends="the layers that change least for their size", headline="cohort", aggregates=ENTRY_RULES)
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> Genes:
        check_clusters(problem, self.clusters, self.vectors)
        model = problem.first_model()
        shared = [name for names in self.travelling(model).values() for name in names]
        first = first_shared(problem, shared).theta
        sizes = [sum(model.get_parameter(name).numel() for name in names) for names in self.layers(model).values()]
        count, smallest = len(sizes), self.smallest(len(sizes))
        if self.gamma > count:
            raise UserError(f"gamma is {self.gamma}, but the model has {count} layers: give 1 to {count}, or 0")

        def schedule(gamma: int) -> Schedule:
            return Schedule(gamma, [0] * count, [1 / size for size in sizes])  # as if nothing had changed yet

        gammas = [count if self.gamma_step else smallest] * self.clusters + [smallest] * self.clusters
        models = [dict(first) for _ in range(self.clusters)] + [{} for _ in range(self.clusters)]
        return Genes(models, [schedule(gamma) for gamma in gammas])

    def client(self, site: Site) -> Own:
        return Own({})

    def layers(self, model: nn.Module) -> dict[str, list[str]]:
        """The layers that may be in the learnGene, by name, and the names of their parameters. Raises UserError."""
        layers = layers_of(model)
        if self.classifier == "own":
            layers.popitem()
        if not layers:
            raise UserError("the model has one layer: with classifier=own nothing is left to share")
        return layers

    def smallest(self, layers: int) -> int:
        """gamma_min for a number of layers."""
        return self.gamma or max(1, 16 * layers // 21)

    def travelling(self, model: nn.Module) -> dict[str, list[str]]:
        """The same layers, with the names of all entries sent with each, its parameters first."""
        layers = self.layers(model)
        if self.batch_norm == "own":
            return layers
        return {layer: names + batch_norm_of(model, layer) for layer, names in layers.items()}

    def observed(self, model: nn.Module) -> list[str]:
        """Those of the smallest learnGene; early rounds of a cluster send more, the first one all layers."""
        layers = self.layers(model)
        sizes = torch.tensor([sum(model.get_parameter(n).numel() for n in names) for names in layers.values()])
        kept = top_layers(1 / sizes.double(), self.smallest(len(layers)), self.order == "ascending")
        travelling = self.travelling(model).values()
        sent = {name for names, sent in zip(travelling, kept, strict=True) if sent for name in names}
        return [name for name, _ in model.named_parameters() if name in sent]

    def start(self, state: Genes, net: Network) -> None:
        """Algorithm 2, lines 1-2."""
        if self.clusters > 1:
            state.subspaces = of_one_shape(
                net.call(self.describe, to=net.clients, check=spanned_by(self.vectors)), net.problem
            )
        state.cluster_of = clusters_of(state.subspaces, self.clusters, self.similarity, self.grouping, net)

    def describe(self, state: Own, message: None, site: Site) -> Subspace:
        return described(site, self.vectors)

    def round(self, state: Genes, net: Network, t: int) -> None:
        model = net.problem.first_model()
        layers = self.layers(model)
        cohort = net.sample(self.fraction)
        sent = {k: self.download(state, k) for k in {state.cluster_of[i] for i in cohort}}
        models = {f"{k} {name}": value for k in sent for name, value in state.models[k].items()}  # of all clusters
        mean, middle = net.entry_means(models, few=True), np.mean if net.votes() is None else np.median
        received: dict[int, list[tuple[list[float], float | None]]] = {}
        senders: dict[int, Counter[str]] = {}

        def check(client: Id, reply: LearnGene) -> None:
            self.check(reply, model, sent[state.cluster_of[client]].gamma)

        for i, reply in net.call(self.train, to={i: sent[state.cluster_of[i]] for i in cohort}, check=check):
            k, theta = state.cluster_of[i], reply.theta.dense()
            mean.add({f"{k} {name}": value for name, value in theta.items()})
            senders.setdefault(k, Counter()).update(theta.keys())
            received.setdefault(k, []).append((reply.scores, reply.accuracy))
        models = mean.over(models)  # Algorithm 2, Eq. 10
        for k in received:
            state.models[k] = {name: models[f"{k} {name}"] for name in state.models[k]}
            schedule = state.schedules[k]
            schedule.senders = [senders[k][names[0]] for names in layers.values()]
            schedule.scores = middle([scores for scores, _ in received[k]], axis=0).tolist()
            measured = [accuracy for _, accuracy in received[k] if accuracy is not None]
            accuracy = float(middle(measured)) if measured else schedule.best  # without measurements: no drop
            smallest = self.smallest(len(layers))
            step = max(1, round(self.gamma_step * (len(layers) - smallest)))
            schedule.gamma = next_gamma(schedule.gamma, accuracy, schedule.best, smallest, step, self.tolerance)
            schedule.best = max(schedule.best, accuracy)

    def check(self, reply: LearnGene, model: nn.Module, gamma: int) -> None:
        """Raises MethodError unless there is a score per layer, and the entries are those of the gamma best layers.

        The sum of scores is 1, up to rounding, or 0 (`layer_scores`).
        """
        layers = len(self.layers(model))
        if len(reply.scores) != layers:
            raise MethodError(f"it sent {len(reply.scores)} scores of {layers} layers")
        if any(reply.scores) and abs(math.fsum(reply.scores) - 1) > 1e-6:
            raise MethodError(f"the sum of its scores is {math.fsum(reply.scores):.6g}, not 1")
        if reply.theta.state.keys() != set(self.best(torch.tensor(reply.scores, dtype=torch.float64), gamma, model)):
            raise MethodError(f"its upload has other entries than those of its {gamma} best layers")

    def best(self, scores: Tensor, gamma: int, model: nn.Module) -> list[str]:
        """The names of the entries of the gamma best layers."""
        lowest = (self.order == "ascending") == (self.score == "cosine")  # of distances, keep the smallest
        gene = top_layers(scores, gamma, lowest)
        return [
            name
            for names, chosen in zip(self.travelling(model).values(), gene, strict=True)
            if chosen
            for name in names
        ]

    def download(self, state: Genes, k: int) -> Cluster:
        """The message of cluster k to its clients."""
        schedule = state.schedules[k]
        gene = learngene(schedule.senders, schedule.scores, schedule.gamma) if self.start_from == "learngene" else []
        return Cluster(Dense(state.models[k]), schedule.gamma, gene)

    def join(self, state: Genes, net: Network, client: Id) -> None:
        """Send the learnGene of the nearest cluster (Eq. 12), and add the client to that cluster's newcomers; also with
        one cluster, since most of their layers are new."""
        asked = [client] if self.clusters > 1 else []
        found = dict(net.call(self.describe, to=asked, check=spanned_by(self.vectors)))
        first = {i: k % self.clusters for i, k in state.cluster_of.items()}
        near = nearest(found[client], state.subspaces, first, self.similarity) if found else 0
        inherited = self.inheritance(state, near, net.problem)
        net.tell(self.begin, to=[client], send=Model(Dense(inherited)))
        k = self.clusters + near
        if not state.models[k]:
            drawn = net.problem.first_state(client, draw="newcomers")
            state.models[k] = {name: inherited.get(name, drawn[name]) for name in state.models[near]}
        state.cluster_of[client] = k
        state.subspaces |= found

    def inheritance(self, state: Genes, near: int, problem: Problem) -> State:
        """The entries that a newcomer gets from its nearest cluster."""
        theta, schedule = state.models[near], state.schedules[near]
        if self.inherit == "nothing":
            return {}
        if self.inherit == "cluster":
            return theta
        layers = list(self.travelling(problem.first_model()).values())
        gene = learngene(schedule.senders, schedule.scores, schedule.gamma)
        return {name: theta[name] for layer in gene for name in layers[layer]}

    def begin(self, state: Own, message: Model, site: Site) -> None:
        """A newcomer's first model: inherited entries, and others as all newcomers draw them."""
        state.theta = dict(site.problem.first_state(site.me, draw="newcomers")) | message.theta.dense()
        site.accuracy(site.model(state.theta), "inherited")

    def train(self, state: Own, message: Cluster, site: Site) -> LearnGene:
        cluster = message.theta.dense()
        model = site.model(state.theta or cluster)
        layers, travelling = self.layers(model), list(self.travelling(model).values())
        load_state(model, {name: cluster[name] for layer in message.start for name in travelling[layer]})
        before = state_of(model)  # theta~
        named = {name: model.get_parameter(name) for names in layers.values() for name in names}
        theta: State = {name: p for name, p in named.items() if p.requires_grad}
        keep = dict.fromkeys(theta, torch.ones(()))
        if self.lambda_elastic:
            keep = self.low_information(model, site)  # Algorithm 1, lines 4-5
        anchors = mixed(before, cluster, keep) if self.elastic == "target" else None
        gen, elg = pulls(theta, cluster, keep, self.norm, anchors)
        joint = self.lambda_elastic if self.elastic_step == "joint" else 0.0

        def extra(_: nn.Module) -> Tensor:
            total = self.lambda_gen * gen() if self.lambda_gen else torch.zeros(())
            return total + joint * elg() if joint else total

        def second() -> None:
            plain_step(list(theta.values()), elg(), self.local.lr_in(site.round) * self.lambda_elastic)

        site.fit(
            model,
            self.local if self.elastic_step == "joint" else replace(self.local, momentum=0.0),
            extra=extra if self.lambda_gen or joint else None,
            after_step=second if self.elastic_step == "split" else None,
        )
        state.theta = state_of(model)
        scores = layer_scores(state.theta, before, layers, self.score)
        sent = self.best(scores, message.gamma, model)
        accuracy = site.accuracy(model, "cohort")
        return LearnGene(
            Dense({name: state.theta[name] for name in sent}), scores.tolist(),
            None if accuracy is None else 100 * accuracy,
        )  # fmt: skip

    def local_model(self, state: Own, site: Site) -> nn.Module | None:
        return own_model(state, site)

    def low_information(self, model: nn.Module, site: Site) -> State:
        """m of Eq. 6: true where theta~ has little Fisher information on the client's training samples."""
        x, y = site.tensors(site.train)
        if 0 < self.fisher_samples < len(y):
            chosen = torch.from_numpy(site.rng.choice(len(y), self.fisher_samples, replace=False)).to(y.device)
            x, y = x[chosen], y[chosen]
        pulled = {name for names in self.layers(model).values() for name in names}
        fisher = {n: f for n, f in fisher_diagonal(model, x, y, kind=self.fisher).items() if n in pulled}
        information = normalised(fisher, self.normalise == "per_tensor")
        keep = {name: value <= self.threshold for name, value in information.items()}
        site.measure("low_information", float(torch.cat([m.flatten() for m in keep.values()]).float().mean()))
        return keep


def normalised(fisher: Mapping[str, Tensor], per_tensor: bool = False) -> State:
    """F^ of Eq. 6, in [0, 1]: scaled by minimum and maximum over all tensors, or per tensor; 0 if these are equal."""
    low, high = ({name: extreme(value) for name, value in fisher.items()} for extreme in (torch.min, torch.max))
    if not per_tensor:
        low = dict.fromkeys(fisher, min(low.values()))
        high = dict.fromkeys(fisher, max(high.values()))
    return {
        name: (value - low[name]) / (high[name] - low[name]) if high[name] > low[name] else torch.zeros_like(value)
        for name, value in fisher.items()
    }


def mixed(local: State, cluster: State, keep: State) -> State:
    """theta' of Eq. 6: the client's value where `keep`, the cluster's elsewhere."""
    return {name: torch.where(keep[name].bool(), local[name], cluster[name]) for name in keep}


def distance(differences: Sequence[Tensor], norm: Norm = "global") -> Tensor:
    """D of Eq. 4 from the differences of the tensors; its gradient is 0 if they are all 0."""
    norms = torch.stack([torch.linalg.vector_norm(d) for d in differences])
    if norm == "per_tensor_sum":
        return norms.sum()
    return norms.square().sum() if norm == "squared" else torch.linalg.vector_norm(norms)


def pulls(
    theta: State, cluster: State, keep: State, norm: Norm = "global", anchors: State | None = None
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Functions for L_gen (Eq. 4) and L_elg (Eq. 8) of the current values of the parameters `theta`.

    With `anchors`, which is theta' before the first step, L_elg is the distance to it.
    """
    centre, masks, fixed = (
        [torch.empty_like(p, requires_grad=False).copy_(state[name]) for name, p in theta.items()]
        for state in (cluster, keep, cluster if anchors is None else anchors)
    )

    def gen() -> Tensor:
        return distance([p - c for p, c in zip(theta.values(), centre, strict=True)], norm)

    def elg() -> Tensor:
        apart = [p - a for p, a in zip(theta.values(), fixed, strict=True)]
        return distance(apart if anchors is not None else [m * d for m, d in zip(masks, apart, strict=True)], norm)

    return gen, elg


def plain_step(theta: list[Tensor], loss: Tensor, lr: float) -> None:
    """One step of gradient descent."""
    step = torch.autograd.grad(loss, theta)
    with torch.no_grad():
        torch._foreach_add_(theta, step, alpha=-lr)


def layer_scores(current: State, before: State, layers: Mapping[str, Sequence[str]], score: Score = "cosine") -> Tensor:
    """xi of Eq. 9, float64 (L,), of sum 1: similarity, or distance, of each layer before and after, over its size."""
    raw = []
    for names in layers.values():
        a, b = (torch.cat([state[name].flatten().double() for name in names]) for state in (current, before))
        raw.append(compared(a, b, score) / len(a))
    scores = torch.tensor(raw, dtype=torch.float64)
    return scores / scores.sum() if scores.sum() else scores


def compared(a: Tensor, b: Tensor, score: Score) -> float:
    """The cosine of two vectors (0 if one is 0), or minus their distance; emd: of their values as distributions."""
    if score == "cosine":
        lengths = a.norm() * b.norm()
        return float(a @ b / lengths) if lengths else 0.0
    if score == "emd":
        a, b = a.sort().values, b.sort().values
    return float(torch.linalg.vector_norm(a - b, 2 if score == "l2" else 1))


def top_layers(scores: Tensor, gamma: int, lowest: bool = False) -> list[bool]:
    """S of Eq. 9: true at the gamma highest (or lowest) scores; ties go to the first."""
    chosen = scores.argsort(descending=not lowest, stable=True)[:gamma].tolist()
    return [layer in chosen for layer in range(len(scores))]


def next_gamma(gamma: int, accuracy: float, best: float, smallest: int, step: int = 1, tolerance: float = 0.5) -> int:
    """gamma of a cluster's next round: reduced by `step`, unless accuracy (percent) fell `tolerance` below the best."""
    return max(smallest, gamma - step) if accuracy >= best - tolerance else gamma


def learngene(senders: Sequence[int], scores: Sequence[float], gamma: int) -> list[int]:
    """The gamma layers that most clients sent, ascending; ties go to the higher mean score, then to the first."""
    return sorted(sorted(range(len(senders)), key=lambda layer: (-senders[layer], -scores[layer], layer))[:gamma])
