"""A method says whose privacy it can promise: then nothing goes round the noise, in any case."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import CASES
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import unpack

SEVERAL = [(name, of) for name, method in CASES.items() for of in sorted(method.promises.protects)]
NOTHING = "epsilon=8,delta=1e-5,clip=1e-30,noise=seeded"  # so that all but what goes round it is lost in rounding


def needed() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")


class Net(nn.Module):
    """A classifier without batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def task(data: int) -> fb.Task:
    random = torch.Generator().manual_seed(data)

    def some(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 1, 4, 4, generator=random), torch.randint(0, 3, (n,), generator=random)

    return fb.Task.of(Net, [(some(12), some(4)) for _ in range(4)], some(6))


def tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif dataclasses.is_dataclass(state):
        for each in dataclasses.fields(state):
            yield from tensors(getattr(state, each.name))


def server_state(method: fb.Method, folder: Any) -> list[Tensor]:
    return list(tensors(unpack(method.state_class("server"), read_checkpoint(folder).server)))


@pytest.mark.parametrize(("name", "of"), SEVERAL)
def test_the_server_keeps_nothing_of_the_data_but_what_bears_noise(name, of, tmp_path):
    needed()
    for data in (1, 2):
        dp = f"of={of},{NOTHING}"
        fb.run(CASES[name], task(data), rounds=2, workers=1, out=tmp_path / str(data), dp=dp, save_models=False)
    first, second = (server_state(CASES[name], tmp_path / data) for data in ("1", "2"))
    assert first
    assert all(torch.allclose(a, b, rtol=0, atol=1e-20) for a, b in zip(first, second, strict=True))
    fb.run(CASES[name], task(2), rounds=2, workers=1, out=tmp_path / "plain", save_models=False)
    plain = server_state(CASES[name], tmp_path / "plain")
    assert not all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(first, plain, strict=True))


@pytest.mark.parametrize(("name", "of"), SEVERAL)
def test_every_round_spends_and_all_together_no_more_than_epsilon(name, of):
    needed()
    dp = f"of={of},epsilon=4,delta=1e-5,clip=1,noise=seeded"
    result = fb.run(CASES[name], task(1), rounds=3, workers=1, dp=dp, save_models=False)
    spent = [row["privacy"]["epsilon"] for row in result.rounds]
    assert 0 < spent[0] < spent[1] < spent[2] <= 4
    assert result.summary["epsilon_spent"] == spent[2] > 3.99


@pytest.mark.parametrize("name", CASES)
def test_what_a_method_cannot_promise_is_refused_in_one_line_and_nothing_is_written(name, tmp_path):
    needed()
    for of in {"clients", "samples"} - CASES[name].promises.protects:
        with pytest.raises(fb.UserError, match=f"^dp of {of}: {CASES[name].method_name} sends values without noise"):
            fb.run(CASES[name], task(1), out=tmp_path / "run", dp=f"of={of},epsilon=8,delta=1e-5,clip=1")
    assert not list(tmp_path.iterdir())
