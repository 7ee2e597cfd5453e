"""What a server half may use: the clients, calls to their handlers, named randomness, what people are shown."""

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
"""Of values (n, …) and who sent them (n, …), bool, what they come to (…)."""


class Refused(FewbytesError):
    """A newcomer the method cannot serve, why in words: `Method.join` raises it, and the run goes on without it."""


@dataclass(frozen=True)
class Handler:
    """A client handler of a method: its name, and the payload classes of its message and reply (None: nothing)."""

    name: str
    message: type[Any] | None
    reply: type[Any] | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Handler:
        """Read a handler's type hints. Raises MethodError if they do not say what travels, or it cannot."""
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
        """Raises MethodError for a message that is not of its class."""
        if type(message) is not self.message:
            wanted = "nothing" if self.message is None else with_article(self.message)
            sent = "nothing" if message is None else with_article(type(message))
            raise MethodError(f"handler {self.name!r} takes {wanted}, it was sent {sent}")

    def roundable(self, way: Way) -> bool:
        """Whether a run that rounds what travels that way finds something to round in its messages or replies."""
        kind = self.reply if way == "uplink" else self.message
        leaves = () if kind is None else schema_of(kind).types()
        return any(getattr(of, "roundable", False) and EXACT not in marks for of, marks in leaves)


def hints_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The type hints of what is called `name`. Raises MethodError if they cannot be resolved."""
    try:
        return typing.get_type_hints(function)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise MethodError(f"the type hints of {name} cannot be resolved: {error}") from None


def takes_site(function: Callable[..., Any]) -> bool:
    """Whether the last of a function's four parameters is a client's site, by the name of its type."""
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
    """A message for each of some clients, made whenever it is read."""

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
    """What people can be shown, a value of `fewbytes.core.gallery`; `ending`: of its file's name."""

    ending: ClassVar[str]

    def drawn(self) -> bytes:
        """The file; empty if there is nothing to see."""


class Averaging(Protocol):
    """What takes in states one by one, and is called for what they come to."""

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """One client's, with a weight above 0."""

    def __call__(self) -> State:
        """Raises MethodError if there was none."""


class EntryAveraging(Protocol):
    """The same of each entry over the states that have it."""

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """One client's, with a weight above 0."""

    def over(self, old: State) -> State:
        """What they come to in place of `old`'s entries; those nobody sent stay."""


class Taking(Protocol):
    """What a run takes of states: `fewbytes.core.means.Means`."""

    def mean(self, around: State | None) -> Averaging:
        """See `Network.mean`."""

    def entry_means(self, around: State | None, few: bool) -> EntryAveraging:
        """See `Network.entry_means`."""

    def clipped(self, states: Sequence[State]) -> Sequence[State]:
        """See `Network.clipped`."""

    def votes(self) -> Vote | None:
        """See `Network.votes`."""


class Gathering(Protocol):
    """The step that is being taken: `fewbytes.core.step.Step`."""

    rng: np.random.Generator

    @property
    def means(self) -> Taking:
        """What the run takes of states."""

    def show(self, name: str, what: Shown) -> None:
        """Keep what people are shown."""

    def note(self, what: str, how_much: str) -> None:
        """Tell people what they should know of a round."""


class Exchanges(Protocol):
    """What a network needs of the engine that runs it."""

    problem: Problem

    @property
    def clients(self) -> list[Id]:
        """The clients that are present, in ascending order."""

    @property
    def step(self) -> Gathering:
        """The step that is being taken."""

    def sample(self, fraction: float) -> list[Id]:
        """The round's cohort."""

    def exchange(
        self,
        function: Callable[..., Any],
        to: Iterable[Id] | Mapping[Id, Any],
        send: Any,
        part: str,
        check: Callable[[Id, Any], None] | None,
    ) -> Iterator[tuple[Id, Any]]:
        """Run a handler on clients, in a part of the network; replies in the order asked."""

    def stream(self, function: Callable[..., Any], send: Any, at_once: int) -> Iterator[tuple[Id, Any, int]]:
        """Keep so many clients at work on a handler; replies as they come."""

    def leave(self, function: Callable[..., Any], to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Leave a message with each of some clients' next request, or with everybody's in a part of the network."""

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Who is in a part of the network."""


class Network:
    """What a server half may use, and no more. `members`: the clients it sees of the engine's (default: all), and
    what that part of the network is called.

    One call at a time: a call inside a call, or one left unread or half-read, is an error in every engine. A stream may
    be left at any reply.

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
        """The clients that are there, in ascending order."""
        return [i for i in self._engine.clients if self._members is None or i in self._members]

    @property
    def problem(self) -> Problem:
        """What is learned."""
        return self._engine.problem

    @property
    def rng(self) -> np.random.Generator:
        """Named randomness of this round."""
        return self._engine.step.rng

    def among(self, clients: Sequence[Id], part: str) -> Network:
        """The same network, as if there were only these of the clients; parts of other names have other clients.

        What is left with everybody in a part also reaches who is in it later, when it is made anew.
        """
        wanted = set(clients)
        members = [i for i in self.clients if i in wanted]
        self._engine.set_part(part, members)
        return Network(self._engine, members, part)

    def sample(self, fraction: float) -> list[Id]:
        """The round's cohort, random: round(fraction * clients) of all there are, at least one, in ascending order.

        It is the same whenever it is asked for in a round. Of a part of the clients (`among`) those that are in it,
        possibly none.
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

        `to`: clients that all get `send`, or a mapping from client to its own message; those that have left by the
        task's schedule are passed over. Read it to the end: clients run as their replies are read. `check`: raises
        MethodError, before a reply reaches the method, for one that the client may not send; it is then left out, as
        one whose fields are not what their types say (`fewbytes.base.ranges`, `fewbytes.core.admission.like`).
        """
        return self._engine.exchange(handler, to, send, self._part, check)

    def stream(
        self, handler: Callable[[Any, Sent, Site], Reply], send: Sent | None = None, at_once: int = 1
    ) -> Iterator[tuple[Id, Reply, int]]:
        """Keep `at_once` clients at work on a handler; yields (client, reply, staleness) as replies come.

        Whoever is asked gets `send`. When the next reply is asked for, the places that are free go to clients drawn at
        random from those that are not at work and have not answered in this round. Leave it (`break`) with enough
        replies: who is still at work then stays so, and answers in a later round, in which `staleness` is how many
        rounds ago it was asked. It ends by itself when nobody is at work or can be asked. A run streams one handler, to
        which its method promises (`streams`), and no message waits beside it (`tell`).
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
        """The same for a handler without reply; returns when all have run.

        `to` and `send`: as in `call`; without `to`, everybody gets `send`. `when`: `next` leaves the message until the
        client is asked next, with whose request it travels and before whose handler this one runs; a newer message to
        the handler takes the place of one that waits, and what waits after the last round is sent then. Left with
        everybody, it also reaches who joins later. What is left waits on disk, so a mapping that makes each message as
        it is read, instead of a dict of all, has one in memory at a time.
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
        """What the run takes of states that clients send, added one by one: their weighted mean, what its rule says, or
        a mean under noise.

        `around`: what the clients were sent, where their updates start; of an entry that is not in it, 0. A method that
        asks for it promises which rules will do, and whether noise will (`fewbytes.core.promises`).
        """
        return self._engine.step.means.mean(around)

    def entry_means(self, around: State | None = None, few: bool = False) -> EntryAveraging:
        """The same of each entry over the states that have it. `few`: possibly of one alone, which by any rule but the
        mean moves it no further, for its number of values, than most move theirs."""
        return self._engine.step.means.entry_means(around, few)

    def clipped(self, states: Sequence[State]) -> Sequence[State]:
        """What clients sent, for a method that takes other means: as is or, by any rule but the mean, clipped."""
        return self._engine.step.means.clipped(states)

    def votes(self) -> Vote | None:
        """The vote on values (n, …) over those clients that sent them (n, …), bool, for a method that takes other
        means: the rule's median or trimmed mean; None: it takes its means, of what is `clipped`."""
        return self._engine.step.means.votes()

    def show(self, name: str, what: Shown) -> None:
        """Show people images, points or shares (`fewbytes.core.gallery`); steers nothing.

        They are kept in the run folder, and the report draws them. In a round that is not scored, and before the first,
        they are dropped. `name`: a file name's part, of a-z, 0-9 and -. Raises MethodError.
        """
        self._engine.step.show(name, what)

    def note(self, what: str, how_much: str) -> None:
        """Tell people what they should know of this round to read its results, in the same words each time it is so,
        and how much of it there was; steers nothing. The live line, the table and the report say it."""
        self._engine.step.note(what, how_much)
