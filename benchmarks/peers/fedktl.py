"""Compares fewbytes' FedKTL with its authors' code (https://github.com/TsingZ0/FedKTL), with equal batches.

    git clone https://github.com/TsingZ0/FedKTL
    python benchmarks/peers/fedktl.py --fedktl FedKTL    # writes docs/agreement.json
    python benchmarks/peers/page.py

Compared is what clients do: training towards the frame (ArcFace), and the mapping from the server's images to latent
vectors. The authors' server needs StyleGAN's weights and draws at random: here it sends the pairs that our server made
in the same round. What our server does is tested against vectors of reference code (tests/methods/test_fedktl.py).
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common import TERMS, Row, copy_into
from compare import Peer, main
from htfllib import STORE, StoredWatch
from htfllib import patches as stored_patches
from torch import nn
from tsingz0 import Watch

import fewbytes as fb
from fewbytes.base.streams import seeded
from fewbytes.core.site import Site
from fewbytes.methods.fedktl import KnowledgeTransfer, Pairs
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import unpack_state

LATENT, RATE, SCALE = 128, 0.01, 8.0
"""The size of our compact generator's latent vectors, the paper's learning rate, and a scale of ArcFace's
at which roundings do not grow: at the authors' 64, three of eight clients end 1e-4 apart, after 4e-7 in round 1."""
METHOD = fb.FedKTL(**{**TERMS, "order": "stored"}, clip=100.0, scale=SCALE, server_epochs=1)
METHODS = {"fedktl": Row(METHOD, "FedKTL-stylegan-xl", same=({"lr": RATE}, ("-lr", str(RATE))))}
OPTIONS = ("-m", "HtFE2", "-fd", "64", "-GPath", os.devnull)


class NoGenerator(nn.Module):
    """In place of StyleGAN, of which only sizes are asked."""

    w_dim, num_ws = LATENT, 1


class FedKtlWatch(StoredWatch):
    """The server's frame and mapping are ours, and so are its pairs."""

    def give(self, client: Any, state: Any, extra: Any) -> None:
        client.s = SCALE
        *features, _, _ = state.values()  # before the classifier, in whose place is the projection
        copy_into(STORE[client.role, "model"], dict(enumerate([*features, *extra.head.values()])))

    def give_server(self, server: Any) -> None:
        site = Site(self.task, 0, 0, "client")
        STORE[server.role, "ETF"] = METHOD.parts(METHOD.client(site), site).network.frame.clone()
        with seeded(self.task.problem.seed, "mapping"):
            STORE[server.role, "proj_fc"] = nn.Linear(64, LATENT)
        pairs = first_pairs(self.task)
        made = list(zip(pairs.images.values(), pairs.vectors.rows, strict=True))
        server.align = lambda: None
        server.generate_images = lambda t: STORE.save(made, server.role, "data_generated")


def first_pairs(task: fb.Task) -> Pairs:
    """What our server sends with the requests of round 2."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "run"
        fb.run(METHOD.changed(lr=RATE), task, rounds=1, workers=1, out=out)
        state = unpack_state(KnowledgeTransfer, read_checkpoint(out).server)
    assert isinstance(state, KnowledgeTransfer)
    assert state.pairs is not None
    return state.pairs


def patches(watch: Watch) -> Iterator[Any]:
    """No generator is loaded."""
    yield from stored_patches(watch)
    server = importlib.import_module("flcore.servers.serverktl_stylegan_xl")
    yield mock.patch.object(server, "pickle", SimpleNamespace(load=lambda file: {"G_ema": NoGenerator()}))


if __name__ == "__main__":
    main(Peer("fedktl", METHODS, patches, FedKtlWatch, OPTIONS, seeds=False), __doc__)
