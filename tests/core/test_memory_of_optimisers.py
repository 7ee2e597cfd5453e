"""An optimiser's memory: two trainings with it are one training of both lengths."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import tiny_data
from torch import nn

import fewbytes as fb
from fewbytes.core.training import Local, fit
from fewbytes.wire import Dense, pack, unpack

TERMS = [
    {"optimiser": "adamw", "weight_decay": 0.1},
    {"optimiser": "adam"},
    {"momentum": 0.9},
    {"optimiser": "nesterov", "momentum": 0.9},
]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(memory_format=torch.channels_last)


def trained(terms: dict, lengths: list[int], memory: dict | None) -> list[torch.Tensor]:
    model, generator = build(), torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 1, 4, 4, generator=generator), torch.arange(9) % 3
    for length in lengths:
        fit(model, x, y, Local(steps=length, batch=9, lr=0.05, order="stored", **terms), memory=memory)
        if memory:  # it is sent or stored in between
            memory = unpack(Dense, bytes(pack(Dense(memory)))).dense()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("terms", TERMS)
def test_two_trainings_with_a_memory_are_one(terms):
    whole = trained(terms, [7], None)
    assert all(torch.equal(a, b) for a, b in zip(trained(terms, [3, 4], {}), whole, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(trained(terms, [3, 4], None), whole, strict=True))


def test_plain_sgd_has_nothing_to_remember():
    memory: dict[str, torch.Tensor] = {}
    trained({}, [2], memory)
    assert memory == {}


def test_privacy_of_samples_does_not_cover_it():
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")

    class Remembering(fb.FedAvg):
        @functools.wraps(fb.FedAvg.train)
        def train(self, state, message, site):
            site.fit(site.model(message.theta.dense()), self.local, memory={})

    task = fb.Task.on(tiny_data(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    with pytest.raises(fb.MethodError, match="continues an optimiser's state"):
        fb.run(Remembering(batch=8), task, rounds=1, workers=1, dp="of=samples,epsilon=8,delta=1e-5,clip=1")
