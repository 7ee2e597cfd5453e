"""FedGen: Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
Algorithm 1, with classifiers shared instead of models.

Every client keeps its own model; feature extractors may differ, but features have one size. Clients train their whole
model and upload its classifier. The server takes the mean of the classifiers, weighted by the clients' numbers of
samples. It also trains a small generator that maps noise and a label to features that the classifiers together assign
to that label; labels are drawn by their frequency at all clients. Clients overwrite their classifier with the mean, and
train it on generated features, too: L = CE(h(f(x)), y) + CE(h(g(y')), y').

Classifier, generator and label counts of round t are sent with the request of round t + 1; after the last round, the
classifier in its own message. It is scored on arrival (`combined`). Clients report label counts before round 1.

Bytes per client and round, before lossless coding: 4 (K' + 1) C up, for K' features and C classes, and 4 C once;
4 ((K' + 1) C + G + C) down, where the generator's parameters are G = (noise + C + 3) hidden + (hidden + 1) K'; after
the last round 4 (K' + 1) C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.ranges import COUNTS, EXACT, Count, Positive, Several, Share
from fewbytes.base.state import State, load_state, state_of
from fewbytes.base.streams import seeded
from fewbytes.core.admission import like
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.fml import parameters_of
from fewbytes.methods.parts.heterogeneous import (
    STORED,
    Head,
    Own,
    TrainedHead,
    begin_training,
    end_training,
    own_draw,
    receive_head,
    shared_head,
)
from fewbytes.models.blocks import head_of, head_sizes, linear_of
from fewbytes.wire import Dense, payload


@payload
class Counts:
    """Client to server: its number of samples per class, (C,)."""

    counts: Annotated[Dense, EXACT, COUNTS]

    @property
    def values(self) -> Tensor:
        return self.counts.state[""]


@payload
class Knowledge:
    """Server to client: g, and the number of samples per class at all clients."""

    generator: Dense
    counts: Annotated[Counts, EXACT]


@dataclass
class GeneratorAndHead:
    """The server's state."""

    generator: State  # g
    counts: Tensor  # (C,)
    head: State  # empty before the first mean


@dataclass(frozen=True)
class FedGen(Method):
    """Hyper-parameters of FedGen; those of FedKTL's comparison."""

    fraction: Share = 1.0  # rho
    local: Local = STORED
    server_steps: Count = 100  # training steps of g per round
    server_lr: Positive = 0.1  # of Adam
    generated: Several = 10  # generated samples per step, on server and clients
    noise: Several = 32  # dimension of the noise input of g
    hidden: Count = 512  # width of g
    release_quirks: bool = False  # as in that comparison's code: uniform noise, and g is sent before its training

    promises = Promises(
        sends="its classifier", headline="combined", models_differ=True, float32_only=True, aggregates=EVERY_RULE
    )
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> GeneratorAndHead:
        head = shared_head(problem)
        with seeded(problem.seed, "generator"):
            g = self.make_generator(head)
        return GeneratorAndHead(parameters_of(g), torch.zeros(head.out_features, dtype=torch.int32), {})

    def client(self, site: Site) -> Own:
        return own_draw(site)

    def start(self, state: GeneratorAndHead, net: Network) -> None:
        self.ask(state, net, net.clients)

    def join(self, state: GeneratorAndHead, net: Network, client: Id) -> None:
        self.ask(state, net, [client])

    def ask(self, state: GeneratorAndHead, net: Network, clients: Iterable[Id]) -> None:
        """Add the clients' label counts to the total."""
        for _, reply in net.call(self.count, to=clients, check=like(counts={"": state.counts})):
            together = state.counts.long() + reply.values
            state.counts = together.clamp(max=torch.iinfo(torch.int32).max).to(torch.int32)

    def count(self, state: Own, message: None, site: Site) -> Counts:
        classes = head_sizes(site.model())[1]
        return Counts(Dense({"": site.train.labels.bincount(minlength=classes).to(torch.int32)}))

    def round(self, state: GeneratorAndHead, net: Network, t: int) -> None:
        mean, check = net.mean(state.head), like(theta=state_of(shared_head(net.problem)))
        send = Knowledge(Dense(state.generator), Counts(Dense({"": state.counts}))) if state.head else None
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=send, check=check):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.head = mean()
        if not self.release_quirks:
            with seeded(net.problem.seed, "server", t):
                self.learn(state)
        net.tell(self.receive, send=Head(Dense(state.head)), when="next")

    def learn(self, state: GeneratorAndHead) -> None:
        """Train g so that the mean logits predict its labels; with linear classifiers, these are the mean's."""
        head = linear_of(state.head)
        g = self.make_generator(head)
        load_state(g, state.generator)
        optimiser = torch.optim.Adam(g.parameters(), self.server_lr)
        for _ in range(self.server_steps):
            optimiser.zero_grad()
            self.generated_loss(head, g, state.counts).backward()
            optimiser.step()
        state.generator = parameters_of(g)

    def train(self, state: Own, message: Knowledge | None, site: Site) -> TrainedHead:
        extra: Callable[[nn.Module], Tensor] | None = None
        model = begin_training(state, site)
        if message is not None:
            g = self.make_generator(cast(nn.Linear, head_of(model)))
            load_state(g, message.generator.dense())
            g.to(site.device).requires_grad_(False)
            counts = message.counts.values

            def extra(model: nn.Module) -> Tensor:
                return self.generated_loss(head_of(model), g, counts)

        site.fit(model, self.local, extra=extra)
        end_training(state, model)
        return TrainedHead(Dense(state_of(head_of(model))), len(site.train))

    def receive(self, state: Own, message: Head, site: Site) -> None:
        receive_head(state, message.theta.dense(), site)

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return site.model(state.theta)

    def make_generator(self, head: nn.Linear) -> nn.Sequential:
        """g: maps noise concatenated with a one-hot label to features.

        Its batch normalisation is always in training mode, so its statistics need not be sent.
        """
        features, classes = head.in_features, head.out_features
        return nn.Sequential(
            nn.Linear(self.noise + classes, self.hidden),
            nn.BatchNorm1d(self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, features),
        )

    def generated_loss(self, head: nn.Module, g: nn.Module, counts: Tensor) -> Tensor:
        """CE(h(g(y)), y) of labels y drawn by their counts (C,)."""
        device = next(g.parameters()).device
        labels = torch.multinomial(counts.float(), self.generated, replacement=True).to(device)
        shape = self.generated, self.noise
        noise = torch.rand(shape, device=device) if self.release_quirks else torch.randn(shape, device=device)
        logits = head(g(torch.cat([noise, F.one_hot(labels, len(counts))], 1)))
        return F.cross_entropy(logits, labels)
