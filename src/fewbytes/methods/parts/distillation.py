"""Parts of server-side distillation: losses, a generator of samples, sample pools, the training of a student.

Logits are (n, classes), images (n, channels, height, width) with values in 0..1. Randomness is torch's global state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewbytes.base.state import in_training
from fewbytes.core.training import batches, ready
from fewbytes.data import Split

# Losses on logits -----------------------------------------------------------------------------------------------------


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(t / T) || softmax(s / T)) per sample, (n,)."""
    log_p, log_q = F.log_softmax(teacher / temperature, 1), F.log_softmax(student / temperature, 1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 times the mean divergence; at T = 1 FedDF's loss."""
    return temperature**2 * divergence(teacher, student, temperature).mean()


def adversarial_loss(teacher: Tensor, student: Tensor, temperature: float = 1.0, masked: bool = True) -> Tensor:
    """-T^2 times the mean divergence; `masked`: only samples that the two classify differently count (DENSE)."""
    apart = divergence(teacher, student, temperature)
    if masked:
        apart = apart * (teacher.argmax(1) != student.argmax(1))
    return -(temperature**2) * apart.mean()


def jensen_shannon(teacher: Tensor, student: Tensor, temperature: float = 3.0) -> Tensor:
    """DeepInversion's mean JS divergence; probabilities are clamped to [0.01, 0.99]."""
    p, q = F.softmax(teacher / temperature, 1), F.softmax(student / temperature, 1)
    p, q, middle = (v.clamp(0.01, 0.99) for v in (p, q, (p + q) / 2))
    return (middle * (2 * middle.log() - p.log() - q.log())).sum(1).mean() / 2


def competition_loss(teacher: Tensor, student: Tensor, temperature: float = 3.0) -> Tensor:
    """1 - JS: Adaptive DeepInversion's term for disagreement of teacher and student."""
    return 1 - jensen_shannon(teacher, student, temperature).clamp(0, 1)


def one_hot_loss(teacher: Tensor) -> Tensor:
    """DAFL: cross-entropy of the teacher's logits with its own decisions."""
    return F.cross_entropy(teacher, teacher.argmax(1))


def activation_loss(features: Tensor) -> Tensor:
    """DAFL: minus the mean absolute value of the features."""
    return -features.abs().mean()


def balance_loss(teacher: Tensor) -> Tensor:
    """DAFL: minus the entropy, in nats, of the batch's mean class probabilities."""
    mean = F.softmax(teacher, 1).mean(0)
    total: Tensor = torch.xlogy(mean, mean).sum()
    return total


# Losses on samples ----------------------------------------------------------------------------------------------------


def statistics_loss(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """DeepInversion, one layer: ||var(x) - variance|| + ||mean(x) - mean||, per channel of x (n, channels, ...)."""
    var, mu = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    distance: Tensor = (var - variance).norm() + (mu - mean).norm()
    return distance


def total_variation(x: Tensor) -> Tensor:
    """The sum of the l2 norms, over the batch, of the differences of neighbours in four directions."""
    down, right = x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]
    falling, rising = x[..., 1:, 1:] - x[..., :-1, :-1], x[..., 1:, :-1] - x[..., :-1, 1:]
    return torch.stack([step.norm() for step in (down, right, falling, rising)]).sum()


@contextmanager
def batch_norm_terms(model: nn.Module) -> Iterator[list[Tensor]]:
    """A list to which each forward pass appends every batch-norm layer's statistics loss; clear it between passes."""
    terms: list[Tensor] = []

    def compare(layer: nn.Module, args: tuple[Tensor]) -> None:
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None:
            terms.append(statistics_loss(args[0], layer.running_mean, layer.running_var))

    hooks = [m.register_forward_pre_hook(compare) for m in model.modules() if isinstance(m, _BatchNorm)]
    try:
        yield terms
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def classifier_inputs(models: nn.ModuleList) -> Iterator[list[Tensor]]:
    """A list to which each forward pass appends the input of each model's last linear layer."""
    inputs: list[Tensor] = []
    layers = [[m for m in model.modules() if isinstance(m, nn.Linear)][-1:] for model in models]
    hooks = [m.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for last in layers for m in last]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


# Samples --------------------------------------------------------------------------------------------------------------


class Generator(nn.Module):
    """Maps noise (n, latent) to images of `shape`: a linear layer to a quarter of the size, up-sampled twice.

    Source: DENSE (Zhang et al. 2022), with its 64 basic channels.
    """

    def __init__(self, latent: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = shape
        self.start = (128, math.ceil(height / 4), math.ceil(width / 4))
        self.linear = nn.Linear(latent, math.prod(self.start))
        self.convolutions = nn.Sequential(
            nn.BatchNorm2d(128),
            *_larger(128, 128, nn.Upsample(scale_factor=2)),
            *_larger(128, 64, nn.Upsample(size=(height, width))),
            nn.Conv2d(64, channels, 3, padding=1),
            nn.Sigmoid(),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.normal_(module.weight, 0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1, 0.02)
            if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, z: Tensor) -> Tensor:
        first = ready(self.linear(z).view(-1, *self.start))
        images: Tensor = self.convolutions(first)
        return images


def _larger(channels_in: int, channels_out: int, up: nn.Upsample) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    return up, convolution, nn.BatchNorm2d(channels_out), nn.LeakyReLU(0.2, inplace=True)


def shifted_and_flipped(x: Tensor) -> Tensor:
    """Each image shifted by up to an eighth of its size (4 of 32 pixels) with zero padding, and randomly mirrored: a
    random crop of the padded image."""
    n, _, height, width = x.shape
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = torch.randint(2, (n,)) * 2 - 1
    theta[:, 1, 1] = 1
    for row, size in ((0, width), (1, height)):
        reach = size // 8
        theta[:, row, 2] = torch.randint(-reach, reach + 1, (n,)) * (2 / size)
    grid = F.affine_grid(theta.to(x.device), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", align_corners=False)


def rolled_and_flipped(x: Tensor, reach: int = 2) -> Tensor:
    """The batch rolled by up to `reach` pixels per axis and randomly mirrored (DeepInversion's jitter)."""
    down, right = (int(n) for n in torch.randint(-reach, reach + 1, (2,)))
    x = x.roll((down, right), (2, 3))
    return x.flip(3) if torch.rand(()) < 0.5 else x


def noise(samples: int, shape: tuple[int, ...]) -> Split:
    """Gaussian noise; each sample is scaled to 0..1."""
    x = torch.randn(samples, *shape)
    flat = x.flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    flat.sub_(low[:, None]).div_((high - low)[:, None])
    return Split(x, torch.zeros(samples, dtype=torch.int64))


class ImagePool:
    """Up to `capacity` generated samples, each with a target such as the teacher's logits."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.filled = capacity, 0
        self._x = self._targets = torch.empty(0)

    def __len__(self) -> int:
        return self.filled

    def add(self, x: Tensor, targets: Tensor) -> None:
        """Add samples (copied)."""
        if not self.filled:
            self._x, self._targets = (v.new_empty(self.capacity, *v.shape[1:]) for v in (x, targets))
        stop = self.filled + len(x)
        self._x[self.filled : stop], self._targets[self.filled : stop] = x, targets
        self.filled = stop

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The samples and targets at `rows`."""
        rows = rows.to(self._x.device)
        return ready(self._x[rows]), self._targets[rows]


# Teachers and students ------------------------------------------------------------------------------------------------


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode without gradients; restore both on exit."""
    training, learnt = model.training, [p for p in model.parameters() if p.requires_grad]
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        if training:
            in_training(model)
        for p in learnt:
            p.requires_grad_(True)


def logits_of(model: nn.Module, data: Split, device: str, batch: int = 250) -> Tensor:
    """The model's logits (n, classes) for all samples of a split, in eval mode."""
    with frozen(model), torch.no_grad():
        parts = (data.take(range(i, min(i + batch, len(data)))) for i in range(0, len(data), batch))
        return torch.cat([model(ready(part.load(device)[0])) for part in parts])


def shuffled(samples: int, batch: int) -> Iterator[Tensor]:
    """One pass over the row numbers 0..samples-1 in random order, in batches."""
    order = torch.randperm(samples)
    return (order[start:stop] for start, stop in batches(samples, batch, "kept"))


def endless(samples: int, batch: int) -> Iterator[Tensor]:
    """Endless passes of `shuffled`."""
    while True:
        yield from shuffled(samples, batch)


def step(optimiser: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> None:
    """One optimiser step on the loss; `clip`: maximum gradient norm."""
    optimiser.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
    optimiser.step()


def lowest(steps: int, objective: Callable[[], tuple[Tensor, Tensor]], optimiser: torch.optim.Optimizer) -> Tensor:
    """Minimise `objective() -> (samples, loss)`; returns the samples of the step with the lowest loss."""
    best, kept = math.inf, torch.empty(0)
    for _ in range(steps):
        samples, loss = objective()
        value = float(loss.detach())
        if value < best or not len(kept):
            best, kept = value, samples.detach().clone()
        step(optimiser, loss)
    return kept
