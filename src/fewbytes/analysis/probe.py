"""Measures what a trained network's features encode: probes for mutual information and linear separability.

Source: the figures of FuseFL (Tang et al., NeurIPS 2024). The network is frozen, in eval mode. At every point three
networks are trained on its features H alone, and measured on the test set:

- I(H;X) = H(X) - R, proxy: a decoder predicts the image from H, R is its mean binary cross-entropy. H(X) is an
  unknown constant, so -R is reported.
- I(H;Y) = ln C - CE, proxy: CE is the cross-entropy of an auxiliary network for the label, C the number of classes.
- Linear separability: the accuracy of one linear layer on the flattened H.

The auxiliary network is, as in the authors' code (their text describes a linear layer), a newly initialised copy of the
layers after H. Its input is H enlarged to the image's size, or H itself if those layers take no other size or H is not
an image. For a fused network H is the mean over branches, and the new layers are those of its first client's model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from fewbytes.analysis.settings import Probing
from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.base.named import only_allowed
from fewbytes.base.streams import seed_torch, stream, stream_seed
from fewbytes.core.training import EVALUATION_BATCH, batches, prepared, ready
from fewbytes.data import Split
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.models.blocks import cut, head_of, unit_number, units_of
from fewbytes.models.ensemble import LogitMean
from fewbytes.models.files import load_model
from fewbytes.models.fused import FusedNetwork
from fewbytes.report.table import percent

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
HIDDEN = 12  # channels inside the decoder
PAPER_BLOCKS = 8  # the paper probes between this many blocks

Module = TypeVar("Module", bound=nn.Module)
Progress = Callable[[int, int, str], None]
"""Called with progress: (batches done, total batches, text)."""


@dataclass(frozen=True)
class Point:
    """A place in a network where features are taken: after the unit `name`, the `units`-th."""

    name: str
    units: int
    shape: tuple[int, ...]  # of one sample's features
    place: int  # index in the output of `activations`


class Probes(nn.Module):
    """The three networks of one point. `rest` is the auxiliary network; `sample` is a sample's shape."""

    def __init__(self, shape: tuple[int, ...], sample: tuple[int, ...], rest: nn.Module, classes: int) -> None:
        super().__init__()
        images = len(shape) == len(sample) == 3
        self.size = sample[1:] if images else None
        self.decoder = make_decoder(shape[0], sample[0]) if images else None
        self.auxiliary, self.enlarges = rest, images and _takes(rest, (shape[0], *sample[1:]))
        self.linear = nn.Linear(math.prod(shape), classes)

    def forward(self, h: Tensor) -> tuple[Tensor | None, Tensor]:
        """From features (n, …): logits of the image (n, channels, height, width), or None, and of the label."""
        large = h if self.size is None else enlarged(h, self.size)
        image = None if self.decoder is None else self.decoder(large)
        return image, self.auxiliary(large if self.enlarges else h)

    def separated(self, h: Tensor) -> Tensor:
        """The linear layer's logits (n, classes)."""
        logits: Tensor = self.linear(h.flatten(1))
        return logits


def probe(
    run: Path, client: int | None = None, points: Sequence[str] = (), how: Probing | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:  # fmt: skip
    """Probe the global model of a finished run, or a client's own (or ensemble member); writes and returns
    RUN/probe.json.

    Probes are trained on all clients' training samples together, without random transforms, and measured on the
    server's test set, on the run's device. `points` names the units after which to probe (see `points_of`). `how`: the
    probes' training, by default as in the paper. `progress` is called for batches. The same seed, on as many threads,
    gives the same file; a probe stopped early writes nothing. Raises UserError for a folder that is not a run's or was
    made from Python, and if there is no such model or it cannot be cut.
    """
    how = how or Probing()
    experiment = experiment_of(run)
    model = load_model(run, client)
    if isinstance(model, LogitMean):
        raise UserError(f"{run} keeps an ensemble, which is probed one member at a time: name a client (--client I)")
    if not isinstance(model, FusedNetwork):
        units_of(model)  # before reading the data, refuse models that cannot be cut
    with only_allowed():  # imports only what is allowed
        task = find(experiment).task
    first = int(next(iter(model.recipe["takes"][0]))) if isinstance(model, FusedNetwork) else client or 0
    chosen, skipped = points_of(model, task.problem.model(first), task.data.test.shape, points)
    train = pooled([one.train for one in task.data.clients], how, task.problem.device)
    test = task.data.test.load(task.problem.device)
    classes = len(task.data.classes)
    found = probed(model, chosen, partial(task.problem.build, first), train, test, classes, how, progress)
    result = {
        "model": "global" if client is None else f"client {client}",
        "epochs": how.epochs,
        "linear_epochs": how.linear_epochs,
        "batch": how.batch,
        "lr": how.lr,
        "seed": how.seed,
        "train_samples": len(train[1]),
        "test_samples": len(test[1]),
        "classes": classes,
        "points": found,
        "skipped": skipped,
    }
    with replacing(run / "probe.json") as file:
        file.write(json.dumps(result, indent=2).encode())
    return result


def probe_table(result: dict[str, Any]) -> Table:
    """The result of `probe` as a table for the terminal: a row per point."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("after", overflow="fold", min_width=10)
    for name in ("shape", "I(H;X) - H(X)\nnats a value", "I(H;Y)\nnats", "auxiliary\nnetwork", "linear\nlayer"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["points"]:
        nats = ["—" if row[name] is None else f"{row[name]:.3f}" for name in ("information_x", "information_y")]
        right = [percent(row[name]) for name in ("auxiliary_accuracy", "linear_accuracy")]
        table.add_row(Text(row["point"]), "x".join(map(str, row["shape"])), *nats, *right)
    return table


def points_of(
    model: nn.Module, architecture: nn.Module, sample: tuple[int, ...], wanted: Sequence[str] = ()
) -> tuple[list[Point], list[str]]:
    """The points to probe, in order, and the names of those left out because a fused network's branches differ there.

    A model is probed after the units `wanted`; else at its default cuts into 8 blocks, as in the paper; else after
    every unit, except a last one that only pools or flattens. A fused network is probed at the ends of its blocks,
    named by the units of `architecture`, a client's model; for other networks `architecture` is the model. Raises
    UserError for an unknown point, or if none is left.
    """
    units, given, mine = units_of(architecture), _shapes(architecture, sample), _shapes(model, sample)
    names, ends = list(units), list(range(len(units)))
    defaults = getattr(architecture, "default_cuts", {}).get(PAPER_BLOCKS, ())
    if isinstance(model, FusedNetwork):
        blocks = cut(architecture, model.recipe["blocks"], model.recipe["after"])
        ends, defaults = [end - 1 for end in accumulate(len(block.units) for block in blocks)], names
    elif not defaults:
        before = given[-2:][0]  # the last unit's own, if it is the only one
        only_shapes = given[-1] != before and not list(units[names[-1]].parameters())
        defaults = names[:-1] if only_shapes else names
    there = [Point(names[end], end + 1, given[end][0], place) for place, end in enumerate(ends)]
    if wanted:
        there = [there[i] for i in sorted({unit_number([point.name for point in there], name) for name in wanted})]
    else:
        there = [point for point in there if point.name in defaults]
    kept = [point for point in there if set(mine[point.place]) == {point.shape}]
    if not kept:
        raise UserError(f"there is nothing to probe: branches differ in shape after {_listed(there)}")
    return kept, [point.name for point in there if point not in kept]


def activations(model: nn.Module, x: Tensor) -> list[list[Tensor]]:
    """A network's features after every unit, or after every fused block: [place][branch], (n, …)."""
    if isinstance(model, FusedNetwork):
        return model.activations(x)
    found = []
    for unit in units_of(model).values():
        x = unit(x)
        found.append([x])
    return found


def features(model: nn.Module, points: Sequence[Point], x: Tensor) -> list[Tensor]:
    """H at every point, without gradients: the mean over branches (n, *shape)."""
    with torch.no_grad():
        found = activations(model, x)
        return [sum(found[p.place][1:], found[p.place][0]) / len(found[p.place]) for p in points]


def make_decoder(channels: int, image: int) -> nn.Sequential:
    """3x3 convolutions from features with `channels` channels, enlarged to the image's size, to logits of its values.

    The paper's final sigmoid is part of the loss, which is more precise.
    """
    return nn.Sequential(
        nn.Conv2d(channels, HIDDEN, 3, padding=1),
        nn.BatchNorm2d(HIDDEN),
        nn.ReLU(),
        nn.Conv2d(HIDDEN, image, 3, padding=1),
    )


def enlarged(h: Tensor, size: Sequence[int]) -> Tensor:
    """Features (n, c, height, width) resized to another height and width: bilinear, corners aligned."""
    if list(h.shape[2:]) == list(size):
        return h
    return F.interpolate(h, list(size), mode="bilinear", align_corners=True)


def reconstruction_loss(logits: Tensor, image: Tensor) -> Tensor:
    """Mean binary cross-entropy of an image's values in [0, 1]."""
    return F.binary_cross_entropy_with_logits(logits, image)


def rest_of(model: nn.Module, units: int) -> nn.Sequential:
    """A model's layers after its first `units` units, the classifier included."""
    return nn.Sequential(*list(units_of(model).values())[units:], head_of(model))


def pooled(splits: Sequence[Split], how: Probing, device: str) -> tuple[Tensor, Tensor]:
    """The samples of all splits (n, …) and their labels (n,), in order, up to the number that `how` sets."""
    starts = np.cumsum([0, *map(len, splits)])
    rows = np.arange(starts[-1])
    if how.samples is not None and how.samples < len(rows):
        rows = np.sort(stream(how.seed, "probe", "samples").choice(rows, how.samples, replace=False))
    parts = [
        split.take(rows[(rows >= start) & (rows < start + len(split))] - start).load(device)
        for split, start in zip(splits, starts, strict=False)
    ]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def probed(
    model: nn.Module,
    points: Sequence[Point],
    fresh: Callable[[], nn.Module],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    how: Probing,
    progress: Progress = lambda *_: None,
) -> list[dict[str, Any]]:
    """Train probes of a frozen model at all points on (x, y) and measure them on other samples: a row per point.

    `fresh` builds a new model of the architecture, whose layers are the auxiliary networks. A row: `point`, `units` and
    `shape` as in `Point`; `information_x` (-R in nats a value; None without a decoder), `information_y` (ln C - CE in
    nats) and `auxiliary_accuracy`, `linear_accuracy`; `auxiliary_enlarged`: whether its input was enlarged. Values that
    are not finite are None. A point's figures do not depend on the other points, unless the model has dropout.
    `progress` is called for every batch.
    """
    x, y = train
    device = str(x.device)
    model = _placed(model, device).eval().requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        probes = []
        for point in points:
            seed_torch(stream_seed(how.seed, "probe", point.name))
            one = Probes(point.shape, tuple(x.shape[1:]), rest_of(fresh(), point.units), classes)
            probes.append(_placed(one, device))
        seed_torch(stream_seed(how.seed, "probe"))
        _train(model, points, probes, x, y, how, progress)
    return _measure(model, points, probes, *test, classes)


def _train(
    model: nn.Module,
    points: Sequence[Point],
    probes: Sequence[Probes],
    x: Tensor,
    y: Tensor,
    how: Probing,
    progress: Progress,
) -> None:
    linear = [p for one in probes for p in one.linear.parameters()]
    informed = [p for one in probes for n, p in one.named_parameters() if not n.startswith("linear.")]
    momenta = {id(group): [torch.zeros_like(p) for p in group] for group in (linear, informed)}
    epochs, bounds, done = max(how.epochs, how.linear_epochs), batches(len(y), how.batch, "kept"), 0
    order_of = stream(how.seed, "probe", "order")
    for one in probes:
        one.train()
    for epoch in range(epochs):
        order: NDArray[np.int64] = order_of.permutation(len(y))
        for start, stop in bounds:
            progress(done, epochs * len(bounds), f"epoch {epoch + 1}/{epochs}")
            chosen = torch.from_numpy(order[start:stop]).to(x.device)
            image, label = ready(x[chosen]), y[chosen]
            for h, one in zip(features(model, points, image), probes, strict=True):
                if epoch < how.epochs:
                    decoded, logits = one(h)
                    loss = F.cross_entropy(logits, label)
                    (loss if decoded is None else loss + reconstruction_loss(decoded, image)).backward()
                if epoch < how.linear_epochs:
                    F.cross_entropy(one.separated(h), label).backward()
            if epoch < how.epochs:
                descend(informed, momenta[id(informed)], how.lr * (1 + math.cos(math.pi * epoch / how.epochs)) / 2)
            if epoch < how.linear_epochs:
                descend(linear, momenta[id(linear)], how.lr)
            done += 1
    progress(done, done, "done")


def descend(parameters: Sequence[Tensor], momenta: Sequence[Tensor], lr: float) -> None:
    """One step of SGD with Nesterov's momentum and weight decay, in place; removes the gradients."""
    moved = [(p, v, p.grad) for p, v in zip(parameters, momenta, strict=True) if p.grad is not None]
    values, velocity, gradients = (list(row) for row in zip(*moved, strict=True))
    with torch.no_grad():
        step = list(torch._foreach_add(gradients, values, alpha=WEIGHT_DECAY))
        torch._foreach_mul_(velocity, MOMENTUM)
        torch._foreach_add_(velocity, step)
        torch._foreach_add_(step, velocity, alpha=MOMENTUM)
        torch._foreach_add_(values, step, alpha=-lr)
    for p in parameters:
        p.grad = None


def _measure(
    model: nn.Module, points: Sequence[Point], probes: Sequence[Probes], x: Tensor, y: Tensor, classes: int
) -> list[dict[str, Any]]:
    """The rows of `probed`, in eval mode."""
    sums = np.zeros((len(points), 4))  # over samples: binary cross-entropy, cross-entropy, both accuracies
    for one in probes:
        one.eval()
    with torch.no_grad():
        for start in range(0, len(y), EVALUATION_BATCH):
            image, label = ready(x[start : start + EVALUATION_BATCH]), y[start : start + EVALUATION_BATCH]
            for i, (h, one) in enumerate(zip(features(model, points, image), probes, strict=True)):
                decoded, logits = one(h)
                bce = math.nan if decoded is None else float(reconstruction_loss(decoded, image)) * len(label)
                right = [int((out.argmax(1) == label).sum()) for out in (logits, one.separated(h))]
                sums[i] += bce, float(F.cross_entropy(logits, label, reduction="sum")), *right
    rows = []
    for point, one, total in zip(points, probes, sums / len(y), strict=True):
        bce, cross_entropy, accuracy, linear = (float(value) for value in total)
        figures = {
            "information_x": -bce,
            "information_y": math.log(classes) - cross_entropy,
            "auxiliary_accuracy": accuracy,
            "linear_accuracy": linear,
        }
        rows.append(
            {"point": point.name, "units": point.units, "shape": list(point.shape)}
            | {name: value if math.isfinite(value) else None for name, value in figures.items()}
            | {"auxiliary_enlarged": one.enlarges}
        )
    return rows


def _shapes(model: nn.Module, sample: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """The shapes of `activations` for one sample, without the batch dimension."""
    device = next(iter(model.parameters())).device
    with torch.no_grad():
        found = activations(model.eval(), torch.zeros(1, *sample, device=device))
    return [[tuple(h.shape[1:]) for h in branches] for branches in found]


def _takes(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a module accepts samples of a shape, by a dry run."""
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(1, *shape))
    except RuntimeError:  # a linear layer after a flattening accepts only one size
        return False
    return True


def _placed(module: Module, device: str) -> Module:
    """The module on the device, prepared, without in-place operations, as several networks read one H."""
    part: Any  # torch types attributes of modules as tensors and modules
    for part in module.modules():
        if getattr(part, "inplace", False):
            part.inplace = False
    return prepared(module.to(device))


def _listed(points: Sequence[Point]) -> str:
    return ", ".join(point.name for point in points)
