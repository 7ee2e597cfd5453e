"""A classifier with fixed class vectors: the equally spread columns of a simplex frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.state import State, load_state
from fewbytes.models.blocks import features_of, head_sizes


def simplex_frame(u: Tensor) -> Tensor:
    """The equiangular tight frame V = sqrt(C / (C - 1)) U (I - 11^T / C), (K, C), of orthonormal columns U (K, C).

    Its columns have length 1 and pairwise cosine -1 / (C - 1); with one class it is U. Source: FedKTL, 3.3.2.
    """
    classes = u.shape[1]
    if classes == 1:
        return u
    v = u @ (torch.eye(classes, dtype=u.dtype) - 1 / classes) * math.sqrt(classes / (classes - 1))
    return F.normalize(v.float(), dim=0)


class Embedding(nn.Module):
    """Samples to u = h(f(x)) / |h(f(x))|, (n, K)."""

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to vectors (n, K) of length 1."""
        return F.normalize(self.head(self.features(x)), dim=1)


class EtfNetwork(nn.Module):
    """Samples to the cosines (n, C) between their embeddings and the columns of a fixed frame (K, C)."""

    def __init__(self, embedding: Embedding, frame: Tensor) -> None:
        super().__init__()
        self.embedding = embedding
        self.register_buffer("frame", frame)
        self.frame: Tensor
        self.recipe: dict[str, Any] = {"kind": "etf"}
        """The arguments of `etf_network`, saved in the model's file; the caller adds `client`."""

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to cosines (n, C) in [-1, 1]."""
        cosines: Tensor = self.embedding(x) @ self.frame
        return cosines


def etf_network(recipe: Mapping[str, Any], state: State, model: Callable[[int], nn.Module]) -> EtfNetwork:
    """Rebuild the network from the `recipe` and state of a file; `model(client)` builds the client's model."""
    body, frame = model(recipe["client"]), state["frame"]
    head = nn.Linear(head_sizes(body)[0], frame.shape[0])
    network = EtfNetwork(Embedding(features_of(body), head), torch.zeros_like(frame))
    load_state(network, state)
    return network
