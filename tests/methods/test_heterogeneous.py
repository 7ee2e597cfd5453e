"""FedKTL's baselines: their equations against vectors computed by reference code, their bytes, awkward clients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cases import CASES, TinyNet, opened, tiny_data, tiny_task
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.state import load_state, state_of
from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.methods import fedgen, fedgh, fedkd, fedproto, fml
from fewbytes.methods.fedkd import compress, restore
from fewbytes.methods.parts.heterogeneous import ClassVectors, Own, class_distance, gathered, with_means
from fewbytes.models.blocks import head_of
from fewbytes.models.build import ModelBuilder
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings
from fewbytes.wire import counted, unpack

NAMES = ["lg_fedavg", "fedproto", "feddistill", "fml", "fedkd", "fedgh", "fedgen"]
ONE_HEAD = ["lg_fedavg", "fedgh", "fedgen"]  # clients end with the same classifier


# Golden vectors -------------------------------------------------------------------------------------------------------


class Golden(nn.Module):
    """The golden vectors' small network, as large as the given values."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        (width, channels), (classes, features) = state["base.0.weight"].shape[:2], state["head.weight"].shape
        pooled = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.AdaptiveAvgPool1d(features)
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        self.base = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), *pooled)
        self.head = nn.Linear(features, classes)
        load_state(self, state)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))

    @property
    def classifier(self) -> nn.Module:
        return self.head

    def units(self) -> dict[str, nn.Module]:
        return {"base": self.base}


def close(value: Tensor, expected: np.ndarray | Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(value, torch.as_tensor(expected).to(value.dtype), rtol=rtol, atol=atol)


def same_step(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in state.items():
        close(value.float(), expected[name], rtol=1e-3, atol=1e-5)


@pytest.fixture
def step(golden):
    """The golden file, a client that has its batch, and its rate and batch size."""
    g = golden("fedktl/ktl_htfl_baselines")
    data = torch.from_numpy(g["x"]), torch.from_numpy(g["y"])
    task = fb.Task.of(lambda: Golden(g.state("init/aux")), [(data, data)])
    return g, opened(task, 0, 1, "train"), {"lr": float(g["lr"]), "batch": len(data[1])}


def known(g, prefix: str) -> ClassVectors:
    """The global entries of a file, `PREFIX_FIRST_LAST`: rows of the classes from the first to the last."""
    (name,) = (name for name in g if name.startswith(f"{prefix}_"))
    first, last = map(int, name.removeprefix(f"{prefix}_").split("_"))
    return ClassVectors.of(torch.from_numpy(g[name]), list(range(first, last + 1)))


def parameters(g, prefix: str) -> dict[str, Tensor]:
    return fml.parameters_of(Golden(g.state(prefix)))


@pytest.mark.golden
def test_a_step_of_fml(step):
    g, site, local = step
    state = Own(g.state("init/model"))
    reply = fb.FML(**local).train(state, fml.Auxiliary(fb.Dense(parameters(g, "init/aux"))), site)
    same_step(state.theta, g.state("fml/after/model"))
    same_step(reply.theta.dense(), g.state("fml/after/aux"))


@pytest.mark.golden
def test_a_step_of_fedkd(step):
    g, site, local = step
    state = fedkd.Own(g.state("init/model"), g.state("fedkd/init/W"))
    method = fb.FedKD(**local, energy_start=1.0, energy_end=1.0)
    message = fedkd.Factors(fb.Dense(compress(parameters(g, "init/aux"), 1.0)))
    reply = method.train(state, message, site)
    same_step(state.theta, g.state("fedkd/after/model"))
    same_step(state.w, g.state("fedkd/after/W"))
    same_step(restore(reply.factors.dense()), g.state("fedkd/after/aux"))


@pytest.mark.golden
def test_factors(golden):
    g = golden("fedktl/ktl_htfl_baselines")
    for i in g.below("svd"):
        for energy in (case for case in g.below(f"svd/{i}") if case != "A"):
            factors = compress({"a": torch.from_numpy(g[f"svd/{i}/A"])}, float(energy.removeprefix("e")))
            assert factors["a/s"].numel() == g[f"svd/{i}/{energy}/rank"]
            assert counted(fb.Dense(factors)).value_bytes == 4 * g[f"svd/{i}/{energy}/elements"]
            close(restore(factors)["a"], g[f"svd/{i}/{energy}/recovered"], rtol=1e-4, atol=1e-5)


@pytest.mark.golden
def test_a_step_of_fedproto(step):
    g, site, local = step
    state = fedproto.Own(g.state("init/model"), known(g, "fedproto/global_protos"))
    method = fb.FedProto(**local, lambda_proto=float(g["fedproto/lambda"]))
    reply = method.train(state, None, site)
    same_step(state.theta, g.state("fedproto/after/model"))
    assert reply.classes == g["fedproto/local_labels"].tolist()
    close(reply.rows, g["fedproto/local_protos"])


@pytest.mark.golden
def test_a_step_of_feddistill(step):
    g, site, local = step
    state = Own(g.state("init/model"))
    method = fb.FedDistill(**local, gamma=float(g["feddistill/lambda"]))
    reply = method.train(state, known(g, "feddistill/global_logits"), site)
    same_step(state.theta, g.state("feddistill/after/model"))
    assert reply.classes == g["feddistill/local_labels"].tolist()
    close(reply.rows, g["feddistill/local_logits"])


@pytest.mark.golden
def test_the_mean_over_the_clients_that_hold_a_class(golden):
    vectors = [[[1, 2], [5, 5], [4, 4]], [[3, 0], [0, 2]]]  # of each client, as its README says
    uploads = [
        ClassVectors.of(torch.tensor(rows).float(), c) for rows, c in zip(vectors, ([0, 1, 2], [0, 2]), strict=True)
    ]
    means = with_means(None, *gathered(enumerate(uploads)))
    assert means.classes == [0, 1, 2]
    close(means.rows, golden("fedktl/ktl_htfl_baselines")["class_mean/out"])


# Equations ------------------------------------------------------------------------------------------------------------


def test_a_class_without_a_vector_draws_nothing():
    values, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 3, 2, 0, 4])
    vectors = ClassVectors.of(torch.randn(2, 4), [0, 3])
    class_distance(values, labels, vectors).backward()
    held = torch.tensor([True, True, False, True, False])
    expected = torch.zeros(5, 4)
    expected[held] = 2 * (values.detach() - vectors.rows[[0, 1, 0, 0, 0]])[held] / 20
    close(values.grad, expected)


def test_a_class_nobody_sent_keeps_its_vector():
    known = ClassVectors.of(torch.tensor([[1.0], [2.0]]), [0, 4])
    new = with_means(known, torch.tensor([[6.0], [8.0], [5.0]]), torch.tensor([4, 4, 1]))
    assert (new.classes, new.rows.flatten().tolist()) == ([0, 1, 4], [1, 5, 7])
    assert with_means(known, torch.empty(0, 0), torch.empty(0)) is known


@pytest.mark.parametrize("energy", [0.5, 0.95, 0.98])
def test_factors_keep_the_energy_asked_for_and_no_rank_more(energy):
    theta = {"linear": torch.randn(7, 12), "kernels": torch.randn(4, 3, 5, 5), "bias": torch.randn(7)}
    factors = compress(theta, energy)
    restored = restore(factors)
    assert restored["bias"] is theta["bias"]
    for name in ("linear", "kernels"):
        total, rank = theta[name].square().sum(), factors[f"{name}/s"].shape[-1]
        assert (theta[name] - restored[name]).square().sum() < (1 - energy) * total * 1.0001
        cut = {k: v[..., : rank - 1, :] if k.endswith("/v") else v[..., : rank - 1] for k, v in factors.items()}
        lower = restore(cut)
        assert (theta[name] - lower[name]).square().sum() >= (1 - energy) * total * 0.9999
        rows, columns = theta[name].shape[-2:]
        pairs = theta[name].shape[:-2].numel()
        assert sum(factors[f"{name}/{part}"].numel() for part in "usv") == pairs * rank * (rows + columns + 1)


def test_at_full_rank_nothing_is_lost_and_what_diverged_goes_as_it_is():
    theta = {"point": torch.randn(3, 2, 1, 1), "linear": torch.randn(3, 3), "nan": torch.full((2, 2), torch.nan)}
    restored = restore(compress(theta, 1.0))
    for name in ("point", "linear"):
        close(restored[name], theta[name], atol=1e-5)
    assert restored["nan"].isnan().all()


def test_the_energy_rises_to_its_end():
    method = fb.FedKD(energy_rounds=100)
    assert [round(method.energy(t), 4) for t in (0, 50, 100, 500)] == [0.95, 0.965, 0.98, 0.98]


@pytest.mark.parametrize("detach", [False, True])
def test_detached_models_learn_from_their_own_loss_only(detach):
    labels = torch.tensor([0, 2, 1, 1])
    a, b, r_a, w_r_b = (torch.randn(4, n, requires_grad=True) for n in (3, 3, 5, 5))
    by_alpha = [
        torch.autograd.grad(fb.FML(alpha=alpha, detach=detach).loss((a, b), labels), b)[0] for alpha in (0.1, 0.9)
    ]
    assert torch.equal(*by_alpha) == detach  # alpha is of a's loss
    method = fb.FedKD(detach=detach)
    both = torch.autograd.grad(method.loss((a, b, r_a, w_r_b), labels), (b, w_r_b))
    own = torch.autograd.grad(method.half((b, w_r_b), (a.detach(), r_a.detach()), labels), (b, w_r_b))
    assert torch.equal(both[0], own[0]) == torch.equal(both[1], own[1]) == detach


def test_the_divergence_of_a_batch():
    teacher, student = torch.randn(6, 5), torch.randn(6, 5)
    per_sample = (teacher.softmax(1) * (teacher.log_softmax(1) - student.log_softmax(1))).sum(1)
    close(fml.mean_divergence(teacher, student, "batchmean"), per_sample.mean())
    close(fml.mean_divergence(teacher, student, "mean"), per_sample.mean() / 5)


# What travels ---------------------------------------------------------------------------------------------------------


def test_client_uploads_only_the_classes_it_trained_on():
    data = tiny_data(2)
    x, y = data.clients[0].train.load()
    one = ClientData(Split(x[y == 1], y[y == 1]), data.clients[0].test)
    task = fb.Task.on(dataclasses.replace(data, clients=(one, data.clients[1])), TinyNet, seed=0)
    for name, size in (("fedproto", 64), ("feddistill", 3), ("fedgh", 64)):
        method = dataclasses.replace(CASES[name], batch=4)
        columns = fb.run(method, task, rounds=1, workers=1).ledger.columns()
        assert columns["value_bytes_up"][columns["round"] == 1].tolist() == [4 * size, 4 * size * 3]


# Clients --------------------------------------------------------------------------------------------------------------


def small(client: int) -> nn.Module:
    """Four classes, of which nobody has the last; two architectures with features of one size."""
    first = nn.Linear(16, 6) if client % 2 else nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 6))
    return nn.Sequential(nn.Flatten(), first, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def awkward_task() -> fb.Task:
    """Clients with one sample; with one class; with fewer samples than a batch; and an ordinary one."""
    data = tiny_data()
    splits = [client.train.load() for client in data.clients]
    rows = [[0], (splits[1][1] == 2).nonzero().flatten().tolist(), [0, 1, 2], list(range(20))]
    clients = [ClientData(Split(x[r], y[r]), data.test) for (x, y), r in zip(splits, rows, strict=True)]
    return fb.Task.on(FederatedData(tuple(clients), data.test, (*data.classes, "d")), small, seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_awkward_clients_of_different_architectures(name, tmp_path):
    fraction = {"fraction": 0.5} if name in ("fedproto", "fedgen") else {}
    method = dataclasses.replace(CASES[name], **fraction)
    result = fb.run(method, awkward_task(), rounds=3, workers=1, out=tmp_path / "run")
    assert result.summary["status"] == "done"
    assert not any("not_finite" in row for row in result.rounds)
    assert 0 <= result.accuracy <= 1
    assert result.summary["score"]["kind"] == ("combined" if name in (*ONE_HEAD, "fedproto") else "personalised")


def test_if_nobody_can_train_fedproto_has_no_accuracy():
    data = tiny_data()
    clients = tuple(ClientData(client.train.take([0]), client.test) for client in data.clients)
    result = fb.run(CASES["fedproto"], fb.Task.on(dataclasses.replace(data, clients=clients), small, seed=0), rounds=2)
    assert all(row["scores"] == {} for row in result.rounds)


def received(folder, client, kind):
    """What a client received after the last round."""
    version = read_checkpoint(folder).named()[client]
    return unpack(kind, (folder / "checkpoint" / "clients" / f"{client}-{version}.state").read_bytes()).received


@pytest.mark.parametrize("name", ONE_HEAD)
def test_in_the_end_everybody_has_the_newest_classifier(name, tmp_path):
    method = dataclasses.replace(CASES[name], fraction=0.5)
    fb.run(method, tiny_task(), rounds=3, workers=1, out=tmp_path / "run")
    heads = [received(tmp_path / "run", i, Own) for i in range(4)]
    for head in heads:
        assert all(torch.equal(value, heads[0][key]) for key, value in head.items())
    if name != "lg_fedavg":  # whose server keeps none
        server = unpack(
            {"fedgh": fedgh.GlobalHead, "fedgen": fedgen.GeneratorAndHead}[name],
            read_checkpoint(tmp_path / "run").server,
        )
        assert all(torch.equal(value, server.head[key]) for key, value in heads[0].items())


def test_lg_fedavg_weighs_by_samples():
    task, method = tiny_task(clients=2), fb.LG_FedAvg(batch=8)
    heads = []
    for i in task.problem.clients:
        state = method.client(opened(task, i, 0, "client"))
        heads.append(method.train(state, None, opened(task, i, 1, "train")).theta.dense()["weight"])
    expected = (17 * heads[0] + 18 * heads[1]) / 35
    result = fb.run(method, task, rounds=1, workers=1)
    close(received(result.folder, 1, Own)["weight"], expected)


def test_a_newcomer_tells_fedgen_its_labels(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import MemoryGrid

    from fewbytes.flower.apps import client_app, serve_run
    from fewbytes.flower.link import Exchange

    task = tiny_task()
    grid = MemoryGrid(client_app(CASES["fedgen"], task, tmp_path), 4)
    grid.present = [0, 1, 2]

    class Late(fb.Watcher):
        def scored(self, row):
            grid.present = [0, 1, 2, 3]

    settings, policy = Settings(rounds=2, out=tmp_path / "run", watcher=Late()), fb.Policy(connect_timeout=0.2)
    serve_run(grid, Run.of(CASES["fedgen"], task, settings, policy), exchange=Exchange(poll=0.001))
    server = unpack(fedgen.GeneratorAndHead, read_checkpoint(tmp_path / "run").server)
    assert server.counts.sum() == sum(len(client.train) for client in task.data.clients)


# FedProto and FedGen --------------------------------------------------------------------------------------------------


def test_fedproto_predicts_by_the_nearest_prototype_and_its_models_are_saved(tmp_path):
    task = tiny_task()
    result = fb.run(dataclasses.replace(CASES["fedproto"], epochs=3), task, rounds=3, workers=1, out=tmp_path / "run")
    assert "personalised" not in result.rounds[0]["scores"].get("accuracy", {})  # nobody has prototypes yet
    assert "combined" not in result.rounds[0]["scores"].get("accuracy", {})
    x, y = task.data.clients[2].test.load()
    network = fb.load_model(tmp_path / "run", 2, build=TinyNet)
    with torch.no_grad():
        features, scores = network.features(x), network(x)
    distances = (features[:, None] - network.prototypes).square().mean(2)
    close(scores, -distances, atol=1e-5)
    correct = []
    for i in task.problem.clients:
        x, y = task.data.clients[i].test.load()
        scores = fb.load_model(tmp_path / "run", i, build=TinyNet)(x)
        correct.append(float((scores.argmax(1) == y).double().mean()))
    assert result.accuracy == pytest.approx(np.mean(correct))


def test_a_class_without_a_prototype_is_never_predicted():
    network = fedproto.PrototypeNetwork(nn.Flatten(), torch.tensor([[0.0, 0.0], [9.0, 9.0]]), [1, 3], 5)
    scores = network(torch.randn(50, 2) * 100)
    assert set(scores.argmax(1).tolist()) <= {1, 3}
    assert scores.isfinite().all()


def test_the_generator_learns_features_that_classifiers_know():
    method = fb.FedGen(server_lr=0.01, hidden=16)
    task = tiny_task()
    state = method.server(task.problem)
    state.head, state.counts = state_of(task.problem.first_model().fc), torch.tensor([5, 0, 2], dtype=torch.int32)
    losses = []
    for _ in range(2):
        g = method.make_generator(task.problem.first_model().fc)
        load_state(g, state.generator)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            losses.append(method.generated_loss(task.problem.first_model().fc, g, state.counts).item())
            method.learn(state)
    assert losses[1] < losses[0] / 2


@pytest.mark.parametrize("quirks", [False, True])
def test_the_generator_is_kept_from_round_to_round_but_not_in_the_release(quirks, tmp_path):
    method = dataclasses.replace(CASES["fedgen"], release_quirks=quirks)
    task = tiny_task()
    fb.run(method, task, rounds=2, workers=1, out=tmp_path / "run")
    server = unpack(fedgen.GeneratorAndHead, read_checkpoint(tmp_path / "run").server)
    first = method.server(task.problem).generator
    assert all(torch.equal(value, first[name]) for name, value in server.generator.items()) == quirks
    labels = torch.cat([client.train.labels for client in task.data.clients])
    assert server.counts.tolist() == labels.bincount().tolist()


# Refusals -------------------------------------------------------------------------------------------------------------


def sized(names: str) -> fb.Task:
    return fb.Task.on(tiny_data(), ModelBuilder(names, (1, 4, 4), 3), seed=0)


class TwoLayerHead(TinyNet):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, 3))


class Whole(nn.Module):
    """A model that does not tell its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))


def counting(client: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3 + client))


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_is_told_before_anything_is_written(name, tmp_path):
    unlike = sized("mlp:hidden=5+mlp:hidden=6")
    if name in (*ONE_HEAD, "fedproto"):
        with pytest.raises(fb.UserError, match=r"5 and 6: .*@512"):
            fb.run(CASES[name], unlike, rounds=1, workers=1, out=tmp_path / "run")
    else:
        fb.run(CASES[name], unlike, rounds=1, workers=1)
    for task, words in (
        (fb.Task.on(tiny_data(), counting, seed=0), "same number of classes, not 3 and 4 and 5 and 6"),
        (
            fb.Task.on(tiny_data(), lambda: nn.Linear(4, 3), seed=0),
            "logits" if name in ("fml", "feddistill") else "units",
        ),
    ):
        with pytest.raises(fb.UserError, match=words):
            fb.run(CASES[name], task, rounds=1, workers=1, out=tmp_path / "run")
    if name in ("fml", "feddistill"):  # which need no features
        fb.run(CASES[name], fb.Task.on(tiny_data(), Whole, seed=0), rounds=1, workers=1)
    two = fb.Task.on(tiny_data(), TwoLayerHead, seed=0)
    if name in ONE_HEAD:
        with pytest.raises(fb.UserError, match="Linear with bias"):
            fb.run(CASES[name], two, rounds=1, workers=1, out=tmp_path / "run")
    else:
        fb.run(CASES[name], two, rounds=1, workers=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "off", "size"), [("fedproto", "lambda_proto", 64), ("feddistill", "gamma", 3)])
def test_without_its_term_a_client_trains_as_by_itself(name, off, size):
    task, alone = tiny_task(), opened(tiny_task(), 0, 1, "train")
    model = alone.model(fresh=True)
    alone.fit(model, fb.Local(epochs=1, lr=0.1, batch=8, order="stored", last="dropped"))
    method = dataclasses.replace(CASES[name], **{off: 0.0})
    state = method.client(opened(task, 0, 0, "client"))
    method.train(state, ClassVectors.of(torch.ones(3, size), [0, 1, 2]), opened(task, 0, 1, "train"))
    assert all(torch.equal(state.theta[key], value) for key, value in state_of(model).items())


@pytest.mark.parametrize("name", ["lg_fedavg", "fedgh", "fedgen", "fedproto"])
def test_what_the_server_sent_is_scored_over_all_samples_together(name, tmp_path):
    """Clients with test sets of different sizes: a mean over them is another number than the share of all samples."""
    data = tiny_data()
    sizes = (6, 1, 3, 2)
    clients = tuple(
        dataclasses.replace(c, test=c.test.take(range(n))) for c, n in zip(data.clients, sizes, strict=True)
    )
    task = fb.Task.on(dataclasses.replace(data, clients=clients), TinyNet)
    result = fb.run(dataclasses.replace(CASES[name], fraction=1.0), task, rounds=2, out=tmp_path / "run", workers=1)
    models = [fb.load_model(tmp_path / "run", client=i, build=TinyNet) for i in range(4)]
    for i, model in enumerate(models):
        news = received(tmp_path / "run", i, fedproto.Own if name == "fedproto" else Own)
        if name == "fedproto":
            load_state(model, {"prototypes": news.rows})
        else:
            load_state(head_of(model), news)
    splits = [client.test.load() for client in clients]
    correct = [int((model(x).argmax(1) == y).sum()) for model, (x, y) in zip(models, splits, strict=True)]
    last = result.rounds[-1]
    assert last["pooled"]["accuracy"]["combined"] == sum(correct) / sum(sizes)
    assert last["scores"]["accuracy"]["combined"] == pytest.approx(
        np.mean([c / n for c, n in zip(correct, sizes, strict=True)])
    )
