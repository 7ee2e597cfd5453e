"""FedKD: Wu, Wu, Lyu, Huang, Xie, "Communication-Efficient Federated Learning via Knowledge Distillation", Nature
Communications 13, 2022, Algorithm 1.

Every client keeps its own model, of any architecture, and a copy of one small auxiliary model that all clients share.
On each batch the two models learn the labels and each other's logits and features, the less the worse they are:
L_a = CE_a + (KL(p_b || p_a) + |r_a - W r_b|^2) / (CE_a + CE_b) for its own model a, L_b likewise, with features r and a
private matrix W. Only b is uploaded; the server takes the mean. Predictions come from a.

In both directions b's matrices are sent as factors of their singular value decomposition, cut at the smallest rank
that keeps more than a fraction T(t) of the squared singular values. A convolution is one small matrix per pair of
channels, all cut at a common rank. T rises from 0.95 to 0.98 over the first thousand rounds.

The auxiliary has the architecture of client 0, and its first weights are drawn from the seed at both ends; the mean of
round t is sent with the request of round t + 1. Its batch-norm statistics are neither sent nor kept, as it runs only in
training mode, which does not read them.

Bytes per client and round, before lossless coding, each way: 4 r (rows + columns + 1) for each matrix cut at rank r,
and 4 for each number of the other parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import FRESH, LEARNT, Count, Share, UpToOne
from fewbytes.base.state import State, load_state, state_of
from fewbytes.core.admission import check_like
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.fml import Kl, mean_divergence, parameters_of
from fewbytes.methods.parts.heterogeneous import STORED, AuxiliaryMean, WithFeatures, feature_sizes, number_of_classes
from fewbytes.models.blocks import head_sizes
from fewbytes.wire import Dense, payload


@payload
class Factors:
    """In either direction: the auxiliary model's parameters, compressed by `compress`."""

    factors: Annotated[Dense, LEARNT, FRESH]


@dataclass
class Own:
    """A client's state."""

    theta: State  # a
    w: State


@dataclass(frozen=True)
class FedKD(Method):
    """Hyper-parameters of FedKD; those of FedKTL's comparison."""

    fraction: Share = 1.0  # rho
    local: Local = replace(STORED, clip=10.0)  # clips the gradient of each model and of W
    energy_start: UpToOne = 0.95  # T at the start
    energy_end: UpToOne = 0.98  # T from round `energy_rounds` on
    energy_rounds: Count = 1000  # rounds over which T rises from start to end
    kl: Kl = "mean"  # mean over samples and classes, as in the authors' code; batchmean: over samples
    detach: bool = False  # no gradient of one model's loss through the other model

    promises = Promises(
        sends="the singular values of a small shared model",
        headline="personalised",
        models_differ=True,
        float32_only=True,
        brings_loss=True,
        aggregates=EVERY_RULE,
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> AuxiliaryMean:
        feature_sizes(problem)
        number_of_classes(problem)
        return AuxiliaryMean({})

    def client(self, site: Site) -> Own:
        own, auxiliary = site.model(fresh=True), site.model(of=0)
        return Own(state_of(own), state_of(nn.Linear(head_sizes(auxiliary)[0], head_sizes(own)[0], bias=False)))

    def round(self, state: AuxiliaryMean, net: Network, t: int) -> None:
        mean = net.mean(state.auxiliary)
        send = Factors(Dense(compress(state.auxiliary, self.energy(t)))) if state.auxiliary else None
        b = parameters_of(net.problem.first_model())

        def check(client: Id, reply: Factors) -> None:
            check_factors(reply.factors.dense(), b)

        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=send, check=check):
            mean.add(restore(reply.factors.dense()))
        state.auxiliary = mean()

    def energy(self, t: int) -> float:
        """T(t)."""
        return self.energy_start + min(1.0, t / self.energy_rounds) * (self.energy_end - self.energy_start)

    def train(self, state: Own, message: Factors | None, site: Site) -> Factors:
        own = site.model(state.theta)
        auxiliary = site.model(None if message is None else restore(message.factors.dense()), of=0)
        three = Three(own, auxiliary, state.w).to(site.device)
        site.fit(three, self.local, loss=self.loss)
        state.theta, state.w = state_of(own), state_of(three.w)
        return Factors(Dense(compress(parameters_of(auxiliary), self.energy(site.round))))

    def loss(self, outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """L_a + L_b."""
        logits_a, logits_b, r_a, w_r_b = outputs
        other = [value.detach() if self.detach else value for value in outputs]
        loss_a = self.half((logits_a, r_a), (other[1], other[3]), labels)
        loss_b = self.half((logits_b, w_r_b), (other[0], other[2]), labels)
        return loss_a + loss_b

    def half(self, mine: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """The loss of one of the two models, from (logits, features) of itself and of the other."""
        ce = F.cross_entropy(mine[0], labels)
        apart = mean_divergence(other[0], mine[0], self.kl) + F.mse_loss(mine[1], other[1])
        return ce + apart / (ce + F.cross_entropy(other[0], labels))

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)


class Three(nn.Module):
    """A client's own model a, the auxiliary b, and W: logits of a and b, r_a, W r_b."""

    def __init__(self, a: nn.Module, b: nn.Module, w: State) -> None:
        super().__init__()
        self.a, self.b = WithFeatures(a), WithFeatures(b)
        rows, columns = w["weight"].shape
        self.w = nn.Linear(columns, rows, bias=False)
        load_state(self.w, w)
        self.apart = a, b, self.w

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        (r_a, logits_a), (r_b, logits_b) = self.a(x), self.b(x)
        return logits_a, logits_b, r_a, self.w(r_b)


def compress(theta: State, energy: float) -> State:
    """Every matrix as factors `name/u` (…, rows, r), `name/s` (…, r), `name/v` (…, r, columns); the rest unchanged.

    r is the smallest rank whose squared singular values, summed over all matrices of an entry (…, rows, columns),
    exceed `energy` of their total; the full rank if none does.
    """
    factors: State = {}
    for name, value in theta.items():
        if value.dim() < 2 or not value.isfinite().all():  # a diverged model has no decomposition
            factors[name] = value
            continue
        u, s, v = torch.linalg.svd(value, full_matrices=False)
        kept = s.double().square().reshape(-1, s.shape[-1]).sum(0).cumsum(0)
        rank = min(int((kept <= energy * kept[-1]).sum()) + 1, len(kept))
        for part, cut in (("u", u[..., :rank]), ("s", s[..., :rank]), ("v", v[..., :rank, :])):
            factors[f"{name}/{part}"] = cut.contiguous()
    return factors


def check_factors(factors: State, theta: State) -> None:
    """Raises MethodError unless the factors match `compress`'s output for such parameters."""
    expected: State = {}
    for name, value in theta.items():
        s = factors.get(f"{name}/s")
        if s is None or not s.dim() or value.dim() < 2:
            expected[name] = value
            continue
        *channels, rows, columns = value.shape
        rank = min(max(s.shape[-1], 1), rows, columns)
        shapes = {"u": (*channels, rows, rank), "s": (*channels, rank), "v": (*channels, rank, columns)}
        expected |= {f"{name}/{part}": value.new_empty(shape) for part, shape in shapes.items()}
    check_like(factors, expected)
    for name, value in factors.items():  # rows, or columns, have norm 1 up to rounding
        if name.endswith(("/u", "/v")) and float(value.norm()) > 2 * math.sqrt(value.numel() / max(value.shape[-2:])):
            raise MethodError(f"its {name!r} is not a factor of a singular value decomposition")


def restore(factors: State) -> State:
    """The parameters from their factors: `u diag(s) v` for entries that have them."""
    theta: State = {}
    for key, value in factors.items():
        name, _, part = key.partition("/")
        if part == "u":
            theta[name] = value * factors[f"{name}/s"].unsqueeze(-2) @ factors[f"{name}/v"]
        elif not part:
            theta[name] = value
    return theta
