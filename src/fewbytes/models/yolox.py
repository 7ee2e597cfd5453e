"""YOLOX object detectors (Ge et al. 2021, arXiv 2107.08430), from the package pixeltable-yolox."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fewbytes.base.errors import UserError

NAMES = ("yolox-nano", "yolox-tiny", "yolox-s", "yolox-m", "yolox-l", "yolox-x")
STRIDE = 32  # image heights and widths are multiples of this number of pixels


class Detector(nn.Module):
    """A YOLOX network, `name` one of NAMES, that detects objects of `classes` classes; state as in the package's own.

    Takes float32 RGB images (n, 3, H, W) in 0..1, H and W multiples of STRIDE. Weights are drawn from torch's global
    generator. Raises UserError if the package is not installed.
    """

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        try:
            from yolox.config import YoloxConfig  # slow to import
        except ImportError as error:
            raise detection_missing(f"model {name!r}") from error
        config = YoloxConfig.get_named_config(name)
        config.num_classes = classes
        network = config.get_model()
        self.backbone: nn.Module = network.backbone
        self.head: nn.Module = network.head
        self.classes = classes

    @property
    def predictors(self) -> tuple[str, ...]:
        """Names of the layers that compute the network's outputs."""
        return tuple(f"head.{kind}_preds.{i}" for kind in ("cls", "reg", "obj") for i in range(3))

    def forward(self, x: Tensor) -> Sequence[Tensor] | Tensor:
        """In training mode the features of three scales, the input of `loss`. In eval mode predictions
        (n, anchors, 5 + classes): centre x, centre y, width and height in pixels, the probability of an object, and the
        probability of each class."""
        features: Sequence[Tensor] = self.backbone(x.flip(1) * 255)  # the package's networks take BGR in 0..255
        if self.training:
            return features
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 has a precision of only a pixel or two
            predictions: Tensor = self.head([f.float() for f in features])
        return predictions

    def loss(self, outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        """YOLOX's loss with SimOTA's assignment of boxes: `targets` (n, most, 5) as in `fewbytes.data.Boxes`.

        Raises UserError if training has diverged.
        """
        outputs = [features.float() for features in outputs]
        with warnings.catch_warnings(), torch.autocast(outputs[0].device.type, enabled=False):
            warnings.simplefilter("ignore")  # the package disables CUDA's autocast in a deprecated way
            try:
                total: Tensor = self.head(outputs, targets, None)[0]
            except RuntimeError as error:
                if all(bool(features.isfinite().all()) for features in outputs):
                    raise
                raise UserError("training has diverged, the detector's features are not finite: lower lr") from error
        return total


def detection_missing(what: str) -> UserError:
    """The error if the optional packages of detection are missing."""
    return UserError(
        f"{what} needs packages that are not installed; install them with: pip install 'fewbytes[detection]'"
    )
