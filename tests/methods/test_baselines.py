"""FedProx, FedNova, SCAFFOLD, FedAvg with a server's step, FedAdam, FedYogi, FedBuff, Ditto, FedRep: against a second
implementation, and what holds in general.

The second one is of numpy and float64, written from the papers' equations, on a network of two linear layers. A
client's batch is all it has, so that an epoch is one step and no order matters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import LOCAL, late_task, opened, tiny_data, tiny_task
from torch import nn

import fewbytes as fb
from fewbytes.base.state import state_of
from fewbytes.data import Split
from fewbytes.methods.fedrep import Body
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own
from fewbytes.methods.scaffold import Control, Controlled
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import Dense, unpack

LR, ROUNDS = 0.3, 3
FULL = {"lr": LR, "batch": 100}
CLOSE = {"rtol": 2e-4, "atol": 2e-6}
HEAD = ["2.weight", "2.bias"]
Weights = dict[str, np.ndarray]


# ---------------------------------------------------------------------------------------------------- the second one


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3))


def two_layer_task() -> fb.Task:
    return fb.Task.on(tiny_data(), two_layers)


def numbers(state: dict[str, torch.Tensor]) -> Weights:
    return {name: value.double().numpy().copy() for name, value in state.items()}


def gradient(w: Weights, client: int) -> Weights:
    """Of the mean cross-entropy over all that a client has."""
    data = two_layer_task().data.clients[client].train
    x, y = data.x[:].double().numpy().reshape(len(data), -1), data.y.numpy()
    h = x @ w["1.weight"].T + w["1.bias"]
    o = h @ w["2.weight"].T + w["2.bias"]
    p = np.exp(o - o.max(1, keepdims=True))
    d = (p / p.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)
    dh = d @ w["2.weight"]
    return {"1.weight": dh.T @ x, "1.bias": dh.sum(0), "2.weight": d.T @ h, "2.bias": d.sum(0)}


def plus(a: Weights, b: Weights, scale: float = 1.0) -> Weights:
    return {name: value + scale * b[name] for name, value in a.items()}


def mean(states: list[Weights], weights: list[float] | None = None) -> Weights:
    return {name: np.average([state[name] for state in states], axis=0, weights=weights) for name in states[0]}


def steps(w: Weights, k: int, direction, names=None) -> Weights:
    for _ in range(k):
        d = direction(w)
        w = {name: value - LR * d[name] if names is None or name in names else value for name, value in w.items()}
    return w


def samples() -> list[float]:
    return [len(client.train) for client in two_layer_task().data.clients]


def first() -> Weights:
    return numbers(two_layer_task().problem.first_state())


class Finished:
    """A run of the library: its models, states and cohorts."""

    def __init__(self, method: fb.Method, task: fb.Task, folder, rounds: int = ROUNDS, **settings) -> None:
        result = fb.run(method, task, rounds=rounds, out=folder, workers=1, **settings)
        self.method, self.folder, checkpoint = method, folder, read_checkpoint(folder)
        self.model = numbers(result.global_model.state_dict()) if result.global_model else {}
        kind = method.state_class("server")
        self.server = unpack(kind, checkpoint.server)
        columns = result.ledger.columns()
        self.cohorts = [columns["client"][columns["round"] == t].tolist() for t in range(1, rounds + 1)]
        self.versions = checkpoint.named()

    def state(self, client: int):
        file = self.folder / "checkpoint" / "clients" / f"{client}-{self.versions[client]}.state"
        return unpack(self.method.state_class("client"), file.read_bytes())


def same(found, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **CLOSE)


# ---------------------------------------------------------------------------------------------------- equations


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_fedprox(mu, tmp_path):
    run, w = Finished(fb.FedProx(**FULL, epochs=4, mu=mu), two_layer_task(), tmp_path), first()
    for _ in range(ROUNDS):
        trained = [steps(w, 4, lambda v, w=w, i=i: plus(gradient(v, i), plus(v, w, -1), mu)) for i in range(4)]
        w = mean(trained, samples())
    same(run.model, w)


@pytest.mark.parametrize("terms", [{}, {"momentum": 0.6}, {"momentum": 0.6, "optimiser": "nesterov"}, {"mu": 0.5}])
def test_fednova(terms, tmp_path):
    """Clients of equal lengths move the model as FedAvg or FedProx does."""
    run = Finished(fb.FedNova(**FULL, epochs=4, **terms), two_layer_task(), tmp_path / "nova")
    kind = fb.FedProx if "mu" in terms else fb.FedAvg
    same(run.model, Finished(kind(**FULL, epochs=4, **terms), two_layer_task(), tmp_path / "avg").model)


def weights(steps: int, terms: dict) -> list[float]:
    """The paper's vector a_i: what a gradient of 1 in one step alone changes, here by torch's own optimiser."""
    found, rho, mu = [], terms.get("momentum", 0.0), terms.get("mu", 0.0)
    for k in range(steps):
        y = nn.Parameter(torch.zeros((), dtype=torch.float64))
        sgd = torch.optim.SGD([y], lr=LR, momentum=rho, nesterov=terms.get("optimiser") == "nesterov")
        for step in range(steps):
            y.grad = torch.tensor(float(step == k), dtype=torch.float64) + mu * y.detach()
            sgd.step()
        found.append(-y.item() / LR)
    return found


@pytest.mark.parametrize("terms", [{}, {"momentum": 0.6}, {"momentum": 0.6, "optimiser": "nesterov"}, {"mu": 0.5}])
def test_fednova_with_clients_that_take_different_numbers_of_steps(terms, tmp_path):
    method, task = fb.FedNova(lr=LR, batch=9, order="stored", last="kept", epochs=1, **terms), two_layer_task()
    sites = [opened(task, i, 1, "train") for i in range(4)]
    steps = [site.steps(method.local) for site in sites]
    assert len(set(steps)) > 1
    norms, x, changes = [sum(map(abs, weights(k, terms))) for k in steps], task.problem.first_state(), []
    for site, norm in zip(sites, norms, strict=True):
        reply = method.train(None, Model(Dense(x)), site)
        assert reply.length == pytest.approx(norm)
        changes.append(numbers(reply.change.dense()))
    w = plus(numbers(x), mean(changes, samples()), float(np.average(norms, weights=samples())))
    same(Finished(method, task, tmp_path, 1).model, w)


class Constant(nn.Module):
    """One weight, its output for any sample."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w.expand(len(x), 1)


def test_fednova_s_fixed_point_is_the_stated_objective_s_and_fedavg_s_is_not():
    """Squared error from targets of 0, at one client, and of 5, at another with eight times the samples and steps."""
    splits = [(torch.zeros(n, 1), torch.full((n,), target)) for n, target in ((8, 0.0), (64, 5.0))]
    task, optimum = fb.Task.of(Constant, [(split, split) for split in splits]), 5 * 64 / 72
    found = {
        kind: fb.run(kind(lr=0.005, batch=8, epochs=1), task, rounds=150, workers=1).global_model.w.item()
        for kind in (fb.FedNova, fb.FedAvg)
    }
    assert found[fb.FedNova] == pytest.approx(optimum, abs=0.03)
    assert found[fb.FedAvg] > optimum + 0.4


def test_fednova_refuses_steps_that_it_cannot_normalise():
    with pytest.raises(fb.UserError, match="optimiser is adam: use sgd"):
        fb.FedNova(optimiser="adam")
    with pytest.raises(fb.UserError, match="mu times lr must be below 1"):
        fb.FedNova(mu=2, lr=0.5)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_fedavg_with_a_step_of_its_server(beta, nesterov, tmp_path):
    """SGD's step on the clients' mean change, here with torch's own optimiser."""
    if nesterov and not beta:
        with pytest.raises(fb.UserError, match="set server_momentum above 0"):
            fb.FedAvg(nesterov=True)
        return
    method = fb.FedAvg(**FULL, epochs=4, server_lr=0.7, server_momentum=beta, nesterov=nesterov)
    run, x = Finished(method, two_layer_task(), tmp_path), first()
    w = {name: nn.Parameter(torch.from_numpy(value.copy())) for name, value in x.items()}
    outer = torch.optim.SGD(w.values(), lr=0.7, momentum=beta, nesterov=nesterov)
    for _ in range(ROUNDS):
        x = {name: p.detach().numpy().copy() for name, p in w.items()}
        d = mean([plus(steps(x, 4, lambda y, i=i, x=x: gradient(y, i)), x, -1) for i in range(4)], samples())
        for name, p in w.items():
            p.grad = torch.from_numpy(-d[name])
        outer.step()
    same(run.model, {name: p.detach().numpy() for name, p in w.items()})
    if beta:
        same(run.server.velocity, {name: -outer.state[p]["momentum_buffer"].numpy() for name, p in w.items()})


def test_fedavg_s_statistics_take_no_step():
    """Batch normalisation's are the clients' mean, whatever the server's step."""
    mean, moved = left(fb.FedAvg(**LOCAL), 1), left(fb.FedAvg(**LOCAL, server_lr=0.5, server_momentum=0.9), 1)
    assert torch.equal(mean["norm.running_mean"], moved["norm.running_mean"])
    assert mean["norm.num_batches_tracked"] == moved["norm.num_batches_tracked"] > 0
    start = tiny_task().problem.first_state()["fc.weight"]
    torch.testing.assert_close(moved["fc.weight"] - start, (mean["fc.weight"] - start) / 2, rtol=1e-4, atol=1e-6)


def test_fedavg_without_a_server_s_step_keeps_the_state_and_the_name_of_earlier_runs():
    """Both are in checkpoints: runs from before there was such a step can be resumed."""
    before = f"FedAvg(fraction=1.0, local={fb.FedAvg().local!r}, buffers='averaged', received=False)"
    assert repr(fb.FedAvg()) == before
    assert fb.FedAvg().state_class("server") is type(fb.FedAvg().server(tiny_task().problem)) is GlobalModel
    assert repr(fb.FedAvg(server_lr=0.5)) == before[:-1] + ", server_lr=0.5)"


@pytest.mark.parametrize("name", ["FedAdam", "FedYogi"])
def test_adaptive_servers(name, tmp_path):
    method = getattr(fb, name)(**FULL, epochs=4, server_lr=0.03)
    run, x = Finished(method, two_layer_task(), tmp_path), first()
    m, v = {k: np.zeros_like(a) for k, a in x.items()}, {k: np.full_like(a, 1e-6) for k, a in x.items()}
    for _ in range(ROUNDS):
        changes = [plus(steps(x, 4, lambda y, i=i: gradient(y, i)), x, -1) for i in range(4)]
        d = mean(changes, samples())
        m = {k: 0.9 * m[k] + 0.1 * d[k] for k in x}
        if name == "FedAdam":
            v = {k: 0.99 * v[k] + 0.01 * d[k] ** 2 for k in x}
        else:
            v = {k: v[k] - 0.01 * d[k] ** 2 * np.sign(v[k] - d[k] ** 2) for k in x}
        x = {k: x[k] + 0.03 * m[k] / (np.sqrt(v[k]) + 1e-3) for k in x}
    same(run.server.m, m)
    same(run.server.v, v)
    same(run.model, x)


@pytest.mark.parametrize("a", [0.5, 0.0])
def test_fedbuff(a, tmp_path):
    """Four clients are always at work, but that who was heard waits for the round's end."""
    method = fb.FedBuff(**FULL, epochs=2, concurrency=4, buffer=2, server_lr=0.7, discount=a)
    speeds = [1, 2, 4, 9]
    run, w, rounds = Finished(method, two_layer_task(), tmp_path, 6, speeds="1,2,4,9"), first(), []
    now, done = 0, {i: (speed, w, 0) for i, speed in enumerate(speeds)}  # when, what each began with, in which round
    for t in range(6):
        changes, heard = [], []
        for _ in range(2):
            i = min(done, key=lambda i: done[i][0])
            now, begun, since = done.pop(i)
            change = plus(steps(begun, 2, lambda v, i=i: gradient(v, i)), begun, -1)
            changes.append({name: value / (1 + t - since) ** a for name, value in change.items()})
            heard.append(i)
        w = plus(w, mean(changes), 0.7)
        done |= {i: (now + speeds[i], w, t + 1) for i in heard}
        rounds.append(heard)
    assert any(3 in heard for heard in rounds)
    assert run.cohorts == rounds
    same(run.model, w)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_scaffold(fraction, tmp_path):
    """Option II as it stands in the paper."""
    method = fb.SCAFFOLD(**FULL, epochs=4, server_lr=0.7, fraction=fraction)
    run, x = Finished(method, two_layer_task(), tmp_path), first()
    c = {k: np.zeros_like(a) for k, a in x.items()}
    own = [c] * 4
    for cohort in run.cohorts:
        assert len(cohort) == 4 * fraction
        dy, dc = [], []
        for i in cohort:
            y = steps(x, 4, lambda y, i=i, c=c: plus(plus(gradient(y, i), own[i], -1), c))
            new = plus(plus(own[i], c, -1), plus(x, y, -1), 1 / (4 * LR))
            dy.append(plus(y, x, -1))
            dc.append(plus(new, own[i], -1))
            own[i] = new
        x, c = plus(x, mean(dy), 0.7), plus(c, mean(dc), len(cohort) / 4)
    same(run.model, x)
    same(run.server.control, c)
    for i in {i for cohort in run.cohorts for i in cohort}:
        same(run.state(i).control, own[i])
    same(run.server.control, mean(own))  # what c is there for


def test_ditto(tmp_path):
    method = fb.Ditto(**FULL, epochs=2, personal_epochs=3, lambda_near=0.4)
    run, w = Finished(method, two_layer_task(), tmp_path), first()
    personal = [w] * 4
    for _ in range(ROUNDS):
        for i, v in enumerate(personal):
            personal[i] = steps(v, 3, lambda v, w=w, i=i: plus(gradient(v, i), plus(v, w, -1), 0.4))
        w = mean([steps(w, 2, lambda u, i=i: gradient(u, i)) for i in range(4)], samples())
    same(run.model, w)
    for i, v in enumerate(personal):
        same(run.state(i).theta, v)


def test_fedrep(tmp_path):
    method, task = fb.FedRep(**FULL, epochs=2, momentum=0.0, head_epochs=3), two_layer_task()
    run, w = Finished(method, task, tmp_path), first()
    phi = {name: value for name, value in w.items() if name not in HEAD}
    heads = [numbers(method.client(opened(task, i, 0, "client")).theta) for i in range(4)]
    assert all(sorted(head) == sorted(HEAD) for head in heads)
    for _ in range(ROUNDS):
        bodies = []
        for i, head in enumerate(heads):
            w = steps(phi | head, 3, lambda u, i=i: gradient(u, i), HEAD)
            w = steps(w, 2, lambda u, i=i: gradient(u, i), phi)
            heads[i] = {name: w[name] for name in HEAD}
            bodies.append({name: w[name] for name in phi})
        phi = mean(bodies)
    same(run.server.theta, phi)
    for i, (head, own) in enumerate(zip(heads, bodies, strict=True)):
        same(run.state(i).theta, head | own)


# ---------------------------------------------------------------------------------------------------- equalities


def left(method: fb.Method, rounds: int = 3) -> dict[str, torch.Tensor]:
    """The server's model, on clients with batch normalisation and dropout."""
    return state_of(fb.run(method, tiny_task(), rounds=rounds, workers=1).global_model)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


TWICE = LOCAL | {"epochs": 2, "momentum": 0.9, "fraction": 0.75}


def test_what_fedavg_s_own_settings_make_is_fedavg_bit_for_bit():
    fedavg = left(fb.FedAvg(**TWICE))
    assert equal(left(fb.FedProx(**TWICE, mu=0.0)), fedavg)
    assert not equal(left(fb.FedProx(**TWICE, mu=0.1)), fedavg)
    for how in ({}, {"personal_epochs": 1, "lambda_near": 0.0}):
        assert equal(left(fb.Ditto(**TWICE, **how)), fedavg)


def test_stragglers_train_for_fewer_epochs():
    one = LOCAL | {"mu": 0.0}
    assert equal(left(fb.FedProx(**one, stragglers=1.0)), left(fb.FedAvg(**LOCAL)))  # 1 to 1
    many = one | {"epochs": 6}
    assert not equal(left(fb.FedProx(**many, stragglers=1.0)), left(fb.FedProx(**many)))
    assert equal(left(fb.FedProx(**many, steps=1, stragglers=1.0)), left(fb.FedProx(**many, steps=1)))  # 1 to 1 step


@pytest.mark.parametrize(("method", "own"), [(fb.Ditto, "personal_epochs"), (fb.FedRep, "head_epochs")])
def test_what_methods_count_by_themselves_counts_as_local_training_does(method, own):
    """With `steps`, the epochs of a head or of an own model are steps."""

    def losses(length: int, **terms) -> dict[str, float]:
        return fb.run(method(lr=0.1, batch=10, **terms, **{own: length}), tiny_task(), rounds=2).rounds[-1]["loss"]

    assert losses(2) == losses(4, steps=2)  # every client has two batches
    assert losses(4, steps=2) != losses(2, steps=2)


def test_fedbuff_that_waits_for_all_of_equal_speed_is_fedavg_with_a_plain_mean():
    """All clients at work and in every buffer: none is stale, and eta_g moves as far as it says."""
    data = tiny_data(3)
    members = tuple(replace(member, train=member.train.take(torch.arange(16))) for member in data.clients)
    task = tiny_task(3).with_data(replace(data, clients=members))  # as many samples each
    everybody = {"concurrency": 3, "buffer": 3}
    fedbuff, fedavg = (
        fb.run(method, task, rounds=4, workers=1) for method in (fb.FedBuff(**LOCAL, **everybody), fb.FedAvg(**LOCAL))
    )
    expected = state_of(fedavg.global_model)
    for name, value in state_of(fedbuff.global_model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    assert [row["staleness"] for row in fedbuff.rounds] == [0.0] * 4
    assert [*fedbuff.rounds[0]["notes"].values()] == ["3 of 3"]  # it waits for the slowest
    for what in ("uplink_nominal_bytes", "downlink_nominal_bytes", "left_out"):
        assert abs(fedbuff.summary[what] - fedavg.summary[what]) <= 4 * 3 * 8  # FedAvg says how many samples
    start, half = task.problem.first_state(), fb.FedBuff(**LOCAL, **everybody, server_lr=0.5)
    moved = state_of(fb.run(half, task, rounds=1, workers=1).global_model)
    whole = state_of(fb.run(replace(half, server_lr=1.0), task, rounds=1, workers=1).global_model)
    for name in ("conv.weight", "fc.bias"):
        torch.testing.assert_close(moved[name] - start[name], (whole[name] - start[name]) / 2, rtol=1e-4, atol=1e-6)


def test_scaffold_s_first_round_is_fedavg_with_a_plain_mean():
    data = tiny_data(3)
    members = tuple(replace(member, train=member.train.take(torch.arange(16))) for member in data.clients)
    task = tiny_task(3).with_data(replace(data, clients=members))  # as many samples each
    scaffold, fedavg = (fb.run(m(**LOCAL), task, rounds=1, workers=1).global_model for m in (fb.SCAFFOLD, fb.FedAvg))
    expected = state_of(fedavg)
    for name, value in state_of(scaffold).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("terms", [{"momentum": 0.9}, {"optimiser": "adam", "lr": 0.01}, {"clip": 0.1}])
def test_scaffold_s_control_variates_are_gradients_however_clients_step(terms):
    """Of one step, in which nothing has moved yet, exactly the gradient."""
    task = two_layer_task()
    x, state = task.problem.first_state(), Control({})
    c = {name: torch.full_like(value, 0.01) for name, value in x.items()}
    method = fb.SCAFFOLD(**FULL | terms, epochs=1)
    reply = method.train(state, Controlled(Dense(x), Dense(c)), opened(task, 0, 1, "train"))
    same(numbers(state.control), gradient(numbers(x), 0))
    assert equal(reply.change.dense(), state.control)


def test_a_newcomer_s_control_variate_is_0(tmp_path):
    """c is the mean over all clients, also of those that come later and have not trained."""
    run = Finished(fb.SCAFFOLD(**LOCAL, fraction=0.5), late_task(), tmp_path, rounds=2)
    own = [numbers(run.state(i).control) if run.versions.get(i) else {} for i in range(3)]
    trained = [c for c in own if c]
    total = {name: sum(c[name] for c in trained) / 3 for name in trained[0]}
    same(run.server.control, total)


def test_a_client_whose_reply_is_not_accepted_keeps_its_control_variate(tmp_path):
    data = tiny_data()
    broken = replace(data.clients[3], train=Split(data.clients[3].train.x * torch.nan, data.clients[3].train.y))
    task = fb.Task.on(replace(data, clients=(*data.clients[:3], broken)), two_layers)
    with pytest.warns(RuntimeWarning, match="client 3 rejected"):
        run = Finished(fb.SCAFFOLD(**LOCAL), task, tmp_path)
    own = [numbers(run.state(i).control) for i in range(3)]
    assert not run.versions.get(3) or not run.state(3).control
    same(run.server.control, {name: value * 3 / 4 for name, value in mean(own).items()})


def test_a_parameter_that_layers_share_is_moved_under_all_its_names():
    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
        model[3].weight = model[1].weight
        return model

    task = fb.Task.on(tiny_data(), build)
    for method in (fb.FedAdam(**LOCAL), fb.SCAFFOLD(**LOCAL, server_lr=0.5)):
        state = method.server(task.problem)
        result = fb.run(method, task, rounds=1, workers=1)
        moved = state_of(result.global_model)
        still = state_of(fb.run(replace(method, server_lr=1e-9), task, rounds=1, workers=1).global_model)
        torch.testing.assert_close(still["1.weight"], state.theta["1.weight"])
        assert not torch.equal(moved["1.weight"], state.theta["1.weight"])


# ---------------------------------------------------------------------------------------------------- heads and bodies


def test_fedrep_s_head_learns_from_the_body_as_it_came():
    task, method = tiny_task(), fb.FedRep(**LOCAL, head_epochs=2)
    site = opened(task, 0, 1, "train")
    state = method.client(opened(task, 0, 0, "client"))
    before, phi = dict(state.theta), method.server(task.problem).theta
    reply = method.train(state, Body(Dense(phi)), site).theta.dense()
    assert reply.keys() == phi.keys()
    assert not reply.keys() & before.keys()
    assert all(not torch.equal(state.theta[name], value) for name, value in before.items())
    assert not torch.equal(reply["conv.weight"], phi["conv.weight"])


def test_fedrep_needs_more_than_one_layer():
    with pytest.raises(fb.UserError, match="one layer"):
        fb.run(fb.FedRep(), fb.Task.on(tiny_data(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), rounds=1)


def test_each_half_of_fedrep_is_clipped_by_its_own_gradients():
    """A norm that either half's gradients keep to clips neither, though both together exceed it."""
    task = two_layer_task()

    def moved(clip: float) -> tuple[torch.Tensor, torch.Tensor]:
        """How far head and body move in a step each."""
        method = fb.FedRep(**FULL, clip=clip, momentum=0.0, epochs=1, head_epochs=1)
        state, phi = method.client(opened(task, 0, 0, "client")), method.server(task.problem).theta
        before = state.theta
        method.train(state, Body(Dense(phi)), opened(task, 0, 1, "train"))
        head, body = (torch.cat([(state.theta[k] - v).flatten() for k, v in old.items()]) for old in (before, phi))
        return head, body

    head, body = moved(clip=0.0)
    lengths = head.norm() / LR, body.norm() / LR
    assert max(lengths) < 2 * min(lengths)
    for one, other in zip(moved(clip=1.01 * float(max(lengths))), (head, body), strict=True):
        assert torch.equal(one, other)
    for half in moved(clip=0.1 * float(min(lengths))):
        assert half.norm() == pytest.approx(0.1 * LR * float(min(lengths)), rel=1e-2)


def test_ditto_begins_with_what_comes_first():
    task, method = two_layer_task(), fb.Ditto(lr=1e-12, batch=100)
    theta = {name: value + 1 for name, value in task.problem.first_state().items()}
    state = Own({})
    method.train(state, Model(Dense(theta)), opened(task, 0, 5, "train"))
    for name, value in theta.items():
        torch.testing.assert_close(state.theta[name], value)
