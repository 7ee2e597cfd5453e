"""Trains the compact image generator (`fewbytes.generators.compact`) on any folder of pictures.

The file that comes with the package, src/fewbytes/generators/compact.safetensors, was made of Debian's package
openclipart-png 1:0.18+dfsg-19 (Open Clip Art Library 0.18, dedicated to the public domain) by

    OMP_NUM_THREADS=1 python scripts/train_generator.py /usr/share/openclipart/png compact.safetensors --bfloat16

The same pictures, options, kind of processor and versions give the same file. Pictures are cut out where they are
transparent, fitted into 32 x 32 with a margin of one pixel, and put on plain backgrounds of soft random colours, half
of them mirrored. Left out are pictures that cover little, grey ones, near-copies, and files above 20 million pixels.

The training is that of a variational autoencoder (Kingma and Welling, ICLR 2014) with a weak prior. Afterwards a
normal distribution is fitted to the latents of all pictures (Ghosh et al., ICLR 2020) and folded into the generator's
first layers, so that standard normal latents give images like the pictures. What is written is an average of the
weights over steps; a file is written every SAVE_EVERY steps, the same that `--steps` with that number gives.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from fewbytes.generators.compact import IMAGE_SIZE, LATENT_DIM, SynthesisNetwork, save_compact

BATCH = 64
RATE, DECAYS_FROM = 0.002, 300  # of Adam; then with the inverse square root of the step
DIVERGENCE = 1e-4  # weight of the Kullback-Leibler divergence of a latent, in nats
KEPT = 0.99  # of the average of the weights, at every step
SAVE_EVERY = 100
MOST_PIXELS = 20_000_000


def cut_outs(folder: Path) -> Tensor:
    """The pictures under a folder, in order of their paths: uint8 (n, 4, 32, 32), premultiplied colours and opacity."""
    Image.MAX_IMAGE_PIXELS = None  # sizes are looked at here
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg"))
    kept: list[Tensor] = []
    looks = torch.empty(len(paths), 4 * 8 * 8)  # of those kept
    for path in paths:
        picture = _cut_out(path)
        if picture is None:
            continue
        colours, opacity = picture[:3].float() / 255, picture[3:].float() / 255
        on_grey = colours + (1 - opacity) / 2
        if opacity.mean() < 0.2 or (on_grey.amax(0) - on_grey.amin(0)).mean() < 0.1 * opacity.mean():
            continue
        look = F.avg_pool2d(torch.cat([on_grey, opacity]), 4).flatten()
        if kept and torch.cdist(look[None], looks[: len(kept)]).min() < 0.06 * len(look) ** 0.5:
            continue
        looks[len(kept)] = look
        kept.append(picture)
    if len(kept) < BATCH:
        raise SystemExit(f"{folder} has {len(kept)} usable PNG or JPEG pictures; training takes at least {BATCH}")
    return torch.stack(kept)


def _cut_out(path: Path) -> Tensor | None:
    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                return None
            picture = image.convert("RGBA")
    except (OSError, ValueError, SyntaxError):  # what Pillow raises for damaged files
        return None
    box = picture.getchannel("A").point(lambda a: 255 * (a > 12)).getbbox()
    if box is None:
        return None
    picture = picture.crop(box).convert("RGBa")  # premultiplied, so that colours of clear pixels do not bleed in
    scale = (IMAGE_SIZE - 2) / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    square = Image.new("RGBa", (IMAGE_SIZE, IMAGE_SIZE))
    square.paste(picture, ((IMAGE_SIZE - width) // 2, (IMAGE_SIZE - height) // 2))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def on_backgrounds(pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut-outs (n, 4, 32, 32), half of them mirrored, before plain backgrounds of soft random colours.

    Images in [-1, 1] (n, 3, 32, 32), opacity in [0, 1] (n, 1, 32, 32), backgrounds in [-1, 1] (n, 3, 1, 1).
    """
    n = len(pictures)
    values = pictures.float() / 255
    values = torch.where(torch.rand(n, 1, 1, 1) < 0.5, values.flip(3), values)
    hue, saturation, value = torch.rand(n, 1), 0.05 + 0.4 * torch.rand(n, 1), 0.65 + 0.35 * torch.rand(n, 1)
    ramp = (torch.tensor([5.0, 3.0, 1.0]) + 6 * hue) % 6  # hue, saturation, value to red, green, blue
    background = (value * (1 - saturation * torch.minimum(ramp, 4 - ramp).clamp(0, 1)))[:, :, None, None]
    opacity = values[:, 3:]
    return 2 * (values[:, :3] + (1 - opacity) * background) - 1, opacity, 2 * background - 1


class Encoder(nn.Module):
    """Images to the mean and the logarithm of the variance of their latents; the sum of a linear and a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            *(nn.Conv2d(3, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(64, 128, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten()),
            nn.Linear(128 * 4 * 4, 2 * LATENT_DIM),
        )
        self.coarse = nn.Linear(3 * 8 * 8, 2 * LATENT_DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = self.fine(x).float() + 2 * self.coarse(F.avg_pool2d(x, 4).flatten(1)).float()
        mean, log_variance = both.chunk(2, 1)
        return mean, (log_variance - 3).clamp(-8, 4)


class Autoencoder(nn.Module):
    """Both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.synthesis = Encoder(), SynthesisNetwork()


def train(pictures: Tensor, steps: int, bfloat16: bool, out: Path, about: dict[str, str]) -> None:
    """Write a generator of images like the cut-outs `pictures`, from time to time and at the end. Prints progress."""
    model = Autoencoder()
    adam = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.8, 0.99), fused=True)
    average = copy.deepcopy(model).requires_grad_(False)
    began = time.monotonic()
    for step in range(1, steps + 1):
        adam.param_groups[0]["lr"] = RATE * min(1, DECAYS_FROM / step) ** 0.5
        real, opacity, background = on_backgrounds(pictures[torch.randint(len(pictures), (BATCH,))])
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            mean, log_variance = model.encoder(real)
            thing, logits, behind = model.synthesis.layers(mean + torch.randn_like(mean) * (log_variance / 2).exp())
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        loss = (
            (torch.lerp(behind, thing, logits.sigmoid()) - real).abs().mean()
            + 0.25 * F.binary_cross_entropy_with_logits(logits, opacity)
            + 0.1 * (behind - background).abs().mean()
            + DIVERGENCE * divergence
        )
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        adam.step()

        kept = min(KEPT, (1 + step) / (10 + step))
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast.detach(), 1 - kept)
        if step % SAVE_EVERY == 0 or step == steps:
            save_compact(standardised(average, pictures), out, about | {"steps": str(step)})
            minutes = (time.monotonic() - began) / 60
            left = minutes * (steps / step - 1)
            print(f"step {step} of {steps}: loss {loss:.3f}, {minutes:.1f} minutes, {left:.1f} to go", flush=True)


@torch.no_grad()
def standardised(model: Autoencoder, pictures: Tensor) -> SynthesisNetwork:
    """The synthesis network for standard normal latents: those of the pictures, decorrelated and scaled."""
    with torch.random.fork_rng():
        encoded = [model.encoder(on_backgrounds(pictures)[0]) for _ in range(2)]
    means, log_variances = (torch.cat(part) for part in zip(*encoded, strict=True))
    values, vectors = torch.linalg.eigh(torch.cov(means.T) + torch.diag(log_variances.exp().mean(0)))
    synthesis = copy.deepcopy(model.synthesis)
    for layer in (synthesis.start, synthesis.coarse, synthesis.background):
        layer.bias.add_(layer.weight @ means.mean(0))
        layer.weight.copy_(layer.weight @ (vectors * values.sqrt()))
    return synthesis


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="PNG and JPEG pictures, at any depth")
    parser.add_argument("out", type=Path, help="the .safetensors file to write")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bfloat16", action="store_true", help="faster on processors that multiply bfloat16 matrices")
    options = parser.parse_args()
    if options.out.suffix != ".safetensors" or not options.out.parent.is_dir():
        parser.error(f"{options.out} must be a .safetensors file in a folder that exists")
    torch.manual_seed(options.seed)
    pictures = cut_outs(options.folder)
    print(f"{len(pictures)} pictures of {options.folder}", flush=True)
    about = {"pictures": str(len(pictures)), "seed": str(options.seed)}
    train(pictures, options.steps, options.bfloat16, options.out, about)


if __name__ == "__main__":
    main()
