"""Any method in clusters of clients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CASES, LOCAL, TinyNet, late_task, tiny_data, tiny_task
from safetensors.torch import load_file

import fewbytes as fb
from fewbytes.experiments.plan import make_plan
from fewbytes.experiments.settings import make_experiment
from fewbytes.methods.parts.clustered import Clustered, Clusters
from fewbytes.report import read_runs
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.run import Run
from fewbytes.wire import unpack


def server(folder) -> Clusters:
    return unpack(Clusters, read_checkpoint(folder).server)


def models(folder) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted((folder / "models").glob("*.safetensors"))}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name][key]) for name, state in one.items() for key, value in state.items()
    )


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fedpurin-sampled", "fedgen", "scaled"])
def test_one_cluster_is_the_method_itself(name, tmp_path):
    method = fb.FedCAMS(**LOCAL) if name == "scaled" else CASES[name]
    for folder, made in (("plain", method), ("one", Clustered(method, clusters=1))):
        fb.run(made, tiny_task(), rounds=3, out=tmp_path / folder, workers=1)
    assert same(models(tmp_path / "plain"), models(tmp_path / "one"))


def test_each_cluster_is_the_method_among_its_clients(tmp_path):
    """Two clusters of two clients: as if there were no others."""
    task, method = tiny_task(), fb.FedBN(**LOCAL)
    fb.run(Clustered(method, clusters=2, vectors=2), task, rounds=3, out=tmp_path / "two", workers=1)
    of = server(tmp_path / "two").cluster_of
    assert set(of.values()) == {0, 1}
    for k in (0, 1):
        there = [(1, None) if of[i] == k else (9, None) for i in range(4)]
        alone = fb.Task.on(replace(task.data, presence=tuple(there)), TinyNet)
        fb.run(method, alone, rounds=3, out=tmp_path / str(k), workers=1)
        for i in (i for i in range(4) if of[i] == k):
            name = f"client-{i}.safetensors"
            assert same({name: models(tmp_path / "two")[name]}, {name: models(tmp_path / str(k))[name]})


@pytest.mark.parametrize("name", ["lg_fedavg", "fedproto"])
def test_what_is_left_with_everybody_reaches_a_newcomer_of_the_cluster(name, tmp_path):
    totals = [
        fb.run(method, late_task(), rounds=3, workers=1).ledger.totals()
        for method in (CASES[name], Clustered(CASES[name], clusters=1))
    ]
    assert totals[0] == totals[1]


def test_a_newcomer_joins_the_cluster_of_its_twin(tmp_path):
    data = tiny_data(5)
    twin = replace(data, clients=(*data.clients[:4], data.clients[1]), presence=((1, None),) * 4 + ((3, None),))
    method = Clustered(fb.FedAvg(**LOCAL), clusters=2, vectors=2)
    fb.run(method, fb.Task.on(twin, TinyNet), rounds=4, out=tmp_path / "run", workers=1)
    of = server(tmp_path / "run").cluster_of
    assert of[4] == of[1]


def test_a_client_silent_at_the_start_is_put_into_the_largest_cluster_and_noted(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import MemoryGrid, handler_of

    from fewbytes.flower.apps import client_app, serve_run
    from fewbytes.flower.link import Exchange
    from fewbytes.running.settings import Settings

    method, task = Clustered(fb.FedAvg(**LOCAL), clusters=2, vectors=2), tiny_task(clients=5)
    grid = MemoryGrid(client_app(method, task, tmp_path), 5, lambda m, r: [] if silent(m) else [r])

    def silent(message) -> bool:
        return handler_of(message) == "describe" and message.metadata.dst_node_id == 1003

    settings, policy = Settings(rounds=2, out=tmp_path / "run"), fb.Policy(round_timeout=0.3, connect_timeout=0.3)
    result = serve_run(grid, Run.of(method, task, settings, policy), exchange=Exchange(poll=0.001))
    assert result.summary["status"] == "done"
    of = server(tmp_path / "run").cluster_of
    others = [k for i, k in of.items() if i != 3]
    assert of[3] == max(set(others), key=others.count)
    notes = [row["notes"] for row in result.rounds if "notes" in row]
    ((told, who),) = notes[0].items()
    assert "largest cluster" in told
    assert (who, len(notes)) == ("1 clients", 1)


def test_the_model_of_each_cluster_is_kept(tmp_path):
    method = Clustered(fb.FedAvg(**LOCAL), clusters=2, vectors=2)
    fb.run(method, tiny_task(), rounds=1, out=tmp_path / "run", workers=1)
    kept = models(tmp_path / "run")
    assert list(kept) == ["cluster-0.safetensors", "cluster-1.safetensors"]
    assert not torch.equal(*(state["conv.weight"] for state in kept.values()))


def test_all_that_a_method_says_of_itself_is_the_inner_method_s():
    inner = fb.FedKGF(fraction=0.5)
    method = Clustered(inner, clusters=2)
    assert method.model_for((1, 8, 8)) == inner.model_for((1, 8, 8)) != fb.FedAvg().model_for((1, 8, 8))
    assert method.quick(3) == Clustered(inner.quick(3), clusters=2)
    assert method.changed(fraction=1.0, lr=0.3) == Clustered(fb.FedKGF(lr=0.3), clusters=2)
    assert method.local == inner.local
    assert [each.name for each in method.handlers()] == ["train", "describe"]
    assert Clustered(fb.FedAvg()).promises == replace(fb.FedAvg.promises, protects=frozenset(), sums=False)
    plan = make_plan(Clustered(fb.FedAvg(**LOCAL, fraction=0.5), 2), tiny_task(), 5, 1e6, 1e6)
    assert (plan.clients, plan.cohort, plan.rounds) == (4, 2, 5)


def test_what_cannot_be_clustered_is_refused():
    with pytest.raises(fb.UserError, match=r"ensemble .*clusters"):
        Clustered(fb.Ensemble())
    with pytest.raises(fb.UserError, match=r"clusters is 5, .*4 "):
        fb.run(Clustered(fb.FedAvg(), clusters=5), tiny_task(), rounds=1)
    with pytest.raises(fb.UserError, match=r"clusters .*at least 1"):
        Clustered(fb.FedAvg(), clusters=0)
    for inner in (3, Clustered(fb.FedAvg())):
        with pytest.raises(fb.UserError, match="clusters"):
            Clustered(inner)
    with pytest.raises(fb.UserError, match=r"genefl .*--set clusters=2"):
        make_experiment({"method": "genefl", "clusters": 2}).build_method()


def test_clusters_are_a_setting_of_any_experiment(tmp_path):
    experiment = make_experiment({"method": "fedper", "clusters": 2, "parameters": {"lr": "0.2"}})
    assert experiment.build_method() == Clustered(fb.FedPer(lr=0.2), clusters=2)
    assert experiment.settings()["clusters"] == 2
    result = fb.run(experiment.build_method(), tiny_task(), rounds=1, out=tmp_path / "run")
    plain = fb.run(fb.FedPer(lr=0.2), tiny_task(), rounds=1, out=tmp_path / "plain")
    assert [each.summary["method"] for each in (result, plain)] == ["fedper in 2 clusters", "fedper"]
    assert [run.label for run in read_runs([tmp_path])] == ["fedper", "fedper in 2 clusters"]
    assert result.summary["score"]["kind"] == "personalised"
