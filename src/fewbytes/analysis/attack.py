"""Measures what a server could see of a client's images: gradient inversion (iDLG) of a method's uploads.

Zhao, Mopuri, Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020, as GENE-FL (arXiv 2504.14628, III-D and Eq. 13)
uses it. The server knows a network's shared tensors and their gradients for one image of the client; it draws the other
tensors at random. From noise x~ it optimises an image until its gradients match: L-BFGS on Eq. 13, summed over the
shared tensors. The classifier's bias reveals the label. A high PSNR is a leak. The control is the first image with all
gradients, without noise: if it is not recognisable, a low PSNR means nothing.

Worst-case assumptions for the client: batches have one image; the attacker gets a label that the upload does not
reveal, and batch normalisation's statistics, which are used, not updated (evaluation mode).

Differences from the authors' code: float64; a line search (strong Wolfe conditions), without which a third of the
starts on a LeNet and CIFAR-10 diverges; a smaller loss for small gradients; usual initial batch normalisation.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from rich.table import Table
from torch import Tensor, nn

from fewbytes.analysis.settings import Attacking
from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.base.named import only_allowed
from fewbytes.base.state import State, load_state, state_of
from fewbytes.base.streams import seeded, stream, stream_seed
from fewbytes.core.task import Task
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.models.build import build_model
from fewbytes.models.files import load_model
from fewbytes.report.leaks import RECOGNISED, inversion_word
from fewbytes.report.table import decibels, figures_table, percent

MATCHED = 1e-6  # loss of Eq. 13 below which gradients match
WEIGHTS = 0.5  # an untrained network's weights and biases are U(-0.5, 0.5), as in the authors' code
HISTORY = 100  # of L-BFGS

Progress = Callable[[int, int, str], None]
"""Called with progress: (iterations done, total iterations, text)."""


def attack(run: Path, how: Attacking | None = None, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Attack training images of a client of a run; writes RUN/attack.json, which it returns, and RUN/attack.png.

    `how.model`: a name for `build_model`, with weights and biases U(-0.5, 0.5), or "run", the model that the run saved:
    the client's own, else the global one. The run's method states which of its tensors are shared. The same seed, on as
    many threads, gives the same files; an attack stopped early writes nothing. Raises UserError for a folder that is
    not a run's, data without images, too few images, and a method whose uploads are not gradients.
    """
    how = how or Attacking()
    client = how.client
    experiment = experiment_of(run)
    with only_allowed():  # imports only what is allowed
        method = experiment.build_method()
        task = find(experiment).task
    if client not in task.problem.clients:
        raise UserError(f"there is no client {client}: the run has {len(task.problem.clients)} clients")
    split = task.data.clients[client].train
    if len(split.shape) != 3 or split.shape[0] not in (1, 3):
        raise UserError(
            f"only images can be attacked, and samples of {experiment.data.dataset} have shape {split.shape}"
        )
    if len(split) < how.images:
        raise UserError(f"client {client} has {len(split)} training images, fewer than {how.images}: set --images")
    victim, attacker = _networks(how, task, run)
    shared = method.observed(victim)
    if not shared:
        raise UserError(
            f"{experiment.method} uploads no fixed tensors of a client's model, so the attack does not apply"
        )
    parameters = dict(victim.named_parameters())
    load_state(attacker, state_of(victim, keep=lambda name: name in shared or name not in parameters))
    if split.learnt is not None:
        raise UserError("the attack infers an image and its label, and these samples have other targets")
    rows = sorted(stream(how.seed, "attack", "images").choice(len(split), how.images, replace=False).tolist())
    images, labels = split.take(rows).load(task.problem.device)
    found: list[dict[str, Any]] = []
    reconstructed = []
    for i, (row, image, label) in enumerate(zip(rows, images.double(), labels.tolist(), strict=True)):
        progress(i, len(rows), f"image {i + 1}/{len(rows)}")
        with seeded(how.seed, "attack", row):
            whole = gradients(victim, image[None], label, shared)
            seen = method.places(victim, whole)
            observed = only(noisy(whole, how.noise), seen)
            recovered = label_of(attacker, observed)
            known = label if recovered is None else recovered
            x, loss = reconstruct(attacker, observed, known, split.shape, how.iterations, how.restarts, seen)
        reconstructed.append(x[0].clamp(0, 1))
        figures = {"loss": _finite(loss), "psnr": _finite(psnr(image, reconstructed[-1]))}
        found.append({"sample": row, "label": label, "recovered_label": recovered} | figures)
    control = found[0]["psnr"]
    if how.noise or seen is not None or len(shared) < len(parameters):
        with seeded(how.seed, "attack", "control"):
            observed = gradients(victim, images[:1].double(), int(labels[0]), list(parameters))
            x, _ = reconstruct(victim, observed, int(labels[0]), split.shape, how.iterations, how.restarts)
            control = _finite(psnr(images[0].double(), x[0].clamp(0, 1)))
    progress(len(rows), len(rows), "done")
    values = [math.inf if row["psnr"] is None else row["psnr"] for row in found]
    counts = {name: p.numel() for name, p in parameters.items()}
    values_seen = {name: int(places.sum()) for name, places in (seen or {}).items()}  # of the last image
    result = {
        "method": experiment.method,
        **dataclasses.asdict(how),
        "observed": shared,
        "observed_values": sum((counts | values_seen)[name] for name in shared),
        "values": sum(counts.values()),
        "label": "given" if found[0]["recovered_label"] is None else "recovered",
        "psnr_mean": _finite(statistics.fmean(values)),
        "psnr_median": _finite(statistics.median(values)),
        "control": control,
        "recognised": sum(value >= RECOGNISED for value in values) / len(values),
        "attacked": found,
    }
    with replacing(run / "attack.png") as picture, replacing(run / "attack.json") as file:
        picture.write(drawn(list(images.cpu()), [image.cpu() for image in reconstructed], values))
        file.write(json.dumps(result, indent=2).encode())
    return result


def attack_table(result: dict[str, Any]) -> Table:
    """The result of `attack` as a table for the terminal: a row per image."""
    mean, median = decibels(result["psnr_mean"]), decibels(result["psnr_median"])
    caption = f"mean {mean}, median {median}; {percent(result['recognised'])} of images reach {RECOGNISED:.0f} dB\n"
    caption += inversion_word(result["control"])
    table = figures_table(caption, [], ["image", "label", "recovered label", "loss (Eq. 13)", "PSNR"])
    for row in result["attacked"]:
        recovered = "given" if row["recovered_label"] is None else str(row["recovered_label"])
        loss = "—" if row["loss"] is None else f"{row['loss']:.1e}"
        table.add_row(str(row["sample"]), str(row["label"]), recovered, loss, decibels(row["psnr"]))
    return table


def gradients(model: nn.Module, x: Tensor, label: int, names: Sequence[str], create_graph: bool = False) -> State:
    """Gradients of the cross-entropy of one sample x (1, ...) with respect to the named parameters.

    `create_graph`: they can be differentiated again. The model stays in its mode.
    """
    parameters = dict(model.named_parameters())
    loss = F.cross_entropy(model(x), torch.tensor([label], device=x.device))
    found = torch.autograd.grad(
        loss, [parameters[name] for name in names], create_graph=create_graph, materialize_grads=True
    )
    return dict(zip(names, found, strict=True))


def noisy(observed: Mapping[str, Tensor], variance: float) -> State:
    """Gaussian noise N(0, variance) added to every entry, drawn from torch's global CPU generator."""
    if not variance:
        return dict(observed)
    return {
        name: value + math.sqrt(variance) * torch.randn(value.shape, dtype=value.dtype).to(value.device)
        for name, value in observed.items()
    }


def only(values: Mapping[str, Tensor], seen: Mapping[str, Tensor] | None) -> State:
    """The values, 0 where `seen` is false; None: true everywhere."""
    return dict(values) if seen is None else {name: value * seen[name] for name, value in values.items()}


def recovered_label(bias_gradient: Tensor) -> int:
    """The label of a single image from the classifier's bias gradient (classes,): its only negative entry (iDLG).

    That gradient is the softmax of the logits, minus one at the label.
    """
    return int(bias_gradient.argmin())


def label_of(model: nn.Module, observed: Mapping[str, Tensor]) -> int | None:
    """The label from the bias gradient of the model's last Linear; None if it is not observed, or not negative."""
    biases = [f"{name}.bias" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1:]
    recovered = biases and biases[0] in observed and bool((observed[biases[0]] < 0).any())
    return recovered_label(observed[biases[0]]) if recovered else None


def matching_loss(
    model: nn.Module,
    observed: Mapping[str, Tensor],
    x: Tensor,
    label: int,
    seen: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """GENE-FL, Eq. 13: the squared distance of the gradients at x (1, ...) from the observed ones, where `seen`."""
    own = only(gradients(model, x, label, list(observed), create_graph=True), seen)
    difference = torch.cat([(own[name] - value).flatten() for name, value in observed.items()])
    return difference.dot(difference)


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two images with values in [0, 1], over all pixels and channels."""
    error = float((a - b).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def reconstruct(
    model: nn.Module,
    observed: Mapping[str, Tensor],
    label: int,
    shape: Sequence[int],
    iterations: int = 300,
    restarts: int = 1,
    seen: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, float]:
    """An image (1, *shape), float64, not clamped, whose gradients match the observed ones where `seen` (None: all), and
    its loss (Eq. 13).

    Starts from N(0, 1), drawn from torch's global CPU generator, with at most `iterations` of L-BFGS, 20 steps each.
    Restarts up to `restarts` times while the loss is above 1e-6, in a local minimum or not finite. Returns the image
    with the smallest loss. Small gradients, of squared norm s < 1, must match to 1e-6 s. Parameters must be float64.
    """
    device = next(model.parameters()).device
    scale = min(1.0, sum(float(value.square().sum()) for value in observed.values())) or 1.0
    best, least = torch.empty(0), math.inf
    for start in range(1 + restarts):
        x = torch.randn(1, *shape, dtype=torch.float64).to(device)
        found, loss = _descended(lambda x: matching_loss(model, observed, x, label, seen) / scale, x, iterations)
        if start == 0 or loss < least:
            best, least = found, loss
        if least < MATCHED:
            break
    return best, least * scale


def _descended(loss_of: Callable[[Tensor], Tensor], x: Tensor, iterations: int) -> tuple[Tensor, float]:
    """L-BFGS from x: the point with the smallest loss, and that loss (infinite if never finite)."""
    best, least = x.clone(), math.inf
    x = x.requires_grad_()
    optimiser = torch.optim.LBFGS([x], history_size=HISTORY, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> float:
        nonlocal best, least
        loss = loss_of(x)
        (x.grad,) = torch.autograd.grad(loss, x)
        value = float(loss.detach())
        if value < least:
            best, least = x.detach().clone(), value
        return value

    for _ in range(iterations):
        before = x.detach().clone()
        optimiser.step(closure)
        if least < MATCHED or not x.isfinite().all() or torch.equal(before, x):
            break
    return best, least


def drawn(originals: Sequence[Tensor], reconstructions: Sequence[Tensor], values: Sequence[float]) -> bytes:
    """A PNG file: originals (channels, height, width) in [0, 1], each with its reconstruction and PSNR in dB below."""
    height, width = originals[0].shape[1:]
    zoom = max(1, -(-64 // height))  # tiles of at least 64 pixels
    wide, high, line, columns = zoom * width + 6, zoom * height + 6, 22, min(10, len(originals))
    rows = -(-len(originals) // columns)
    sheet = Image.new("RGB", (columns * wide, rows * (2 * high + line)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for i, (pair, value) in enumerate(zip(zip(originals, reconstructions, strict=True), values, strict=True)):
        left, top = i % columns * wide, i // columns * (2 * high + line)
        for k, image in enumerate(pair):
            pixels = (image.expand(3, -1, -1).permute(1, 2, 0) * 255).round().byte().numpy()
            tile = Image.fromarray(pixels).resize((zoom * width, zoom * height), Image.Resampling.NEAREST)
            sheet.paste(tile, (left + 3, top + k * high + 3))
        pen.text((left + wide / 2, top + 2 * high + line / 2 - 3), decibels(value), "black", font, anchor="mm")
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _networks(how: Attacking, task: Task, run: Path) -> tuple[nn.Module, nn.Module]:
    """The client's network, and another with different random weights; float64, in evaluation mode."""
    client, seed = how.client, how.seed
    if how.model == "run":
        own = (run / "models" / f"client-{client}.safetensors").is_file()
        victim = load_model(run, client if own else None)
        other = dataclasses.replace(task.problem, seed=stream_seed(seed, "attack", "attacker")).model(client)
    else:
        victim, other = (_untrained(how.model, task, seed, whose) for whose in ("victim", "attacker"))
    return victim.to(task.problem.device).double().eval(), other.to(task.problem.device).double().eval()


def _untrained(model: str, task: Task, seed: int, whose: str) -> nn.Module:
    """A model by name with random weights. Batch normalisation keeps its own: others would block gradients."""
    with seeded(seed, "attack", whose):
        network = build_model(model, task.problem.sample_shape, len(task.data.classes))
        for layer in network.modules():
            for parameter in layer.parameters(recurse=False) if isinstance(layer, (nn.Conv2d, nn.Linear)) else ():
                nn.init.uniform_(parameter, -WEIGHTS, WEIGHTS)
    return network


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
