"""What a federated method is: one object whose server half calls its client half by name. Read this first."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.core.problem import Id, Task
from fewbytes.core.ranges import wrong
from fewbytes.core.site import Site

if TYPE_CHECKING:
    from fewbytes.core.network import Network


class Method(ABC):
    """A federated method: a frozen dataclass of hyper-parameters. All that lasts is the server's and clients' state.

    A client handler is any method `(self, state, message, site) -> reply`; its type hints say what is packed: a
    payload, or None for nothing. The server half reaches it with `net.call(self.handler, to=..., send=...)`.
    """

    headline: ClassVar[str] = "global"
    """The accuracy the method's paper reports: `global`, `personalised`, or a name its handlers score."""
    scored_after_finish: ClassVar[bool] = False
    """Whether `finish` changes the models the paper scores, so that they are scored once more after it."""

    def __new__(cls, *args: Any, **parameters: Any) -> Self:
        """Raises MethodError for a class that is no frozen dataclass, or adds hyper-parameters without being one."""
        for each in (c for c in cls.__mro__ if issubclass(c, Method) and c is not Method):
            made = vars(each).get("__dataclass_params__")
            added = any("ClassVar" not in str(kind) for kind in inspect.get_annotations(each).values())
            must = added or made is not None or (each is cls and not dataclasses.is_dataclass(cls))
            if must and not (made and made.frozen):
                raise MethodError(
                    f"{each.__name__} is no frozen dataclass: write @dataclass(frozen=True) above class {each.__name__}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check hyper-parameters by their types, which may say ranges (`fewbytes.core.ranges`). Raises UserError."""
        hints = typing.get_type_hints(type(self), include_extras=True)
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if must := wrong(hints[f.name], value):
                raise UserError(f"{f.name} {must}, not {value!r}")

    def remodel(self, model: nn.Module, seed: int) -> nn.Module:
        """What the method trains in place of a client's model, made of it; `seed` is the task's. Default: itself."""
        return model

    def adapted(self, task: Task) -> Task:
        """The task with the models this method trains; engines begin with it. Twice is the same as once."""
        if type(self).remodel is Method.remodel or task.remodel == self.remodel:
            return task
        return dataclasses.replace(task, remodel=self.remodel)

    def server(self, task: Task) -> Any:
        """The server's state before the first round: a dataclass of packable fields, or None."""
        return None

    def client(self, site: Site) -> Any:
        """A client's state, made on the client when it is first asked; stays there. A dataclass, or None."""
        return None

    def planned_rounds(self, asked: int) -> int:
        """How many rounds a run of `asked` takes: as many, but for one-shot and staged methods with a number of
        their own."""
        return asked

    @property
    def own_rounds(self) -> bool:
        """Whether a run takes a number of rounds of its own, whatever is asked."""
        return self.planned_rounds(1) == self.planned_rounds(2)

    def start(self, state: Any, net: Network) -> None:
        """Before round 1: handshakes, clustering."""

    @abstractmethod
    def round(self, state: Any, net: Network, t: int) -> None:
        """Round t = 1, 2, …: as many exchanges as the paper has; changes `state` in place."""

    def finish(self, state: Any, net: Network) -> None:
        """After the last round: a last exchange, a calibration."""

    def join(self, state: Any, net: Network, client: Id) -> None:
        """A client the run did not know, between rounds; those that left are no longer in `net.clients`.

        Raises Refused (of `fewbytes.core.network`), before it changes the state, for one the method cannot serve.
        """

    def global_model(self, state: Any, task: Task) -> nn.Module | None:
        """The model scored on the server's test set, if the method has one."""
        return None

    def local_model(self, state: Any, site: Site) -> nn.Module | None:
        """A client's own model, scored on its test split, if the method has one."""
        return None

    def observed(self, model: nn.Module) -> list[str] | None:
        """Names of the parameters whose change a server sees in an upload, were `model` the clients' model.

        None: none as such, so that `fewbytes attack` does not apply.
        """
        return None
