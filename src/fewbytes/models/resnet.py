"""ResNets for small images, with the papers' depths and parameter names."""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016); `activation` follows the first and the sum."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.activation = activation()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x (n, channels_in, h, w) to (n, width, h / stride, w / stride), rounded up."""
        y = self.activation(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.activation(y + self.shortcut(x))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride) and 1x1 convolutions and a shortcut; four times wider than `width` at its end.

    `activation` follows the first two and the sum.
    """

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.activation = activation()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(channels_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x (n, channels_in, h, w) to (n, 4 width, h / stride, w / stride), rounded up."""
        y = self.activation(self.bn1(self.conv1(x)))
        y = self.activation(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.activation(y + self.shortcut(x))
        return out


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out))


DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    4: (BasicBlock, (1,)),
    6: (BasicBlock, (1, 1)),
    8: (BasicBlock, (1, 1, 1)),
    10: (BasicBlock, (1, 1, 1, 1)),
    18: (BasicBlock, (2, 2, 2, 2)),
    26: (BasicBlock, (3, 3, 3, 3)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}
"""Depth -> kind of block, blocks per stage."""


class ResNet(nn.Module):
    """Stem (`pre_conv`, `pre_bn`), stages of blocks (`layers.<stage>.<block>`), global average pool, `fc`.

    `width` is the number of channels of the first stage; each later stage doubles it and halves the image. `stem`:
    "7x7" is a 7x7 convolution of stride 2 and a 3x3 max-pool of stride 2, "3x3" one 3x3 convolution of stride 1.
    Images (n, channels, any height and width) -> logits (n, classes). Convolutions start Kaiming-normal (fan-out),
    `fc` as in PyTorch. `activation` is what follows convolutions. Source: FedPURIN's ResNet-8 and -10; the 3x3 stem is
    He et al.'s for CIFAR.
    """

    def __init__(
        self, depth: int, channels: int, classes: int, width: int = 64, stem: str = "3x3",
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation()
        large = stem == "7x7"
        kernel, stride, padding = (7, 2, 3) if large else (3, 1, 1)
        self.pre_conv = nn.Conv2d(channels, width, kernel, stride, padding, bias=False)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        self.pre_bn = nn.BatchNorm2d(width)
        self.layers, reached = _stages(depth, width, activation)
        self.fc = nn.Linear(reached, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, h, w) to logits (n, classes)."""
        x = self.pool(self.activation(self.pre_bn(self.pre_conv(x))))
        logits: Tensor = self.fc(self.layers(x).mean(dim=(2, 3)))
        return logits

    @property
    def classifier(self) -> nn.Module:
        """`fc`: features (n, channels of the last stage) to logits."""
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        """The stem, every block, the global pool (see `fewbytes.models.blocks`)."""
        stem = nn.Sequential(self.pre_conv, self.pre_bn, self.activation, self.pool)
        blocks = {
            f"layers.{i}.{j}": block
            for i, stage in enumerate(self.layers.children())
            for j, block in enumerate(stage.children())
        }
        return {"stem": stem, **blocks, "pool": GlobalPool()}

    @property
    def default_cuts(self) -> dict[int, tuple[str, ...]]:
        """FuseFL's cuts into 2, 3 and 4 blocks at ends of stages, which fit any depth; ResNet-18 also into 8."""
        stages = [len(list(stage.children())) for stage in self.layers.children()]
        if len(stages) < 3:
            return {}
        half, last = f"layers.{len(stages) // 2 - 1}", f"layers.{len(stages) - 2}"
        cuts = {2: (half,), 3: ("stem", half), 4: ("stem", half, last)}
        if stages == [2, 2, 2, 2]:
            cuts[8] = ("stem", *(f"layers.{unit}" for unit in ("0.0", "0.1", "1.0", "2.0", "3.0", "3.1")))
        return cuts


def _stages(depth: int, width: int, activation: type[nn.Module]) -> tuple[nn.Sequential, int]:
    """The stages of blocks, and the number of the last one's output channels."""
    block, stages = DEPTHS[depth]
    layers, reached = nn.Sequential(), width
    for stage, blocks in enumerate(stages):
        row = nn.Sequential()
        for i in range(blocks):
            row.append(block(reached, width * 2**stage, 2 if stage and i == 0 else 1, activation))
            reached = width * 2**stage * block.expansion
        layers.append(row)
    return layers, reached


class GlobalPool(nn.Module):
    """The mean over height and width: (n, channels, height, width) to (n, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (n, channels, h, w) to (n, channels)."""
        return x.mean(dim=(2, 3))
