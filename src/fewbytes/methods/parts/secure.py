"""SecureAggregation: runs a method whose server needs only sums so that it sees only sums. After Bonawitz et al.,
"Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with its round of consistency, on the
graph of Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.

Five exchanges replace one call of a handler. Clients advertise public keys and their weights. Each sends encrypted
shares of two secrets to its neighbours. Each runs the handler, quantises its reply and sends it under a mask of its own
and one mask per neighbour, which the neighbour's mask cancels. Each confirms to its neighbours which clients it sees as
present. Each with enough confirmations reveals shares: for neighbours whose values arrived, of their own mask's seed;
for dropped ones, of the key of their masks with others. The server removes the remaining masks, and the method reads
one reply, the mean. Masks depend on all that clients received (`exchange.view`); different views do not cancel.

Bytes per client and call, for D values and n neighbours (all others, up to 49 clients): 4 D + 155 n + 950 up, which
noise makes incompressible, and 190 n + 800 down besides the method's own message.
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
from fewbytes.methods.parts.summable import remade, samples_field, split, tensors_of, types_of, weight_of
from fewbytes.methods.parts.summing import SummingNetwork
from fewbytes.methods.parts.wrapper import Wrapper, packed, unpacked

COUNTERS = float(1 << 24)
"""The largest integer that a client may send, such as batch normalisation's count of batches."""


@dataclass
class Secrets:
    """A client's secrets during one exchange, and the messages it received."""

    sealing: bytes
    masking: bytes
    seed: bytes
    cohort: Tensor = field(default_factory=lambda: numbers([]))  # participants
    neighbours: ByClient = field(default_factory=lambda: ByClient.of({}))  # their public keys
    going: Tensor = field(default_factory=lambda: numbers([]))  # continuing clients
    received: ByClient = field(default_factory=lambda: ByClient.of({}))  # encrypted shares of continuing neighbours
    weight: int = 0  # total of all continuing clients
    view: bytes = b""  # digest of all it received, set when its values are sent
    there: Tensor = field(default_factory=lambda: numbers([]))  # arrived clients, set when it confirms them


@dataclass
class Hidden:
    """A client's state."""

    inner: bytes  # the method's state, as a frame; empty if it has none
    secrets: Secrets | None  # of the current exchange
    heard: bytes = b""  # digest of the method's last message without a reply


@dataclass(frozen=True)
class SecureAggregation(Wrapper):
    """The method whose replies are summed in secret, and the range of their values.

    >>> import fewbytes as fb
    >>> fb.SecureAggregation(fb.FedAvg()).method_name
    'fedavg with secure aggregation'
    """

    range: Positive = 64.0  # R; the mean is exact to R / 2^31 per client

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method) or isinstance(self.inner, SecureAggregation):
            raise UserError(f"secure aggregation is for a method, such as FedAvg(), not {self.inner!r}")
        if not self.inner.promises.sums:
            raise UserError(
                f"secure aggregation: the server of {self.inner.method_name} needs more than the mean of replies: "
                "leave it out, or use fedavg"
            )
        super().__post_init__()

    @property
    def promises(self) -> Promises:  # type: ignore[override]  # depends on the inner method
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
        return False  # replies are integers already

    def promising(self, task: Asked, dp: Privacy | str | None, rounds: int) -> Asked:
        """As in any method. Raises UserError for client-level privacy."""
        promising_task = super().promising(task, dp, rounds)
        if dp is not None and promising_task.problem.privacy is None:
            raise UserError(
                "dp of clients clips each client's update, which secure aggregation hides from the server: use dp of "
                "samples, or leave one out"
            )
        return promising_task

    def server(self, problem: Problem) -> Any:
        """The inner method's state. Raises UserError if there are too few clients to hide one among."""
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
        """True only for handlers that discard secrets: others must not run twice on the same secrets."""
        if handler == self.advertise_keys.__name__:
            return True
        return any(each.name == handler and each.reply is None for each in self.inner.handlers())

    # ------------------------------------------------------------------------------------------------- the client half

    def advertise_keys(self, state: Hidden, message: None, site: Site) -> Keys:
        """Draw this exchange's secrets; those of an unfinished exchange are discarded."""
        mine = state.secrets = Secrets(new_key(), new_key(), os.urandom(32))
        weighed = any(samples_field(each.reply) for each in self.inner.handlers())
        samples = len(site.train) if weighed else None
        return Keys(public_key(mine.sealing), public_key(mine.masking), samples, state.heard)

    def deal_shares(self, state: Hidden, message: Neighbours, site: Site) -> Dealt:
        """Share the secrets among the neighbours, which the cohort determines."""
        mine, others, cohort = state.secrets, message.keys.each(2 * KEY), clients_in(message.cohort)
        if mine is None or mine.neighbours.data:
            raise MethodError("the server asks for shares out of turn")
        if len(cohort) < LEAST or site.me not in cohort or list(others) != graph(cohort)[site.me]:
            raise MethodError("the server names neighbours that are not those that follow from the cohort")
        mine.cohort, mine.neighbours = message.cohort, message.keys
        needed, sealing = threshold(len(others)), private_key(mine.sealing)
        seeds, keys = shares_of(mine.seed, list(others), needed), shares_of(mine.masking, list(others), needed)
        shares = {
            i: sealed(agreed(sealing, public[:KEY], f"shares from {site.me} for {i}"), seeds[i] + keys[i])
            for i, public in others.items()
        }
        return Dealt(ByClient.of(shares), digest_of(mine.seed))

    def keep_shares(self, state: Hidden, message: Received, site: Site) -> None:
        """Keep the neighbours' shares; late ones belong to an exchange whose secrets are discarded next."""
        if state.secrets is not None and not state.secrets.view:
            state.secrets.going, state.secrets.received = message.going, message.shares
            state.secrets.weight = message.weight

    def hide(self, state: Hidden, handler: str, message: Any, reply: Any, site: Site) -> Any:
        """The reply to send: this client's contribution to the mean, quantised and masked.

        Raises UserError for values beyond the range, MethodError if the server could remove the masks.
        """
        mine = state.secrets
        if mine is None or mine.view:
            raise MethodError("the server asks for values out of turn: nothing masks them")
        cohort, going, partners = clients_in(mine.cohort), clients_in(mine.going), mine.received.each(SEALED)
        enough_of("continue", cohort, cohort, going, site.me)
        public, others = mine.neighbours.each(2 * KEY), set(going)
        if list(partners) != [i for i in public if i in others] or len(partners) < threshold(len(public)):
            raise MethodError(
                "too few of its neighbours continue to mask its values, or other ones than the server names"
            )
        weight = weight_of(reply)
        if not weight <= mine.weight:
            raise MethodError(f"all clients together weigh {mine.weight}, and this one alone {weight}")
        types = types_of(message, site.problem, site.me)
        tensors = tensors_of(reply)
        if not all(value.isfinite().all() for value in tensors.values()):  # the server refuses these, as without masks
            return remade(reply, {key: torch.full(value.shape, torch.nan) for key, value in tensors.items()})
        words = []
        for name, value in tensors.items():
            if value.dtype != types.get(name[1], torch.float32):
                raise MethodError(f"{name[1]!r} cannot be summed: the server does not know that it is {value.dtype}")
            try:
                words.append(quantised(value, self.most(value.dtype), weight / mine.weight))
            except ValueError as error:
                raise UserError(
                    f"{name[1]!r} cannot be summed, {error}: lower lr if it is too high, or set a "
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
        """Confirm to the neighbours the arrived clients that the server named, and this client's view: only once, and
        if enough clients arrived."""
        mine = state.secrets
        if mine is None or not mine.view or len(mine.there):
            raise MethodError("the server asks to confirm the arrived clients out of turn, or again")
        there, public = clients_in(message.there), mine.neighbours.each(2 * KEY)
        enough_of("are present", clients_in(mine.cohort), clients_in(mine.going), there, site.me)
        partners = [i for i in mine.received.each(SEALED) if i in there]
        if len(partners) < threshold(len(public)):
            raise MethodError("too few of its neighbours are present for the sum to hide a client")
        mine.there = message.there
        return Confirmed(ByClient.of({i: self._mark(mine, site.me, i, public[i]) for i in partners}))

    def _mark(self, mine: Secrets, one: Id, other: Id, public: bytes) -> bytes:
        """The mark that proves to `other` that `one` received the same; this client is one of the two."""
        seen = digest(mine.view, clients_in(mine.there)).hex()
        return agreed(private_key(mine.sealing), public[:KEY], f"{one} confirms to {other} {seen}")[:MARK]

    def reveal_shares(self, state: Hidden, message: Confirmed, site: Site) -> Revealed:
        """The shares that remove the remaining masks: one secret per neighbour, never both, only once, and if more than
        half of the neighbours received the same as this client."""
        mine = state.secrets
        if mine is None or not len(mine.there):
            raise MethodError("the server asks to reveal shares out of turn, or again")
        public, received = mine.neighbours.each(2 * KEY), mine.received.each(SEALED)
        same = [
            i for i, mark in message.marks.each(MARK).items()
            if i in received and mark == self._mark(mine, i, site.me, public[i])
        ]  # fmt: skip
        if len(same) < threshold(len(public)):
            raise MethodError("too few of its neighbours received the same: it reveals nothing")
        there = clients_in(mine.there)
        state.secrets = None
        sealing = private_key(mine.sealing)
        both = {
            i: opened(agreed(sealing, public[i][:KEY], f"shares from {i} for {site.me}"), text)
            for i, text in received.items()
        }
        good = {i: shares for i, shares in both.items() if shares is not None}  # undecryptable shares are missing
        return Revealed(
            ByClient.of({i: shares[:SHARE] for i, shares in good.items() if i in there}),
            ByClient.of({i: shares[SHARE:] for i, shares in good.items() if i not in there}),
        )

    def most(self, kind: torch.dtype) -> float:
        """The largest allowed value of a tensor of this dtype."""
        return self.range if kind.is_floating_point else COUNTERS


def enough_of(do: str, cohort: Sequence[Id], known: Sequence[Id], these: Sequence[Id], me: Id) -> None:
    """Raises MethodError unless `these` are known clients, include `me`, and are more than half of the cohort."""
    if not set(these) <= set(known) or me not in these or len(these) < LEAST or 2 * len(these) <= len(cohort):
        raise MethodError(f"of {len(cohort)} participating clients {len(these)} {do}, too few to hide this one among")
