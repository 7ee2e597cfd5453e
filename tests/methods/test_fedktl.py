"""FedKTL: its equations against vectors computed by reference code, its properties, its bytes, its bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.methods.fedktl import (
    Local,
    align,
    arcface_logits,
    client_images,
    make_transformer,
    mmd,
    with_class_means,
)
from fewbytes.methods.heterogeneous import class_means
from fewbytes.models.etf import Embedding, EtfNetwork, simplex_frame
from fewbytes.state import load_state, state_of
from fewbytes.training import fit, outputs

CASES = ["default", "first_round_no_pairs", "plain_s1_m0", "clip"]


def close(value: Tensor, expected: np.ndarray | Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(value.detach(), torch.as_tensor(expected).to(value.dtype), rtol=rtol, atol=atol)


def network(state: dict[str, Tensor], frame: Tensor) -> EtfNetwork:
    """The golden vectors' small network with the given values."""
    convolution, width = state["base.0.weight"], state["head.weight"].shape[1]
    base = nn.Sequential(
        nn.Conv2d(convolution.shape[1], convolution.shape[0], 3, padding=1),
        nn.BatchNorm2d(convolution.shape[0]),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.AdaptiveAvgPool1d(width),
    )
    head = nn.Linear(width, state["head.weight"].shape[0])
    load_state(base, {k.removeprefix("base."): v for k, v in state.items() if k.startswith("base.")})
    load_state(head, {k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")})
    return EtfNetwork(Embedding(base, head), frame)


def named(network: EtfNetwork) -> dict[str, Tensor]:
    parts = {"base": network.embedding.features, "head": network.embedding.head}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in state_of(module).items()}


# Golden vectors -------------------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_the_frame(golden):
    g = golden("fedktl/ktl_etf")
    for case in g.below():
        frame = simplex_frame(torch.from_numpy(g[f"{case}/P"]))
        close(frame, g[f"{case}/etf"])
        close(frame.T @ frame, g[f"{case}/gram"], atol=2e-6)
        close(F.normalize(frame, dim=0).T, g[f"{case}/etf_rows_normalized"])


@pytest.mark.golden
def test_the_discrepancy_and_its_gradient(golden):
    g = golden("fedktl/ktl_mmd")
    for case in g.below():
        x = torch.from_numpy(g[f"{case}/x"]).requires_grad_()
        y = torch.from_numpy(g[f"{case}/y"]) if f"{case}/y" in g else x.detach()
        value = mmd(x, y)
        close(value, g[f"{case}/mmd"], rtol=1e-3, atol=1e-5)
        if f"{case}/grad_x" in g:
            value.backward()
            close(x.grad, g[f"{case}/grad_x"], rtol=1e-3, atol=1e-5)


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES)
def test_two_local_steps(golden, case):
    g = golden("fedktl/ktl_local")
    mu, scale, margin = (float(v) for v in g[f"{case}/mu_s_m"])
    method = fb.FedKTL(mu=mu, scale=scale, margin=margin, lr=float(g["lr"]), batch=g["x"].shape[1])
    net = network(g.state("init/model"), torch.from_numpy(g["etf"]))
    local, pairs = Local(net), None
    if len(g[f"{case}/mse"]):
        weight = g.state("init/proj")["weight"]
        local.mapping = nn.Linear(weight.shape[1], weight.shape[0])
        load_state(local.mapping, g.state("init/proj"))
        pairs = torch.from_numpy(g["x_gen"]), torch.from_numpy(g["latent_gen"])
    logits, losses, norms = [], [], []
    arcface = method.loss

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        logits.append(arcface_logits(scores, labels, scale, margin).detach())
        losses.append(float(arcface(scores, labels).detach()))
        return arcface(scores, labels)

    clip = method.clipped(local)

    def before_step() -> None:
        norms.append([float(nn.utils.get_total_norm(p.grad for p in m.parameters())) for m in local.children()])
        clip()

    x, y = torch.from_numpy(g["x"]).flatten(0, 1), torch.from_numpy(g["y"]).flatten()
    extra = None if pairs is None else method.transfer_loss(local, net.embedding.features, *pairs)
    fit(
        local, x, y, epochs=1, lr=method.lr, batch=method.batch, order=method.order, loss=loss, extra=extra,
        before_step=before_step,
    )  # fmt: skip
    close(torch.stack(logits)[0], g[f"{case}/logits"][0], rtol=1e-5, atol=1e-4)
    close(torch.stack(logits), g[f"{case}/logits"], rtol=2e-3, atol=1e-2)
    close(torch.tensor(losses), g[f"{case}/ce"], rtol=1e-3, atol=1e-3)
    norms = torch.tensor(norms)
    close(norms, g[f"{case}/grad_norm_model_proj"][:, : norms.shape[1]], rtol=2e-3, atol=1e-3)
    for name, value in named(net).items():
        close(value.float(), g[f"{case}/after/model/{name}"], rtol=1e-3, atol=1e-5)
    if pairs is not None:
        for name, value in state_of(local.mapping).items():
            close(value, g[f"{case}/after/proj/{name}"], rtol=1e-3, atol=1e-5)


@pytest.mark.golden
def test_prototypes_and_predictions(golden):
    g = golden("fedktl/ktl_protos")
    net = network(g.state("model"), torch.from_numpy(g["etf"]))
    x, y = torch.from_numpy(g["x"]).flatten(0, 1), torch.from_numpy(g["y"]).flatten()
    means = class_means(outputs(net.embedding, x), y)
    assert means.classes == g["proto_labels"].tolist()
    close(F.normalize(means.rows, dim=1), g["protos"])
    assert means.rows.numel() == g["upload_elements"]
    cosines = outputs(net, x)
    close(cosines, g["test_cosine"])
    assert cosines.argmax(1).tolist() == g["test_pred"].tolist()


@pytest.mark.golden
@pytest.mark.parametrize("case", ["one_step", "three_steps", "one_step_reset"])
def test_alignment(golden, case):
    g = golden("fedktl/ktl_align")
    prototypes, labels = torch.from_numpy(g["protos"]), torch.from_numpy(g["labels"])
    latents = list(torch.from_numpy(g[f"{case}/latents"]))
    start = torch.from_numpy(g["init/centroids"])
    f = make_transformer(prototypes.shape[1], start.shape[1])
    load_state(f, {k.removeprefix("mlp."): v for k, v in g.state("init/F").items()})
    table = "means" if case == "one_step_reset" else "learned"
    if f"{case}/class_means_before" in g:
        close(with_class_means(start, f, prototypes, labels), g[f"{case}/class_means_before"])
    if table == "means":
        close(with_class_means(start, f, prototypes, labels), g[f"{case}/init_centroids"])
    epochs = len(latents)
    made = align(
        f, start, prototypes, labels, lambda n: latents.pop(0), epochs=epochs, batch=len(labels), lr=float(g["lr"]),
        lambda_mse=float(g["lambda"]), table=table,
    )  # fmt: skip
    after = {k.removeprefix("mlp."): v for k, v in g.state(f"{case}/after/F").items()}
    for name, value in state_of(f).items():
        if name not in ("0.bias", "1.running_mean"):  # rounding noise made large by Adam
            close(value.float(), after[name], rtol=1e-3, atol=2e-4)
    if table == "learned":
        close(made, g[f"{case}/after/centroids_embedding"], rtol=1e-3, atol=2e-4)
    load_state(f, {name: after[name] for name in ("0.bias", "1.running_mean")})
    close(with_class_means(start, f, prototypes, labels), g[f"{case}/class_means_after"], rtol=2e-3, atol=1e-3)


@pytest.mark.golden
def test_images_for_clients(golden):
    g = golden("fedktl/ktl_images")
    synthesised = (torch.from_numpy(g["synthesis_output"]) * 127.5 + 128).clamp(0, 255) / 255  # StyleGAN3's
    images = client_images(synthesised, g["images"].shape[1:])
    close((images - 0.5) / 0.5, g["images"])
    assert np.array_equal(g["vectors"], g["latent_centroids"])  # the pair's vector is the centroid itself
