"""FedPURIN: Xie, He, Shi, "FedPURIN: Programmed Update and Reduced INformation for Sparse Personalized Federated
Learning", arXiv 2510.16065, 2025, Algorithm 1.

Every client keeps its own model. After local training it selects the values whose removal would change the loss most
(its critical values, Eq. 7-8) and uploads only those, with a bit mask. The server averages them over clients whose
masks overlap enough (Eq. 9), and takes the mean of all uploads for the rest (Eq. 10). Each client gets a combination
of the two by its own mask (Eq. 11). Batch normalisation stays on the client.

The download of round t is sent with the request of the client's next round (after the last round, in its own message),
so that the next upload can be coded against it: one message each way per round, and the same T downloads in total.

Bytes per client and round, before lossless coding, with n_i critical values of d shared ones:
up 4 n_i + d/8; down 4 nnz + d/8, where nnz counts the non-zeros sent (after round beta only those outside the mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import nn

from fewbytes.base.ranges import PART, Count, NotNegative, Samples, Share
from fewbytes.base.state import State, load_state, state_of, trained_parameters
from fewbytes.core.method import Method
from fewbytes.core.network import LazyMapping, Network, Vote
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import ENTRY_RULES
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.activations import Counts
from fewbytes.methods.parts.critical import (
    check_mask,
    collaborators,
    combine,
    critical,
    critical_means,
    critical_votes,
    overlap,
    scores,
    sparse_mean,
    sparse_vote,
)
from fewbytes.methods.parts.uploads import Uploads
from fewbytes.models import batch_norm_names
from fewbytes.wire import Masked, payload


@payload
class Combined:
    """Server to client: theta_i^(t+1) at its non-zeros; with `kept`, without the critical values the client has."""

    theta: Masked
    kept: bool


@payload
class Critical:
    """Client to server: theta_i * m_i and m_i, at one bit per entry."""

    theta: Annotated[Masked, PART]
    samples: Samples


@dataclass
class Personal:
    """A client's state."""

    theta: State  # theta_i after its last training, with its batch normalisation
    mask: State  # m_i of the last upload
    received: State = field(default_factory=dict)  # what its next training begins with


@dataclass(frozen=True)
class FedPURIN(Method):
    """Hyper-parameters of FedPURIN; the paper's values, its code's where the paper gives none."""

    tau: Share = 0.5  # fraction of each layer that is critical, in (0, 1]
    beta: Count = 100  # last round with collaboration
    gradient: Literal["exact", "delta"] = "exact"  # Eq. 7's g: the last batch's gradient, or the round's change
    hessian: bool = False  # Eq. 7's second-order term
    cutoff: NotNegative = 1e-10  # scores up to this are not critical
    batch_norm: Literal["local", "selected"] = "local"  # selected: scored and sent like other layers
    weighted: bool = False  # Eq. 10 weighted by samples instead of 1/N
    gradient_storage: Literal["float32", "float16"] = "float32"  # float16: as the authors' code
    activations: bool = False  # count for the report how often elements are critical (Fig. 5 and 6); changes nothing
    fraction: Share = 1.0
    local: Local = Local(epochs=5, lr=0.1, batch=100, momentum=0.9)  # E, eta

    promises = Promises(
        sends="the half of its values that matters most, and a bit mask", headline="sparse", aggregates=ENTRY_RULES
    )

    def server(self, problem: Problem) -> Counts:
        return Counts()

    def client(self, site: Site) -> Personal:
        return Personal(dict(site.problem.first_state(site.me)), {})

    def round(self, state: Counts, net: Network, t: int) -> None:
        model = net.problem.first_model()
        names = taking_part(model, self.batch_norm)

        def check(client: Id, reply: Critical) -> None:
            check_mask(reply.theta.mask, model, names, self.tau)

        replies = net.call(self.train, to=net.sample(self.fraction), check=check)  # lines 3-8
        if self.activations:
            replies = state.counted(replies)
        combined, mean = self.aggregate(replies, t, net.clipped, net.votes())
        net.tell(self.receive, to=combined, when="next")
        if self.activations and mean:
            state.nonzero.add({name: value != 0 for name, value in mean.items()})

    def finish(self, state: Counts, net: Network) -> None:
        if self.activations:
            net.show("activations", state.shares())

    def aggregate(
        self,
        replies: Iterable[tuple[Id, Critical]],
        t: int,
        clipped: Callable[[Sequence[State]], Sequence[State]] = lambda states: states,
        vote: Vote | None = None,
    ) -> tuple[Mapping[Id, Combined], State]:
        """Lines 9-13: the reply for each client, and Eq. 10's mean; both empty if there are no clients to aggregate.

        Clients without critical values are left out of every mean. `clipped` and `vote`: the run's aggregation rule,
        if it is not the mean.
        """
        sent, kept = Uploads(), t > self.beta
        for i, reply in replies:
            sent.add(i, reply.theta, reply.samples)
        if len(sent.clients) < 2 or not sent.rows:
            return {}, {}
        group = collaborators(overlap(sent.masks()), t, self.beta)  # line 10
        weights = sent.samples if self.weighted else [1.0] * len(sent.rows)

        def combined(uploads: Sequence[State], masks: Sequence[State]) -> tuple[State, Sequence[State]]:
            delta: Sequence[State] = [{}] * len(uploads)  # line 11, Eq. 9
            if not kept:
                delta = critical_means(uploads, group) if vote is None else critical_votes(uploads, masks, group, vote)
            mean = sparse_mean(uploads, weights) if vote is None else sparse_vote(uploads, masks, vote)  # Eq. 10
            return mean, [combine(d, mean, mask) for d, mask in zip(delta, masks, strict=True)]  # Eq. 11

        theta, mean = sent.combined(clipped(sent.values), combined)
        return LazyMapping(sent.clients, lambda i: Combined(Masked.nonzero(theta(i)), kept)), mean

    def train(self, state: Personal, message: None, site: Site) -> Critical:
        begin = state.theta | state.received
        model = site.model(begin)
        site.fit(model, self.local)  # line 4
        after, mask = state_of(model), {}
        for name in taking_part(model, self.batch_norm):
            p = model.get_parameter(name)
            theta = p.detach()  # on the training device, where scores are computed
            g = torch.zeros_like(theta) if p.grad is None else p.grad
            if self.gradient == "delta":
                g = theta - begin[name].to(theta.device)
            if self.gradient_storage == "float16":
                g = g.half().float()
            mask[name] = critical(scores(theta, g, self.hessian), self.tau, self.cutoff).cpu()  # lines 5-6
        state.theta, state.mask, state.received = after, mask, {}
        reply = Critical(Masked.of(after, mask), len(site.train))  # line 7
        load_state(model, reply.theta.dense())
        site.score("sparse", model)
        return reply

    def receive(self, state: Personal, message: Combined, site: Site) -> None:
        theta = message.theta.dense()
        if message.kept:
            theta = {name: torch.where(state.mask[name], state.theta[name], theta[name]) for name in theta}
        state.received = theta  # lines 14-17
        site.score("combined", site.model(state.theta | theta))

    def local_model(self, state: Personal, site: Site) -> nn.Module:
        return site.model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return taking_part(model, self.batch_norm)

    def places(self, model: nn.Module, gradients: State) -> State:
        """The critical ones; the server knows all initial values of the client, as it sent them."""
        return {
            name: critical(scores(model.get_parameter(name).detach(), g, self.hessian), self.tau, self.cutoff)
            for name, g in gradients.items()
        }


def taking_part(model: nn.Module, batch_norm: str = "local") -> list[str]:
    """Names of the shared trainable tensors: all except batch normalisation's, or all (`selected`)."""
    stay = batch_norm_names(model) if batch_norm == "local" else set()
    return [name for name in trained_parameters(model) if name not in stay]
