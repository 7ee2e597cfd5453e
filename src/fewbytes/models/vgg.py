"""VGG-9, the moderate CNN of FedMA."""

from __future__ import annotations

from torch import Tensor, nn

from fewbytes.base.errors import UserError

WIDTHS = (32, 64, 128, 128, 256, 256, 512, 512)  # channels of six convolutions, features of two layers


class Vgg9(nn.Module):
    """Six 3x3 convolutions `conv1` to `conv6`, two layers `fc1` and `fc2`, each with ReLU, and a classifier `fc`.

    2x2 max-pools follow `conv2`, `conv4` and `conv6`, dropout `conv4` (0.05), the flattening and `fc2` (0.1). No batch
    normalisation. `scale` multiplies all widths, rounded: 0.447 = 1/sqrt(5) for five clients of FuseFL. `shape` is
    (channels, height, width) of one image, at least 8 x 8. Source: FedMA (Wang et al. 2020).
    """

    default_cuts = {2: ("conv4",), 3: ("conv2", "conv4"), 4: ("conv2", "conv4", "conv6")}  # noqa: RUF012

    def __init__(self, shape: tuple[int, ...], classes: int, scale: float = 1.0) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 8:
            raise UserError(f"vgg9 needs images of at least 8 x 8 pixels, not {height} x {width}; use mlp")
        widths = [max(1, round(w * scale)) for w in WIDTHS]
        sizes = [channels, *widths]
        for i in range(6):
            self.add_module(f"conv{i + 1}", nn.Conv2d(sizes[i], sizes[i + 1], 3, padding=1))
        self.pool, self.drop, self.drop_features = nn.MaxPool2d(2), nn.Dropout(0.05), nn.Dropout(0.1)
        self.fc1 = nn.Linear(widths[5] * (height // 8) * (width // 8), widths[6])
        self.fc2 = nn.Linear(widths[6], widths[7])
        self.fc = nn.Linear(widths[7], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, h, w) to logits (n, classes)."""
        for unit in self.units().values():
            x = unit(x)
        logits: Tensor = self.fc(x)
        return logits

    @property
    def classifier(self) -> nn.Module:
        """`fc`: features (n, 512 scale) to logits."""
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        """Each layer with its activation, pooling and dropout (see `fewbytes.models.blocks`)."""
        after = {2: (self.pool,), 4: (self.pool, self.drop), 6: (self.pool,)}
        convolutions = {
            f"conv{i}": nn.Sequential(self.get_submodule(f"conv{i}"), nn.ReLU(), *after.get(i, ())) for i in range(1, 7)
        }
        return {
            **convolutions,
            "fc1": nn.Sequential(nn.Flatten(), self.drop_features, self.fc1, nn.ReLU()),
            "fc2": nn.Sequential(self.fc2, nn.ReLU(), self.drop_features),
        }
