"""The network of NVFlare's hello-pt: 62,006 values, for colour images of 32 x 32 pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Network(nn.Module):
    """Two convolutions and three linear layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
            self.linear = nn.ModuleList([nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)])

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (n, 10), of images, (n, 3, 32, 32)."""
        for layer in (self.first, self.second):
            x = functional.max_pool2d(functional.relu(layer(x)), 2)
        x = x.flatten(1)
        for layer in self.linear[:-1]:
            x = functional.relu(layer(x))
        return self.linear[-1](x)
