"""What is learned and by whom: the problem, which both ends of the wire hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from fewbytes.base.calls import takes_argument
from fewbytes.base.errors import UserError
from fewbytes.base.ranges import wrong
from fewbytes.base.state import State, frozen_digest, load_state, mark_trained, state_of, trained_entries
from fewbytes.base.streams import seeded
from fewbytes.core.devices import Precision, check_device, check_precision
from fewbytes.core.entries import check_entries, unexpand
from fewbytes.core.objective import Objective
from fewbytes.core.outputs import logits_of
from fewbytes.core.privacy import SamplePrivacy
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import ClientData, Split
from fewbytes.models.protocol import Adapters, Weights
from fewbytes.wire.layout import Layout

Id = int
"""A client: 0, 1, 2, …"""


@dataclass(frozen=True)
class Problem:
    """What is learned and by whom, without anybody's data: what both ends of the wire must have in common.

    `build`: makes a model; called with a client's id if it takes an argument (models may differ), else with nothing.
    If it has a method `architecture(client)`, clients for which that is equal start from the same weights. `objective`:
    what models learn. `present`: per client the first and the last round it is there (None: to the end). `classes`:
    their names. `sample`: a sample of zeros (1, …) as models take samples, if one is known. `public`: samples that no
    client owns. `lora`: adapters that are trained in place of each model. `remodel`: what a method makes of each model,
    given the seed (`Method.remodel`). `pretrained`: weights that models start from, where they fit, whatever is drawn.
    `agreed`: what else both ends must have in common, in words for people, by what it is. `privacy`: what clients
    promise their samples, if anything. `recalibrate`: whether a client's own model is scored, and saved, with batch
    normalisation's statistics of its own training samples.

    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> clients = [((x, y), (x, y))] * 3
    >>> problem = fb.Task.of(lambda: torch.nn.Linear(4, 4), clients, presence=[(1, None), (1, 2), (3, None)]).problem
    >>> problem.clients_in(1), problem.clients_in(3), list(problem.first_state())
    ([0, 1], [0, 2], ['weight', 'bias'])
    """

    build: Callable[..., nn.Module]
    objective: Objective
    present: tuple[tuple[int, int | None], ...]
    classes: tuple[str, ...] = ()
    sample: Tensor | NamedTensors | None = field(default=None, compare=False)
    public: Split | None = None
    seed: int = 0
    precision: Precision = "float32"
    device: str = "cpu"
    lora: Adapters | None = None
    remodel: Callable[[nn.Module, int], nn.Module] | None = None
    pretrained: Weights | None = field(default=None, compare=False, repr=False)
    agreed: Mapping[str, str] = field(default_factory=dict, hash=False)
    privacy: SamplePrivacy | None = None
    recalibrate: bool = False
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises UserError for a precision there is not, and a device that is not here."""
        for name, kind in (("precision", Precision), ("seed", int), ("recalibrate", bool)):
            if must := wrong(kind, getattr(self, name)):
                raise UserError(f"{name} {must}, not {getattr(self, name)!r}")
        check_device(self.device)
        check_precision(self.precision, self.device)

    @property
    def clients(self) -> Sequence[Id]:
        """All clients there are, will be or have been."""
        return range(len(self.present))

    @property
    def stays(self) -> bool:
        """Whether every client is there all the time."""
        if "stays" not in self._kept:
            self._kept["stays"] = all(first == 1 and last is None for first, last in self.present)
        return bool(self._kept["stays"])

    def clients_in(self, t: int) -> list[Id]:
        """The clients that are there in round t, in ascending order."""
        if self.stays:
            return list(self.clients)
        return [i for i, (first, last) in enumerate(self.present) if first <= t and (last is None or t <= last)]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample, of several tensors that of the first. Raises UserError if it is not known."""
        return tuple(self.on_cpu().blank().shape[1:])

    def blank(self) -> Tensor | NamedTensors:
        """A sample of zeros (1, …) as models take samples. Raises UserError if the task has no data here."""
        if self.sample is None:
            raise UserError("the samples' shape cannot be known here: give the task a test set")
        return self.sample.to(self.device)

    def architecture(self, client: Id) -> Any:
        """A key that is equal for clients with the same model."""
        if "alike" not in self._kept:
            self._kept["alike"] = not takes_argument(self.build)
        if self._kept["alike"]:
            return 0
        of = getattr(self.build, "architecture", None)
        return client if of is None else of(client)

    def on_cpu(self) -> Problem:
        """The same for the CPU, to look at models before a run forks its workers: those have no GPU that is open."""
        if self.device == "cpu":
            return self
        return replace(self, device="cpu", precision="float32" if self.precision == "tf32" else self.precision)

    def architectures(self) -> Iterator[Id]:
        """A client of each architecture, the lowest of those that have it."""
        return iter({self.architecture(i): i for i in reversed(self.clients)}.values())

    def model(self, client: Id, draw: str = "first model") -> nn.Module:
        """A new model of the client's architecture, with the weights that all clients of it share by that draw."""
        with seeded(self.seed, draw, self.architecture(client)):
            return self.drawn(client).to(self.device)

    def drawn(self, client: Id) -> nn.Module:
        """A new model of the client's architecture, its weights drawn from torch's generator as it stands, or the
        pretrained ones.

        It takes samples of several tensors by their names, and of outputs that have `logits` it gives those; with a
        loss that takes the whole output it gives that along (`fewbytes.core.outputs`).
        """
        model = self.build(client) if takes_argument(self.build) else self.build()
        if not isinstance(model, nn.Module):
            raise UserError(f"the model must be a torch.nn.Module, {self.build!r} made a {type(model).__name__}")
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"a {type(model).__name__} has no parameter to train: let some require gradients")
        if self.lora is not None:
            if self.pretrained is not None:
                self.pretrained.into(model)  # under adapters, where the names are still those of the file
            model = self.lora.added(model, head=self.objective.has_head)
        model = model if self.remodel is None else self.remodel(model, self.seed)
        if self.pretrained is not None and self.lora is None:
            self.pretrained.into(model)
        check_entries(model)
        unexpand(model)
        mark_trained(model)
        try:
            model.register_forward_pre_hook(_by_name, with_kwargs=True)
            model.register_forward_hook(partial(logits_of, whole=self.objective.whole))
        except RuntimeError:  # of a ScriptModule
            raise UserError(
                f"a {type(model).__name__} of torch.jit.script cannot be trained here: give the module it was made of"
            ) from None
        return model

    def first_model(self, state: State | None = None) -> nn.Module:
        """A new model with the first weights (the same at every node), or with `state`'s where it has them."""
        model = self.model(0)
        if state is not None:
            load_state(model, state)
        return model

    def first_state(self, client: Id = 0, draw: str = "first model") -> State:
        """The first weights of the client's architecture that are trained, or of another draw: a copy."""
        key = (draw, self.architecture(client))
        if key not in self._kept:
            self._kept[key] = state_of(self.on_cpu().model(client, draw))
        return {name: value.clone() for name, value in self._kept[key].items()}

    def frozen(self, client: Id) -> str:
        """A digest of what of the client's model is not trained, and so must be the same wherever it is made; empty if
        all of it is trained."""
        key = ("frozen", self.architecture(client))
        if key not in self._kept:
            self._kept[key] = frozen_digest(self.on_cpu().model(client))
        digest: str = self._kept[key]
        return digest

    def layout(self, client: Id) -> Layout:
        """The entries of the client's model, as both ends of the wire know them."""
        key = ("layout", self.architecture(client))
        if key not in self._kept:
            self._kept[key] = Layout.of(self.first_state(client))
        layout: Layout = self._kept[key]
        return layout

    def statistics(self, client: Id) -> frozenset[str]:
        """The entries of the client's model that are no parameters, such as batch normalisation's statistics, by name;
        and by the endings of their names that are no parameter's, which parts of the model know them by."""
        key = ("statistics", self.architecture(client))
        if key not in self._kept:
            entries = trained_entries(self.on_cpu().model(client))
            learnt = {name for name, value in entries.items() if isinstance(value, nn.Parameter)}
            kept = entries.keys() - learnt
            self._kept[key] = frozenset(kept | (_endings(kept) - _endings(learnt)))
        names: frozenset[str] = self._kept[key]
        return names


class Posed(Protocol):
    """A problem and the data of those clients that are here, as a task has them (`fewbytes.core.task`)."""

    @property
    def problem(self) -> Problem:
        """What both ends have in common."""

    @property
    def data(self) -> Owned:
        """What only each client has."""


class Owned(Protocol):
    """Each client's own data."""

    @property
    def clients(self) -> Sequence[ClientData]:
        """By client."""


def _endings(names: Iterable[str]) -> set[str]:
    """The names, and what is left of each without the modules it begins with: a.b.c, b.c, c."""
    return {".".join(parts[i:]) for parts in (name.split(".") for name in names) for i in range(len(parts))}


def _by_name(model: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), {**others, **args[0].tensors}) if args and isinstance(args[0], NamedTensors) else (args, others)
