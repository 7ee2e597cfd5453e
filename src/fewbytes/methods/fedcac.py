"""FedCAC: Wu, Liu, Niu, Zhu, Tang, "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning
through Cautiously Aggressive Collaboration", ICCV 2023; as FedPURIN's evaluation runs it.

After local training a client scores every parameter by the effect of its change in this round, |Delta theta * theta|;
the largest fraction tau of each layer is critical. It uploads its model and a bit mask m_i of the critical values. The
server computes the mean thetabar of all models, weighted by samples. For each client it also computes the mean
delta_i over itself and the clients whose masks overlap enough with its own, C_i = {j: O_ij >= T(t)}. T(t) rises until,
after round beta, no client is left. The client gets theta_i = m_i * delta_i + (1 - m_i) * thetabar. FedPURIN, which
builds on FedCAC, has the same masks, overlaps and thresholds (its Eq. 8 and lines 9-10).

The download of round t is sent with the request of the client's next round; after the last round, in its own message.
After round beta it has only the values outside the mask: the client knows its mask and has the critical ones.
Batch-norm statistics stay with the client.

Bytes per client and round, before lossless coding, with n_i critical values of D parameters: up 4 D + D/8; down 4 D,
after round beta 4 (D - n_i).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import nn

from fewbytes.base.ranges import LEARNT, PART, WHOLE, Count, Samples, Share
from fewbytes.base.state import Mean, State, state_of, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id
from fewbytes.core.promises import Promises
from fewbytes.core.rules import CLIPPING
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.critical import (
    check_mask,
    collaborators,
    combine,
    critical,
    critical_means,
    overlap,
    scores,
)
from fewbytes.wire import Bits, Dense, payload


@payload
class Combined:
    """Server to client: theta_i of the next round; with `kept`, only each tensor's values outside the mask, flat."""

    theta: Dense
    kept: bool


@payload
class Marked:
    """Client to server: theta_i, m_i and the number of samples."""

    theta: Annotated[Dense, WHOLE, LEARNT]
    mask: Annotated[Bits, PART]
    samples: Samples


@dataclass
class Personal:
    """A client's state."""

    theta: State  # theta_i after its last training, with its batch-norm statistics
    mask: State  # m_i of the last upload
    received: State = field(default_factory=dict)  # what its next training begins with


@dataclass(frozen=True)
class FedCAC(Method):
    """Hyper-parameters of FedCAC, with the values of FedPURIN's evaluation."""

    tau: Share = 0.5  # fraction of each layer that is critical, in (0, 1]
    beta: Count = 100  # last round with collaboration on critical values
    fraction: Share = 1.0
    local: Local = Local(epochs=5, lr=0.1, batch=100, momentum=0.9)

    promises = Promises(
        sends="its whole model, and a bit mask of its critical values", headline="personalised", aggregates=CLIPPING
    )

    def client(self, site: Site) -> Personal:
        return Personal(dict(site.problem.first_state(site.me)), {})

    def round(self, state: None, net: Network, t: int) -> None:
        model = net.problem.first_model()
        names = list(trained_parameters(model))

        def check(client: Id, reply: Marked) -> None:
            check_mask(reply.mask.bits, model, names, self.tau)

        replies = dict(net.call(self.train, to=net.sample(self.fraction), check=check))
        net.tell(self.receive, to=self.aggregate(replies, t, net.clipped), when="next")

    def aggregate(
        self, replies: Mapping[Id, Marked], t: int, clipped: Callable[[Sequence[State]], Sequence[State]] = list
    ) -> dict[Id, Combined]:
        """The reply for each client; empty for a single client, which would get its own model back."""
        if len(replies) < 2:
            return {}
        models = clipped([reply.theta.dense() for reply in replies.values()])
        masks = [reply.mask.bits for reply in replies.values()]
        average = Mean()
        for model, reply in zip(models, replies.values(), strict=True):
            average.add(model, weight=reply.samples)
        mean = average()
        if t > self.beta:
            sent = [{name: mean[name][~mask[name]] for name in mean} for mask in masks]
        else:
            deltas = critical_means(models, collaborators(overlap(masks), t, self.beta))
            sent = [combine(delta, mean, mask) for delta, mask in zip(deltas, masks, strict=True)]
        return {i: Combined(Dense(theta), t > self.beta) for i, theta in zip(replies, sent, strict=True)}

    def train(self, state: Personal, message: None, site: Site) -> Marked:
        begin = state.theta | state.received
        model = site.model(begin)
        site.fit(model, self.local)
        after = state_of(model)
        theta = {name: after[name] for name in trained_parameters(model)}
        state.mask = {name: sensitive(theta[name], begin[name], self.tau) for name in theta}
        state.theta, state.received = after, {}
        return Marked(Dense(theta), Bits(state.mask), len(site.train))

    def receive(self, state: Personal, message: Combined, site: Site) -> None:
        theta = message.theta.dense()
        if message.kept and not fits(theta, state.mask):  # the server has another mask
            return
        if message.kept:
            theta = {name: state.theta[name].masked_scatter(~state.mask[name], theta[name]) for name in theta}
        state.received = theta
        site.score("combined", site.model(state.theta | theta))

    def local_model(self, state: Personal, site: Site) -> nn.Module:
        return site.model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return [name for name, p in model.named_parameters() if p.requires_grad]


def sensitive(after: torch.Tensor, before: torch.Tensor, tau: float) -> torch.Tensor:
    """m_i of one layer: true at the largest fraction tau of |(after - before) * after|.

    Where a half is not above 1e-10, all that is above 1e-20 is critical (the authors' code).
    """
    return critical(scores(after, after - before), tau, least=1e-20)


def fits(values: State, mask: State) -> bool:
    """Whether each entry has as many values as there are places outside the mask."""
    return values.keys() == mask.keys() and all(
        list(values[name].shape) == [int((~each).sum())] for name, each in mask.items()
    )
