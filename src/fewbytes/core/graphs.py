"""Training steps recorded on a GPU as CUDA graphs and replayed: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Any, Tensor], Tensor]
"""(samples, targets) of a batch to its loss; leaves gradients, and updates parameters with them."""


@dataclass
class Recorded:
    """A step's recorded kernels, and the tensors for its batch, loss and gradients."""

    graph: torch.cuda.CUDAGraph
    samples: Tensor
    targets: Tensor
    loss: Tensor
    gradients: list[Tensor | None]


@dataclass
class Recording:
    """A step of one module with fixed terms, recorded for each batch shape that occurs twice.

    An epoch has at most two shapes; all recordings share memory, as many clients have more shapes. `terms` include the
    addresses of the module's values, which recordings read and write.
    """

    model: nn.Module
    step: Step
    velocity: dict[Tensor, Tensor]
    terms: Hashable
    by_shape: dict[Hashable, Recorded | None] = field(default_factory=dict)
    refused: bool = False  # by CUDA: steps that wait for the GPU cannot be recorded

    def __call__(self, samples: Any, targets: Tensor) -> Tensor:
        """Run the step; the next batch of the same shape overwrites the loss."""
        if self.refused or not isinstance(samples, Tensor):
            return self.step(samples, targets)
        shape = (samples.shape, samples.stride(), samples.dtype, targets.shape, targets.dtype)
        if shape not in self.by_shape:
            self.by_shape[shape] = None
            return self.step(samples, targets)
        if (recorded := self.by_shape[shape]) is None:
            stream = torch.cuda.current_stream()
            try:
                recorded = self.by_shape[shape] = self._record(samples, targets)
            except RuntimeError:
                torch.cuda.set_stream(stream)
                _end_recording()
                self.refused = True
                return self.step(samples, targets)
        recorded.samples.copy_(samples)
        recorded.targets.copy_(targets)
        recorded.graph.replay()
        for p, gradient in zip(self.model.parameters(), recorded.gradients, strict=True):
            p.grad = gradient
        return recorded.loss

    def _record(self, samples: Tensor, targets: Tensor) -> Recorded:
        samples, targets = samples.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        others = [recorded.graph for recorded in self.by_shape.values() if recorded]
        with torch.cuda.graph(graph, others[0].pool() if others else None):  # recordings take turns in one memory pool
            loss = self.step(samples, targets)
        return Recorded(graph, samples, targets, loss, [p.grad for p in self.model.parameters()])


def _end_recording() -> None:
    """Clean up after a failed recording: random numbers are still drawn for it until another one succeeds."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


Recordings = dict[Hashable, Recording]
"""By module and terms."""


def recording(kept: Recordings, model: nn.Module, step: Step, velocity: dict[Tensor, Tensor], terms: Hashable) -> Step:
    """The step of a new training, with earlier recordings if there are any."""
    if not same_each_time(model):
        return step
    learns = tuple(p.requires_grad for p in model.parameters())
    trains = tuple(module.training for module in model.modules())
    terms = terms, tuple(value.data_ptr() for value in (*model.parameters(), *model.buffers()))
    key = id(model), learns, trains
    found = kept.get(key)
    if found is None or found.terms != terms:
        found = kept[key] = Recording(model, step, velocity, terms)
    for v in found.velocity.values():
        v.fill_(-0.0)  # adding a gradient to -0.0 gives that gradient, bit for bit
    return found


def same_each_time(model: nn.Module) -> bool:
    """Whether each pass launches the same kernels, as with PyTorch's modules and our own; a replay would skip other
    modules' computations and state in Python."""
    return all(type(m).__module__.split(".")[0] in ("torch", "torchvision", "fewbytes") for m in model.modules())
