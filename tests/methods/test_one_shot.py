"""The one-shot baselines: their equations against vectors computed by reference code, and what their servers do."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, TinyNet, tiny_data, tiny_task
from torch import nn

import fewbytes as fb
from fewbytes.base.cores import all_cores
from fewbytes.base.state import Mean, state_of
from fewbytes.data import ClientData, Dataset, FederatedData, Split, load_dataset, with_public
from fewbytes.data.public import reshaped
from fewbytes.experiments.plan import make_plan
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.methods.coboosting import boosted, diversified, hard_loss, weighted
from fewbytes.methods.parts.distillation import (
    Generator,
    ImagePool,
    activation_loss,
    adversarial_loss,
    balance_loss,
    batch_norm_terms,
    classifier_inputs,
    competition_loss,
    distillation_loss,
    divergence,
    frozen,
    jensen_shannon,
    noise,
    one_hot_loss,
    rolled_and_flipped,
    shifted_and_flipped,
    statistics_loss,
    total_variation,
)
from fewbytes.methods.parts.one_shot import Uploads, ensemble
from fewbytes.models import LogitMean, Mlp
from fewbytes.models.build import ModelBuilder
from fewbytes.models.files import save_model
from fewbytes.running.checkpoint import fingerprint, read_checkpoint
from fewbytes.wire import unpack

DISTILLED = ["feddf", "dense", "coboosting", "feddafl", "fedadi"]


# Equations ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def vectors(golden):
    g = golden("fusefl/baseline_losses")
    return {name: torch.from_numpy(np.asarray(g[name])) for name in g}


def same(value: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def temperatures(vectors: dict[str, torch.Tensor], name: str) -> list[int]:
    """What follows `name` in the vectors' names."""
    found = [int(key.removeprefix(name)) for key in vectors if key.startswith(name)]
    assert found
    return found


@pytest.mark.golden
def test_the_ensemble_and_the_distillation_losses(vectors):
    members, student = vectors["teacher_logits"], vectors["student_logits"]
    teacher = LogitMean([Fixed(logits) for logits in members])(torch.empty(0))
    same(teacher, vectors["ensemble_logits"])
    for t in temperatures(vectors, "kd/kl_batchmean_times_T2_T"):
        same(distillation_loss(teacher, student, t), vectors[f"kd/kl_batchmean_times_T2_T{t}"])
        same(divergence(teacher, student, t).mean(), vectors[f"kd/kl_batchmean_no_T2_T{t}"])
    for t in temperatures(vectors, "feddf/avg_losses_T"):
        each = torch.stack([distillation_loss(member, student, t) for member in members])
        same(each.mean(), vectors[f"feddf/avg_losses_T{t}"])


@pytest.mark.golden
def test_the_terms_of_dense(vectors):
    teacher, student = vectors["ensemble_logits"], vectors["student_logits"]
    same(F.cross_entropy(teacher, vectors["labels"]), vectors["gen/ce"])
    for t in temperatures(vectors, "gen/adv_masked_T"):
        same(adversarial_loss(teacher, student, t), vectors[f"gen/adv_masked_T{t}"])
        same(adversarial_loss(teacher, student, t, masked=False), vectors[f"gen/adv_unmasked_T{t}"])
    x, mean, variance = (vectors[name] for name in ("bn_input", "bn_running_mean", "bn_running_var"))
    same(statistics_loss(x, mean, variance), vectors["gen/bn_one_layer"])


@pytest.mark.golden
def test_the_terms_of_co_boosting(vectors):
    members, teacher, labels = vectors["teacher_logits"], vectors["ensemble_logits"], vectors["labels"]
    for h in temperatures(vectors, "coboost/hard_ce_hs"):
        same(hard_loss(teacher, labels, h), vectors[f"coboost/hard_ce_hs{h}"])
    mu, decay, epoch = vectors["coboost/mu_decay_epoch"].tolist()
    w = boosted(vectors["coboost/w_before"], members, labels, mu * decay**epoch)
    torch.testing.assert_close(w, vectors["coboost/w_after"], rtol=1e-6, atol=1e-9)  # mu is given in float32
    same(weighted(members, vectors["coboost/w_after"]), vectors["coboost/weighted_logits_after"])
    x, a, u = (vectors[f"coboost/ods_{name}"] for name in ("x", "A", "u"))
    same(diversified(x, lambda x: x @ a.T, u, 8 / 255), vectors["coboost/ods_x_perturbed"])


def test_what_is_hard_for_the_ensemble_counts_more_but_its_hardness_has_no_gradient():
    logits = torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    y, p = torch.zeros(2, dtype=torch.int64), torch.tensor([1 / (1 + math.exp(-4)), 0.5], dtype=torch.float64)
    same(hard_loss(logits, y, 0.0), F.cross_entropy(logits, y))
    loss = hard_loss(logits, y, 2.0)
    same(loss.detach(), ((1 - p) ** 2 * -p.log()).mean())
    same(torch.autograd.grad(loss, logits)[0][:, 0], -((1 - p) ** 3) / 2)


def test_weights_move_to_the_members_that_are_right_and_never_all_vanish():
    right = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    logits, y, w = torch.stack([right, -right, right]), torch.tensor([0, 1]), torch.full((3,), 1 / 3)
    for _ in range(40):
        w = boosted(w, logits, y, 0.01)
    assert w[1] == 0
    assert w[0] > 0.6 < w[2]
    random = torch.Generator().manual_seed(0)
    for _ in range(100):  # of a single member the gradient is but rounding
        assert boosted(torch.tensor([1e-3]), torch.randn(1, 2, 2, generator=random), y, 0.01) > 0


def test_co_boosting_makes_images_harder_for_the_ensemble_than_they_begin():
    task = tiny_task()
    teacher = ensemble({0: task.problem.first_state()}, task.problem).requires_grad_(False)
    student, y = task.problem.first_model(), torch.arange(64) % 3

    def loss(steps: int) -> float:
        torch.manual_seed(0)
        method = dataclasses.replace(CASES["coboosting"], generator_steps=steps, generator_lr=0.01)
        images = method.generate(student, teacher, y, (1, 4, 4))
        with torch.no_grad():
            apart = adversarial_loss(teacher(images), student.eval()(images), 3.0, masked=False)
            return float(hard_loss(teacher(images), y, 1.0) + apart)

    with torch.random.fork_rng():
        assert loss(60) < loss(1)


@pytest.mark.golden
def test_the_terms_of_dafl(vectors):
    teacher = vectors["ensemble_logits"]
    same(one_hot_loss(teacher), vectors["dafl/one_hot"])
    same(activation_loss(vectors["teacher_features"]), vectors["dafl/activation"])
    same(balance_loss(teacher) / math.log(10), vectors["dafl/info_entropy_log10"])


@pytest.mark.golden
def test_the_terms_of_adi(vectors):
    teacher, student, x = vectors["ensemble_logits"], vectors["student_logits"], vectors["images"]
    same(total_variation(x), vectors["adi/tv_l2"])
    same(x.norm(), vectors["adi/l2"])
    for t in temperatures(vectors, "adi/js_T"):
        same(jensen_shannon(teacher, student, t), vectors[f"adi/js_T{t}"])
    same(competition_loss(teacher, student), vectors["adi/competition"])


class Fixed(nn.Module):
    """Says the same whatever it is asked."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_the_mask_leaves_out_what_both_see_alike():
    teacher = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    student = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert adversarial_loss(teacher, student) == -divergence(teacher, student)[1] / 2
    assert adversarial_loss(teacher, student) > adversarial_loss(teacher, student, masked=False)


def test_batch_norm_terms_vanish_on_data_with_the_models_own_statistics():
    x, model = torch.randn(50, 1, 4, 4), TinyNet()
    model.norm.momentum = 1.0
    model(x)
    model.norm.running_var *= (50 * 16 - 1) / (50 * 16)  # it keeps the unbiased variance
    model.eval()
    with batch_norm_terms(LogitMean([model, Mlp((1, 4, 4), 3)])) as terms:
        model(x)
        model(x + 1)
    assert len(terms) == 2
    assert terms[0] < 1e-4 < terms[1]
    model(x)
    assert len(terms) == 2  # nothing is watched outside the block


def test_features_are_what_the_last_linear_layers_are_given():
    models = nn.ModuleList([TinyNet(), Mlp((1, 4, 4), 3), nn.Conv2d(1, 3, 4)])
    with classifier_inputs(models) as features:
        for model in models:
            model(torch.randn(5, 1, 4, 4))
    assert [tuple(f.shape) for f in features] == [(5, 64), (5, 200)]


# Samples --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (2, 9, 6)])
def test_generated_images_have_the_shape_and_range_of_data(shape):
    images = Generator(7, shape)(torch.randn(4, 7))
    assert tuple(images.shape) == (4, *shape)
    assert 0 <= images.min() <= images.max() <= 1


def test_images_are_moved_by_whole_pixels():
    x = torch.zeros(200, 2, 16, 16)
    x[:, :, 8, 8] = torch.tensor([1.0, 2.0])
    moved = shifted_and_flipped(x)
    assert set(moved.unique().tolist()) == {0.0, 1.0, 2.0}
    assert (moved.sum((2, 3)) == torch.tensor([1.0, 2.0])).all()
    at = moved[:, 0].flatten(1).argmax(1)
    assert set((at // 16).tolist()) == set(range(6, 11))  # an eighth of the height each way
    assert set((at % 16).tolist()) == set(range(5, 11))  # and mirrored, 8 becomes 7


def test_rolling_loses_no_pixel():
    x = torch.arange(2 * 9 * 9).view(2, 1, 9, 9)
    seen = [rolled_and_flipped(x) for _ in range(100)]
    assert all(torch.equal(y.flatten(1).sort().values, x.flatten(1)) for y in seen)
    assert len({tuple(y.flatten().tolist()) for y in seen}) > 25


def test_noise_fills_the_range_of_pixels():
    x, _ = noise(20, (1, 5, 5)).load()
    assert torch.equal(x.flatten(1).amin(1), torch.zeros(20))
    assert torch.equal(x.flatten(1).amax(1), torch.ones(20))


def test_a_pool_gives_back_what_was_added():
    pool, x, logits = ImagePool(5), torch.randn(5, 1, 2, 2), torch.randn(5, 3)
    pool.add(x[:2], logits[:2])
    pool.add(x[2:], logits[2:])
    assert len(pool) == 5
    got = pool.take(torch.tensor([4, 0]))
    assert torch.equal(got[0], x[[4, 0]])
    assert torch.equal(got[1], logits[[4, 0]])


# Servers --------------------------------------------------------------------------------------------------------------


def uploads(folder) -> Uploads:
    return unpack(Uploads, read_checkpoint(folder).server)


def test_the_ensemble_answers_with_the_mean_of_the_clients_logits(tmp_path):
    task = tiny_task()
    result = fb.run(CASES["ensemble"], task, rounds=9, out=tmp_path / "run")
    models = uploads(tmp_path / "run").models
    x, y = task.data.test.load()
    logits = torch.stack([task.problem.first_model(theta).eval()(x) for theta in models.values()]).mean(0)
    assert torch.equal(result.global_model(x), logits)
    assert result.accuracy == (logits.argmax(1) == y).double().mean()
    assert len(result.rounds) == 1
    loaded = fb.load_model(tmp_path / "run", build=TinyNet)
    assert torch.equal(loaded(x), logits)
    for client, theta in models.items():
        member = fb.load_model(tmp_path / "run", client, build=TinyNet)
        assert torch.equal(member(x), task.problem.first_model(theta).eval()(x))
    with pytest.raises(fb.UserError, match=r"client-9.safetensors.* 0, 1, 2, 3"):
        fb.load_model(tmp_path / "run", 9, build=TinyNet)


def test_models_of_different_kinds_make_one_ensemble(tmp_path):
    def build(client):
        return TinyNet() if client % 2 else Mlp((1, 4, 4), 3)

    task = fb.Task.on(tiny_data(), build, seed=0)
    result = fb.run(CASES["ensemble"], task, rounds=1, out=tmp_path / "run")
    x, _ = task.data.test.load()
    loaded = fb.load_model(tmp_path / "run", build=build)
    assert torch.equal(loaded(x), result.global_model(x))
    for name in DISTILLED:  # they teach a student of the first client's kind
        student = fb.run(CASES[name], task, rounds=1).global_model
        assert isinstance(student, Mlp)


def test_an_ensemble_of_a_named_model_is_loaded_by_its_name(tmp_path):
    about = {"model": "mlp:hidden=3", "sample_shape": [4], "classes": 2}
    model = LogitMean([Mlp((4,), 2, hidden=3) for _ in range(3)])
    model.recipe = {"kind": "ensemble", "clients": [0, 1, 2]}
    save_model(model, tmp_path / "models" / "global.safetensors", about)
    x = torch.randn(5, 4)
    assert torch.equal(fb.load_model(tmp_path)(x), model(x))


def test_a_client_that_does_not_answer_is_no_member():
    task = tiny_task()
    assert len(ensemble({1: task.problem.first_state(), 3: task.problem.first_state()}, task.problem).members) == 2
    with pytest.raises(fb.MethodError, match="no client replied"):
        ensemble({}, task.problem)


def test_feddf_starts_from_the_unweighted_mean_and_learns_from_the_ensemble(tmp_path):
    training = {"epochs": 5, "lr": 0.03, "batch": 8, "last": "kept"}
    data = tiny_data(3)
    samples = Split(*map(torch.cat, zip(*(client.train.load() for client in data.clients), strict=True)))
    parts = [samples.take(np.flatnonzero(samples.y == c)) for c in range(3)]  # every client has one class
    clients = tuple(ClientData(part, part) for part in parts)
    task = fb.Task.on(FederatedData(clients, data.test, data.classes, public=tiny_data(seed=7).test), TinyNet, seed=0)
    fb.run(fb.Ensemble(**training), task, rounds=1, out=tmp_path / "run")
    mean = Mean()
    for theta in uploads(tmp_path / "run").models.values():
        mean.add(theta)
    result = fb.run(fb.FedDF(**training, server_steps=200), task, rounds=1)
    x, y = task.data.test.load()
    averaged = task.problem.first_model(mean()).eval()
    assert result.rounds[0]["scores"]["accuracy"]["global"] == (averaged(x).argmax(1) == y).double().mean()
    teacher = fb.load_model(tmp_path / "run", build=TinyNet)
    with torch.no_grad():
        distance = [distillation_loss(teacher(x), m.eval()(x)) for m in (averaged, result.global_model)]
    assert distance[1] < distance[0] / 2


def test_feddf_stops_when_it_no_longer_learns_and_keeps_the_best():
    task = tiny_task()
    student, teacher = (
        task.problem.first_model(),
        ensemble(dict.fromkeys(range(4), task.problem.first_state()), task.problem),
    )
    before = state_of(student)
    seen = []
    student.register_forward_hook(lambda module, args, out: seen.append(module.training))
    dataclasses.replace(CASES["feddf"], server_steps=2000, patience=100, server_lr=1e-9).distil(
        student, teacher, task.problem
    )
    assert sum(seen) < 2000
    assert torch.allclose(student.conv.weight, before["conv.weight"], atol=1e-5)


def test_feddf_learns_from_public_data_and_not_from_its_labels(tmp_path):
    data, public = tiny_data(), tiny_data(seed=7).test
    relabelled = Split(public.x, public.y.flip(0))
    tasks = [fb.Task.on(dataclasses.replace(data, public=split), TinyNet) for split in (None, public, relabelled)]
    states = [state_of(fb.run(CASES["feddf"], task, rounds=1).global_model) for task in tasks]
    assert not torch.equal(states[0]["fc.weight"], states[1]["fc.weight"])
    assert all(torch.equal(states[1][name], states[2][name]) for name in states[1])
    assert fingerprint(CASES["feddf"], tasks[0], "") != fingerprint(CASES["feddf"], tasks[1], "")


def test_a_runs_fingerprint_is_of_every_clients_model():
    def of(names):
        return fingerprint(CASES["ensemble"], fb.Task.on(tiny_data(), ModelBuilder(names, (1, 4, 4), 3)), "")

    mixes = ["mlp", "mlp+mlp@8", "mlp+mlp@9", "mlp@8+mlp", "mlp+mlp@8+mlp@8"]
    assert len({of(names) for names in mixes}) == len(mixes)
    assert of("mlp") == of("mlp+mlp")


@pytest.mark.parametrize("name", ["dense", "fedadi"])
def test_made_images_please_the_teacher(name):
    """What is made is nearer to the teacher's classes and batch-norm statistics the longer it is made."""
    task = tiny_task()
    x, y = task.data.test.load()
    model = task.problem.first_model()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(100):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
        teacher = LogitMean([model]).eval().requires_grad_(False)
        statistics = []
        for steps in (1, 60):
            field, make = ("generator_steps", "generate") if name == "dense" else ("pixel_steps", "dream")
            changed = {field: steps, "server_batch": 64}
            method = dataclasses.replace(CASES[name], **changed)
            images = getattr(method, make)(task.problem.first_model(), teacher, (1, 4, 4), "cpu")
            with batch_norm_terms(teacher) as terms:
                teacher(images)
            statistics.append(float(terms[0]))
    assert statistics[1] < statistics[0]


@pytest.mark.parametrize("name", DISTILLED)
def test_the_student_is_trained_and_the_teacher_is_not(name):
    task = tiny_task()
    student, teacher = (
        task.problem.first_model(),
        ensemble(dict.fromkeys(range(2), task.problem.first_state()), task.problem),
    )
    teacher.requires_grad_(False)
    before = state_of(teacher)
    CASES[name].distil(student.train(), teacher, task.problem)
    assert all(torch.equal(value, before[key]) for key, value in state_of(teacher).items())
    assert student.training
    assert all(p.requires_grad for p in student.parameters())
    assert not torch.equal(student.fc.weight, task.problem.first_state()["fc.weight"])


def test_frozen_is_undone():
    model = TinyNet()
    model.conv.weight.requires_grad_(False)
    with frozen(model):
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
    assert model.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["conv.weight"]


@pytest.mark.parametrize("name", DISTILLED)
def test_distillation_that_was_interrupted_starts_again_without_the_clients(name, tmp_path, monkeypatch):
    whole = fb.run(CASES[name], tiny_task(), rounds=1, out=tmp_path / "whole")

    def interrupted(self, student, teacher, task):
        torch.rand(3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(CASES[name]), "distil", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fb.run(CASES[name], tiny_task(), rounds=1, out=tmp_path / "run")
    monkeypatch.setattr(type(CASES[name]), "train", None)
    resumed = fb.run(CASES[name], tiny_task(), rounds=1, out=tmp_path / "run", resume=True)
    assert uploads(tmp_path / "run").models == {}
    for key, value in state_of(whole.global_model).items():
        assert torch.equal(value, state_of(resumed.global_model)[key])
    assert [row["phase"] for row in resumed.rounds] == ["round", "finish"]
    assert resumed.accuracy == resumed.rounds[-1]["scores"]["accuracy"]["global"]


@pytest.mark.parametrize("name", ["dense", "coboosting", "feddafl", "fedadi"])
def test_only_images_can_be_made(name):
    data = [(torch.randn(20, 4), torch.arange(20) % 2)] * 2
    task = fb.Task.of(lambda: nn.Linear(4, 2), zip(data, data, strict=True), data[0])
    with pytest.raises(fb.UserError, match=r"generates images.*\(4,\).*FedDF"):
        fb.run(CASES[name], task, rounds=1)
    fb.run(CASES["feddf"], task, rounds=1)


def test_a_plan_is_of_the_one_round_and_distils_nothing(monkeypatch):
    monkeypatch.setattr(fb.DENSE, "distil", None)
    plan = make_plan(CASES["dense"], tiny_task(), 20, 1e6, 1e6)
    assert plan.rounds == 1
    assert plan.nominal_up == sum(v.nbytes for v in TinyNet().state_dict().values())
    assert plan.down == 0
    assert plan.train_seconds > 0


@pytest.mark.parametrize("name", ["dense", "coboosting", "fedadi"])
def test_several_cores_give_the_same_each_time(name, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    method = dataclasses.replace(CASES[name], server_batch=128)
    states = [state_of(fb.run(method, tiny_task(), rounds=1).global_model) for _ in range(2)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_all_cores_are_given_back():
    with pytest.raises(ValueError, match="x"), all_cores():
        raise ValueError("x")
    assert torch.get_num_threads() == 1


# Public samples -------------------------------------------------------------------------------------------------------


def test_held_out_samples_belong_to_no_client():
    digits = load_dataset("digits")
    left, public = with_public(digits, "100", seed=3)
    assert (len(left.train), len(public)) == (len(digits.train) - 100, 100)
    assert not set(left.train.rows) & set(public.rows)
    assert set(public.rows) != set(with_public(digits, "100", seed=4)[1].rows)
    assert (public.rows == with_public(digits, "100", seed=3)[1].rows).all()
    with pytest.raises(fb.UserError, match=f"samples of {len(digits.train)}"):
        with_public(digits, "100000", seed=3)


def test_another_data_set_is_made_the_tasks_shape():
    digits = load_dataset("digits")
    colour = Dataset("c", Split(torch.zeros(4, 3, 12, 10, dtype=torch.uint8), torch.zeros(4).long()), digits.test, ())
    left, public = with_public(colour, "digits", seed=0)
    assert left is colour
    assert public.shape == (3, 12, 10)
    x, grey = public.load()[0], digits.train.load()[0]
    assert torch.equal(x[:, 0], x[:, 2])
    assert abs(float(x.mean() - grey.mean())) < 0.01
    back = reshaped(public, (1, 8, 8)).load()[0]
    assert float((back - grey).abs().mean()) < 0.1
    flat = dataclasses.replace(colour, train=Split(torch.zeros(4, 5), torch.zeros(4).long()))
    with pytest.raises(fb.UserError, match="must be images"):
        with_public(flat, "digits", seed=0)


@pytest.mark.parametrize("public", ["100", 100])
def test_public_samples_are_a_setting(public):
    found = find(make_experiment({"method": "feddf", "public": public, "clients": 3}))
    data = found.task.data
    assert len(data.public) == 100
    assert sum(len(client.train) for client in data.clients) == len(load_dataset("digits").train) - 100
    again = find(make_experiment(msgspec.toml.decode(found.experiment.toml()))).task.data
    assert torch.equal(again.public.load()[0], data.public.load()[0])


def test_public_samples_of_ones_own_need_no_labels():
    pair = (torch.randn(20, 4), torch.arange(20) % 2)
    task = fb.Task.of(lambda: nn.Linear(4, 2), [(pair, pair)], pair, public=torch.randn(30, 4))
    assert len(task.data.public) == 30
    fb.run(CASES["feddf"], task, rounds=1)
