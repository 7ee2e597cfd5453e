"""How near the compact generator's images are to the pictures it was trained on: Fréchet distances, and two pictures.

    python benchmarks/generator_quality.py /usr/share/openclipart/png [--generator compact] [--pictures docs/pictures]

The distance is that of Heusel et al. (NeurIPS 2017) in features that need no download: the 64 of a small network that
learned here, from a fixed seed, to tell by how many quarter turns a real image was turned (Gidaris et al., ICLR 2018).
It compares with other figures of this script only. Every set has as many images as one half of the pictures; the
distance is to the other half. Floor: the one half. Ceilings: normal noise with the mean and covariance of the pixels of
real images, and real images with their pixels shuffled.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from fewbytes.generators import load_generator

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train_generator import cut_outs, on_backgrounds

STEPS, BATCH = 300, 64


class Turns(nn.Module):
    """Images (n, 3, 32, 32) in [0, 1] to logits of 0, 1, 2, 3 quarter turns."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(nn.Conv2d(3, 32, 4, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        )
        self.turns = nn.Linear(64 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.turns(F.adaptive_avg_pool2d(self.convs(x), 2).flatten(1))

    def features(self, x: Tensor) -> Tensor:
        """(n, 64), float64: the last maps, averaged over the image."""
        return self.convs(x).mean((2, 3)).double()


def trained(real: Tensor) -> Turns:
    network = Turns()
    adam = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(STEPS):
        x, turns = real[torch.randint(len(real), (BATCH,))], torch.arange(BATCH) % 4
        x = torch.cat([x[i::4].rot90(i, (2, 3)) for i in range(4)])
        loss = F.cross_entropy(network(x), turns.sort().values)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return network.eval().requires_grad_(False)


def frechet(a: Tensor, b: Tensor) -> float:
    """Of features (n, d): |mean difference|^2 + tr(A + B - 2 (A B)^(1/2)), A and B the covariances."""
    A, B = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(A)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ B @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + A.trace() + B.trace() - 2 * mixed)


def noise_like(images: Tensor) -> Tensor:
    """Normal noise with the images' pixel mean and covariance, clamped to [0, 1]."""
    flat = images.flatten(1)
    centred = flat - flat.mean(0)
    noise = torch.randn(len(flat), len(flat)) @ centred / len(flat) ** 0.5
    return (flat.mean(0) + noise).clamp(0, 1).view_as(images)


def shuffled(images: Tensor) -> Tensor:
    """Every image's pixels in an order of its own."""
    flat = images.flatten(2)
    return torch.stack([image[:, torch.randperm(flat.shape[2])] for image in flat]).view_as(images)


def save_grid(images: Tensor, columns: int, path: Path) -> None:
    """Images in rows, every pixel doubled, as a PNG file of 256 colours."""
    images = F.pad(images, (0, 1, 0, 1), value=1.0)
    rows = torch.cat([torch.cat(list(row), 2) for row in images.split(columns)], 1)
    pixels = (255 * rows).round().byte().permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(pixels)
    picture = picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST)
    picture.quantize(256).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the pictures the generator was trained on")
    parser.add_argument("--generator", default="compact")
    parser.add_argument("--pictures", type=Path, help="a folder to draw samples and interpolations into")
    options = parser.parse_args()
    generator = load_generator(options.generator)
    torch.manual_seed(0)
    real = on_backgrounds(cut_outs(options.folder))[0] / 2 + 0.5
    one, other = real[torch.randperm(len(real))].chunk(2)
    made = generator.synthesise(generator.sample_latents(len(one)))
    network = trained(real)
    reference = network.features(other)
    for name, images in {
        "real images, the other half": one,
        "generated": made,
        "normal noise": noise_like(one),
        "shuffled pixels": shuffled(one),
    }.items():
        print(f"{name}: {frechet(network.features(images), reference):.3f}")
    if options.pictures is not None:
        save_grid(made[:96], 16, options.pictures / "compact-generator.png")
        ends = generator.sample_latents(8)
        steps = torch.linspace(0, 1, 16)[:, None]
        strips = [start + steps * (end - start) for start, end in zip(ends[:4], ends[4:], strict=True)]
        save_grid(generator.synthesise(torch.cat(strips)), 16, options.pictures / "compact-interpolation.png")


if __name__ == "__main__":
    main()
