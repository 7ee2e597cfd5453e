"""The federated method: one object whose server half calls its client half by name. Read this first."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from torch import nn

from fewbytes.base.errors import MethodError, UserError, returned, suggestion, with_article
from fewbytes.base.ranges import check_ranges
from fewbytes.base.rate import Way
from fewbytes.base.state import State
from fewbytes.core.class_checks import called, check_class, place_of
from fewbytes.core.network import Handler, Network, hints_of, required, takes_site
from fewbytes.core.objective import Objective
from fewbytes.core.options import OF_METHOD, OF_TASK, belongs
from fewbytes.core.privacy import SamplePrivacy
from fewbytes.core.problem import Id, Posed, Problem
from fewbytes.core.promise import Privacy
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.models.builders import default_model
from fewbytes.wire.schema import check_fields

TERMS = tuple(f.name for f in dataclasses.fields(Local))
"""The terms of local training, settable by their plain names."""


Asked = TypeVar("Asked", bound=Posed)
"""A task whose problem a method adapts."""


def _with(task: Asked, problem: Problem) -> Asked:
    return dataclasses.replace(task, problem=problem)  # type: ignore[type-var]


def own_defaults(cls: type) -> dict[str, Any]:
    """The hyper-parameters that a method's class itself declares, and their defaults (`dataclasses.MISSING`: none)."""
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in (dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ())
    }


class Method(ABC):
    """A federated method: a frozen dataclass of hyper-parameters. Only the server's and the clients' state persist.

    A client handler is any method `(self, state, message, site: Site) -> reply`. Its type hints give the payload
    classes, or None for nothing. The server half calls it with `net.call(self.handler, to=..., send=...)`. A method
    that trains has a field `local: Local`; its terms can be given by their plain names.

    >>> from dataclasses import dataclass
    >>> import fewbytes as fb
    >>> import torch
    >>> @fb.payload
    ... class Size:
    ...     samples: int
    >>> @dataclass(frozen=True)
    ... class Counting(fb.Method):
    ...     promises = fb.Promises(sends="how many samples it has")
    ...
    ...     def round(self, state, net, t):
    ...         print(sum(reply.samples for _, reply in net.call(self.count, to=net.clients)))
    ...
    ...     def count(self, state: None, message: None, site: fb.Site) -> Size:
    ...         return Size(len(site.train))
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> result = fb.run(Counting(), fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))] * 3), rounds=1)
    12
    """

    promises: ClassVar[Promises] = Promises()
    """Its properties, which tests hold it to."""
    needs: ClassVar[type[Objective]] = Objective  # type: ignore[type-abstract]
    """The objective it can learn."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__init__" not in vars(cls):
            cls.__init__ = Method.__init__  # type: ignore[method-assign]  # a dataclass leaves it as it is

    def __init__(self, *values: Any, **parameters: Any) -> None:
        """Hyper-parameters in order or by name, local training's terms by their plain names: `FedAvg(epochs=5)`.

        Raises UserError for a value out of range, TypeError for an unknown parameter, MethodError for a class that no
        run can use.
        """
        check_class(type(self), Method)
        for name, value in _parameters(type(self), values, parameters).items():
            object.__setattr__(self, name, value)
        check_ranges(self)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Further checks of hyper-parameters by subclasses. Raises UserError."""

    @property
    def method_name(self) -> str:
        """Its name on the command line and in results."""
        return type(self).__name__.lower()

    @property
    def parameters(self) -> dict[str, Any]:
        """All hyper-parameters by their plain names, including local training's terms."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        local = own.pop("local") if isinstance(own.get("local"), Local) else None
        return ({} if local is None else dataclasses.asdict(local)) | own

    def changed(self, **parameters: Any) -> Self:
        """A copy of the method with other hyper-parameters, by their plain names. Raises UserError."""
        return dataclasses.replace(self, **parameters)  # type: ignore[type-var]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults of all hyper-parameters by plain name (`dataclasses.MISSING`: none)."""
        own = own_defaults(cls)
        local = own.pop("local") if isinstance(own.get("local"), Local) else None
        return ({} if local is None else dataclasses.asdict(local)) | own

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """The types of all hyper-parameters by plain name, with ranges."""
        own, terms = (typing.get_type_hints(each, include_extras=True) for each in (cls, Local))
        return {name: own.get(name, terms.get(name)) for name in cls.defaults()}

    def remodel(self, model: nn.Module, seed: int) -> nn.Module:
        """The model the method trains in place of a client's `model`; `seed` is the task's. Default: the same model."""
        return model

    def adapted(self, task: Asked) -> Asked:
        """The task with the models this method trains; engines start with it. Applying it twice has no further effect.

        Raises UserError if the method cannot learn the task's objective, or keep its clients' own entries.
        """
        problem = task.problem
        if not isinstance(problem.objective, self.needs):
            raise UserError(problem.objective.suits)
        if problem.own and not self.promises.keeps_own:
            raise UserError(
                f"with send=A, lora's matrices B stay with the clients, and {self.method_name} cannot leave a part of "
                "the model out of its messages: leave send=A out, or use another method"
            )
        if type(self).remodel is Method.remodel or problem.remodel == self.remodel:
            return task
        return _with(task, dataclasses.replace(problem, remodel=self.remodel))

    def promising(self, task: Asked, dp: Privacy | str | None, rounds: int) -> Asked:
        """The task with privacy of samples over this number of rounds, if the run's setting `dp` asks for it; clients'
        nodes need it, too. Raises UserError for a method that cannot give it."""
        privacy = Privacy.read(dp) if isinstance(dp, str) else dp
        if privacy is None or privacy.of == "clients":
            return task
        privacy.check(self.method_name, self.promises.protects)
        if getattr(task.problem.objective, "weights", None) is not None:
            raise UserError(
                "dp of samples takes no class weights, which a sample has only beside others: leave them out"
            )
        local: Local = self.local  # type: ignore[attr-defined]  # of every method that protects samples
        terms = SamplePrivacy(privacy, rounds, local.epochs, local.batch, local.steps)
        words = f"{privacy} over {rounds} rounds of {terms.length} in batches of {terms.batch}"
        agreed = {**task.problem.agreed, "dp": words}
        return _with(task, dataclasses.replace(task.problem, privacy=terms, agreed=agreed))

    def server(self, problem: Problem) -> Any:
        """The server's initial state: a dataclass of packable fields, or None."""
        return None

    def client(self, site: Site) -> Any:
        """A client's initial state, made on the client at its first request; stays there. A dataclass, or None."""
        return None

    def planned_rounds(self, asked: int) -> int:
        """The number of rounds of a run of `asked` rounds: the same, except for one-shot and staged methods with their
        own number."""
        return asked

    def cohort(self, clients: int) -> int:
        """The number of clients that answer in a round, out of `clients`."""
        return max(1, round(getattr(self, "fraction", 1.0) * clients))

    def model_for(self, shape: tuple[int, ...]) -> str:
        """The name of a model that suits the method and samples of `shape`; the default if the user names none."""
        return default_model(shape)

    def quick(self, epochs: int) -> Self:
        """The method for a trial of minutes: with `epochs` local epochs a round (in all, if it sets its own rounds),
        and far less work on the server than in its paper."""
        return self.changed(epochs=epochs) if "epochs" in self.parameters else self

    @property
    def own_rounds(self) -> bool:
        """Whether the method sets its own number of rounds, whatever is asked."""
        return self.planned_rounds(1) == self.planned_rounds(2)

    def runs(self) -> tuple[Method, ...]:
        """The methods whose handlers its server half may call: itself and, if it wraps another method, that one."""
        return (self,)

    def handlers(self) -> list[Handler]:
        """The handlers that run on clients. Raises MethodError as `handlers_of` does."""
        found = [each for owner in self.runs() for each in handlers_of(type(owner))]
        return list({each.name: each for each in reversed(found)}.values())

    def handle(self, handler: str, state: Any, message: Any, site: Site) -> Any:
        """Run one of its handlers."""
        return getattr(self, handler)(state, message, site)

    def roundable(self, way: Way) -> bool:
        """Whether values travel in that direction that a run may round (`uplink_bits`, `downlink_bits`)."""
        return any(handler.roundable(way) for handler in self.handlers())

    def state_class(self, half: Literal["server", "client"]) -> type[Any] | None:
        """The class of the state that `server` or `client` returns, from its return type; None for no state.

        Raises MethodError if the return type is missing, or the state cannot be packed.
        """
        function = getattr(type(self), half)
        if function is getattr(Method, half):
            return None
        within = f"{type(self).__name__}.{half}"
        kind = required(hints_of(function, within).get("return", inspect.Signature.empty))
        if kind is type(None):
            return None
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            given = ", ".join(inspect.signature(getattr(Method, half)).parameters)
            raise MethodError(
                f"{within} must say by its return type which dataclass the state is: write def {half}({given}) -> …, "
                f"the class of what it returns ({place_of(function)})"
            )
        check_fields(kind)
        return kind

    def start(self, state: Any, net: Network) -> None:
        """Before round 1: handshakes, clustering."""

    @abstractmethod
    def round(self, state: Any, net: Network, t: int) -> None:
        """Round t = 1, 2, …, with any number of exchanges; changes `state` in place."""

    def finish(self, state: Any, net: Network) -> None:
        """After the last round and the delivery of all waiting messages: a last exchange, a calibration."""

    def join(self, state: Any, net: Network, client: Id) -> None:
        """Add a new client between rounds; clients that left are no longer in `net.clients`.

        Raises Refused (of `fewbytes.core.network`), before changing the state, if the method cannot serve it.
        """

    def global_model(self, state: Any, problem: Problem) -> nn.Module | None:
        """The model to score on the server's test set, if the method has one."""
        return None

    def server_models(self, state: Any, problem: Problem) -> dict[str, nn.Module]:
        """The server's models to keep in the run folder, by name: the global one, if there is one."""
        model = self.global_model(state, problem)
        return {} if model is None else {"global": model}

    def local_model(self, state: Any, site: Site) -> nn.Module | None:
        """A client's own model, to score on its test split, if the method has one."""
        return None

    def has_local_models(self, own: bool) -> bool:
        """Whether `local_model` may return one. `own`: `Problem.own`."""
        return type(self).local_model is not Method.local_model

    def goes_back(self, handler: str) -> bool:
        """Whether a node lets a client run a handler from an older state than its last one, as when a run returns to a
        checkpoint."""
        return True

    def observed(self, model: nn.Module) -> list[str] | None:
        """Names of the parameters whose change a server sees in an upload, if `model` is the clients' model.

        None: no such parameters, so `fewbytes attack` does not apply.
        """
        return None

    def places(self, model: nn.Module, gradients: State) -> State | None:
        """Where in these parameters, given their gradients, a server sees the change: bool tensors like them; None:
        everywhere."""
        return None


def _parameters(cls: type, values: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """All hyper-parameters of a method's class from the given ones. Raises TypeError."""
    own = own_defaults(cls)
    given = dict(zip(own, values, strict=False))
    if len(values) > len(own) or given.keys() & named.keys():
        raise TypeError(f"{cls.__name__} takes {', '.join(own) or 'no parameter'}, each once")
    given |= named
    local = given.get("local", own.get("local"))
    if isinstance(local, Local) and (terms := {name: given.pop(name) for name in TERMS if name in given.keys() - own}):
        given["local"] = dataclasses.replace(local, **terms)
    if unknown := given.keys() - own.keys():
        name = min(unknown)
        known = [*own, *(TERMS if isinstance(local, Local) else ())]
        hint = belongs(name, given[name], OF_TASK) or suggestion(name, known)
        raise TypeError(f"{cls.__name__} has no parameter {name!r}{hint}")
    if missing := [name for name, value in (own | given).items() if value is dataclasses.MISSING]:
        raise TypeError(f"{cls.__name__} needs {', '.join(missing)}")
    return own | given


def handlers_of(cls: type[Method]) -> list[Handler]:
    """The client handlers of a class: its functions of a state, a message and a `Site`, by their type hints.

    Raises MethodError for functions that its server half calls as handlers (without any: those that look like one)
    without such hints or with a message or reply that cannot travel.
    """
    functions = {
        name: each for name, each in inspect.getmembers(cls, inspect.isfunction) if vars(Method).get(name) != each
    }
    own = {name: each for name, each in functions.items() if not hasattr(Method, name)}
    asked, typed = called(functions.values()) & own.keys(), {name for name, each in own.items() if takes_site(each)}
    named = {name for name, each in own.items() if list(inspect.signature(each).parameters)[3:] == ["site"]}
    found = []
    for name in sorted(asked | typed or named):
        try:
            found.append(Handler.of(own[name]))
        except MethodError as error:
            if name not in typed - asked:  # else a function that handlers share
                raise MethodError(f"{cls.__name__}: {error} ({place_of(own[name])})") from None
    return found


def option_of(method: Method) -> Callable[[str, Any], str]:
    """How to pass an option of the method, given in the wrong place, in Python (`belongs`)."""
    cls, own = type(method), {}
    if isinstance(method, Method):  # else the run reports it
        own = {f"the method, {cls.__name__}({{}})": (*own_defaults(cls), *cls.defaults())}
    return functools.partial(belongs, places={**own, **OF_METHOD, **OF_TASK})


def check_state(method: Method, half: Literal["server", "client"], state: Any) -> None:
    """Raises MethodError for a state that cannot be packed, or is not of `server`'s or `client`'s return type."""
    within = f"{type(method).__name__}.{half}"
    hint = hints_of(getattr(type(method), half), within).get("return", inspect.Signature.empty)
    if state is None and (hint in (inspect.Signature.empty, Any) or type(None) in (hint, *typing.get_args(hint))):
        return
    kind = method.state_class(half)
    if type(state) is not kind:
        says = "no state" if kind is None else with_article(kind)
        raise MethodError(f"{within} is annotated to return {says}, but returned {returned(state)}")


def check_model(method: Method, hook: str, model: Any) -> None:
    """Raises MethodError if a method's `global_model` or `local_model` returned anything but a model or None."""
    if model is not None and not isinstance(model, nn.Module):
        within = f"{type(method).__name__}.{hook}"
        raise MethodError(f"{within} must return a module or None, not {with_article(type(model))}")
