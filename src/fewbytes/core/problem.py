"""The problem, which both ends of the wire know: what is learnt, and which clients take part."""

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
"""A client's number: 0, 1, 2, …"""


@dataclass(frozen=True)
class Problem:
    """A learning problem without any data: all that both ends of the wire must share.

    `build`: makes a model; called with a client's id if it takes an argument (models may differ). If it has a method
    `architecture(client)`, clients with equal results start from the same weights. `objective`: the learning objective.
    `present`: per client its first and last round (None: to the end). `classes`: their names. `sample`: a sample of
    zeros (1, …) as model input, if known. `public`: samples that no client owns. `lora`: adapters that are trained in
    place of each model. `remodel`: maps each model and the seed to the method's (`Method.remodel`). `pretrained`: start
    weights, where they fit, for any draw. `agreed`: descriptions of everything else both ends must share, by name.
    `privacy`: of samples, if any. `recalibrate`: whether a client's own model is scored, and saved, with batch
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
        """Raises UserError for an unknown precision, and a device that is missing here."""
        for name, kind in (("precision", Precision), ("seed", int), ("recalibrate", bool)):
            if must := wrong(kind, getattr(self, name)):
                raise UserError(f"{name} {must}, not {getattr(self, name)!r}")
        check_device(self.device)
        check_precision(self.precision, self.device)

    @property
    def clients(self) -> Sequence[Id]:
        """All clients: past, present and future."""
        return range(len(self.present))

    @property
    def stays(self) -> bool:
        """Whether every client is present in all rounds."""
        if "stays" not in self._kept:
            self._kept["stays"] = all(first == 1 and last is None for first, last in self.present)
        return bool(self._kept["stays"])

    def clients_in(self, t: int) -> list[Id]:
        """The clients present in round t, in ascending order."""
        if self.stays:
            return list(self.clients)
        return [i for i, (first, last) in enumerate(self.present) if first <= t and (last is None or t <= last)]

    @property
    def own(self) -> bool:
        """Whether every client keeps some of the trained entries, which are never sent (`base.state.own_entries`)."""
        return self.lora is not None and self.lora.own

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample; for several tensors, the first one's. Raises UserError if it is unknown."""
        return tuple(self.on_cpu().blank().shape[1:])

    def blank(self) -> Tensor | NamedTensors:
        """A sample of zeros (1, …) as model input. Raises UserError if the task has no data here."""
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
        """The problem on the CPU, to inspect models before a run forks its workers, which cannot use an open GPU."""
        if self.device == "cpu":
            return self
        return replace(self, device="cpu", precision="float32" if self.precision == "tf32" else self.precision)

    def architectures(self) -> Iterator[Id]:
        """The lowest client of each architecture."""
        return iter({self.architecture(i): i for i in reversed(self.clients)}.values())

    def model(self, client: Id, draw: str = "first model") -> nn.Module:
        """A new model of the client's architecture, with the weights that all its clients share for that draw."""
        with seeded(self.seed, draw, self.architecture(client)):
            return self.drawn(client).to(self.device)

    def drawn(self, client: Id) -> nn.Module:
        """A new model of the client's architecture, with weights from torch's current generator, or the pretrained
        ones.

        It takes samples of several tensors by name. Of outputs with `logits` it returns those; for a loss that takes
        the whole output, that too (`fewbytes.core.outputs`).
        """
        model = self.build(client) if takes_argument(self.build) else self.build()
        if not isinstance(model, nn.Module):
            raise UserError(f"the model must be a torch.nn.Module, {self.build!r} made a {type(model).__name__}")
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"a {type(model).__name__} has no parameter to train: let some require gradients")
        if self.lora is not None:
            if self.pretrained is not None:
                self.pretrained.into(model)  # before adapters, while names match the file
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
        except RuntimeError:  # from a ScriptModule
            raise UserError(
                f"a {type(model).__name__} of torch.jit.script cannot be trained here: give the module it was made of"
            ) from None
        return model

    def first_model(self, state: State | None = None) -> nn.Module:
        """A new model with the first weights (the same at every node), replaced by `state`'s where it has them."""
        model = self.model(0)
        if state is not None:
            load_state(model, state)
        return model

    def first_state(self, client: Id = 0, draw: str = "first model") -> State:
        """A copy of the trained first weights of the client's architecture, or of another draw."""
        key = (draw, self.architecture(client))
        if key not in self._kept:
            self._kept[key] = state_of(self.on_cpu().model(client, draw))
        return {name: value.clone() for name, value in self._kept[key].items()}

    def frozen(self, client: Id) -> str:
        """A digest of the untrained entries of the client's model, which must be equal everywhere; empty if all are
        trained."""
        key = ("frozen", self.architecture(client))
        if key not in self._kept:
            self._kept[key] = frozen_digest(self.on_cpu().model(client))
        digest: str = self._kept[key]
        return digest

    def layout(self, client: Id) -> Layout:
        """The entries of the client's model, known to both ends of the wire."""
        key = ("layout", self.architecture(client))
        if key not in self._kept:
            self._kept[key] = Layout.of(self.first_state(client))
        layout: Layout = self._kept[key]
        return layout

    def statistics(self, client: Id) -> frozenset[str]:
        """Names of the entries of the client's model that are not parameters, such as batch normalisation's statistics,
        and their suffixes that no parameter has, as used by parts of the model."""
        key = ("statistics", self.architecture(client))
        if key not in self._kept:
            entries = trained_entries(self.on_cpu().model(client))
            learnt = {name for name, value in entries.items() if isinstance(value, nn.Parameter)}
            kept = entries.keys() - learnt
            self._kept[key] = frozenset(kept | (_endings(kept) - _endings(learnt)))
        names: frozenset[str] = self._kept[key]
        return names


class Posed(Protocol):
    """A problem and the data of the clients that are here, such as a task (`fewbytes.core.task`)."""

    @property
    def problem(self) -> Problem:
        """The shared part of the task."""

    @property
    def data(self) -> Owned:
        """The clients' private part of the task."""


class Owned(Protocol):
    """Each client's own data."""

    @property
    def clients(self) -> Sequence[ClientData]:
        """By client."""


def _endings(names: Iterable[str]) -> set[str]:
    """The names, and their suffixes without leading modules: a.b.c, b.c, c."""
    return {".".join(parts[i:]) for parts in (name.split(".") for name in names) for i in range(len(parts))}


def _by_name(model: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), {**others, **args[0].tensors}) if args and isinstance(args[0], NamedTensors) else (args, others)
