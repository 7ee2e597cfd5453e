"""Small models: the papers' four-layer CNN, a smooth LeNet, and a perceptron for flat or tiny samples."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fewbytes.base.errors import UserError


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
        """Images (n, channels, h, w) to logits (n, classes)."""
        x = self.pool(self.conv1(x).relu())
        x = self.pool(self.conv2(x).relu())
        logits: Tensor = self.fc(self.fc1(x.flatten(1)).relu())
        return logits

    @property
    def classifier(self) -> nn.Module:
        """`fc`: features (n, 512) to logits."""
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        """Each layer with its activation and pooling (see `fewbytes.models.blocks`)."""
        return {
            "conv1": nn.Sequential(self.conv1, nn.ReLU(), self.pool),
            "conv2": nn.Sequential(self.conv2, nn.ReLU(), self.pool),
            "fc1": nn.Sequential(nn.Flatten(), self.fc1, nn.ReLU()),
        }


class LeNet(nn.Module):
    """Three 5x5 convolutions of 12 channels (strides 2, 2, 1, padded), each with a sigmoid, and a classifier `fc`.

    `shape` is (channels, height, width) of one image, of any size. The model is smooth, so gradients can be matched by
    gradient descent. Source: the network of DLG and iDLG (Zhu et al. 2019, Zhao et al. 2020).
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, *size = shape
        height, width = ((n + 3) // 4 for n in size)
        self.conv1 = nn.Conv2d(channels, 12, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(12, 12, 5, stride=2, padding=2)
        self.conv3 = nn.Conv2d(12, 12, 5, padding=2)
        self.fc = nn.Linear(12 * height * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, h, w) to logits (n, classes)."""
        for convolution in (self.conv1, self.conv2, self.conv3):
            x = convolution(x).sigmoid()
        logits: Tensor = self.fc(x.flatten(1))
        return logits

    @property
    def classifier(self) -> nn.Module:
        """`fc`: features (n, 12 ⌈h/4⌉ ⌈w/4⌉) to logits."""
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        """Each convolution with its sigmoid (see `fewbytes.models.blocks`)."""
        named = {"conv1": self.conv1, "conv2": self.conv2, "conv3": self.conv3}
        return {name: nn.Sequential(layer, nn.Sigmoid()) for name, layer in named.items()}


class Mlp(nn.Module):
    """Hidden layers `fc1`, `fc2`, … with ReLU on the flattened sample, and a classifier `fc`."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 200, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers
        for i in range(layers):
            self.add_module(f"fc{i + 1}", nn.Linear(hidden if i else math.prod(shape), hidden))
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to logits (n, classes)."""
        x = x.flatten(1)
        for i in range(self.layers):
            x = self.get_submodule(f"fc{i + 1}")(x).relu()
        logits: Tensor = self.fc(x)
        return logits

    @property
    def classifier(self) -> nn.Module:
        """`fc`: features (n, hidden) to logits."""
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        """Each hidden layer (see `fewbytes.models.blocks`)."""
        names = [f"fc{i + 1}" for i in range(self.layers)]
        return {name: nn.Sequential(nn.Flatten(), self.get_submodule(name), nn.ReLU()) for name in names}
