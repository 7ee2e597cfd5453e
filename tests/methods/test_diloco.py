"""DiLoCo: against a plain loop of torch's optimisers, and what fragments send, keep and miss."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from cases import CASES, opened, tiny_data, tiny_task
from torch import nn
from torch.nn import functional

import fewbytes as fb
from fewbytes.base.state import state_of
from fewbytes.methods.diloco import Replica, fragments_of, in_turn, joined
from fewbytes.methods.parts.averaging import Model
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import Dense, unpack

LAYERS = [["1.weight", "1.bias", "3.weight", "3.bias"], ["2.weight", "2.bias"]]
"""Of three layers those sent in odd rounds, and those sent in even ones."""
WHOLE = [*LAYERS[0], *LAYERS[1]]


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 5), nn.Linear(5, 3))


def task() -> fb.Task:
    return fb.Task.on(tiny_data(), three_layers)


def plain_loop(rounds: int, steps: int, fragments: list[list[str]]) -> dict[str, torch.Tensor]:
    """The server's model: a client's batch is all it has, so that no order matters."""
    data = [client.train for client in task().data.clients]
    x = [(train.x[:], train.y) for train in data]
    theta = task().problem.first_state()
    outer = {name: nn.Parameter(value.clone()) for name, value in theta.items()}
    groups = [torch.optim.SGD([outer[name] for name in names], 0.7, 0.9, nesterov=True) for names in fragments]
    models, inner = [three_layers() for _ in data], []
    for model in models:
        model.load_state_dict(theta)
        inner.append(torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1))
    for t in range(rounds):
        names = fragments[t % len(fragments)]
        for model, optimiser, (samples, labels) in zip(models, inner, x, strict=True):
            for _ in range(steps):
                optimiser.zero_grad()
                functional.cross_entropy(model(samples), labels).backward()
                optimiser.step()
        weights = [len(labels) for _, labels in x]
        for name in names:
            trained = [
                weight * model.get_parameter(name).detach() for weight, model in zip(weights, models, strict=True)
            ]
            outer[name].grad = outer[name].detach() - torch.stack(trained).sum(0) / sum(weights)
        groups[t % len(fragments)].step()
        for model in models:
            model.load_state_dict({name: outer[name].detach() for name in names}, strict=False)
    return {name: p.detach() for name, p in outer.items()}


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_run_is_the_papers_loop(fragments):
    method = fb.DiLoCo(steps=3, batch=100, lr=0.01, fragments=fragments)
    result = fb.run(method, task(), rounds=5, workers=1)
    expected = plain_loop(5, 3, LAYERS if fragments == 2 else [WHOLE])
    for name, value in state_of(result.global_model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_moments_stay_with_clients_from_round_to_round(tmp_path):
    fb.run(fb.DiLoCo(steps=3, batch=100), task(), rounds=2, out=tmp_path, workers=1)
    for client, version in read_checkpoint(tmp_path).named().items():
        file = tmp_path / "checkpoint" / "clients" / f"{client}-{version}.state"
        memory = unpack(Replica, file.read_bytes()).memory
        assert memory["step 1.weight"] == 6
        assert memory.keys() == {f"{what} {n}" for what in ("step", "exp_avg", "exp_avg_sq") for n in WHOLE}


def test_fragments_are_every_pth_layer_and_all_of_them_once():
    blocks = [f"h.{i}.{part}.weight" for i in range(5) for part in ("attn.c_attn", "mlp.c_fc")]
    names = ["wte.weight", *blocks, "ln_f.weight", "ln_f.bias"]
    found = fragments_of(names, 3)
    assert found[0] == ["wte.weight", *blocks[4:6], "ln_f.weight", "ln_f.bias"]  # layers 0, 3 and 6
    assert sorted(found[0] + found[1] + found[2]) == sorted(names)
    assert [in_turn(names, 3, t) for t in (1, 2, 3, 4)] == [*found, found[0]]
    assert fragments_of(names, 1) == [names]
    assert fragments_of(task().problem.first_state(), 2) == LAYERS


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(fb.UserError, match=r"^fragments=4: the model has only 3 layers to send in turn"):
        fb.run(fb.DiLoCo(fragments=4), task(), rounds=1)


def train(state: Replica, theta: dict[str, torch.Tensor], t: int) -> dict[str, torch.Tensor]:
    """What a client sends; it hardly moves."""
    method = fb.DiLoCo(steps=1, batch=100, lr=1e-12, weight_decay=0.0, fragments=2)
    return method.train(state, Model(Dense(theta)), opened(task(), 0, t, "train")).theta.dense()


def test_a_client_keeps_its_own_layers_until_it_misses_a_round():
    first = task().problem.first_state()
    state = Replica({}, {}, {})
    assert train(state, first, 1).keys() == set(LAYERS[0])
    state.theta = {name: value + 1 for name, value in state.theta.items()}  # it has learnt
    theta = {name: value + 5 for name, value in first.items()}
    state.received = theta  # of the server's model, nothing else has changed
    own = train(state, theta, 2)
    for name in LAYERS[1]:
        torch.testing.assert_close(own[name], first[name] + 1)
    for name in LAYERS[0]:  # sent in round 1, so renewed
        torch.testing.assert_close(state.theta[name], first[name] + 5)
    late = train(state, theta, 4)  # without round 3
    for name in LAYERS[1]:
        torch.testing.assert_close(late[name], first[name] + 5)


def test_what_rounding_corrects_later_reaches_a_clients_own_layers():
    own, before = {"a": torch.tensor([3.0]), "n": torch.tensor([7])}, {"a": torch.tensor([1.0]), "n": torch.tensor([0])}
    now = {"a": torch.tensor([1.25]), "n": torch.tensor([4])}
    assert joined(own, before, now, []) == {"a": torch.tensor([3.25]), "n": torch.tensor([7])}
    assert joined(own, before, now, ["a"])["a"] == 1.25
    assert joined(own, before, before, []) == own


def test_a_reply_of_other_layers_is_left_out():
    method = CASES["diloco-fragments"]
    left_out = fb.run(Wrong(**method.parameters), tiny_task(), rounds=1, workers=1).rounds[0]["left_out"]
    assert [(each["client"], each["outcome"]) for each in left_out] == [(1, "rejected")]
    assert "not of this round's fragment" in left_out[0]["why"]


class Wrong(fb.DiLoCo):
    """A DiLoCo whose client 1 sends the other fragment."""

    @functools.wraps(fb.DiLoCo.train)
    def train(self, state, message, site):
        reply = super().train(state, message, site)
        if site.me != 1:
            return reply
        other = in_turn(message.theta.state, self.fragments, site.round + 1)
        return replace(reply, theta=Dense({name: message.theta.dense()[name] for name in other}))


def test_a_quick_trial_counts_epochs():
    quick = fb.DiLoCo().quick(2)
    assert (quick.local.epochs, quick.local.steps, quick.local.optimiser) == (2, 0, "adamw")
