"""Compares the server half of FedKTL with its authors' code (https://github.com/TsingZ0/FedKTL): the alignment.

    git clone https://github.com/TsingZ0/FedKTL
    python benchmarks/peers/fedktl_server.py --fedktl FedKTL    # writes docs/agreement.json
    python benchmarks/peers/page.py

Both sides train the same transformer and table of centroids on the same prototypes, against the same valid latent
vectors of our compact generator: the authors' StyleGAN is only asked for such vectors. All prototypes are one batch, so
that their order has no effect. Adam makes whole steps of gradients that are rounding alone. So both sides compute with
64 bits, and the bias before batch normalisation, which has no other gradient, stays as it is.

The authors' code also sets the table to the classes' means, but writes them to views of it, so that it stays: the table
is learned, as with our `centroids=learned`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common import most_apart, record
from fedktl import LATENT
from htfllib import STORE
from torch import Tensor, nn
from tsingz0 import UNUSED, commit_of

import fewbytes as fb
from fewbytes.generators import load_generator
from fewbytes.methods.fedktl import make_transformer

CLASSES, CLIENTS, EPOCHS, SEED = 10, 8, 100, 1
METHOD = fb.FedKTL(server_epochs=EPOCHS, server_batch=1000, centroids="learned")


def draws() -> Iterator[Tensor]:
    """Valid latent vectors for each step; equal on both sides."""
    for step in count():
        torch.manual_seed(step)
        yield load_generator("compact").sample_latents(CLASSES * CLIENTS).double()


def theirs(module: Any, transformer: nn.Module, table: nn.Embedding, uploaded: list[Any]) -> list[Tensor]:
    """The centroids and the transformer's values after the authors' alignment."""
    server, latents = object.__new__(module.FedKTL), draws()
    server.role, server.save_folder_name, server.device = "Server", None, "cpu"
    server.server_learning_rate, server.lamda = METHOD.server_lr, METHOD.lambda_mse
    server.server_epochs, server.server_batch_size = EPOCHS, METHOD.server_batch
    server.MSEloss, server.classes_ids_tensor = nn.MSELoss(), torch.arange(CLASSES)
    STORE.update({("Server", "uploaded_protos"): uploaded, ("Server", "G"): nn.Identity()})
    STORE.update({("Server", "F"): transformer, ("Server", "Centroids"): table})
    utilities = mock.MagicMock(get_w_from_seed=lambda generator, n, device: next(latents)[:n, None])
    with mock.patch.multiple(module, load_item=STORE.load, save_item=STORE.save, gen_utils=utilities):
        server.align()
    return [STORE["Server", "latent_centroids"], *STORE["Server", "F"].state_dict().values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fedktl", metavar="PATH", type=Path, required=True, help="a checkout of the authors' code")
    checkout: Path = parser.parse_args().fedktl
    commit = commit_of(checkout)
    sys.path.insert(0, str((checkout / "system").resolve()))
    sys.modules.update({name: mock.MagicMock() for name in UNUSED if name not in sys.modules})
    module = importlib.import_module("flcore.servers.serverktl_stylegan_xl")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    labels = torch.arange(CLASSES).repeat(CLIENTS)
    prototypes = F.normalize(torch.randn(CLASSES, CLASSES)[labels] + 0.3 * torch.randn(len(labels), CLASSES), dim=1)
    other = module.Feature_Transformer(CLASSES, LATENT)
    other.mlp[0].bias.requires_grad_(False)
    ours, table, latents = make_transformer(CLASSES, LATENT), nn.Embedding(CLASSES, LATENT), draws()
    ours.load_state_dict(other.mlp.state_dict())
    ours[0].bias.requires_grad_(False)
    found = theirs(module, other, table, list(zip(prototypes, labels, strict=True)))
    free = METHOD.align(ours, table.weight.detach(), prototypes, labels, lambda n: next(latents)[:n])
    apart = most_apart([free, *ours.state_dict().values()], found)
    moved = float((free - table.weight.detach()).norm() / table.weight.norm())
    record("fedktl", commit, "fedktl", {"server": float(f"{apart:.2g}")})
    print(f"{apart:.1e} apart after {EPOCHS} epochs, in which the centroids moved by {moved:.0%} of their length")


if __name__ == "__main__":
    main()
