"""The server half's interface: the clients, calls to their handlers, named randomness, and the gallery."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from torch import Tensor

from fewbytes.base.errors import FewbytesError, MethodError, with_article
from fewbytes.base.ranges import EXACT
from fewbytes.base.rate import Way
from fewbytes.base.state import State
from fewbytes.core.problem import Id, Problem
from fewbytes.core.site import Site
from fewbytes.wire.schema import check_fields, schema_of

Sent = TypeVar("Sent")
Reply = TypeVar("Reply")
Vote = Callable[[Tensor, Tensor], Tensor]
"""From values (n, …), and which clients sent them (n, …), bool, to their aggregate (…)."""


class Refused(FewbytesError):
    """A newcomer the method cannot serve, with the reason: raised by `Method.join`; the run continues without it."""


@dataclass(frozen=True)
class Handler:
    """A client handler of a method: its name, and the payload classes of its message and reply (None: nothing)."""

    name: str
    message: type[Any] | None
    reply: type[Any] | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Handler:
        """Read a handler's type hints. Raises MethodError if they are missing, or a message or reply cannot travel."""
        name = getattr(function, "__name__", repr(function))
        hints = hints_of(function, f"handler {name!r}")
        names = [n for n in hints if n != "return"]
        if len(names) != 3 or "return" not in hints or not _is_site(hints[names[2]]):
            raise MethodError(
                f"handler {name!r} must be typed: write def {name}(self, state: …, message: …, site: fb.Site) -> …, "
                "with the classes of the state, the message and the reply, or None for nothing"
            )
        kinds = [required(hints[names[1]]), required(hints["return"])]
        for kind, what in zip(kinds, ("message", "reply"), strict=True):
            if kind is not type(None):
                try:
                    check_fields(kind)
                except MethodError as error:
                    raise MethodError(f"the {what} of handler {name!r}: {error}") from None
        return cls(name, *(None if kind is type(None) else kind for kind in kinds))

    def check(self, message: Any) -> None:
        """Raises MethodError for a message of another class."""
        if type(message) is not self.message:
            wanted = "nothing" if self.message is None else with_article(self.message)
            sent = "nothing" if message is None else with_article(type(message))
            raise MethodError(f"handler {self.name!r} takes {wanted}, it was sent {sent}")

    def roundable(self, way: Way) -> bool:
        """Whether a run that rounds values in that direction can round any in its messages or replies."""
        kind = self.reply if way == "uplink" else self.message
        leaves = () if kind is None else schema_of(kind).types()
        return any(getattr(of, "roundable", False) and EXACT not in marks for of, marks in leaves)


def hints_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The type hints of a function, called `name` in errors. Raises MethodError if they cannot be resolved."""
    try:
        return typing.get_type_hints(function)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise MethodError(f"the type hints of {name} cannot be resolved: {error}") from None


def takes_site(function: Callable[..., Any]) -> bool:
    """Whether the last of a function's four parameters is a client's site, by its type's name."""
    names = list(inspect.signature(function).parameters)
    hint = inspect.get_annotations(function).get(names[-1]) if len(names) == 4 else None
    return str(getattr(hint, "__name__", hint)).rpartition(".")[2] == "Site"


def _is_site(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Site)


def required(kind: Any) -> Any:
    """The type T of `T | None`, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
    return kind


class LazyMapping(Mapping[Id, Sent]):
    """A message for each of some clients, made on every access."""

    def __init__(self, clients: Sequence[Id], make: Callable[[Id], Sent]) -> None:
        self._clients, self._make = dict.fromkeys(clients), make

    def __getitem__(self, client: Id) -> Sent:
        if client not in self._clients:
            raise KeyError(client)
        return self._make(client)

    def __iter__(self) -> Iterator[Id]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class Shown(Protocol):
    """Something to show people, a value of `fewbytes.core.gallery`; `ending`: its file's suffix."""

    ending: ClassVar[str]

    def drawn(self) -> bytes:
        """The file's contents; empty if there is nothing to see."""


class Averaging(Protocol):
    """Accumulates states one by one; calling it returns their aggregate."""

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one client's state, with a weight above 0."""

    def __call__(self) -> State:
        """The aggregate. Raises MethodError if there was no state."""


class EntryAveraging(Protocol):
    """Like `Averaging`, for each entry over the states that have it."""

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one client's state, with a weight above 0."""

    def over(self, old: State) -> State:
        """`old` with its entries replaced by aggregates; entries that nobody sent stay."""


class Taking(Protocol):
    """A run's aggregation of states: `fewbytes.core.means.Means`."""

    def mean(self, around: State | None) -> Averaging:
        """See `Network.mean`."""

    def entry_means(self, around: State | None, few: bool) -> EntryAveraging:
        """See `Network.entry_means`."""

    def clipped(self, states: Sequence[State]) -> Sequence[State]:
        """See `Network.clipped`."""

    def votes(self) -> Vote | None:
        """See `Network.votes`."""


class Gathering(Protocol):
    """The current step: `fewbytes.core.step.Step`."""

    rng: np.random.Generator

    @property
    def means(self) -> Taking:
        """The run's aggregation of states."""

    def show(self, name: str, what: Shown) -> None:
        """Keep something to show people."""

    def note(self, what: str, how_much: str) -> None:
        """Note something people should know about a round."""


class Exchanges(Protocol):
    """The interface of the engine that a network needs."""

    problem: Problem

    @property
    def clients(self) -> list[Id]:
        """The clients that are present, in ascending order."""

    @property
    def step(self) -> Gathering:
        """The current step."""

    def sample(self, fraction: float) -> list[Id]:
        """The round's sampled clients."""

    def exchange(
        self,
        function: Callable[..., Any],
        to: Iterable[Id] | Mapping[Id, Any],
        send: Any,
        part: str,
        check: Callable[[Id, Any], None] | None,
    ) -> Iterator[tuple[Id, Any]]:
        """Run a handler on clients, in a subset of clients; yields replies in the order asked."""

    def stream(self, function: Callable[..., Any], send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        """Keep `at_once` clients at work on a handler; yields replies as they arrive."""

    def leave(self, function: Callable[..., Any], to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Leave a message for each of some clients, or for everybody in a subset, to travel with the next request."""

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Set the members of a subset of clients."""


class Network:
    """The interface of a server half. `members`: the visible clients of the engine (default: all); `part`: the name of
    that subset.

    One call at a time: a nested call, or one left unread or half-read, is an error in every engine. A stream may be
    left at any reply.

    >>> import fewbytes as fb
    >>> import torch
    >>> class Half(fb.FedAvg):
    ...     def round(self, state, net, t):
    ...         print(f"round {t} asks {len(net.sample(0.5))} of {net.clients}")
    ...         super().round(state, net, t)
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))] * 4)
    >>> result = fb.run(Half(fraction=0.5), task, rounds=1)
    round 1 asks 2 of [0, 1, 2, 3]
    """

    def __init__(self, engine: Exchanges, members: Collection[Id] | None = None, part: str = "") -> None:
        self._engine, self._members, self._part = engine, None if members is None else frozenset(members), part

    @property
    def clients(self) -> list[Id]:
        """The present clients, in ascending order."""
        return [i for i in self._engine.clients if self._members is None or i in self._members]

    @property
    def problem(self) -> Problem:
        """The learning problem."""
        return self._engine.problem

    @property
    def rng(self) -> np.random.Generator:
        """Named randomness of this round."""
        return self._engine.step.rng

    def among(self, clients: Sequence[Id], part: str) -> Network:
        """The same network restricted to these clients; subsets of other names must have other clients.

        A message left for everybody in a subset also reaches clients added when it is created again.
        """
        wanted = set(clients)
        members = [i for i in self.clients if i in wanted]
        self._engine.set_part(part, members)
        return Network(self._engine, members, part)

    def sample(self, fraction: float) -> list[Id]:
        """The round's sampled clients: round(fraction * clients) of all present, at least one, in ascending order.

        It returns the same clients throughout a round. For a subset (`among`): its sampled members, possibly none.
        """
        return [i for i in self._engine.sample(fraction) if self._members is None or i in self._members]

    def call(
        self,
        handler: Callable[[Any, Sent, Site], Reply],
        to: Iterable[Id] | Mapping[Id, Sent],
        send: Sent | None = None,
        check: Callable[[Id, Reply], None] | None = None,
    ) -> Iterator[tuple[Id, Reply]]:
        """Run a handler on clients; yields (client, reply) in the order asked, one reply in memory at a time.

        `to`: clients that all get `send`, or a mapping from client to its own message; clients that have left by the
        task's schedule are skipped. Read it to the end: clients run as their replies are read. `check`: raises
        MethodError for an invalid reply before the method sees it. The reply is then left out, like one whose fields
        violate their types (`fewbytes.base.ranges`, `fewbytes.core.admission.like`).
        """
        return self._engine.exchange(handler, to, send, self._part, check)

    def stream(
        self, handler: Callable[[Any, Sent, Site], Reply], send: Sent | None = None, at_once: int = 1
    ) -> Iterator[tuple[Id, Reply, int]]:
        """Keep `at_once` clients at work on a handler; yields (client, reply, staleness) as replies arrive.

        All clients get `send`. At each request for a reply, free places go to randomly drawn clients that are not at
        work and have not answered in this round. Leave it (`break`) after enough replies: clients at work continue and
        answer in a later round; `staleness` is the number of rounds since they were asked. It ends when no client is at
        work or can be asked. A run streams one handler; its method must set `streams`, and cannot leave waiting
        messages (`tell`).
        """
        if self._members is not None:
            raise MethodError("a stream is of all clients, not of a part of them (among)")
        return self._engine.stream(handler, send, at_once)

    def tell(
        self,
        handler: Callable[[Any, Sent, Site], None],
        to: Iterable[Id] | Mapping[Id, Sent] | None = None,
        send: Sent | None = None,
        when: Literal["now", "next"] = "now",
    ) -> None:
        """Run a handler without reply; returns when all clients have run it.

        `to` and `send`: as in `call`; without `to`, everybody gets `send`. `when="next"` leaves the message to travel
        with the client's next request; its handler runs before the request's. A newer message to the same handler
        replaces a waiting one; messages still waiting after the last round are sent then. One left for everybody also
        reaches later newcomers. Messages wait on disk: a mapping that makes each on access, instead of a dict of all,
        keeps one in memory at a time.
        """
        if when not in ("now", "next"):
            raise MethodError(f"a message is sent now or next, not {when!r}")
        if when == "next":
            wanted = to if to is None or isinstance(to, Mapping) else dict.fromkeys(to, send)
            self._engine.leave(handler, wanted, send, self._part)
            return
        for _ in self.call(handler, self.clients if to is None else to, send):
            pass

    def mean(self, around: State | None = None) -> Averaging:
        """The run's aggregation of clients' states, added one by one: their weighted mean, a robust rule's result, or a
        noisy mean.

        `around`: the clients' message, from which updates count; entries missing there count from 0. A method that uses
        it promises which rules it allows, and whether noise (`fewbytes.core.promises`).
        """
        return self._engine.step.means.mean(around)

    def entry_means(self, around: State | None = None, few: bool = False) -> EntryAveraging:
        """Like `mean`, for each entry over the states that have it. `few`: an entry may have a single sender; then any
        rule but the mean limits its update, per root of its number of values, to the others' median."""
        return self._engine.step.means.entry_means(around, few)

    def clipped(self, states: Sequence[State]) -> Sequence[State]:
        """Clients' states, for a method with other means: unchanged or, by any rule but the mean, clipped."""
        return self._engine.step.means.clipped(states)

    def votes(self) -> Vote | None:
        """The vote over values (n, …) and which clients sent them (n, …), bool, for a method with other means: the
        rule's median or trimmed mean. None: the method uses its own means, of `clipped` states."""
        return self._engine.step.means.votes()

    def show(self, name: str, what: Shown) -> None:
        """Show people images, points or shares (`fewbytes.core.gallery`); has no effect on training.

        The run folder keeps them, and the report draws them. Dropped in rounds that are not scored, and before the
        first. `name`: part of a file name, of a-z, 0-9 and -. Raises MethodError.
        """
        self._engine.step.show(name, what)

    def note(self, what: str, how_much: str) -> None:
        """Note something people need to interpret this round's results, with the same words each time, and an amount;
        has no effect on training. The live line, the table and the report print it."""
        self._engine.step.note(what, how_much)
