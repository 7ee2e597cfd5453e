"""A small U-Net for semantic segmentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import UserError


class UNet(nn.Module):
    """Ronneberger, Fischer, Brox, "U-Net", MICCAI 2015, small: two levels down and up, `width` channels at the top.

    Each level has two 3x3 convolutions with batch norm and ReLU. Max-pools halve, nearest neighbours double, and skip
    connections concatenate each level's features on the way up. `shape` is (channels, height, width) of one image.
    Raises UserError if a side is not a multiple of 4 pixels.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 16) -> None:
        super().__init__()
        channels, *size = shape
        if any(side % 4 for side in size):
            raise UserError(f"unet needs images whose sides are multiples of 4 pixels, not {size[0]} x {size[1]}")
        self.down1 = _pair(channels, width)
        self.down2 = _pair(width, 2 * width)
        self.bottom = _pair(2 * width, 4 * width)
        self.up2 = _pair(6 * width, 2 * width)
        self.up1 = _pair(3 * width, width)
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, h, w) to logits (n, classes, h, w)."""
        top = self.down1(x)
        middle = self.down2(F.max_pool2d(top, 2))
        x = self.bottom(F.max_pool2d(middle, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), middle], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), top], 1))
        logits: Tensor = self.classifier(x)
        return logits


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
