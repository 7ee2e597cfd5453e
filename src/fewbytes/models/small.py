"""The two small models: the papers' four-layer CNN and a perceptron for flat or tiny samples."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fewbytes.errors import UserError


class Cnn4(nn.Module):
    """Two 5x5 convolutions (32 and 64 channels), each with ReLU and 2x2 max-pool, a layer of 512, a classifier `fc`.

    `shape` is (channels, height, width) of one image. Source: FedKTL (McMahan et al. 2017's CNN, unpadded). Raises
    UserError if the image is under 16 x 16, too small for these layers.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, *size = shape
        height, width = (((n - 4) // 2 - 4) // 2 for n in size)
        if min(height, width) < 1:
            raise UserError(
                f"cnn4 needs images of at least 16 x 16 pixels, not {size[0]} x {size[1]}; use mlp or resnet8"
            )
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(64 * height * width, 512)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv1(x).relu())
        x = self.pool(self.conv2(x).relu())
        logits: Tensor = self.fc(self.fc1(x.flatten(1)).relu())
        return logits


class Mlp(nn.Module):
    """One hidden layer with ReLU on the flattened sample, and a classifier `fc`."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 200) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.fc1(x.flatten(1)).relu())
        return logits
