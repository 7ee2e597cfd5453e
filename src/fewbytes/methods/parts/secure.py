"""SecureAggregation: any method whose server needs only sums, run so that it sees nothing else. After Bonawitz et al.,
"Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with a server that follows the
protocol, and Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.

Where the method calls a handler, four exchanges take the place of one: clients advertise public keys and how much they
weigh; each deals shares of two secrets to its neighbours, sealed; each runs the handler, quantises what it would reply
and sends it under one mask for each neighbour, which that neighbour's takes off, and one of its own; and each reveals
shares: of every neighbour whose numbers have come those of its own mask, of every other those of the masks it has with
others. The server takes off what masks are left, and the method reads one reply, the mean of all.

Bytes per client and call, for D values and n neighbours (all others, up to 49 clients): 4 D + 125 n + 820 up, which
noise keeps from being coded, and 160 n + 600 down besides the method's own message.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn

from fewbytes.base.errors import FewbytesError, MethodError, UserError
from fewbytes.base.ranges import Positive, Samples
from fewbytes.base.rate import Way
from fewbytes.core.method import Method
from fewbytes.core.network import Handler, Network
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id, Problem, Task
from fewbytes.core.promise import Privacy
from fewbytes.core.site import Site
from fewbytes.methods.parts.around import Around, packed, unpacked
from fewbytes.methods.parts.masks import (
    KEY,
    SEALED,
    SHARE,
    UNIT,
    Words,
    agreed,
    degree,
    dequantised,
    digest_of,
    masked,
    new_key,
    opened,
    private_key,
    public_key,
    quantised,
    ring,
    sealed,
    secret_of,
    shares_of,
    threshold,
    usable,
)
from fewbytes.methods.parts.summable import (
    remade,
    samples_field,
    shapes,
    split,
    tensors_of,
    types_of,
    weight_of,
    words_of,
)
from fewbytes.wire import payload

LEAST = 3
"""Of fewer clients each would learn from the mean what the other sent."""
COUNTERS = float(1 << 24)
"""The largest whole number that a client may send, such as batch normalisation's count of batches."""
Key = Annotated[bytes, Meta(min_length=KEY, max_length=KEY)]


@payload
class ByClient:
    """Equally many bytes for each of some clients."""

    clients: Tensor  # int64, ascending
    data: bytes

    @classmethod
    def of(cls, pieces: Mapping[Id, bytes]) -> Self:
        clients = sorted(pieces)
        return cls(torch.tensor(clients, dtype=torch.int64), b"".join(pieces[i] for i in clients))

    def each(self, length: int) -> dict[Id, bytes]:
        """By client. Raises MethodError unless so many bytes are there for each."""
        clients = self.clients.flatten().tolist()
        if len(set(clients)) != len(clients) or len(self.data) != length * len(clients):
            raise MethodError(f"{len(self.data)} bytes are not {length} for each of {len(clients)} clients")
        return {i: self.data[length * at : length * (at + 1)] for at, i in enumerate(clients)}


@payload
class Keys:
    """Client to server: its public keys of this exchange, and on how many samples it trains."""

    sealing: Key  # with which shares for it are sealed
    masking: Key  # with which masks are agreed on
    samples: Samples


@payload
class Neighbours:
    """Server to client: both public keys of each of its neighbours, for sealing and for masking."""

    keys: ByClient


@payload
class Dealt:
    """Client to server: sealed shares of its secrets for each neighbour, and what its own mask's seed hashes to."""

    shares: ByClient
    digest: Key


@payload
class Received:
    """Server to client: the shares that those of its neighbours who go on have sealed for it, and what all who go on
    weigh together."""

    shares: ByClient
    weight: int


@payload
class Arrived:
    """Server to client: of its neighbours that went on, whose numbers have come, and whose have not."""

    there: Tensor
    gone: Tensor


@payload
class Revealed:
    """Client to server: its shares of the seeds of those there, and of the private keys of those gone."""

    seeds: ByClient
    keys: ByClient


@dataclass
class Secrets:
    """What a client knows during one exchange that the server does not."""

    sealing: bytes
    masking: bytes
    seed: bytes
    neighbours: ByClient  # their public keys
    received: ByClient  # their shares, sealed
    weight: int  # of all together
    sent: bool  # whether its numbers are on their way


@dataclass
class Hidden:
    """A client's state."""

    inner: bytes  # of the method, as a frame; empty: it has none
    secrets: Secrets | None  # of the exchange that is under way


@dataclass(frozen=True)
class SecureAggregation(Around):
    """The method whose replies are summed unseen, and how large their values may be."""

    range: Positive = 64.0  # R; the mean is exact to R / 2^30, times a half for each client

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method) or isinstance(self.inner, SecureAggregation):
            raise UserError(f"secure aggregation is of a method, like FedAvg(), not of {self.inner!r}")
        if not self.inner.sums:
            raise UserError(
                f"secure aggregation: the server of {self.inner.method_name} needs more of replies than their mean: "
                "leave it out, or take fedavg"
            )
        super().__post_init__()
        object.__setattr__(self, "protects", self.inner.protects & {"samples"})

    def __getattr__(self, name: str) -> Any:
        """The inner method's hyper-parameters, and its handlers with their replies masked."""
        value = super().__getattr__(name)
        return MethodType(self._around(value), self) if is_handler(value) else value

    def _around(self, inner: Callable[[Any, Any, Site], Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def handler(self: SecureAggregation, state: Hidden, message: Any, site: Site) -> Any:
            own = self.own(state)
            reply = inner(own, message, site)
            state.inner = packed(own)
            return None if reply is None else self.hide(state, message, reply, site)

        return handler

    @property
    def method_name(self) -> str:
        return f"{self.inner.method_name} with secure aggregation"

    def roundable(self, way: Way) -> bool:
        return False  # what travels is whole numbers

    def promising(self, task: Task, dp: str | None, rounds: int) -> Task:
        """As any method's. Raises UserError for a promise to clients."""
        if dp is not None and Privacy.read(dp).of == "clients":
            raise UserError(
                "dp of clients clips each one's update, which secure aggregation hides from the server: promise it of "
                "samples, or leave one out"
            )
        return super().promising(task, dp, rounds)

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

    # ------------------------------------------------------------------------------------------------- the client half

    def advertise_keys(self, state: Hidden, message: None, site: Site) -> Keys:
        """Draw this exchange's secrets; those of one that was never ended are forgotten."""
        mine = Secrets(new_key(), new_key(), os.urandom(32), ByClient.of({}), ByClient.of({}), 0, False)
        state.secrets = mine
        return Keys(public_key(mine.sealing), public_key(mine.masking), len(site.train))

    def deal_shares(self, state: Hidden, message: Neighbours, site: Site) -> Dealt:
        """Share the secrets among the neighbours."""
        mine, others = state.secrets, message.keys.each(2 * KEY)
        if mine is None or mine.neighbours.data or site.me in others or len(others) < LEAST - 1:
            raise MethodError("it is asked to deal shares out of turn, or to too few")
        mine.neighbours = message.keys
        needed, sealing = threshold(len(others)), private_key(mine.sealing)
        seeds, keys = shares_of(mine.seed, list(others), needed), shares_of(mine.masking, list(others), needed)
        shares = {
            i: sealed(agreed(sealing, public[:KEY], f"shares from {site.me} for {i}"), seeds[i] + keys[i])
            for i, public in others.items()
        }
        return Dealt(ByClient.of(shares), digest_of(mine.seed))

    def keep_shares(self, state: Hidden, message: Received, site: Site) -> None:
        """Keep the neighbours' shares; what comes too late is of an exchange whose secrets are forgotten next."""
        if state.secrets is not None and not state.secrets.sent:
            state.secrets.received, state.secrets.weight = message.shares, message.weight

    def hide(self, state: Hidden, message: Any, reply: Any, site: Site) -> Any:
        """The reply as it travels: this client's part of the mean, quantised, under its masks.

        Raises UserError for values beyond the range, MethodError for a server that would see through the masks.
        """
        mine = state.secrets
        if mine is None or mine.sent:
            raise MethodError("it is asked for its numbers out of turn: nothing masks them")
        public, partners = mine.neighbours.each(2 * KEY), mine.received.each(SEALED)
        if not partners.keys() <= public.keys() or len(partners) < threshold(len(public)):
            raise MethodError("too few of its neighbours go on to mask its numbers")
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
        mine.sent = True
        masking = private_key(mine.masking)
        others = {i: agreed(masking, public[i][KEY:], "masks") for i in partners}
        added = [mine.seed, *(key for i, key in others.items() if i > site.me)]
        taken = [key for i, key in others.items() if i < site.me]
        hidden = masked(np.concatenate([np.zeros(0, np.uint32), *words]), added, taken)
        return remade(
            reply,
            {
                key: torch.from_numpy(piece.view(np.int32)).view(like.shape)
                for key, piece, like in split(hidden, tensors)
            },
        )

    def reveal_shares(self, state: Hidden, message: Arrived, site: Site) -> Revealed:
        """The shares by which the masks that are left come off: of each neighbour one secret, never both, and once."""
        mine = state.secrets
        if mine is None or not mine.sent:
            raise MethodError("it is asked to reveal shares out of turn, or again")
        there, gone = message.there.tolist(), message.gone.tolist()
        public, received = mine.neighbours.each(2 * KEY), mine.received.each(SEALED)
        if sorted([*there, *gone]) != sorted(received):
            raise MethodError("it is asked for two secrets of a neighbour, or of others than its neighbours")
        if len(there) < threshold(len(public)):
            raise MethodError("too few of its neighbours are there for the sum to hide anybody")
        state.secrets = None
        sealing = private_key(mine.sealing)
        both = {
            i: opened(agreed(sealing, public[i][:KEY], f"shares from {i} for {site.me}"), text)
            for i, text in received.items()
        }
        good = {i: shares for i, shares in both.items() if shares is not None}  # others are one share fewer
        return Revealed(
            ByClient.of({i: good[i][:SHARE] for i in there if i in good}),
            ByClient.of({i: good[i][SHARE:] for i in gone if i in good}),
        )

    def most(self, kind: torch.dtype) -> float:
        """The largest value of a tensor of this type."""
        return self.range if kind.is_floating_point else COUNTERS


class SummingNetwork(Network):
    """A network whose calls yield one reply, the weighted mean of all, and nothing of which client sent what."""

    def __init__(self, method: SecureAggregation, net: Network) -> None:
        super().__init__(net._engine, net._members, net._part)
        self._method = method

    def among(self, clients: Sequence[Id], part: str) -> Network:
        return SummingNetwork(self._method, super().among(clients, part))

    def call(
        self,
        handler: Callable[[Any, Any, Site], Any],
        to: Iterable[Id] | Mapping[Id, Any],
        send: Any = None,
    ) -> Iterator[tuple[Id, Any]]:
        """As in `Network`, of all replies together: their mean, weighted as the method would, and the sum of their
        samples, as the first client's. Raises TooFewReplies if too many drop out, FewbytesError for a mean that no
        honest client's numbers have."""
        if Handler.of(handler).reply is None:
            return super().call(handler, to, send)
        return iter([self._summed(handler, to, send)])

    def _summed(self, handler: Callable[..., Any], to: Iterable[Id] | Mapping[Id, Any], send: Any) -> tuple[Id, Any]:
        cohort, counted = list(to), samples_field(Handler.of(handler).reply)
        exchange = self._begun(cohort, counted is not None)
        here = [i for i in cohort if i in exchange.others]
        messages = {i: to[i] for i in here} if isinstance(to, Mapping) else dict.fromkeys(here, send)
        first, came, total = self._collected(handler, messages, exchange)
        enough(len(came), len(cohort))
        total = self._unmasked(total, exchange, came)
        samples = sum(exchange.weights[i] for i in came)
        types = types_of(messages[came[0]], self.problem, came[0])
        part, means = samples / exchange.weight, {}
        for key, words, like in split(total, tensors_of(first)):
            kind = types.get(key[1], torch.float32)
            most = self._method.most(kind)
            mean = dequantised(words, most, part).view(like.shape)
            if bool((mean.abs() > most * (1 + len(came) / (part * UNIT))).any()):  # but for rounding
                raise FewbytesError(
                    f"secure aggregation: the mean of {key[1]!r} is beyond {most:g}, so that some client sent numbers "
                    "it must not: who, cannot be told; go on without those you trust least (--resume RUN --exclude …)"
                )
            means[key] = (mean if kind.is_floating_point else mean.round()).to(kind)
        return came[0], remade(first, means, {counted: samples} if counted else {})

    def _begun(self, cohort: list[Id], weighed: bool) -> Exchange:
        """The first two exchanges, after which shares are on their way to who goes on."""
        keys = self._keys(cohort)
        order = list(keys)
        secrets.SystemRandom().shuffle(order)
        asked = ring(order, degree(len(order)))
        public = {i: each.sealing + each.masking for i, each in keys.items()}
        messages = {i: Neighbours(ByClient.of({j: public[j] for j in asked[i]})) for i in keys}
        dealt: dict[Id, dict[Id, bytes]] = {}
        digests: dict[Id, bytes] = {}
        for i, reply in super().call(self._method.deal_shares, to=messages):
            dealt[i], digests[i] = reply.shares.each(SEALED), reply.digest
            if dealt[i].keys() != set(asked[i]):
                raise MethodError(f"client {i} dealt no shares to those it was asked to")
        needed = {i: threshold(len(these)) for i, these in asked.items()}
        others = going_on({i: [j for j in asked[i] if j in dealt] for i in dealt}, needed)
        enough(len(others), len(cohort))
        exchange = Exchange(keys, digests, others, needed, {i: keys[i].samples if weighed else 1 for i in others})
        shares = {i: ByClient.of({j: dealt[j][i] for j in these}) for i, these in others.items()}
        received = {i: Received(each, exchange.weight) for i, each in shares.items()}
        super().tell(self._method.keep_shares, to=received, when="next")
        return exchange

    def _keys(self, cohort: list[Id]) -> dict[Id, Keys]:
        """Everybody's public keys."""
        enough(len(cohort), len(cohort))
        keys: dict[Id, Keys] = {}
        for i, reply in super().call(self._method.advertise_keys, to=cohort):
            if not (usable(reply.sealing) and usable(reply.masking)):
                raise MethodError(f"client {i} sent a public key that hides nothing")
            keys[i] = reply
        enough(len(keys), len(cohort))
        return keys

    def _collected(
        self, handler: Callable[..., Any], messages: Mapping[Id, Any], exchange: Exchange
    ) -> tuple[Any, list[Id], Words]:
        """The third exchange: a reply, whose replies came, and the sum of their numbers."""
        first, total = None, np.zeros(0, np.uint32)
        came: list[Id] = []
        odd: list[Id] = []
        for i, reply in super().call(handler, to=messages):
            tensors = tensors_of(reply)
            if any(value.dtype != torch.int32 for value in tensors.values()) or weight_of(reply) != exchange.weights[i]:
                raise MethodError(f"client {i} sent no masked numbers of its weight")
            if first is None:
                first, total = reply, words_of(tensors)
            elif shapes(tensors) == shapes(tensors_of(first)):
                total += words_of(tensors)
            else:
                odd.append(i)  # or the first is: who is unlike most is told apart when all have come
            came.append(i)
        super().tell(self._method.keep_shares, when="next")  # nobody is to get what was left after all
        if odd:
            raise MethodError(f"what clients {came[0]} and {odd[0]} sent cannot be added up")
        return first, came, total

    def _unmasked(self, total: Words, exchange: Exchange, came: list[Id]) -> Words:
        """The last exchange: the sum of what those who came sent, once the masks are off that did not cancel."""
        here, others, needed = set(came), exchange.others, exchange.needed
        there = {i: [j for j in these if j in here] for i, these in others.items()}
        gone = {i: [j for j in these if j not in here] for i, these in others.items()}
        if few := [i for i, these in there.items() if len(these) < needed[i]]:
            raise TooFewReplies(
                too_few(f"{len(there[few[0]])} of {needed[few[0]]} neighbours that client {few[0]} needs")
            )
        orders = {i: Arrived(*(torch.tensor(these[i], dtype=torch.int64) for these in (there, gone))) for i in came}
        shares: dict[Id, dict[Id, bytes]] = {i: {} for i in others}
        for i, reply in super().call(self._method.reveal_shares, to=orders):
            seeds, keys = reply.seeds.each(SHARE), reply.keys.each(SHARE)
            if not (seeds.keys() <= set(there[i]) and keys.keys() <= set(gone[i])):
                raise MethodError(f"client {i} revealed other shares than it was asked for")
            for j, share in (seeds | keys).items():
                shares[j][i] = share
        added: list[bytes] = []
        taken: list[bytes] = []
        for i in others:
            if i in here:
                taken.append(rebuilt(i, shares[i], needed[i], digest_of, exchange.digests[i]))
                continue
            private = private_key(rebuilt(i, shares[i], needed[i], public_key, exchange.keys[i].masking))
            for j in there[i]:  # which added what they agreed on if i is the greater
                (taken if i > j else added).append(agreed(private, exchange.keys[j].masking, "masks"))
        return masked(total, added, taken)


@dataclass(frozen=True)
class Exchange:
    """What the server knows of one. `others`: of those who go on, which of their neighbours do, too; `needed`: how many
    neighbours open a client's secrets."""

    keys: Mapping[Id, Keys]
    digests: Mapping[Id, bytes]
    others: Mapping[Id, list[Id]]
    needed: Mapping[Id, int]
    weights: Mapping[Id, int]  # of those who go on

    @property
    def weight(self) -> int:
        """Of all who go on together."""
        return sum(self.weights.values())


def too_few(what: str) -> str:
    """The words for a sum that cannot be had."""
    return f"secure aggregation: only {what} are there; the run can be resumed"


def enough(count: int, asked: int) -> None:
    """Raises TooFewReplies for fewer clients than hide one among them."""
    if count < LEAST:
        raise TooFewReplies(too_few(f"{count} of {asked} clients, of at least {LEAST}"))


def going_on(others: dict[Id, list[Id]], needed: Mapping[Id, int]) -> dict[Id, list[Id]]:
    """Of clients, by those neighbours that have dealt shares, who can go on, and with whom: each with as many as are
    `needed`."""
    while few := {i for i, these in others.items() if len(these) < needed[i]}:
        others = {i: [j for j in these if j not in few] for i, these in others.items() if i not in few}
    return others


def rebuilt(
    client: Id, shares: Mapping[Id, bytes], needed: int, told: Callable[[bytes], bytes], public: bytes
) -> bytes:
    """A client's secret, of which it `told` something `public`, from shares; where there are more than are needed, one
    may be wrong. Raises TooFewReplies."""
    for left_out in (None, *shares):
        chosen = {i: share for i, share in shares.items() if i != left_out}
        few = {i: chosen[i] for i in list(chosen)[:needed]}
        if len(few) == needed and told(secret := secret_of(few)) == public:
            return secret
    raise TooFewReplies(
        too_few(f"{len(shares)} shares of client {client}'s secret, of {needed} true ones that open it,")
    )


def is_handler(value: Any) -> bool:
    """Whether an attribute of a method is one of its client handlers."""
    try:
        return inspect.ismethod(value) and bool(Handler.of(value))
    except (MethodError, TypeError):
        return False
