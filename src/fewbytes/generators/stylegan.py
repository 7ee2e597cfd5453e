"""StyleGAN3 and StyleGAN-XL as generators: their equations in plain PyTorch, with weights from NVIDIA's pickles.

"Alias-Free Generative Adversarial Networks", Karras et al., NeurIPS 2021 (both configurations, T and R), and
"StyleGAN-XL: Scaling StyleGAN to Large Diverse Datasets", Sauer et al., SIGGRAPH 2022 (stem and super-resolution).
Filters, factors and paddings are read from the file, not recomputed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fewbytes.base.errors import UserError
from fewbytes.base.pickles import Record, read_pickle
from fewbytes.generators.protocol import check_latents

BATCH = 4  # images synthesised at a time
LARGEST = 8192  # maximum samples per side, layers, factors and taps: more than any real file has
SLOPE, GAIN = 0.2, math.sqrt(2)  # of every leaky ReLU; the gain keeps the variance


@dataclass(frozen=True, eq=False)
class Linear:
    """x -> x W^T + b. The gains of equalised learning rates are multiplied in."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x (n, in) to (n, out)."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Mapping:
    """z and a class -> w, without truncation (psi = 1). Only StyleGAN-XL has classes, with an embedding each."""

    z_dim: int
    classes: int  # 0: unconditional
    embedding: Tensor  # (classes or more, features); empty if unconditional
    projection: Linear | None  # of an embedding to the size of z
    layers: tuple[Linear, ...]

    def __call__(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """w (n, w_dim) for z (n, z_dim) and, if there are classes, labels (n,)."""
        x = _unit(z)
        if self.projection is not None:
            x = torch.cat([x, _unit(_leaky(self.projection(self.embedding[labels])))], 1)
        for layer in self.layers:
            x = _leaky(layer(x))
        return x


@dataclass(frozen=True, eq=False)
class FourierFeatures:
    """The input signal: sine waves on a plane that w shifts and rotates, mixed by one matrix (Karras et al., 3.2)."""

    affine: Linear  # w -> cosine and sine of an angle (after division by their norm), shift in x and in y
    frequencies: Tensor  # (channels, 2), in waves per image
    phases: Tensor  # (channels,), in waves
    mixing: Tensor  # (channels, channels)
    size: int  # samples per side, including the margin around the image
    rate: float  # samples per side of the image

    def __call__(self, w: Tensor) -> Tensor:
        """w (n, w_dim) to the signal (n, channels, size, size)."""
        a = self.affine(w)
        cosine, sine, right, down = (a / a[:, :2].norm(dim=1, keepdim=True))[:, :, None, None].unbind(1)
        at = (torch.arange(self.size) + (1 - self.size) / 2) / self.rate
        x, y = at - right, at[:, None] - down
        plane = torch.stack([cosine * x - sine * y, sine * x + cosine * y], 3)  # (n, size, size, 2)
        waves = torch.sin(2 * math.pi * (plane @ self.frequencies.T + self.phases))
        return (waves @ self.mixing.T).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class Layer:
    """Modulated convolution, then the leaky ReLU between an up- and a downsampling filter (Karras et al., 3.1)."""

    affine: Linear  # w -> a style per input channel
    weight: Tensor  # (out, in, k, k)
    power: Tensor | None  # (out, in), the kernels' sums of squares; None: the layer to RGB, without activation
    bias: Tensor  # (out,)
    gain: Tensor  # (), the inverse of the input's magnitude in training
    up_filter: Tensor  # (taps, taps)
    down_filter: Tensor
    up: int
    down: int
    cut: int  # samples to drop on each side after upsampling
    clamp: float

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        """x (n, in, size, size) and w (n, w_dim) to (n, out, size, size) of `size_after(size)`."""
        style = self.affine(w)
        # Styles multiply the input, demodulation the output: so all images share the weights.
        x = F.conv2d(x * (style * self.gain)[:, :, None, None], self.weight, padding=self.weight.shape[2] - 1)
        if self.power is not None:
            x = x * (style.square() @ self.power.T + 1e-8).rsqrt()[:, :, None, None]
        x = _upsample(x + self.bias[:, None, None], self.up_filter, self.up, self.cut)
        if self.power is not None:
            x = F.leaky_relu(x, SLOPE, inplace=True).mul_(GAIN)  # x is the largest signal: no copies
        return _downsample(x.clamp_(-self.clamp, self.clamp), self.down_filter, self.down)

    def size_after(self, size: int) -> int:
        """Samples per side after this layer. Raises UserError if it is 0, or too large for a real generator."""
        upsampled = (size + self.weight.shape[2] - 2) * self.up + len(self.up_filter)
        left = upsampled - 2 * self.cut - len(self.down_filter)
        if upsampled > LARGEST or left < 0 or self.cut < 0:
            raise UserError("a layer has an impossible size")
        return left // self.down + 1


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, SLOPE) * GAIN


def _upsample(x: Tensor, kernel: Tensor, factor: int, cut: int) -> Tensor:
    """Insert zeros between the samples and filter; drop `cut` samples on each side of the full convolution."""
    kernels = (kernel * factor**2).repeat(x.shape[1], 1, 1, 1)
    return F.conv_transpose2d(x, kernels, stride=factor, padding=cut, groups=len(kernels))


def _downsample(x: Tensor, kernel: Tensor, factor: int) -> Tensor:
    """Filter where the kernel lies wholly inside, and keep every `factor`-th sample."""
    kernels = kernel.flip(0, 1).repeat(x.shape[1], 1, 1, 1)
    return F.conv2d(x, kernels, stride=factor, groups=len(kernels))


@dataclass(eq=False)
class StyleGAN:
    """A `ConditionalGenerator` whose latent vectors are w, the same for every layer."""

    latent_dim: int
    mapping: Mapping
    features: FourierFeatures
    layers: tuple[Layer, ...]
    scale: float  # multiplies the last layer's output; then black is at `black`, white at black + 2
    black: float

    @torch.no_grad()
    def sample_latents(self, n: int) -> Tensor:
        """w for z ~ N(0, I) and, in StyleGAN-XL, uniformly drawn classes: float32 (n, latent_dim)."""
        z = torch.randn(n, self.mapping.z_dim)
        return self.mapping(z, torch.randint(self.mapping.classes, (n,)) if self.mapping.classes else None)

    @property
    def classes(self) -> int:
        """StyleGAN-XL's number of classes (ImageNet's in published models); 0: none."""
        return self.mapping.classes

    @torch.no_grad()
    def class_latents(self, labels: Tensor) -> Tensor:
        """w for z ~ N(0, I) and these classes (n,): float32 (n, latent_dim)."""
        return self.mapping(torch.randn(len(labels), self.mapping.z_dim), labels)

    @torch.no_grad()
    def synthesise(self, latents: Tensor) -> Tensor:
        """The images of w (n, latent_dim): float32 (n, channels, height, width) in [0, 1]."""
        check_latents(latents, self.latent_dim)
        return torch.cat([self._images(w) for w in latents.split(BATCH)])

    def _images(self, w: Tensor) -> Tensor:
        x = self.features(w)
        for layer in self.layers:
            x = layer(x, w)
        return ((x * self.scale - self.black) / 2).clamp(0, 1)


def load_stylegan(path: Path) -> StyleGAN:
    """Load the network `G_ema` from a pickle of StyleGAN3's or StyleGAN-XL's training code; no code in it is run.

    Raises UserError for any other file.
    """
    content = read_pickle(path)
    network = content.get("G_ema") if isinstance(content, dict) else None
    if not isinstance(network, Record):
        raise UserError(f"{path} has no network G_ema: it is not a checkpoint of StyleGAN3 or StyleGAN-XL")
    try:
        return _generator(network)
    except UserError as error:
        raise UserError(f"{path} is not a usable StyleGAN3 or StyleGAN-XL: {error}") from error


def _generator(network: Record) -> StyleGAN:
    mapping, synthesis = _module(network, "mapping"), _module(network, "synthesis")
    w_dim = _integer(mapping, "w_dim")
    features = _features(_module(synthesis, "input"), w_dim)
    names = _member(synthesis, "layer_names")
    if not isinstance(names, list) or not 0 < len(names) <= 100 or not all(isinstance(name, str) for name in names):
        raise UserError("its synthesis network has no list of at most 100 layers")
    layers: list[Layer] = []
    size, channels = features.size, len(features.mixing)
    for name in names:
        layer = _layer(_module(synthesis, name), w_dim, channels)
        size, channels = layer.size_after(size), len(layer.weight)
        layers.append(layer)
    embed = _member(mapping, "embed")
    xl = isinstance(embed, Record) and embed.name == "torch.nn.modules.sparse.Embedding"
    return StyleGAN(
        latent_dim=w_dim,
        mapping=_mapping(mapping, w_dim, xl),
        features=features,
        layers=tuple(layers),
        scale=_number(synthesis, "output_scale"),
        black=-1 if xl else -128 / 127.5,
    )


def _mapping(record: Record, w_dim: int, xl: bool) -> Mapping:
    z_dim, classes = _integer(record, "z_dim"), _integer(record, "c_dim", least=0)
    embedding, projection = torch.empty(0), None
    if classes:
        if not xl:
            raise UserError("a StyleGAN3 with classes is not supported")
        embedding = _tensor(_module(record, "embed"), "weight", None, None)
        projection = _linear(_module(record, "embed_proj"), embedding.shape[1], z_dim)
        if classes > len(embedding):
            raise UserError(f"it has {classes} classes, but embeddings for {len(embedding)}")
    widths = [z_dim * (2 if classes else 1), *[w_dim] * _integer(record, "num_layers")]
    layers = [_linear(_module(record, f"fc{i}"), width, w_dim) for i, width in enumerate(widths[:-1])]
    return Mapping(z_dim, classes, embedding, projection, tuple(layers))


def _features(record: Record, w_dim: int) -> FourierFeatures:
    if not torch.equal(_tensor(record, "transform", 3, 3), torch.eye(3)):
        raise UserError("it rotates or shifts its images (input.transform), which is not supported")
    mixing = _tensor(record, "weight", None, None)
    channels = mixing.shape[1]
    size = _member(record, "size")
    if not isinstance(size, np.ndarray) or size.shape != (2,) or not 0 < size[0] == size[1] <= LARGEST:
        raise UserError("its input is not square")
    return FourierFeatures(
        affine=_linear(_module(record, "affine"), w_dim, 4),
        frequencies=_tensor(record, "freqs", channels, 2),
        phases=_tensor(record, "phases", channels),
        mixing=mixing / math.sqrt(channels),
        size=int(size[0]),
        rate=_number(record, "sampling_rate"),
    )


def _layer(record: Record, w_dim: int, channels: int) -> Layer:
    weight = _tensor(record, "weight", None, channels, None, None)
    if weight.shape[2] != weight.shape[3]:
        raise UserError("a kernel is not square")
    up, up_filter = _integer(record, "up_factor"), _filter(record, "up_filter")
    # Samples that the official code adds before filtering: before and after, in x and in y.
    padding = _member(record, "padding")
    before = padding[0] if isinstance(padding, list) and padding else None
    if not isinstance(before, int) or abs(before) > LARGEST or padding != 2 * [before, before + 1 - up]:
        raise UserError("the padding of a layer does not keep the signal centred")
    to_rgb = _member(record, "is_torgb") is True
    return Layer(
        affine=_linear(_module(record, "affine"), w_dim, channels),
        weight=weight / math.sqrt(weight[0].numel()) if to_rgb else weight,
        power=None if to_rgb else weight.square().sum((2, 3)),
        bias=_tensor(record, "bias", len(weight)),
        gain=_tensor(record, "magnitude_ema").rsqrt(),
        up_filter=up_filter,
        down_filter=_filter(record, "down_filter"),
        up=up,
        down=_integer(record, "down_factor"),
        cut=len(up_filter) - 1 - before,
        clamp=math.inf if _member(record, "conv_clamp") is None else _number(record, "conv_clamp"),
    )


def _filter(record: Record, name: str) -> Tensor:
    """A filter in two dimensions. The file stores separable filters in one dimension, and None for no filter."""
    found = _member(record, name)
    if found is None:
        return torch.ones(1, 1)
    if isinstance(found, Tensor) and found.dim() == 1:
        return torch.outer(*[_tensor(record, name, None)] * 2)
    return _tensor(record, name, None, len(found) if isinstance(found, Tensor) and found.dim() else None)


def _linear(record: Record, inputs: int, outputs: int) -> Linear:
    rate = _number(record, "bias_gain")
    weight, bias = _tensor(record, "weight", outputs, inputs), _tensor(record, "bias", outputs)
    return Linear(weight * (rate / math.sqrt(inputs)), bias * rate)


def _member(record: Record, name: str) -> object:
    """A module's parameter, buffer, submodule or attribute, wherever PyTorch stores it; None if there is none."""
    for kind in ("_parameters", "_buffers", "_modules"):
        members = record.state.get(kind)
        if isinstance(members, dict) and name in members:
            return members[name]
    return record.state.get(name)


def _module(record: Record, name: str) -> Record:
    found = _member(record, name)
    if not isinstance(found, Record):
        raise UserError(f"its {record.name} has no part {name!r}")
    return found


def _tensor(record: Record, name: str, *shape: int | None) -> Tensor:
    """A float32 tensor of this shape; None in the shape allows any size but 0."""
    found = _member(record, name)
    if not isinstance(found, Tensor) or found.dim() != len(shape) or not found.numel():
        raise UserError(f"its {record.name} has no {name} of {len(shape)} dimensions")
    if any(expected not in (None, size) for expected, size in zip(shape, found.shape, strict=True)):
        raise UserError(f"{name} of its {record.name} has shape {tuple(found.shape)}, not {shape}")
    return found.float().contiguous()


def _integer(record: Record, name: str, least: int = 1) -> int:
    found = _member(record, name)
    if not isinstance(found, int) or not least <= found <= LARGEST:
        raise UserError(f"its {record.name} has no {name} between {least} and {LARGEST}")
    return found


def _number(record: Record, name: str) -> float:
    found = _member(record, name)
    if not isinstance(found, int | float) or not abs(found) < 1e30:
        raise UserError(f"its {record.name} has no finite number {name}")
    return float(found)
