"""A compact generator of 32 x 32 colour images, shipped with the package.

`scripts/train_generator.py` trains it; `docs/generators.md` describes its data and quality.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.generators.protocol import check_latents

SHIPPED = Path(__file__).with_name("compact.safetensors")
LATENT_DIM = 128
IMAGE_SIZE = 32
KEY = "fewbytes"
"""The key of a file's metadata; its value describes the generator in JSON."""


class SynthesisNetwork(nn.Module):
    """Latents (n, LATENT_DIM) to images (n, 3, 32, 32) in about [-1, 1]: an object on a plain background.

    Four maps, the object's colours and the logit of its opacity, are the sum of a coarse part, linear in the latent,
    and a convolutional part. The background's colour is linear in the latent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(LATENT_DIM, 128 * 4 * 4)
        self.fine = nn.Sequential(
            *(nn.LeakyReLU(0.2), nn.ConvTranspose2d(128, 96, 4, stride=2, padding=1)),
            *(nn.LeakyReLU(0.2), nn.Conv2d(96, 96, 3, padding=1)),
            *(nn.LeakyReLU(0.2), nn.ConvTranspose2d(96, 64, 4, stride=2, padding=1)),
            *(nn.LeakyReLU(0.2), nn.Conv2d(64, 64, 3, padding=1)),
            *(nn.LeakyReLU(0.2), nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1)),
            *(nn.LeakyReLU(0.2), nn.Conv2d(32, 4, 3, padding=1)),
        )
        self.coarse = nn.Linear(LATENT_DIM, 4 * 8 * 8)
        self.background = nn.Linear(LATENT_DIM, 3)

    def layers(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The object (n, 3, 32, 32), the logits of its opacity (n, 1, 32, 32), the background (n, 3, 1, 1)."""
        x = self.start(latents).unflatten(1, (128, 4, 4)).contiguous(memory_format=torch.channels_last)
        coarse = self.coarse(latents).float().unflatten(1, (4, 8, 8))
        maps = self.fine(x).float() + F.interpolate(coarse, scale_factor=4.0, mode="bilinear")
        return maps[:, :3], 4 * maps[:, 3:], self.background(latents).float()[:, :, None, None]

    def forward(self, latents: Tensor) -> Tensor:
        """The object over the background; its opacity is the sigmoid of its logit."""
        thing, logits, background = self.layers(latents)
        return torch.lerp(background, thing, torch.sigmoid(logits))


class CompactGenerator:
    """A generator of 32 x 32 colour images from a safetensors file written by `save_compact`."""

    latent_dim = LATENT_DIM

    def __init__(self, path: Path | str) -> None:
        """Raises UserError for a file of another kind, or a damaged one."""
        self._network = SynthesisNetwork().eval().requires_grad_(False)
        self._network.load_state_dict(_read(Path(path), self._network.state_dict()))

    def sample_latents(self, n: int) -> Tensor:
        """Latents, float32 (n, 128): standard normal in every component."""
        return torch.randn(n, LATENT_DIM)

    @torch.no_grad()
    def synthesise(self, latents: Tensor) -> Tensor:
        """The images of latents (n, 128): float32 (n, 3, 32, 32) in [0, 1]. Raises UserError for another size."""
        check_latents(latents, LATENT_DIM)
        image: Tensor = self._network(latents)
        return (image / 2 + 0.5).clamp(0, 1)


def save_compact(network: SynthesisNetwork, path: Path, about: dict[str, str]) -> None:
    """Write the network as float16, with `about` (its training) in the metadata."""
    state = {name: value.half().contiguous() for name, value in network.state_dict().items()}
    with replacing(path) as file:
        file.write(save(state, metadata={KEY: json.dumps({"generator": "compact"} | about)}))


def _read(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a compact generator, float32. Raises UserError if names or shapes are not those `expected`."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "{}"))
            if not isinstance(about, dict) or about.get("generator") != "compact":
                raise UserError(f"{path} is not a compact generator: it was not written by scripts/train_generator.py")
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for name in sorted(shapes.keys() | expected):
                if name not in expected or shapes.get(name) != tuple(expected[name].shape):
                    raise UserError(f"{path} is not a compact generator of this version: {name!r} does not fit")
            state = {name: file.get_tensor(name).float() for name in expected}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"the generator {path} cannot be read: {error}") from None
    for name, value in state.items():
        if not value.isfinite().all():
            raise UserError(f"the generator {path} is damaged: {name!r} has values that are not finite")
    return state
