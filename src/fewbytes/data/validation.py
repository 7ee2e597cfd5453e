"""Validation data: a part of clients' training data, by which a run chooses its best model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.streams import stream
from fewbytes.data.clients import FederatedData
from fewbytes.data.joined import joined
from fewbytes.data.split import ClientData, Split


def hold_out(data: FederatedData, share: float, seed: int, apart: bool = False) -> FederatedData:
    """`data` with this share of each client's training samples, of every class alike, held out as validation data.

    The server validates on all clients' together. `apart`: clients' data are on their own nodes, so that it validates
    on that share of its own test data, which are then no test data. At least one sample is held out wherever there are
    two. The result depends only on the arguments; a client's part only on its own data. Raises UserError for a share
    that is not between 0 and 1.

    >>> from fewbytes.data import Partition, federate, hold_out, load_dataset
    >>> data = hold_out(federate(load_dataset("digits"), Partition(clients=4)), 0.1, seed=1)
    >>> [(len(client.train), len(client.validation)) for client in data.clients], len(data.validation), len(data.test)
    ([(326, 36), (260, 29), (357, 40), (351, 39)], 144, 359)
    """
    if not 0 < share < 1:
        raise UserError(f"validation is a share of the training samples between 0 and 1, not {share!r}")

    def halved(split: Split, *whose: Any) -> tuple[Split, Split]:
        chosen = _chosen(split.labels.numpy(), share, stream(seed, "validation", *whose))
        return split.take(np.flatnonzero(~chosen)), split.take(np.flatnonzero(chosen))

    clients = []
    for i, client in enumerate(data.clients):
        train, held = halved(client.train, "client", i)
        held = Split(held.x, held.y, held.rows, None, held.learnt)  # without random changes
        clients.append(ClientData(train, client.test, held))
    if apart:
        test, own = halved(data.test, "server")
        return replace(data, clients=tuple(clients), test=test, validation=own)
    parts = [part for client in clients if (part := client.validation) is not None and len(part)]
    return replace(data, clients=tuple(clients), validation=joined(parts) if parts else data.test.take([]))


def _chosen(labels: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A mask of about this share of every class."""
    chosen, n = np.zeros(len(labels), dtype=bool), len(labels)
    if n < 2:
        return chosen
    order = rng.permutation(n)
    order = order[np.argsort(labels[order], kind="stable")]
    number = min(max(1, round(share * n)), n - 1)
    chosen[order[((np.arange(number) + 0.5) * n / number).astype(int)]] = True
    return chosen
