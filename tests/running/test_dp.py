"""A run that promises privacy: what it learns, what it says, and that what is spent is never forgotten."""

from __future__ import annotations

import builtins
import functools
import json
import logging
import math
from dataclasses import dataclass, replace

import pytest
import torch
from cases import CASES, LOCAL, tiny_task
from runs import fingerprint
from torch import nn

import fewbytes as fb
from fewbytes.core.privacy import Diary
from fewbytes.core.site import Shared
from fewbytes.core.training import Local
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.experiments.display import Display
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.models import build_model
from fewbytes.report import read_runs, write_report
from fewbytes.report.table import badges, summary_table

METHOD = fb.FedAvg(**LOCAL)
CLIENTS = "epsilon=8,delta=1e-5,clip=1.0,noise=seeded"
SAMPLES = f"of=samples,{CLIENTS}"


@pytest.fixture(autouse=True)
def counted():
    return pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")


def task(clients: int = 4) -> fb.Task:
    random = torch.Generator().manual_seed(0)

    def some(n):
        return torch.randn(n, 6, generator=random), torch.randint(0, 3, (n,), generator=random)

    return fb.Task.of(lambda: nn.Linear(6, 3), [(some(20), some(5)) for _ in range(clients)], some(9))


@functools.cache
def digits(clients: int) -> fb.Task:
    data = load_dataset("digits")
    dealt = federate(data, Partition("iid", clients=clients), seed=0)
    return fb.Task.on(dealt, lambda: build_model("mlp:layers=1", data.train.shape, len(data.classes)), seed=0)


class StopAfterOne(fb.Watcher):
    def scored(self, row):
        raise KeyboardInterrupt


def test_at_epsilon_8_a_hundred_clients_learn_digits():
    how = {"rounds": 8, "evaluate_every": 8, "workers": 1, "save_models": False}
    result = fb.run(fb.FedAvg(epochs=2, lr=0.2, batch=5), digits(100), dp="epsilon=8,delta=1e-5,clip=1", **how)
    assert result.accuracy > 0.8
    assert 7.9 < result.summary["epsilon_spent"] <= 8


def test_at_epsilon_8_for_every_sample_a_few_clients_learn_digits():
    how = {"rounds": 5, "evaluate_every": 5, "workers": 1, "save_models": False}
    dp = "of=samples,epsilon=8,delta=1e-5,clip=1"
    result = fb.run(fb.FedAvg(epochs=4, lr=0.5, batch=40), digits(4), dp=dp, **how)
    assert result.accuracy > 0.75
    assert 7.9 < result.summary["epsilon_spent"] <= 8
    assert "train" not in result.rounds[0]["loss"]


def test_what_is_promised_and_spent_is_where_the_result_is(tmp_path, capsys):
    with Display("fedavg", tmp_path / "run") as display:
        result = fb.run(METHOD, task(), rounds=2, out=tmp_path / "run", workers=1, dp=CLIENTS, watcher=display)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [row["privacy"] for row in rows] == [
        {"epsilon": pytest.approx(5.30, abs=0.01), "means": 1}, {"epsilon": pytest.approx(8), "means": 2},
    ]  # fmt: skip
    assert "epsilon 8.00" in capsys.readouterr().err.replace("\n", " ")
    summary = json.loads((tmp_path / "run" / "result.json").read_text())
    assert summary["dp"] == "epsilon=8,delta=1e-05,clip=1,noise=seeded"
    assert summary["epsilon_spent"] == rows[1]["privacy"]["epsilon"] == result.summary["epsilon_spent"]
    assert summary["noise_multiplier"] > 0
    runs = read_runs([tmp_path / "run"])
    assert badges(runs[0]) == ["epsilon 8.00 of 8"]
    outside = "Not covered"
    assert outside in str(summary_table(runs).caption)
    assert outside in write_report(runs, tmp_path / "report.html").read_text()


@pytest.mark.parametrize("dp", [CLIENTS, SAMPLES])
def test_a_resumed_run_spends_and_becomes_what_an_uninterrupted_one_does(dp, tmp_path):
    settings = {"task": task(), "rounds": 3, "workers": 1, "dp": dp}
    fb.run(METHOD, out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, out=tmp_path / "halted", watcher=StopAfterOne(), **settings)
    for other in ({"dp": dp.replace("8", "9")}, {"dp": None}, {"rounds": 4}):
        with pytest.raises(fb.UserError, match="of another configuration"):
            fb.run(METHOD, out=tmp_path / "halted", resume=True, **settings | other)
    fb.run(METHOD, out=tmp_path / "halted", resume=True, **settings)
    assert fingerprint(tmp_path / "halted") == fingerprint(tmp_path / "whole")


@dataclass(frozen=True)
class Dying(fb.FedAvg):
    """FedAvg whose process ends in round 2, when the noisy mean is there."""

    def round(self, state, net, t):
        super().round(state, net, t)
        if t == 2 and not DIED:
            DIED.append(state.theta["weight"].clone())
            raise KeyboardInterrupt


DIED: list[torch.Tensor] = []


@pytest.mark.parametrize(
    "dp", [CLIENTS, SAMPLES, CLIENTS.replace("seeded", "secure"), SAMPLES.replace("seeded", "secure")]
)
def test_a_round_done_again_sends_nothing_that_is_not_counted(dp, tmp_path):
    DIED.clear()
    settings = {"task": task(), "rounds": 3, "workers": 1, "dp": dp, "out": tmp_path / "run", "keep_frames": True}
    method = Dying(**LOCAL)
    with pytest.raises(KeyboardInterrupt):
        fb.run(method, **settings)
    frames = tmp_path / "run" / "frames"
    sent = {p.name: p.read_bytes() for p in frames.iterdir() if not p.name.startswith("2-") or p.name.endswith("down")}
    told = {p.name: p.read_bytes() for p in frames.glob("2-*-up.frame")}
    assert told
    result = fb.run(method, resume=True, **settings)
    spent = [row["privacy"]["epsilon"] for row in result.rounds]
    assert len(spent) == 3
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(8, rel=1e-5)
    assert all((frames / name).read_bytes() == data for name, data in sent.items())
    if "samples" in dp:  # who has no checkpoint, a client's node, says what it said before
        assert all((frames / name).read_bytes() == data for name, data in told.items())


def test_what_clients_were_promised_is_spent_though_a_run_goes_back(tmp_path):
    settings = {"task": task(), "rounds": 3, "workers": 1, "dp": CLIENTS.replace("seeded", "secure")}
    fb.run(METHOD, out=tmp_path / "run", keep_checkpoints=3, **settings)
    with pytest.raises(fb.UserError, match=r"of 3 noisy means .*0 .*round"):
        fb.run(METHOD, out=tmp_path / "run", resume=True, from_round=1, **settings)
    assert (tmp_path / "run" / "result.json").exists()  # the run is as it was
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 3


def test_a_client_counts_every_model_that_it_trains_and_none_twice(tmp_path):
    settings = {"task": task(), "rounds": 3, "workers": 1, "dp": SAMPLES.replace("seeded", "secure")}
    settings |= {"out": tmp_path / "run", "keep_checkpoints": 4}
    first = fb.run(METHOD, **settings)
    again = fb.run(METHOD, resume=True, from_round=1, **settings)  # the same models: nothing new is said
    assert again.summary["epsilon_spent"] == first.summary["epsilon_spent"] == pytest.approx(8, rel=1e-5)
    assert torch.equal(again.global_model.weight, first.global_model.weight)
    for diary in (tmp_path / "run" / "checkpoint" / "clients").glob("*.trained"):
        diary.write_bytes(diary.read_bytes()[:32] + b"another model".ljust(32) + b"and another".ljust(32))
    with pytest.raises(fb.FewbytesError, match=r"of 3 rounds .*more"):
        fb.run(METHOD, resume=True, from_round=1, **settings)


def test_secure_noise_is_never_the_same_and_seeded_noise_always():
    how = {"task": task(), "rounds": 1, "workers": 1, "save_models": False}
    for of in (CLIENTS, SAMPLES):
        made = [
            fb.run(METHOD, dp=of.replace("seeded", noise), **how).global_model.weight
            for noise in ("secure", "secure", "seeded", "seeded")
        ]
        assert not torch.allclose(made[0], made[1])
        assert not torch.allclose(made[0], made[2])
        assert torch.equal(made[2], made[3])


def test_a_secret_is_nobodys_else_and_outlives_the_run(tmp_path):
    run = {"task": task(), "workers": 2, "out": tmp_path / "run", "dp": SAMPLES.replace("seeded", "secure")}
    fb.run(METHOD, rounds=2, **run)
    secret = tmp_path / "run" / "checkpoint" / "clients" / "secret"
    assert len(secret.read_bytes()) == 32
    assert secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dp", [CLIENTS, SAMPLES])
def test_on_flower_it_is_the_same(dp, tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import MemoryGrid, run

    from fewbytes.flower.apps import client_app

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    method = CASES["fedavg"]
    grid = MemoryGrid(client_app(method, method.promising(task(), dp, 4), tmp_path), 4)
    if dp == SAMPLES:  # whose noise the server knows
        with pytest.raises(fb.FewbytesError, match="noise=seeded"):
            run("fedavg", tmp_path / "refused", task=task(), grid=grid, dp=dp)
    grid.config = {"privacy-in-all": "any"}
    run("fedavg", tmp_path / "flower", task=task(), grid=grid, dp=dp)
    fb.run(method, task(), rounds=4, out=tmp_path / "local", workers=2, dp=dp)
    assert fingerprint(tmp_path / "flower") == fingerprint(tmp_path / "local")


def test_on_flower_a_node_that_promises_otherwise_takes_no_part(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import run

    with pytest.raises(fb.FewbytesError, match="dp"):
        run("fedavg", tmp_path / "flower", task=task(), node_task=task(), dp=SAMPLES)
    with pytest.raises(fb.UserError, match="over_selection"):
        run("fedavg", tmp_path / "over", task=task(), dp=CLIENTS, policy=fb.Policy(over_selection=0.3))
    assert not (tmp_path / "over").exists()


class Talkative(fb.FedAvg):
    """FedAvg that tells clients the mean before the round is over."""

    def round(self, state, net, t):
        fb.FedAvg.round(self, state, net, t)
        fb.FedAvg.round(self, state, net, t)


def test_a_mean_is_sent_to_nobody_before_it_is_counted():
    with pytest.raises(fb.MethodError, match="noisy mean"):
        fb.run(Talkative(**LOCAL), task(), rounds=2, workers=1, dp=CLIENTS)


def test_steps_are_counted_exactly():
    """Of 20 samples in batches of 8 an epoch is three Poisson batches, and so is `steps=3`."""
    how = {"task": task(), "rounds": 2, "workers": 1, "dp": SAMPLES}
    by_epochs, by_steps = fb.run(fb.FedAvg(**LOCAL), **how), fb.run(fb.FedAvg(**LOCAL, steps=3), **how)
    assert torch.equal(by_epochs.global_model.weight, by_steps.global_model.weight)
    assert by_epochs.summary["epsilon_spent"] == by_steps.summary["epsilon_spent"]
    fewer = fb.run(fb.FedAvg(**LOCAL, steps=1), **how)
    assert fewer.summary["epsilon_spent"] == pytest.approx(8, rel=1e-4)


class Restless(fb.FedAvg):
    """FedAvg that takes a step more than its terms say."""

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        return super(Restless, self.changed(steps=self.local.steps + 1)).train(state, message, site)


def test_a_client_takes_no_more_steps_than_are_counted():
    with pytest.raises(fb.FewbytesError, match="3 steps in batches of 8"):
        fb.run(Restless(**LOCAL, steps=3), task(), rounds=2, workers=1, dp=SAMPLES)


class Diligent(fb.FedAvg):
    """FedAvg that trains twice."""

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        site.fit(site.model(message.theta.dense()), self.local)
        return super().train(state, message, site)


def test_a_client_trains_no_more_than_is_counted():
    with pytest.raises(fb.FewbytesError, match="would be more"):
        fb.run(Diligent(**LOCAL), task(), rounds=2, workers=1, dp=SAMPLES)


@pytest.mark.parametrize("dp", [CLIENTS, SAMPLES])
@pytest.mark.parametrize(
    ("method", "made", "more", "why"),
    [
        (METHOD, tiny_task, {}, r"dp .*\(norm\)"),
        (METHOD, task, {"aggregate": "median"}, "aggregate is median"),
    ],
)
def test_what_cannot_be_promised_is_told_before_anything_is_written(method, made, more, why, dp, tmp_path):
    with pytest.raises(fb.UserError, match=why):
        fb.run(method, made(), out=tmp_path / "run", dp=dp, **more)
    assert not (tmp_path / "run").exists()


def test_class_weights_are_not_for_single_samples(tmp_path):
    weighed = fb.Task.of(
        lambda: nn.Linear(2, 2), [((torch.randn(4, 2), torch.tensor([0, 1, 0, 1])),) * 2], weights=[1, 2]
    )
    with pytest.raises(fb.UserError, match=r"dp of samples .*class weights"):
        fb.run(METHOD, weighed, out=tmp_path / "run", dp=SAMPLES)


def test_without_the_package_it_is_told_what_to_install(tmp_path, monkeypatch):
    plain = builtins.__import__

    def without(name, *rest):
        if name.startswith("dp_accounting"):
            raise ImportError(f"No module named {name!r}")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(fb.UserError, match=r"pip install 'fewbytes\[dp\]'"):
        fb.run(METHOD, task(), out=tmp_path / "run", dp=CLIENTS)
    assert not (tmp_path / "run").exists()


def site_of(made: fb.Task, diary: Diary, number: int = 1) -> fb.Site:
    made = METHOD.promising(METHOD.adapted(made), SAMPLES.replace("seeded", "secure"), 4)
    return fb.Site(made, 0, number, "train", Shared(diary))


class Forgetful:
    """A diary of one secret."""

    def secret(self) -> bytes:
        return bytes(32)

    def trained(self, client, begin, spent):
        return 1


def change(made: fb.Task, local: Local, weights: float = 0.1) -> torch.Tensor:
    """By how much a client's training moves the weights."""
    site = site_of(made, Forgetful())
    model = site.model({"weight": torch.full((3, 6), weights)})
    before = model.weight.detach().clone()
    site.fit(model, local)
    return (model.weight.detach() - before) / local.lr


def test_of_other_settings_or_samples_the_noise_is_another():
    """The difference of two answers with the same noise would tell all that the noise hides."""
    first = change(task(), METHOD.local)
    assert torch.equal(first, change(task(), METHOD.local))
    others = task()
    others.data.clients[0].train.y[0] = (others.data.clients[0].train.y[0] + 1) % 3
    for other in (change(task(), replace(METHOD.local, lr=2 * METHOD.local.lr)), change(others, METHOD.local)):
        assert float((first - other).norm()) > 0.5 * float(first.norm())


@pytest.mark.parametrize("weights", [3e38, math.inf, math.nan])
def test_what_leaves_under_dp_is_finite(weights):
    try:
        moved = change(task(), METHOD.local, weights)
    except fb.FewbytesError as error:
        assert "not finite" in str(error)  # noqa: PT017
    else:
        assert bool(moved.isfinite().all())
