"""A classifier without weights: a sample's class is that of the prototype nearest to its features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewbytes.base.state import State, load_state
from fewbytes.models.blocks import features_of


class PrototypeNetwork(nn.Module):
    """Samples to minus the mean squared distance of their features to every class's prototype, (n, C).

    `prototypes`: rows (m, K') of the `known` classes, at least one. Classes without a prototype get a larger distance
    than all others.
    """

    def __init__(self, features: nn.Module, prototypes: Tensor, known: Sequence[int], classes: int) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("known", torch.tensor(known))
        self.prototypes: Tensor
        self.known: Tensor
        self.classes = classes
        self.recipe: dict[str, Any] = {"kind": "prototypes", "classes": classes}
        """The arguments of `prototype_network`, saved in the model's file; the caller adds `client`."""

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to scores (n, C), at most 0."""
        features = self.features(x).float()
        if torch.compiler.is_compiling():  # exported: ONNX has no cdist
            distances = (features[:, None] - self.prototypes).square().mean(2)
        else:
            exact = "donot_use_mm_for_euclid_dist"
            distances = torch.cdist(features, self.prototypes, compute_mode=exact).square() / features.shape[1]
        farther = distances.amax(1, keepdim=True) + 1
        scores: Tensor = -farther.repeat(1, self.classes).index_copy(1, self.known, distances)
        return scores


def prototype_network(recipe: Mapping[str, Any], state: State, model: Callable[[int], nn.Module]) -> PrototypeNetwork:
    """Rebuild the network from the `recipe` and state of a file; `model(client)` builds the client's model."""
    features, prototypes = features_of(model(recipe["client"])), state["prototypes"]
    network = PrototypeNetwork(features, torch.zeros_like(prototypes), state["known"].tolist(), recipe["classes"])
    load_state(network, state)
    return network
