"""Clients that lie: what they send, and what becomes of a run by the mean and by rules that bear them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from cases import CASES
from commands import fewbytes
from runs import configured

import fewbytes as fb
from fewbytes.analysis.poisoning import poison, poison_table, poisoned, stamped, with_malicious
from fewbytes.analysis.settings import Poisoning
from fewbytes.base.units import megabytes
from fewbytes.core.site import Site
from fewbytes.data import Split
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.methods.parts.averaging import Model
from fewbytes.report import read_runs, write_report
from fewbytes.report.leaks import poison_words

TERMS = {"rounds": 8, "clients": 5, "partition": "iid", "parameters": {"epochs": 2, "lr": 0.2, "batch": 20}}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return configured(tmp_path_factory.mktemp("fedavg"), "fedavg", **TERMS)


@pytest.fixture(scope="module")
def task(run) -> fb.Task:
    return find(experiment_of(run)).task


def sent(how: Poisoning, task: fb.Task, liar: int) -> dict[str, torch.Tensor]:
    """What client 1 replies to the first model in round 1, as its change, if `liar` lies."""
    first, method = task.problem.first_state(), with_malicious(fb.FedAvg(batch=20), [liar], how)
    site = Site(task, 1, 1, "train")
    torch.manual_seed(site.seed)
    reply = method.train(None, Model(fb.Dense(first)), site)
    assert reply.samples == len(task.data.clients[1].train)
    return {name: value - first[name] for name, value in reply.theta.dense().items()}


def test_a_liar_s_update_is_scaled_turned_round_or_noise_as_long_and_others_are_honest(task):
    honest = sent(Poisoning(), task, liar=0)
    for kind, factor in (("scale", 3.0), ("flip", -3.0)):
        lie = sent(Poisoning(poison=kind, factor=3.0), task, liar=1)
        for name, value in honest.items():
            torch.testing.assert_close(lie[name], factor * value, rtol=1e-3, atol=1e-5)
    noise = sent(Poisoning(poison="noise", factor=3.0), task, liar=1)
    vectors = [torch.cat([value.flatten() for value in each.values()]) for each in (honest, noise)]
    assert float(vectors[1].norm() / vectors[0].norm()) == pytest.approx(3, rel=1e-3)
    assert abs(float(torch.cosine_similarity(*vectors, dim=0))) < 0.1


def test_liars_learn_wrong_labels_or_a_bright_corner():
    x, y = torch.zeros(4, 1, 16, 16), torch.tensor([0, 1, 2, 0])
    split = Split(x, y)
    wrong = poisoned(split, Poisoning(poison="labels"), classes=3)
    assert wrong.labels.tolist() == [1, 2, 0, 1]
    triggered = poisoned(split, Poisoning(poison="backdoor", target=2), classes=3)
    assert triggered.labels.tolist() == [2, 1, 2, 0]
    assert triggered.load()[0].sum((1, 2, 3)).tolist() == [4, 0, 4, 0]
    assert stamped(x)[0, 0, 14:, 14:].eq(1).all()
    assert not x.any()
    assert split.labels.tolist() == y.tolist()


def test_its_tables_show_the_bytes_of_each_direction_and_their_sum(run, tmp_path):
    result = poison(run, Poisoning(factor=2.0))
    summary = json.loads((run / "result.json").read_text())
    up, down = summary["uplink_bytes"], summary["downlink_bytes"]
    wanted = [megabytes(up), megabytes(down), megabytes(up + down)]
    table = poison_table(result)
    heads = [str(column.header) for column in table.columns]
    assert heads[-3:] == ["MB up", "MB down", "MB both"]
    assert [next(iter(column.cells)) for column in table.columns][-3:] == wanted
    page = write_report(read_runs([run]), tmp_path / "report.html").read_text()
    assert "".join(f"<td>{cell}</td>" for cell in wanted) in page
    for row in (result["clean"], *result["poisoned"]):
        del row["downlink_bytes"]  # as older versions wrote it
    (run / "poison.json").write_text(json.dumps(result))
    page = write_report(read_runs([run]), tmp_path / "older.html").read_text()
    assert f"<td>{megabytes(up)}</td><td>—</td><td>—</td>" in page


def test_by_the_mean_the_model_is_the_liar_s_and_by_the_median_it_is_not(run):
    result = poison(run, Poisoning(poison="scale", aggregate="median"))
    clean, (mean, median) = result["clean"]["accuracy"], [row["accuracy"] for row in result["poisoned"]]
    assert clean > 0.85
    assert mean is None or mean < clean - 0.2
    assert median > clean - 0.03
    assert [row["rule"] for row in result["poisoned"]] == ["mean", "median"]
    assert len(result["malicious"]) == 1
    succeeds, withstands = poison_words(result)
    assert "With the mean the attack succeeds" in succeeds
    assert "median withstands it" in withstands
    page = write_report(read_runs([run]), run / "report.html").read_text()
    assert "Malicious clients" in page
    assert withstands in page


def test_a_backdoor_is_the_mean_s_and_not_the_median_s(run):
    result = poison(run, Poisoning(poison="backdoor", target=3, aggregate="median"))
    mean, median = result["poisoned"]
    assert result["clean"]["success"] < 0.15
    assert mean["success"] >= 0.8
    assert median["success"] <= 0.15
    assert median["accuracy"] > result["clean"]["accuracy"] - 0.03


def test_a_control_that_does_not_succeed_makes_the_result_void(run):
    result = poison(run, Poisoning(poison="scale", factor=1.0, aggregate="median"))
    assert result["poisoned"][0]["accuracy"] == result["clean"]["accuracy"], "a factor of 1 is no lie"
    (word,) = poison_words(result)
    assert word.startswith("Void: with the mean, accuracy")


def test_models_of_clients_own_are_judged_by_the_honest_clients(tmp_path):
    terms = TERMS | {"rounds": 2, "parameters": {"epochs": 1, "lr": 0.1, "batch": 20}}
    result = poison(configured(tmp_path, "fedpurin", **terms), Poisoning(factor=5.0, aggregate="norm-clip"))
    assert [row["rule"] for row in result["poisoned"]] == ["mean", "norm-clip"]
    assert result["poisoned"][0]["accuracy"] != result["clean"]["accuracy"]


ABLE = [
    "fedavg",
    "fedprox",
    "scaffold",
    "ditto",
    "fedper",
    "fedrep",
    "lg_fedavg",
    "fedpurin",
    "fedcac",
    "fedkgf",
    "genefl",
    "dense",
    "fml",
]


@pytest.mark.parametrize("name", ABLE)
def test_a_method_whose_clients_lie_keeps_its_name_and_hyper_parameters(name):
    liar = with_malicious(CASES[name], [0], Poisoning())
    assert (liar.method_name, liar.parameters) == (CASES[name].method_name, CASES[name].parameters)


@pytest.mark.parametrize("name", ["fedproto", "feddistill", "dgc", "fedpm", "separate", "clustered"])
def test_a_method_whose_replies_hold_no_model_is_refused(name):
    with pytest.raises(fb.UserError, match="sends no models"):
        with_malicious(CASES[name], [0], Poisoning())


def test_a_run_that_promises_privacy_keeps_its_noisy_mean(tmp_path):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")
    terms = TERMS | {"rounds": 2, "dp": "epsilon=8,delta=1e-5,clip=0.5,noise=seeded"}
    private = configured(tmp_path, "fedavg", **terms)
    (row,) = poison(private)["poisoned"]
    assert row["accuracy"] is not None, "an update 100 times as long is clipped"
    with pytest.raises(fb.UserError, match="noisy mean"):
        poison(private, Poisoning(aggregate="median"))


def test_the_command_line_tells_the_result(run):
    done = fewbytes("attack", run, "--poison", "flip", "--share", "0.4", "--factor", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((run / "poison.json").read_text())
    assert (result["poison"], len(result["malicious"]), result["factor"]) == ("flip", 2, 2.0)


def test_mistakes_are_told_and_nothing_is_written(run, tmp_path):
    before = sorted(path for path in run.iterdir())
    mistakes = {
        "no class 10": Poisoning(poison="backdoor", target=10),
        "5 of 5 clients": Poisoning(share=0.95),
        "krum=2 needs 7 clients": Poisoning(aggregate="krum=2"),
    }
    for told, how in mistakes.items():
        with pytest.raises(fb.UserError, match=told):
            poison(run, how)
    with pytest.raises(fb.UserError, match=r"median.*'mode'"):
        Poisoning(aggregate="mode")
    with pytest.raises(fb.UserError, match="is not a run folder"):
        poison(tmp_path)
    with pytest.raises(fb.UserError, match=r"factor .*above 0"):
        dataclasses.replace(Poisoning(), factor=0.0)
    assert sorted(run.iterdir()) == before
    for words, told in {
        ("--poison", "lie"): "poison is one of scale",
        ("--poison", "scale", "--images", "3"): "--images is not a setting of poisoning",
        ("--poison", "scale", "--client", "1"): "--client is not a setting of poisoning",
        ("--poison", "scale", "--membership"): "one attack at a time",
    }.items():
        done = fewbytes("attack", run, *words)
        assert done.returncode == 2
        assert told in done.stderr.replace("\n", " ")
