"""SecureAggregation: any method whose server needs only sums, run so that it sees nothing else. After Bonawitz et al.,
"Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with its round of consistency, on the
graph of Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.

Where the method calls a handler, five exchanges take the place of one: clients advertise public keys and how much they
weigh; each deals shares of two secrets to its neighbours, sealed; each runs the handler, quantises what it would reply
and sends it under one mask for each neighbour, which that neighbour's takes off, and one of its own; each confirms to
its neighbours what it received about who is there; and each that has enough confirmations reveals shares: of every
neighbour whose numbers have come those of its own mask, of every other those of the masks it has with others. The
server takes off what masks are left, and the method reads one reply, the mean of all. Masks are made of all that
clients received (`exchange.view`): of clients that received unlike things none cancels.

Bytes per client and call, for D values and n neighbours (all others, up to 49 clients): 4 D + 155 n + 950 up, which
noise keeps from being coded, and 190 n + 800 down besides the method's own message.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.ranges import Positive
from fewbytes.base.rate import Way
from fewbytes.core.method import Asked, Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promise import Privacy
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.methods.parts.exchange import (
    LEAST,
    MARK,
    Arrived,
    ByClient,
    Confirmed,
    Dealt,
    Keys,
    Neighbours,
    Received,
    Revealed,
    clients_in,
    digest,
    digest_of_message,
    graph,
    masks_of,
    numbers,
    view,
)
from fewbytes.methods.parts.masks import (
    KEY,
    SEALED,
    SHARE,
    agreed,
    digest_of,
    masked,
    new_key,
    opened,
    private_key,
    public_key,
    quantised,
    sealed,
    shares_of,
    threshold,
)
from fewbytes.methods.parts.summable import remade, split, tensors_of, types_of, weight_of
from fewbytes.methods.parts.summing import SummingNetwork
from fewbytes.methods.parts.wrapper import Wrapper, packed, unpacked

COUNTERS = float(1 << 24)
"""The largest whole number that a client may send, such as batch normalisation's count of batches."""


@dataclass
class Secrets:
    """What a client knows during one exchange that the server does not, and what it received."""

    sealing: bytes
    masking: bytes
    seed: bytes
    cohort: Tensor = field(default_factory=lambda: numbers([]))  # who takes part
    neighbours: ByClient = field(default_factory=lambda: ByClient.of({}))  # their public keys
    going: Tensor = field(default_factory=lambda: numbers([]))  # who goes on
    received: ByClient = field(default_factory=lambda: ByClient.of({}))  # of neighbours who do, their shares, sealed
    weight: int = 0  # of all together
    view: bytes = b""  # of all that it received, once its numbers are on their way
    there: Tensor = field(default_factory=lambda: numbers([]))  # whose numbers have come, once it has confirmed that


@dataclass
class Hidden:
    """A client's state."""

    inner: bytes  # of the method, as a frame; empty: it has none
    secrets: Secrets | None  # of the exchange that is under way
    heard: bytes = b""  # digest of the method's last message that asked for no reply


@dataclass(frozen=True)
class SecureAggregation(Wrapper):
    """The method whose replies are summed unseen, and how large their values may be.

    >>> import fewbytes as fb
    >>> fb.SecureAggregation(fb.FedAvg()).method_name
    'fedavg with secure aggregation'
    """

    range: Positive = 64.0  # R; the mean is exact to R / 2^30, times a half for each client

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method) or isinstance(self.inner, SecureAggregation):
            raise UserError(f"secure aggregation is of a method, like FedAvg(), not of {self.inner!r}")
        if not self.inner.promises.sums:
            raise UserError(
                f"secure aggregation: the server of {self.inner.method_name} needs more of replies than their mean: "
                "leave it out, or take fedavg"
            )
        super().__post_init__()

    @property
    def promises(self) -> Promises:  # type: ignore[override]  # of each one its own
        return replace(super().promises, protects=self.inner.promises.protects & {"samples"}, hides=True)

    def handle_inner(self, handler: str, state: Hidden, message: Any, site: Site) -> Any:
        """Run one of the inner method's handlers, and mask its reply."""
        own = self.own(state)
        reply = self.inner.handle(handler, own, message, site)
        state.inner = packed(own)
        if reply is None:
            state.heard, state.secrets = digest(handler, digest_of_message(message)), None
            return None
        return self.hide(state, handler, message, reply, site)

    @property
    def method_name(self) -> str:
        return f"{self.inner.method_name} with secure aggregation"

    def roundable(self, way: Way) -> bool:
        return False  # what travels is whole numbers

    def promising(self, task: Asked, dp: Privacy | str | None, rounds: int) -> Asked:
        """As any method's. Raises UserError for a promise to clients."""
        promising_task = super().promising(task, dp, rounds)
        if dp is not None and promising_task.problem.privacy is None:
            raise UserError(
                "dp of clients clips each one's update, which secure aggregation hides from the server: promise it of "
                "samples, or leave one out"
            )
        return promising_task

    def server(self, problem: Problem) -> Any:
        """The inner method's. Raises UserError if there are too few clients to hide one among."""
        if (cohort := self.inner.cohort(len(problem.clients))) < LEAST:
            raise UserError(
                f"secure aggregation hides a client among others: {LEAST} a round are needed, and there are {cohort}"
            )
        return self.inner.server(problem)

    def client(self, site: Site) -> Hidden:
        return Hidden(packed(self.inner.client(site)), None)

    def state_class(self, half: Literal["server", "client"]) -> type[Any] | None:
        return Hidden if half == "client" else self.inner.state_class(half)

    def own(self, state: Hidden) -> Any:
        """The inner method's part of a client's state."""
        return unpacked(self.inner.state_class("client"), state.inner)

    def start(self, state: Any, net: Network) -> None:
        self.inner.start(state, SummingNetwork(self, net))

    def round(self, state: Any, net: Network, t: int) -> None:
        self.inner.round(state, SummingNetwork(self, net), t)

    def finish(self, state: Any, net: Network) -> None:
        self.inner.finish(state, SummingNetwork(self, net))

    def join(self, state: Any, net: Network, client: Id) -> None:
        self.inner.join(state, SummingNetwork(self, net), client)

    def global_model(self, state: Any, problem: Problem) -> nn.Module | None:
        return self.inner.global_model(state, problem)

    def server_models(self, state: Any, problem: Problem) -> dict[str, nn.Module]:
        return self.inner.server_models(state, problem)

    def local_model(self, state: Hidden, site: Site) -> nn.Module | None:
        return self.inner.local_model(self.own(state), site)

    def observed(self, model: nn.Module) -> None:
        """Nothing of one client's."""

    def places(self, model: nn.Module, gradients: Any) -> None:
        """Nothing of one client's."""

    def goes_back(self, handler: str) -> bool:
        """Only where secrets are forgotten: else a client could be had to deal, hide or reveal twice."""
        if handler == self.advertise_keys.__name__:
            return True
        return any(each.name == handler and each.reply is None for each in self.inner.handlers())

    # ------------------------------------------------------------------------------------------------- the client half

    def advertise_keys(self, state: Hidden, message: None, site: Site) -> Keys:
        """Draw this exchange's secrets; those of one that was never ended are forgotten."""
        mine = state.secrets = Secrets(new_key(), new_key(), os.urandom(32))
        return Keys(public_key(mine.sealing), public_key(mine.masking), len(site.train), state.heard)

    def deal_shares(self, state: Hidden, message: Neighbours, site: Site) -> Dealt:
        """Share the secrets among the neighbours, who follow from who takes part."""
        mine, others, cohort = state.secrets, message.keys.each(2 * KEY), clients_in(message.cohort)
        if mine is None or mine.neighbours.data:
            raise MethodError("it is asked to deal shares out of turn")
        if len(cohort) < LEAST or site.me not in cohort or list(others) != graph(cohort)[site.me]:
            raise MethodError("the neighbours it is given are not those that follow from who takes part")
        mine.cohort, mine.neighbours = message.cohort, message.keys
        needed, sealing = threshold(len(others)), private_key(mine.sealing)
        seeds, keys = shares_of(mine.seed, list(others), needed), shares_of(mine.masking, list(others), needed)
        shares = {
            i: sealed(agreed(sealing, public[:KEY], f"shares from {site.me} for {i}"), seeds[i] + keys[i])
            for i, public in others.items()
        }
        return Dealt(ByClient.of(shares), digest_of(mine.seed))

    def keep_shares(self, state: Hidden, message: Received, site: Site) -> None:
        """Keep the neighbours' shares; what comes too late is of an exchange whose secrets are forgotten next."""
        if state.secrets is not None and not state.secrets.view:
            state.secrets.going, state.secrets.received = message.going, message.shares
            state.secrets.weight = message.weight

    def hide(self, state: Hidden, handler: str, message: Any, reply: Any, site: Site) -> Any:
        """The reply as it travels: this client's part of the mean, quantised, under its masks.

        Raises UserError for values beyond the range, MethodError for a server that would see through the masks.
        """
        mine = state.secrets
        if mine is None or mine.view:
            raise MethodError("it is asked for its numbers out of turn: nothing masks them")
        cohort, going, partners = clients_in(mine.cohort), clients_in(mine.going), mine.received.each(SEALED)
        enough_of("go on", cohort, cohort, going, site.me)
        public, others = mine.neighbours.each(2 * KEY), set(going)
        if list(partners) != [i for i in public if i in others] or len(partners) < threshold(len(public)):
            raise MethodError("too few of its neighbours go on to mask its numbers, or others than the server says")
        weight = weight_of(reply)
        if not weight <= mine.weight:
            raise MethodError(f"all clients together weigh {mine.weight}, and this one alone {weight}")
        types = types_of(message, site.problem, site.me)
        tensors = tensors_of(reply)
        if not all(value.isfinite().all() for value in tensors.values()):  # refused, as it is without masks
            return remade(reply, {key: torch.full(value.shape, torch.nan) for key, value in tensors.items()})
        words = []
        for name, value in tensors.items():
            if value.dtype != types.get(name[1], torch.float32):
                raise MethodError(f"{name[1]!r} cannot be summed: the server does not know that it is {value.dtype}")
            try:
                words.append(quantised(value, self.most(value.dtype), weight / mine.weight))
            except ValueError as error:
                raise UserError(
                    f"of {name[1]!r} {error}, so that it cannot be summed: is lr too high? else take a "
                    "larger range (--secure-range)"
                ) from None
        mine.view = view(cohort, going, mine.weight, handler, message, state.heard)
        masking = private_key(mine.masking)
        keys = {i: agreed(masking, public[i][KEY:], masks_of(mine.view)) for i in partners}
        added = [mine.seed, *(key for i, key in keys.items() if i > site.me)]
        taken = [key for i, key in keys.items() if i < site.me]
        hidden = masked(np.concatenate([np.zeros(0, np.uint32), *words]), added, taken)
        return remade(
            reply,
            {
                key: torch.from_numpy(piece.view(np.int32)).view(like.shape)
                for key, piece, like in split(hidden, tensors)
            },
        )

    def confirm(self, state: Hidden, message: Arrived, site: Site) -> Confirmed:
        """Tell the neighbours whose numbers have come, as the server says, and in what view it sent its own: once, and
        of enough clients."""
        mine = state.secrets
        if mine is None or not mine.view or len(mine.there):
            raise MethodError("it is asked to confirm who is there out of turn, or again")
        there, public = clients_in(message.there), mine.neighbours.each(2 * KEY)
        enough_of("are there", clients_in(mine.cohort), clients_in(mine.going), there, site.me)
        partners = [i for i in mine.received.each(SEALED) if i in there]
        if len(partners) < threshold(len(public)):
            raise MethodError("too few of its neighbours are there for the sum to hide anybody")
        mine.there = message.there
        return Confirmed(ByClient.of({i: self._mark(mine, site.me, i, public[i]) for i in partners}))

    def _mark(self, mine: Secrets, one: Id, other: Id, public: bytes) -> bytes:
        """By which `other` knows that `one` received the same, where this client is one of the two."""
        seen = digest(mine.view, clients_in(mine.there)).hex()
        return agreed(private_key(mine.sealing), public[:KEY], f"{one} confirms to {other} {seen}")[:MARK]

    def reveal_shares(self, state: Hidden, message: Confirmed, site: Site) -> Revealed:
        """The shares by which the masks that are left come off: of each neighbour one secret, never both, once, and if
        more than half of the neighbours received the same as this client."""
        mine = state.secrets
        if mine is None or not len(mine.there):
            raise MethodError("it is asked to reveal shares out of turn, or again")
        public, received = mine.neighbours.each(2 * KEY), mine.received.each(SEALED)
        same = [
            i for i, mark in message.marks.each(MARK).items()
            if i in received and mark == self._mark(mine, i, site.me, public[i])
        ]  # fmt: skip
        if len(same) < threshold(len(public)):
            raise MethodError("too few of its neighbours received the same as it: it reveals nothing")
        there = clients_in(mine.there)
        state.secrets = None
        sealing = private_key(mine.sealing)
        both = {
            i: opened(agreed(sealing, public[i][:KEY], f"shares from {i} for {site.me}"), text)
            for i, text in received.items()
        }
        good = {i: shares for i, shares in both.items() if shares is not None}  # others are one share fewer
        return Revealed(
            ByClient.of({i: shares[:SHARE] for i, shares in good.items() if i in there}),
            ByClient.of({i: shares[SHARE:] for i, shares in good.items() if i not in there}),
        )

    def most(self, kind: torch.dtype) -> float:
        """The largest value of a tensor of this type."""
        return self.range if kind.is_floating_point else COUNTERS


def enough_of(do: str, cohort: Sequence[Id], known: Sequence[Id], these: Sequence[Id], me: Id) -> None:
    """Raises MethodError unless these are among the known and one of them, and more than half of all who take part."""
    if not set(these) <= set(known) or me not in these or len(these) < LEAST or 2 * len(these) <= len(cohort):
        raise MethodError(f"of {len(cohort)} clients that take part {len(these)} {do}, too few to hide this one among")
