"""FedMA: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated Learning with Matched Averaging", ICLR 2020,
Algorithm 1, for chains of convolutions and linear layers.

Neurons of one layer have no order, so the server matches those of all clients before averaging. A Beta-Bernoulli
process (that of PFNM, Yurochkin et al. 2019) scores every pair of a client's neuron and a global one, including new
global ones; the Hungarian algorithm finds the best assignment of each client in turn. Layer by layer, the clients load
the matched layer, permute the inputs of their next layer to fit, and train the layers after it further. The classifiers
are averaged class by class, weighted by each client's samples of the class.

Each layer takes one round, and the run has L rounds, whatever number is requested. The download of layer l is sent with
the request for layer l + 1. A client that misses a round is left out of later ones: its neurons are not matched.

Bytes per client over the whole run, before lossless coding, with N_l neurons of layer l, W_l after matching, which may
be more, and I_l weights of a neuron per preceding one, its kernel: up 4 (sum_l N_l (W_(l-1) I_l + 1) + C), C for
the counts of the classes; down 4 sum_(l < L) (W_l (W_(l-1) I_l + 1) + N_l).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.extras import needs
from fewbytes.base.ranges import COUNTS, EXACT, FRESH, LEARNT, Positive, Several, Whole
from fewbytes.base.state import State, state_of
from fewbytes.core.admission import like
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.training import Local, prepared
from fewbytes.methods.parts.one_shot import LONG, check_stages, of_stage, shorter
from fewbytes.models.chain import chain_of, resized
from fewbytes.wire import Dense, payload


@payload
class Matched:
    """Server to client: layer l of the global model, and the global neuron of each of the client's neurons."""

    layer: Annotated[Dense, EXACT]  # equal for all clients
    places: Annotated[Dense, EXACT]


@payload
class Sent:
    """Client to server: its trained layer l; with the classifier, also its number of samples per class."""

    layer: Annotated[Dense, LEARNT, FRESH]
    counts: Annotated[Dense | None, EXACT, COUNTS]


@dataclass
class Matching:
    """The server's state."""

    theta: State = field(default_factory=dict)  # the global model's layers so far
    places: dict[Id, Tensor] = field(default_factory=dict)  # of each client's neurons in the last layer so far


@dataclass
class Own:
    """A client's state."""

    theta: State  # its model: global layers, then its own


@dataclass(frozen=True)
class FedMA(Method):
    """Hyper-parameters of FedMA: the paper's for the process, FuseFL's for local training."""

    layers: Several = 3  # L, number of layers with the classifier, 9 for vgg9; one per round
    gamma: Positive = 7.0  # larger values give more new global neurons
    variance: Positive = 1.0  # sigma^2, of clients' neurons around the global one
    prior_variance: Positive = 1.0  # sigma_0^2, of global neurons around 0
    sweeps: Whole = 5  # number of times that each client is matched again
    local: Local = LONG  # total epochs (or steps), E/L per round: at least L

    promises = Promises(sends="its model once, layer by layer")
    needs: ClassVar[type[Objective]] = Classification

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stages(self.local, self.layers, "layers, which are matched one after another")

    def planned_rounds(self, asked: int) -> int:
        return self.layers

    def model_for(self, shape: tuple[int, ...]) -> str:
        """A model with `layers` layers."""
        images = len(shape) == 3 and min(shape[1:]) >= 8
        return "vgg9" if images and self.layers == 9 else f"mlp:layers={self.layers - 1}"

    def quick(self, epochs: int) -> Self:
        return replace(self, local=shorter(self.local, max(epochs, self.layers)))

    def server(self, problem: Problem) -> Matching:
        needs("matching neurons", "clusters", "scipy")
        if len(list(problem.architectures())) > 1:
            raise UserError("FedMA matches the layers of one model, so all clients need the same one")
        model = problem.first_model()
        if (there := len(chain_of(model))) != self.layers:
            raise UserError(f"the {type(model).__name__} has {there} layers for FedMA to match: set layers={there}")
        return Matching()

    def client(self, site: Site) -> Own:
        return Own(dict(site.problem.first_state(site.me)))

    def round(self, state: Matching, net: Network, t: int) -> None:
        layers = layers_of(net.problem.first_model())
        wanted, send = layers[t - 1], dict.fromkeys(net.clients)
        if t > 1:
            own, last = len(weight_of(layers[t - 2])), {name: state.theta[name] for name in layers[t - 2]}
            wanted = permuted(wanted, torch.arange(own), len(weight_of(last)))
            there = {i: places for i, places in state.places.items() if i in send}
            send = {i: Matched(Dense(last), Dense({"": places})) for i, places in there.items()}
        classes = {"": torch.zeros(len(weight_of(wanted)), dtype=torch.int32)} if t == self.layers else None
        replies = dict(net.call(self.train, to=send, check=like(layer=wanted, counts=classes)))
        if not replies:
            raise MethodError(f"no client that sent the earlier layers has sent layer {t}")
        sent = [reply.layer.dense() for reply in replies.values()]
        if t == self.layers:
            state.theta |= by_classes(sent, torch.stack([reply.counts.state[""] for reply in replies.values()]))
            return
        means, places = matched(
            [rows_of(layer) for layer in sent], self.gamma, self.variance, self.prior_variance, self.sweeps, net.rng
        )
        state.theta |= layer_of(means, wanted)
        state.places = dict(zip(replies, places, strict=True))

    def train(self, state: Own, message: Matched | None, site: Site) -> Sent:
        t = site.round
        names = [list(layer) for layer in layers_of(site.problem.first_model())]
        if message is not None:
            layer, following = message.layer.dense(), {name: state.theta[name] for name in names[t - 1]}
            state.theta |= layer | permuted(following, message.places.dense()[""], len(weight_of(layer)))
        model = prepared(resized(site.problem.model(site.me), state.theta))
        for before in list(chain_of(model).values())[: t - 1]:
            before.requires_grad_(False)
        local = of_stage(self.local, t - 1, self.layers)
        if t == self.layers:  # only the classifier is left: as in the authors' code
            local = replace(local.lasting(3 * local.length), lr=local.lr / 10, weight_decay=1e-4)
        site.fit(model, local)
        site.score("local", model)
        state.theta = state_of(model)
        trained = {name: state.theta[name] for name in names[t - 1]}
        counts = site.train.labels.bincount(minlength=len(weight_of(trained))).to(torch.int32)
        return Sent(Dense(trained), Dense({"": counts}) if t == self.layers else None)

    def global_model(self, state: Matching, problem: Problem) -> nn.Module | None:
        """None before the last layer."""
        whole = state.theta.keys() == problem.first_state().keys()
        return resized(problem.first_model(), state.theta) if whole else None


def layers_of(model: nn.Module) -> list[State]:
    """The entries of each layer, its weights first."""
    own = state_of(model)
    return [
        {f"{name}.{kind}": own[f"{name}.{kind}"] for kind, _ in layer.named_parameters()}
        for name, layer in chain_of(model).items()
    ]


def weight_of(layer: State) -> Tensor:
    """A layer's weights, (neurons, …)."""
    return next(iter(layer.values()))


def permuted(layer: State, places: Tensor, width: int) -> State:
    """A layer whose columns for each preceding neuron are moved to its place (n,) of `width`; zeros elsewhere.

    A neuron's columns are adjacent: a channel's kernel, or its pixels if they were flattened.
    """
    (name, weight), n = next(iter(layer.items())), len(places)
    columns = weight.new_zeros(len(weight), width, weight[0].numel() // n)
    columns[:, places.long()] = weight.reshape(len(weight), n, -1)
    return layer | {name: columns.reshape(len(weight), -1, *weight.shape[2:])}


def rows_of(layer: State) -> Tensor:
    """Each neuron as a row, (neurons, values): its input weights, and its bias."""
    return torch.cat([value.reshape(len(value), -1) for value in layer.values()], 1).double()


def layer_of(rows: Tensor, like: State) -> State:
    """Undo `rows_of`, with the names and types of the layer `like`."""
    parts = rows.split([value[0].numel() for value in like.values()], 1)
    return {
        name: part.reshape(-1, *value.shape[1:]).to(value.dtype)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }


def matched(
    clients: Sequence[Tensor],
    gamma: float,
    variance: float,
    prior_variance: float,
    sweeps: int,
    rng: np.random.Generator,
) -> tuple[Tensor, list[Tensor]]:
    """Global neurons (global, values) from each client's (neurons, values), and each client's assignment to them.

    A global neuron is the posterior mean of those matched to it: their sum / sigma^2 over 1 / sigma_0^2 + n / sigma^2.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    every = range(len(clients))
    widest_first = sorted(every, key=lambda j: -len(clients[j]))
    places: dict[int, Tensor] = {}
    for j in [*widest_first, *(j for _ in range(sweeps) for j in rng.permutation(len(clients)).tolist())]:
        places.pop(j, None)
        places = renumbered(places)
        sums, counts = added(clients, places)
        score = scores(clients[j], sums, counts, len(clients), gamma, variance, prior_variance)
        place = torch.from_numpy(linear_sum_assignment(score.numpy(), maximize=True)[1])
        new = place >= len(sums)
        place[new] = len(sums) + torch.arange(int(new.sum()))  # in the client's order; any order is equivalent
        places[j] = place
    sums, counts = added(clients, places)
    means = sums / variance / (1 / prior_variance + counts / variance)[:, None]
    return means, [places[j].to(torch.int32) for j in every]


def renumbered(places: dict[int, Tensor]) -> dict[int, Tensor]:
    """The same matching without global neurons that no client's neuron is matched to."""
    if not places:
        return {}
    numbers = torch.cat(list(places.values())).unique(return_inverse=True)[1]
    return dict(zip(places, numbers.split([len(place) for place in places.values()]), strict=True))


def added(clients: Sequence[Tensor], places: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the neurons matched to each global one, (global, values), and their number, (global,)."""
    width = max((int(place.max()) + 1 for place in places.values()), default=0)
    sums, counts = clients[0].new_zeros(width, clients[0].shape[1]), clients[0].new_zeros(width)
    for j, place in sorted(places.items()):
        sums[place] += clients[j]
        counts[place] += 1
    return sums, counts


def scores(
    w: Tensor, sums: Tensor, counts: Tensor, clients: int, gamma: float, variance: float, prior_variance: float
) -> Tensor:
    """Scores for matching a client's neurons w (n, values) to global ones, or to new ones: (n, global + n).

    With s = sum / sigma^2 and tau = 1 / sigma_0^2 + count / sigma^2 of a global neuron, J clients: joining it scores
    ||w / sigma^2 + s||^2 / (1 / sigma^2 + tau) - ||s||^2 / tau + 2 log(count / (J - count)); opening the i-th new one
    ||w / sigma^2||^2 / (1 / sigma^2 + 1 / sigma_0^2) + 2 log(gamma / J) - 2 log(i).
    """
    w, s, tau = w / variance, sums / variance, 1 / prior_variance + counts / variance
    w_squared, s_squared = w.square().sum(1, keepdim=True), s.square().sum(1)
    together = w_squared + 2 * w @ s.T + s_squared
    joined = together / (1 / variance + tau) - s_squared / tau + 2 * (counts / (clients - counts)).log()
    opened = w_squared / (1 / variance + 1 / prior_variance) + 2 * math.log(gamma / clients)
    return torch.cat([joined, opened - 2 * torch.arange(1, len(w) + 1, dtype=w.dtype).log()], 1)


def by_classes(layers: Sequence[State], counts: Tensor) -> State:
    """The mean of classifiers, each class weighted by the clients' counts (clients, classes); equal weights for a class
    that no client has."""
    counts = counts.double()
    counts[:, counts.sum(0) == 0] = 1
    shares = counts / counts.sum(0)
    return {
        name: torch.einsum("jc,jc...->c...", shares, torch.stack([layer[name] for layer in layers]).double()).to(
            value.dtype
        )
        for name, value in layers[0].items()
    }
