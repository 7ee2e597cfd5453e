"""A small network with batch norm, whose counters NVFlare averages to fractions, and the digits of each site."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import fewbytes


class Network(torch.nn.Sequential):
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = torch.nn.Linear(64, 48), torch.nn.BatchNorm1d(48), torch.nn.ReLU(), torch.nn.Linear(48, 10)
        super().__init__(*layers)


def digits(site: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every third of the package's digits, from 0 to 1, and their labels; site 0 is nobody's."""
    with np.load(Path(fewbytes.__file__).parent / "data" / "digits.npz") as file:
        images, labels = (torch.from_numpy(file[name][site::3]) for name in ("images", "labels"))
    return images.flatten(1) / 16, labels.long()
