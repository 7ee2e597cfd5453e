"""Models with features of a given length, so that clients with different models can exchange features."""

from __future__ import annotations

from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.models.blocks import is_splittable, units_of


class PooledFeatures(nn.Module):
    """`model` with a new last layer: its features are averaged to `size` numbers, followed by a new classifier `fc`.

    The average is 1-d adaptive pooling over the feature vector: unchanged at that length, windows (possibly
    overlapping) of a longer vector, repetitions of a shorter one. The last layer is the `classifier` of a splittable
    model, else the last Linear. `fc` is a Linear, or with `hidden` two of them with tanh between. Changes `model`.
    Source: FedKTL, section 4.1. Raises UserError if there is no such layer.
    """

    def __init__(self, model: nn.Module, size: int, classes: int, hidden: int | None = None) -> None:
        super().__init__()
        model.set_submodule(_last_layer(model), nn.Identity())
        self.body, self.pool = model, nn.AdaptiveAvgPool1d(size)
        self.fc: nn.Module = nn.Linear(size, classes)
        if hidden is not None:
            self.fc = nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to logits (n, classes)."""
        logits: Tensor = self.fc(self.pool(self.body(x).flatten(1)))
        return logits

    @property
    def classifier(self) -> nn.Module:
        """`fc`: features (n, size) to logits."""
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        """The model's units, or the single unit `body`; the last one ends with the pooling."""
        splittable = is_splittable(self.body)
        units = units_of(self.body) if splittable else {"body": self.body}
        last = next(reversed(units))
        return {**units, last: nn.Sequential(units[last], nn.Flatten(), self.pool)}

    @property
    def default_cuts(self) -> dict[int, tuple[str, ...]]:
        """Those of the pooled model."""
        return getattr(self.body, "default_cuts", {})


def _last_layer(model: nn.Module) -> str:
    """The name of the last layer inside the model."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    last = model.classifier if is_splittable(model) else linears[-1] if linears else None
    found: list[str] = [name for name, module in model.named_modules() if module is last]
    if not found or not found[-1]:
        raise UserError(
            f"a {type(model).__name__} has no Linear as last layer to replace: leave out @, or use another model"
        )
    return found[-1]
