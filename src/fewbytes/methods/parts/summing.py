"""The server half of secure aggregation: a network whose calls yield only sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fewbytes.base.errors import FewbytesError, MethodError
from fewbytes.core.network import Handler, Network
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.core.site import Site
from fewbytes.methods.parts.exchange import (
    LEAST,
    MARK,
    Arrived,
    ByClient,
    Confirmed,
    Keys,
    Neighbours,
    Received,
    graph,
    masks_of,
    numbers,
    view,
)
from fewbytes.methods.parts.masks import (
    SEALED,
    SHARE,
    UNIT,
    Words,
    agreed,
    dequantised,
    digest_of,
    masked,
    private_key,
    public_key,
    secret_of,
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


class SummingNetwork(Network):
    """A network whose calls yield one reply, the weighted mean of all, never a single client's; `method` (a
    `SecureAggregation`) has the handlers of an exchange."""

    def __init__(self, method: Any, net: Network) -> None:
        super().__init__(net._engine, net._members, net._part)
        self._method = method

    def among(self, clients: Sequence[Id], part: str) -> Network:
        return SummingNetwork(self._method, super().among(clients, part))

    def call(
        self,
        handler: Callable[[Any, Any, Site], Any],
        to: Iterable[Id] | Mapping[Id, Any],
        send: Any = None,
        check: Callable[[Id, Any], None] | None = None,
    ) -> Iterator[tuple[Id, Any]]:
        """As in `Network`, but yields one reply: the mean, weighted as the method would, with the sum of samples, under
        the first client's id. `check` is ignored: it is for single replies. Raises TooFewReplies if too many clients
        drop out, FewbytesError for a mean that honest clients cannot produce."""
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
        seen = exchange.view(handler.__name__, messages[came[0]])
        total = self._unmasked(total, exchange, came, seen)
        samples = sum(exchange.weights[i] for i in came)
        types = types_of(messages[came[0]], self.problem, came[0])
        part, means = samples / exchange.weight, {}
        for key, words, like in split(total, tensors_of(first)):
            kind = types.get(key[1], torch.float32)
            most = self._method.most(kind)
            mean = dequantised(words, most, part).view(like.shape)
            if bool((mean.abs() > most * (1 + len(came) / (part * UNIT))).any()):  # up to rounding
                raise FewbytesError(
                    f"secure aggregation: the mean of {key[1]!r} is beyond {most:g}, so some client sent invalid "
                    "values, and the sum hides which; resume without the clients you trust least (--resume RUN "
                    "--exclude …)"
                )
            means[key] = (mean if kind.is_floating_point else mean.round()).to(kind)
        return came[0], remade(first, means, {counted: samples} if counted else {})

    def _begun(self, cohort: list[Id], weighed: bool) -> Exchange:
        """The first two exchanges; the shares are then sent on to the continuing clients."""
        keys = self._keys(cohort)
        asked = graph(sorted(keys))
        public = {i: each.sealing + each.masking for i, each in keys.items()}
        who = numbers(keys)
        messages = {i: Neighbours(who, ByClient.of({j: public[j] for j in asked[i]})) for i in keys}
        dealt: dict[Id, dict[Id, bytes]] = {}
        digests: dict[Id, bytes] = {}
        for i, reply in super().call(self._method.deal_shares, to=messages):
            dealt[i], digests[i] = reply.shares.each(SEALED), reply.digest
            if dealt[i].keys() != set(asked[i]):
                raise MethodError(f"client {i} sent shares to other clients than its neighbours")
        needed = {i: threshold(len(these)) for i, these in asked.items()}
        others = continuing({i: [j for j in asked[i] if j in dealt] for i in dealt}, needed)
        enough(len(others), len(cohort))
        weights = {i: (keys[i].samples or 1) if weighed else 1 for i in others}
        exchange = Exchange(keys, digests, others, needed, weights)
        shares = {i: ByClient.of({j: dealt[j][i] for j in these}) for i, these in others.items()}
        going = numbers(others)
        received = {i: Received(going, each, exchange.weight) for i, each in shares.items()}
        super().tell(self._method.keep_shares, to=received, when="next")
        return exchange

    def _keys(self, cohort: list[Id]) -> dict[Id, Keys]:
        """All clients' public keys."""
        enough(len(cohort), len(cohort))
        keys: dict[Id, Keys] = {}
        for i, reply in super().call(self._method.advertise_keys, to=cohort):
            if not (usable(reply.sealing) and usable(reply.masking)):
                raise MethodError(f"client {i} sent an unsafe public key")
            keys[i] = reply
        usual = Counter(each.heard for each in keys.values()).most_common(1)
        keys = {i: each for i, each in keys.items() if each.heard == usual[0][0]}  # the others joined later
        enough(len(keys), len(cohort))
        return keys

    def _collected(
        self, handler: Callable[..., Any], messages: Mapping[Id, Any], exchange: Exchange
    ) -> tuple[Any, list[Id], Words]:
        """The third exchange: one reply, the clients that replied, and the sum of their values."""
        first, total = None, np.zeros(0, np.uint32)
        came: list[Id] = []
        odd: list[Id] = []
        for i, reply in super().call(handler, to=messages):
            tensors = tensors_of(reply)
            if any(value.dtype != torch.int32 for value in tensors.values()) or weight_of(reply) != exchange.weights[i]:
                raise MethodError(f"client {i} sent other values than masked ones of its weight")
            if first is None:
                first, total = reply, words_of(tensors)
            elif shapes(tensors) == shapes(tensors_of(first)):
                total += words_of(tensors)
            else:
                odd.append(i)  # or the first reply is the odd one; checked after all have arrived
            came.append(i)
        super().tell(self._method.keep_shares, when="next")  # cancel shares that were not delivered
        if odd:
            raise MethodError(
                f"the values of clients {came[0]} and {odd[0]} have different shapes and cannot be summed"
            )
        return first, came, total

    def _unmasked(self, total: Words, exchange: Exchange, came: list[Id], seen: bytes) -> Words:
        """The last two exchanges: the sum of values of clients that `came`, after removing masks that did not cancel;
        `seen`: the view from which the masks were derived."""
        here, others, needed = set(came), exchange.others, exchange.needed
        there = {i: [j for j in these if j in here] for i, these in others.items()}
        gone = {i: [j for j in these if j not in here] for i, these in others.items()}
        if few := [i for i, these in there.items() if len(these) < needed[i]]:
            raise TooFewReplies(
                too_few(f"{len(there[few[0]])} of {needed[few[0]]} neighbours that client {few[0]} needs")
            )
        if 2 * len(came) <= len(exchange.keys):
            raise TooFewReplies(too_few(f"{len(came)} of {len(exchange.keys)} clients"))
        shares: dict[Id, dict[Id, bytes]] = {i: {} for i in others}
        for i, reply in super().call(self._method.reveal_shares, to=self._confirmed(came, there, needed)):
            seeds, keys = reply.seeds.each(SHARE), reply.keys.each(SHARE)
            if not (seeds.keys() <= set(there[i]) and keys.keys() <= set(gone[i])):
                raise MethodError(f"client {i} revealed other shares than requested")
            for j, share in (seeds | keys).items():
                shares[j][i] = share
        added: list[bytes] = []
        taken: list[bytes] = []
        for i in others:
            if i in here:
                taken.append(rebuilt(i, shares[i], needed[i], digest_of, exchange.digests[i]))
                continue
            private = private_key(rebuilt(i, shares[i], needed[i], public_key, exchange.keys[i].masking))
            for j in there[i]:  # j added the mask shared with i if i is greater
                (taken if i > j else added).append(agreed(private, exchange.keys[j].masking, masks_of(seen)))
        return masked(total, added, taken)

    def _confirmed(self, came: list[Id], there: Mapping[Id, list[Id]], needed: Mapping[Id, int]) -> dict[Id, Confirmed]:
        """For each client with enough marks, the marks that prove that its neighbours received the same."""
        arrived, marks = Arrived(numbers(came)), dict[Id, dict[Id, bytes]]()
        for i, reply in super().call(self._method.confirm, to=came, send=arrived):
            marks[i] = reply.marks.each(MARK)
            if not marks[i].keys() <= set(there[i]):
                raise MethodError(f"client {i} confirmed to other clients than requested")
        each = {i: {j: marks[j][i] for j in there[i] if i in marks.get(j, ())} for i in marks}
        if len(able := {i: found for i, found in each.items() if len(found) >= needed[i]}) < LEAST:
            raise TooFewReplies(too_few(f"{len(able)} of {len(came)} clients on whose view enough others agree"))
        return {i: Confirmed(ByClient.of(found)) for i, found in able.items()}


@dataclass(frozen=True)
class Exchange:
    """The server's data of one exchange. `others`: the continuing neighbours of each continuing client; `needed`: the
    number of neighbours that restore a client's secrets."""

    keys: Mapping[Id, Keys]
    digests: Mapping[Id, bytes]
    others: Mapping[Id, list[Id]]
    needed: Mapping[Id, int]
    weights: Mapping[Id, int]  # of continuing clients

    @property
    def weight(self) -> int:
        """The total weight of the continuing clients."""
        return sum(self.weights.values())

    def view(self, handler: str, message: Any) -> bytes:
        """The view of clients that received this message."""
        heard = next(iter(self.keys.values())).heard
        return view(sorted(self.keys), sorted(self.others), self.weight, handler, message, heard)


def too_few(what: str) -> str:
    """The error text for a sum that cannot be computed."""
    return f"secure aggregation: only {what} are present; the run can be resumed"


def enough(count: int, asked: int) -> None:
    """Raises TooFewReplies for fewer than LEAST clients."""
    if count < LEAST:
        raise TooFewReplies(too_few(f"{count} of {asked} clients, of at least {LEAST}"))


def continuing(others: dict[Id, list[Id]], needed: Mapping[Id, int]) -> dict[Id, list[Id]]:
    """The clients that can continue, and their continuing neighbours: each has at least as many as `needed`. `others`:
    by client, the neighbours that sent shares."""
    while few := {i for i, these in others.items() if len(these) < needed[i]}:
        others = {i: [j for j in these if j not in few] for i, these in others.items() if i not in few}
    return others


def rebuilt(
    client: Id, shares: Mapping[Id, bytes], needed: int, shown: Callable[[bytes], bytes], public: bytes
) -> bytes:
    """A client's secret from shares, checked by `shown(secret) == public`; with more shares than needed, one may be
    wrong. Raises TooFewReplies."""
    for left_out in (None, *shares):
        chosen = {i: share for i, share in shares.items() if i != left_out}
        few = {i: chosen[i] for i in list(chosen)[:needed]}
        if len(few) == needed and shown(secret := secret_of(few)) == public:
            return secret
    raise TooFewReplies(
        too_few(f"{len(shares)} shares of client {client}'s secret, which needs {needed} correct ones,")
    )
