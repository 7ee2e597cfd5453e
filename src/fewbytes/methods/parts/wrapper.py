"""A method that wraps another: its properties are the inner method's, except those it overrides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from fewbytes.base.state import State
from fewbytes.core.method import Asked, Method
from fewbytes.core.objective import Objective
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.wire import pack_state, unpack_state


@dataclass(frozen=True)
class Wrapper(Method):
    """Base of methods that run another one, `inner`, unchanged."""

    inner: Method

    @property
    def promises(self) -> Promises:  # type: ignore[override]  # depends on the inner method
        """The inner method's, without the server half's: each wrapper states which of those it keeps."""
        return replace(self.inner.promises, aggregates=frozenset(), protects=frozenset(), sums=False)

    @property
    def needs(self) -> type[Objective]:  # type: ignore[override]  # depends on the inner method
        return self.inner.needs

    def runs(self) -> tuple[Method, ...]:
        return (self, *self.inner.runs())

    def handle(self, handler: str, state: Any, message: Any, site: Site) -> Any:
        if hasattr(type(self), handler):
            return super().handle(handler, state, message, site)
        return self.handle_inner(handler, state, message, site)

    def handle_inner(self, handler: str, state: Any, message: Any, site: Site) -> Any:
        """Run one of the inner method's handlers."""
        return self.inner.handle(handler, state, message, site)

    @property
    def local(self) -> Local:
        """The inner method's local training, if it trains."""
        local: Local = self.inner.local  # type: ignore[attr-defined]
        return local

    @property
    def parameters(self) -> dict[str, Any]:
        return self.inner.parameters

    def changed(self, **parameters: Any) -> Self:
        return replace(self, inner=self.inner.changed(**parameters))

    def quick(self, epochs: int) -> Self:
        return replace(self, inner=self.inner.quick(epochs))

    def model_for(self, shape: tuple[int, ...]) -> str:
        return self.inner.model_for(shape)

    def planned_rounds(self, asked: int) -> int:
        return self.inner.planned_rounds(asked)

    def cohort(self, clients: int) -> int:
        return self.inner.cohort(clients)

    def remodel(self, model: nn.Module, seed: int) -> nn.Module:
        return self.inner.remodel(model, seed)

    def adapted(self, task: Asked) -> Asked:
        return self.inner.adapted(task)

    def client(self, site: Site) -> Any:
        return self.inner.client(site)

    def local_model(self, state: Any, site: Site) -> nn.Module | None:
        return self.inner.local_model(state, site)

    def has_local_models(self, own: bool) -> bool:
        return self.inner.has_local_models(own)

    def goes_back(self, handler: str) -> bool:
        return self.inner.goes_back(handler)

    def observed(self, model: nn.Module) -> list[str] | None:
        return self.inner.observed(model)

    def places(self, model: nn.Module, gradients: State) -> State | None:
        return self.inner.places(model, gradients)


def packed(state: Any) -> bytes:
    """A state of the inner method as a frame; empty for None."""
    return b"" if state is None else bytes(pack_state(state))


def unpacked(kind: type[Any] | None, frame: bytes) -> Any:
    """Undo `packed` for a state of that class (None: no state)."""
    if kind is None or not frame:
        return None
    return unpack_state(kind, frame)
