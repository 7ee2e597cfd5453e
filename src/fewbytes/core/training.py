"""Local training: its terms, the only training loop, and what it needs to continue where it was."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypedDict, TypeVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import named
from fewbytes.base.ranges import BelowOne, Count, NotNegative, Positive, Share, Whole, check_ranges
from fewbytes.base.state import State, copied, in_training, load_state, state_of
from fewbytes.base.streams import Generators
from fewbytes.core.devices import Precision, arithmetic
from fewbytes.core.graphs import Recordings, Step, recording
from fewbytes.core.privacy import PrivateSteps
from fewbytes.data.named import NamedTensors, one_tensor
from fewbytes.data.split import LazySamples, Transform

M = TypeVar("M", bound=nn.Module)
Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) to the mean loss of a batch; outputs are anything the model returns."""
Velocity = dict[Tensor, Tensor]
"""Velocities of SGD with momentum, by parameter."""
Moments = defaultdict[Tensor, dict[str, Any]]
"""The state of Adam by parameter and torch's name for it, such as `exp_avg`."""
EVALUATION_BATCH = 250  # samples
Order = Literal["shuffled", "stored"]
"""Order of a client's samples: shuffled in each epoch, or as stored. With `steps`, the next round starts another
shuffle, or continues with the stored samples after the last round's."""
Last = Literal["merged", "kept", "dropped"]
"""Samples left over by the last whole batch of an epoch. `merged`: fewer than half a batch join the previous batch.
`kept`: they are a batch of their own, except a single one, which joins. `dropped`: left out."""
KEPT_BYTES = 2 << 30  # maximum size of a frozen part's outputs to keep over the epochs
SHUFFLED_BYTES = 64 << 20  # maximum size of samples to shuffle all at once


def prepared(model: M) -> M:
    """The model, with weights of two-dimensional convolutions channels-last, which is faster.

    1x1 convolutions with a stride and fewer than 16 input channels only get the pixels they use: else, on CPUs with
    channels-last, their weight gradients overwrite other memory (oneDNN, issue 6035).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and _overwrites(module):
            module._conv_forward = functools.partial(_of_used_pixels, module)  # type: ignore[method-assign]
    for value in (*model.parameters(), *model.buffers()):
        if value.dim() == 4:
            value.data = value.data.to(memory_format=torch.channels_last)  # also where both layouts look alike
    return model


def _overwrites(layer: nn.Conv2d) -> bool:
    of_pixels = layer.kernel_size == (1, 1) and layer.padding == (0, 0) and layer.groups == 1
    return of_pixels and layer.in_channels < 16 and max(layer.stride) > 1


def _of_used_pixels(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1x1 convolution of only the pixels of x (…, height, width) that its stride uses."""
    return F.conv2d(x[..., :: layer.stride[0], :: layer.stride[1]], weight, bias)


def ready(x: Tensor) -> Tensor:
    """Images (n, channels, height, width) channels-last, as for `prepared` models; other samples unchanged."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def batches(samples: int, size: int, last: Last = "merged") -> list[tuple[int, int]]:
    """Bounds of consecutive batches, the last as `last` says. Fewer samples than a batch are one batch; a single sample
    is none if incomplete batches are dropped.

    (Batch normalisation has no variance for one sample, and a poor one for a few.)
    """
    bounds = [(start, min(start + size, samples)) for start in range(0, samples, size)]
    left = samples % size
    if last == "dropped" and samples < size:
        return bounds if samples > 1 else []
    if left and samples > size:
        if last == "dropped":
            bounds.pop()
        elif left == 1 or (last == "merged" and 2 * left < size):
            bounds[-2:] = [(bounds[-2][0], samples)]
    return bounds


def clip_each(norm: float, *modules: nn.Module) -> None:
    """Clip each module's gradients, as one vector, to `norm`."""
    for module in modules:
        nn.utils.clip_grad_norm_(module.parameters(), norm)


@dataclass(frozen=True)
class Local:
    """The terms of local training, the same for every method; each method has its own defaults.

    Raises UserError for an invalid value.

    >>> import fewbytes as fb
    >>> local = fb.Local(epochs=2, lr=0.1, lr_rounds=10, lr_schedule="step")
    >>> [round(local.lr_in(t), 3) for t in (1, 10, 11)]
    [0.1, 0.1, 0.01]
    >>> fb.FedAvg(local=local) == fb.FedAvg(epochs=2, lr=0.1, batch=10, lr_rounds=10, lr_schedule="step")
    True
    """

    epochs: Count = 1  # passes over a client's samples in a round
    lr: Positive = 0.01  # learning rate
    batch: Count = 10  # samples
    momentum: BelowOne = 0.0  # of SGD
    weight_decay: NotNegative = 0.0  # L2 penalty, added to gradients (adamw: decoupled)
    optimiser: Literal["sgd", "nesterov", "adam", "adamw"] = "sgd"  # Adam's betas are 0.9 and 0.999
    lr_rounds: Whole = 0  # the period of lr_schedule; 0: constant lr
    lr_schedule: Literal["cosine", "linear", "step"] = "cosine"  # lr falls to 0 over lr_rounds; step: at each lr_rounds
    lr_factor: Share = 0.1  # factor for lr at each step
    lr_warmup: Whole = 0  # rounds of linear rise of lr to its full value; then the schedule begins
    clip: NotNegative = 0.0  # maximum norm of a gradient; 0: no limit
    order: Order = "shuffled"  # of samples, in each epoch; stored: as they are
    steps: Whole = 0  # batches in a round, instead of epochs, over several shuffles if needed; 0: use epochs
    last: Last = "merged"  # samples left over by whole batches: join the batch before if under half of one

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def length(self) -> int:
        """Its length: steps if set, else epochs."""
        return self.steps or self.epochs

    def lasting(self, length: int) -> Self:
        """The same terms with this number of steps or epochs, at least 1."""
        return replace(self, steps=length) if self.steps else replace(self, epochs=length)

    def lr_in(self, t: int) -> float:
        """The learning rate of round t, counted from 1."""
        if t <= self.lr_warmup:
            return self.lr * t / self.lr_warmup
        behind = t - self.lr_warmup - 1  # rounds of the schedule
        if not self.lr_rounds:
            return self.lr
        if self.lr_schedule == "step":
            return self.lr * self.lr_factor ** (behind // self.lr_rounds)
        done = min(behind, self.lr_rounds)
        if self.lr_schedule == "linear":
            return self.lr * (1 - done / self.lr_rounds)
        return self.lr * (1 + math.cos(math.pi * done / self.lr_rounds)) / 2


class Hooks(TypedDict, total=False):
    """A method's additions to the training of a model, as arguments of `Site.fit`.

    `loss`: of a batch's outputs and targets, instead of the task's. `extra(model)` is added to every batch's loss.
    Samples first pass `frozen`, in eval mode and without gradients; its outputs are computed once for all epochs if
    there is no transform and they take at most `KEPT_BYTES`. `before_step` is called after a batch's gradients are
    computed, with a function that computes them again, for the same batch and the current parameters; `after_step`
    after the parameters are updated. `memory`: the optimiser's state after an earlier training, by name, which this one
    continues, and replaces by its own at its end; empty for none.

    >>> import fewbytes as fb
    >>> list(fb.Hooks(extra=lambda model: 0.01 * sum(p.square().sum() for p in model.parameters())))
    ['extra']
    """

    loss: Loss
    extra: Callable[[nn.Module], Tensor] | None
    frozen: nn.Module | None
    before_step: Callable[[Callable[[], Tensor]], None] | None
    after_step: Callable[[], None] | None
    memory: State | None


@dataclass
class Position:
    """Where a training is: whole epochs, batches of the current one, its order of samples (empty: as stored), and its
    loss so far."""

    epoch: int
    batch: int
    order: Tensor
    total: Tensor


@dataclass
class Snapshot:
    """All that a training needs to continue. `key`: of the training, which no other has."""

    key: bytes
    model: State
    memory: State  # the optimiser's
    at: Position
    generators: Generators = field(default_factory=Generators.now)


class Saving(Protocol):
    """The saved state of one training."""

    def resumed(self) -> Snapshot | None:
        """The state to continue from; None if there is none of this training."""

    @property
    def due(self) -> bool:
        """Whether it is time to save."""

    def save(self, model: State, memory: State, at: Position) -> None:
        """Save the state."""


class Saves(Protocol):
    """Where a handler's trainings are saved."""

    def next(self, start: Iterable[Tensor], about: str) -> Saving:
        """For the handler's next training, which begins from these tensors and the global generators, with terms
        `about`."""


def own_loss(model: nn.Module) -> Loss | None:
    """The model's own loss, a method `loss(outputs, targets)`."""
    brought = getattr(model, "loss", None)
    return brought if callable(brought) else None


def fit(
    model: nn.Module,
    x: Tensor | NamedTensors | LazySamples,
    y: Tensor,
    local: Local,
    t: int = 1,
    *,
    precision: Precision = "float32",
    transform: Transform | None = None,
    private: PrivateSteps | None = None,
    recordings: Recordings | None = None,
    saving: Saving | None = None,
    **hooks: Unpack[Hooks],
) -> float:
    """Train `model` in place on (x, y), with the terms of round t; returns the mean loss over the batches of the last
    epoch, which `steps` may end early (0 for none).

    Shuffles by torch's global generator; the optimiser starts fresh, unless it has a `memory`. `precision`: of forward
    passes. `transform` is applied to every batch. Gradients are clipped as one vector or, if the model has `apart`,
    separately for each module in it. `private`: makes the batches and gradients instead, with privacy of samples; then
    the returned loss is 0, and samples are transformed one by one. `recordings`: of this module's steps on a GPU, from
    earlier trainings; this one's are added, and results are the same. `saving`: the training is saved as it goes, and
    continues from what is there; not with `private` or functions called at steps, whose state is elsewhere. Afterwards
    each parameter's `.grad` is the gradient of the very last batch. Parameters that do not require gradients never
    change, others not in batches without a gradient for them.
    """
    loss = hooks.get("loss") or own_loss(model) or F.cross_entropy
    extra, frozen = hooks.get("extra"), hooks.get("frozen")
    before_step, after_step = hooks.get("before_step"), hooks.get("after_step")
    model.to(x.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    memory, names = hooks.get("memory"), {name: p for name, p in model.named_parameters() if p.requires_grad}
    velocity, moments = recalled(memory or {}, names)
    step = stepper(parameters, local, local.lr_in(t), velocity, moments)
    bounds = batches(len(y), local.batch, local.last)
    counts = by_epoch(local, len(bounds) if private is None else private.epoch)
    begun = (t - 1) * sum(counts)  # batches of earlier rounds; stored samples continue after them
    dropping = bool(bounds) and bounds[-1][1] < len(y)
    if local.order == "stored" and bounds and not dropping:
        bounds = bounds[begun % len(bounds) :] + bounds[: begun % len(bounds)]
    context = arithmetic(precision, str(x.device))
    total = torch.zeros((), device=x.device)
    draws = transform is not None or isinstance(x, LazySamples)  # as users' data sets may at each access

    def read(
        x: Tensor | NamedTensors | LazySamples, y: Tensor, rows: slice | Tensor
    ) -> tuple[Tensor | NamedTensors, Tensor]:
        samples, targets = x[rows], y[rows]
        if transform is not None and len(targets):
            samples = transform(one_tensor(samples), targets)
        return samples, targets

    def gradients(samples: Tensor | NamedTensors, targets: Tensor) -> Tensor:
        """Leaves a batch's gradients in the parameters; returns its loss."""
        for p in parameters:
            p.grad = None
        if private is not None:
            with context:
                private.gradients(model, loss, one_tensor(samples), targets)
            if extra is not None:
                extra(model).backward()
            return torch.zeros(())
        with context:
            value: Tensor = loss(model(samples), targets)
            if extra is not None:
                value = value + extra(model)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TypeError(f"the loss of a batch is {named(value)}, not one number: let it return their mean")
        value.backward()
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # an embedding's; hooks and velocities need dense ones
        return value.detach()

    def stepped(samples: Tensor | NamedTensors, targets: Tensor) -> Tensor:
        value = gradients(samples, targets)
        if before_step is not None:
            before_step(functools.partial(gradients, samples, targets))
        if local.clip:
            clip_each(local.clip, *getattr(model, "apart", [model]))
        step()
        if after_step is not None:
            after_step()
        return value

    in_training(model)
    of_each_batch: Step = stepped
    plain = loss is F.cross_entropy and not extra and not before_step and not after_step and private is None
    plain = plain and memory is None and saving is None  # recorded steps have velocities of their own
    if recordings is not None and plain and x.device.type == "cuda" and local.optimiser in ("sgd", "nesterov"):
        of_each_batch = recording(recordings, model, stepped, velocity, (local, local.lr_in(t), precision))
    ordered = private is None and (local.order == "shuffled" or dropping)  # by the rows of a permutation
    if (
        frozen is not None
        and transform is None
        and isinstance(x, Tensor)
        and len(counts) > 1
        and len(y) * outputs(frozen, x[:1], precision).nbytes <= KEPT_BYTES
    ):
        x, frozen = outputs(frozen, x, precision), None
    found = None if saving is None else saving.resumed()
    if found is not None:
        load_state(model, found.model)
        velocities, moment = recalled(found.memory, names)
        velocity.update(velocities)
        moments.update(moment)
    for epoch, count in enumerate(counts):
        at = found.at if found is not None and found.at.epoch >= epoch else None  # where the saved training is
        total = torch.zeros((), device=x.device)
        picked: Iterable[slice | Tensor] = itertools.starmap(slice, bounds)
        from_x, from_y = x, y
        if private is not None:
            picked = private.batches(x.device)
        elif ordered:
            # stored samples continue where the last epoch stopped, so that no sample is skipped forever
            start = begun * local.batch % len(y)
            if at is not None:
                order = at.order
            else:
                order = torch.randperm(len(y)) if local.order == "shuffled" else torch.arange(len(y)).roll(-start)
            order, begun = order.to(x.device), begun + count
            if isinstance(x, Tensor) and x.nbytes <= SHUFFLED_BYTES and count == len(bounds):
                from_x, from_y = x[order], y[order]
            else:
                picked = (order[start:stop] for start, stop in bounds)
        done = 0
        if found is not None and at is not None:
            done = count if at.epoch > epoch else at.batch
            total = at.total.to(x.device)
            found.generators.restore()
        for rows in itertools.islice(picked, done, count):
            cut = functools.partial(read, from_x, from_y)
            if private is not None and draws and isinstance(rows, Tensor):
                samples, targets = private.one_by_one(rows, cut)
            else:
                samples, targets = cut(rows)
            if frozen is not None:
                samples = outputs(frozen, samples, precision)
            total += of_each_batch(samples, targets)
            done += 1
            last = done == count and epoch == len(counts) - 1  # is not saved: a gradient is left after it
            if saving is not None and saving.due and not last:
                rows = order.cpu() if ordered else torch.empty(0, dtype=torch.int64)
                place = Position(epoch, done, rows, total.cpu())
                saving.save(state_of(model), memorised(names, velocity, moments), place)
    if memory is not None:
        memory.clear()
        memory.update(memorised(names, velocity, moments))
    return float(total) / counts[-1] if bounds and counts else 0.0


def steps_of(local: Local, samples: int) -> int:
    """The number of steps of a training on that many samples, without privacy of samples."""
    return sum(by_epoch(local, len(batches(samples, local.batch, local.last))))


def by_epoch(local: Local, whole: int) -> list[int]:
    """Number of batches in each epoch of a training; `whole`: in a full epoch."""
    if not local.steps:
        return [whole] * local.epochs
    full, rest = divmod(local.steps, whole) if whole else (0, 0)
    return [whole] * full + [rest] * (rest > 0)


def stepper(
    parameters: Sequence[nn.Parameter], local: Local, lr: float, velocity: Velocity, moments: Moments
) -> Callable[[], object]:
    """A function that updates the parameters that have gradients, on each call.

    `velocity`: of SGD with momentum; `moments`: of Adam. Those that a parameter has are continued; both are updated.
    """
    if local.optimiser in ("adam", "adamw"):
        made = torch.optim.AdamW if local.optimiser == "adamw" else torch.optim.Adam
        optimiser = made(parameters, lr, weight_decay=local.weight_decay)
        optimiser.state = moments
        return optimiser.step
    return lambda: _sgd([p for p in parameters if p.grad is not None], velocity, local, lr)


VELOCITY, STEP = "momentum_buffer", "step"  # torch's names


def recalled(memory: State, parameters: Mapping[str, nn.Parameter]) -> tuple[Velocity, Moments]:
    """Undo `memorised`, for parameters by name."""
    velocity: Velocity = {}
    moments: Moments = defaultdict(dict)
    for key, value in memory.items():
        what, _, name = key.partition(" ")
        p = parameters[name]
        own = value.clone() if what == STEP else torch.empty_like(p.detach()).copy_(value)
        if what == VELOCITY:
            velocity[p] = own
        else:
            moments[p][what] = own
    return velocity, moments


def memorised(parameters: Mapping[str, nn.Parameter], velocity: Velocity, moments: Moments) -> State:
    """An optimiser's state as named tensors: torch's name for each, then the parameter's."""
    memory = {f"{VELOCITY} {name}": copied(velocity[p]) for name, p in parameters.items() if p in velocity}
    kept = [(f"{what} {name}", value) for name, p in parameters.items() for what, value in moments.get(p, {}).items()]
    return memory | {key: copied(value) for key, value in kept}


@torch.no_grad()
def _sgd(moved: Sequence[Tensor], velocity: Velocity, local: Local, lr: float) -> None:
    """One step, in place; also updates velocities, which begin as a parameter's first gradient."""
    if not moved:
        return
    step: list[Tensor] = [p.grad for p in moved if p.grad is not None]
    if local.weight_decay:
        step = list(torch._foreach_add(step, list(moved), alpha=local.weight_decay))
    if local.momentum:
        known = [(velocity[p], g) for p, g in zip(moved, step, strict=True) if p in velocity]
        if known:
            velocities, gradients = (list(each) for each in zip(*known, strict=True))
            if all(v.dtype.itemsize >= 4 for v in velocities):
                torch._foreach_mul_(velocities, local.momentum)
            else:
                for v in velocities:
                    v.mul_(local.momentum)  # all at once, the momentum would also be rounded to a narrow type
            torch._foreach_add_(velocities, gradients)
        velocity.update({p: g.clone() for p, g in zip(moved, step, strict=True) if p not in velocity})
        velocities, nesterov = [velocity[p] for p in moved], local.optimiser == "nesterov"
        step = list(torch._foreach_add(step, velocities, alpha=local.momentum)) if nesterov else velocities
    torch._foreach_add_(list(moved), step, alpha=-lr)


def outputs(model: nn.Module, x: Tensor | NamedTensors | LazySamples, precision: Precision = "float32") -> Tensor:
    """The model's outputs for samples x (n, …), float32 (n, …), in eval mode and without gradients.

    `precision`: of the forward passes.
    """
    training = model.training
    model.to(x.device).eval()
    kept = torch.empty(0)
    with torch.no_grad(), arithmetic(precision, str(x.device)):
        for start in range(0, len(x), EVALUATION_BATCH):
            part: Tensor = model(x[start : start + EVALUATION_BATCH]).float()
            if start == 0:
                if len(part) == len(x):
                    kept = part
                    break
                layout = torch.channels_last if part.dim() == 4 else torch.contiguous_format
                kept = torch.empty((len(x), *part.shape[1:]), device=x.device, memory_format=layout)
            kept[start : start + len(part)] = part
    in_training(model) if training else model.eval()
    return kept
