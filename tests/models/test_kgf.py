"""Generated kernels: values, gradients and constants against vectors of reference code; models made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.core.training import fit
from fewbytes.models.kgf import (
    GeneratedConv2d,
    Kernels,
    _Convolution,
    base_gradient,
    constants,
    kernel_bank,
    with_generated_kernels,
)

golden = pytest.mark.golden


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / "fedkgf" / f"{name}.npz") as file:
        return {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}


def close(value: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    torch.testing.assert_close(value.detach(), expected, rtol=rtol, atol=atol)


@golden
def test_kernels_and_their_gradients():
    found = vectors("kgf_values")
    for i in range(int(found["cases"])):
        w, alpha, beta, gradient = (found[f"c{i}_{name}"] for name in ("w", "alpha", "beta", "G"))
        close(kernel_bank(w, alpha, beta), found[f"c{i}_bank"])
        close(base_gradient(w, beta, gradient), found[f"c{i}_grad_w"])
        close(base_gradient(w, beta, gradient, through=False), found[f"c{i}_grad_direct_only"])
        short = kernel_bank(w.float(), alpha.float(), beta.float())
        close(short, found[f"c{i}_bank"].float(), 2e-4, 1e-6)


@golden
def test_zero_and_other_special_values():
    found = vectors("kgf_special")
    w, alpha, beta = (found[name].view(-1, 1, 1, 1) for name in ("w", "alpha", "beta"))
    close(kernel_bank(w, alpha, beta)[len(w) :].flatten(), found["kgf"])
    only = torch.cat([torch.zeros_like(w), torch.ones_like(w)])
    close(base_gradient(w, beta, only).flatten(), found["dkgf_dw"])
    short = kernel_bank(w.float(), alpha.float(), beta.float())[len(w) :].flatten()
    close(short, found["kgf_f32"], 2e-4, 1e-6)


@golden
def test_the_convolution_and_its_gradients():
    found = vectors("kgf_conv")
    for i in range(int(found["cases"])):
        x, w, alpha, beta = (found[f"c{i}_{name}"] for name in ("x", "w", "alpha", "beta"))
        stride, pad = int(found[f"c{i}_stride"]), int(found[f"c{i}_pad"])
        for through, name in ((True, "grad_w"), (False, "grad_direct_only")):
            base, images = w.clone().requires_grad_(), x.clone().requires_grad_()
            how = ([stride] * 2, [pad] * 2, [1, 1], through, True)
            y = _Convolution.apply(images, base, None, alpha, beta, how)
            close(y, found[f"c{i}_y"])
            (found[f"c{i}_R"] * y).sum().backward()
            close(base.grad, found[f"c{i}_{name}"])
        bank, own = kernel_bank(w, alpha, beta), x.clone().requires_grad_()
        (found[f"c{i}_R"] * torch.conv2d(own, bank, None, stride, pad)).sum().backward()
        close(images.grad, own.grad)


@golden
def test_every_node_draws_the_same_constants():
    found = vectors("kgf_draws")
    for i in range(int(found["cases"])):
        shape = tuple(int(n) for n in found[f"c{i}_shape"])
        alpha, beta = constants(int(found[f"c{i}_seed"]), int(found[f"c{i}_layer"]), shape)
        assert torch.equal(alpha, found[f"c{i}_alpha_f32"])
        assert torch.equal(beta, found[f"c{i}_beta_f32"])


def test_it_trains_and_saves_no_constants():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    with_generated_kernels(model, Kernels(base=2, seed=5))
    assert isinstance(model[0], GeneratedConv2d)
    x, y = torch.rand(64, 1, 4, 4), torch.arange(64) % 2
    x[:, 0, 0] += y[:, None]
    assert fit(model, x, y, fb.Local(epochs=20, lr=0.1, batch=16)) < 0.1


def test_what_cannot_be_generated_is_left_alone():
    model = nn.Sequential(nn.Conv2d(4, 32, 3, groups=2), nn.ConvTranspose2d(32, 32, 2), nn.Conv2d(32, 4, 1))
    with pytest.raises(fb.UserError, match="16 base kernels"):
        with_generated_kernels(model, Kernels())
    mixed = nn.Sequential(nn.Conv2d(4, 32, 3, groups=2), nn.Conv2d(32, 33, 1))
    with_generated_kernels(mixed, Kernels())
    assert type(mixed[0]) is nn.Conv2d
    assert mixed(torch.rand(1, 4, 6, 6)).shape == (1, 33, 4, 4)
