"""FuseFL end to end: equalities with plain training, lost clients, bytes, files, different models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import CASES, TinyNet, opened, task_of, tiny_data, tiny_task
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.core.objectives import Classification
from fewbytes.experiments.plan import make_plan
from fewbytes.methods.fusefl import FusedBlocks
from fewbytes.methods.parts.one_shot import of_stage
from fewbytes.models import build_model
from fewbytes.models.blocks import cut
from fewbytes.models.build import ModelBuilder
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings
from fewbytes.wire import unpack

pytest.importorskip("flwr", reason="Flower is not installed")

from flower_grid import MemoryGrid

from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange

pytestmark = pytest.mark.filterwarnings(
    "ignore:batch normalisation .* sees a single value"
)  # deep networks, small images
LOCAL = {"lr": 0.1, "batch": 8, "momentum": 0.0}


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def outputs(model, data):
    x, _ = data.load()
    with torch.no_grad():
        return model.eval()(x)


def test_one_client_and_one_block_is_plain_training():
    task = tiny_task(clients=1)
    fused = fb.run(fb.FuseFL(blocks=1, ccvr_samples=0, epochs=3, **LOCAL), task, rounds=1).global_model
    site = opened(task, 0, 1, "train")  # seeded as the client's handler is
    plain = site.model()
    site.fit(plain, fb.Local(epochs=3, **LOCAL))
    (part,) = cut(plain, 1)
    same(fused.blocks[0].branches[0].block.state(), part.state())
    same(fused.classifier.state_dict(), plain.fc.state_dict())


def test_one_client_that_averages_freezes_one_network_block_by_block():
    """M = 1 with the average adaptor: the same network trained on, each time with one more block frozen."""
    task = tiny_task(clients=1)
    task = fb.Task.on(task.data, lambda: build_model("mlp:layers=3,hidden=6", (1, 4, 4), 3))
    method = fb.FuseFL(blocks=3, adaptor="average", ccvr_samples=0, epochs=3, **LOCAL)
    fused = fb.run(method, task, rounds=1).global_model
    model = task.problem.model(0)
    for k in range(3):
        for name, value in model.named_parameters():
            value.requires_grad_(name.split(".")[0] not in [f"fc{i + 1}" for i in range(k)])
        opened(task, 0, k + 1, "train").fit(model, fb.Local(epochs=1, **LOCAL))
    torch.testing.assert_close(outputs(fused, task.data.test), outputs(model, task.data.test))


def test_one_block_is_isolated_networks_whose_features_are_summed(tmp_path):
    task = tiny_task(clients=3)
    fused = fb.run(fb.FuseFL(blocks=1, ccvr_samples=0, epochs=2, **LOCAL), task, rounds=1).global_model
    x, _ = task.data.test.load()
    features, weights, biases = [], [], []
    for i in task.problem.clients:
        model = task.problem.model(i)
        opened(task, i, 1, "train").fit(model, fb.Local(epochs=2, **LOCAL))
        model.eval()
        with torch.no_grad():
            features.append(cut(model, 1)[0](x))
        weights.append(model.fc.weight)
        biases.append(model.fc.bias)
    logits = F.linear(sum(features), torch.stack(weights).mean(0), torch.stack(biases).mean(0))
    torch.testing.assert_close(outputs(fused, task.data.test), logits.detach())


def test_epochs_are_shared_out_over_the_stages():
    for total in (4, 7, 10, 200):
        for blocks in (1, 2, 4):
            shares = [of_stage(fb.Local(epochs=total), k, blocks).epochs for k in range(blocks)]
            assert sum(shares) == total
            assert min(shares) >= 1
    assert [of_stage(fb.Local(epochs=200), k, 8).epochs for k in range(8)] == [25] * 8
    assert [of_stage(fb.Local(epochs=2, steps=7), k, 3).steps for k in range(3)] == [2, 2, 3]


@pytest.mark.parametrize(("settings", "words"), [({"blocks": 8}, "8 blocks"), ({"cuts": "a,b,c,d"}, "5 blocks")])
def test_fewer_epochs_than_blocks_are_refused(settings, words):
    with pytest.raises(UserError, match=f"epochs 4 .*{words}"):
        fb.FuseFL(epochs=4, **settings)
    with pytest.raises(UserError, match=f"steps 4 .*{words}.*steps="):
        fb.FuseFL(steps=4, **settings)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_the_saved_network_is_the_one_that_was_scored(reduce, tmp_path):
    task = tiny_task()
    method = fb.FuseFL(blocks=3, final_reduce=reduce, ccvr_samples=50, epochs=3, **LOCAL)
    result = fb.run(method, task, rounds=1, out=tmp_path / "run")
    loaded = fb.load_model(tmp_path / "run", build=TinyNet)
    same(loaded.state_dict(), result.global_model.state_dict())
    x, y = task.data.test.load()
    right, n = Classification().evaluate(loaded, x, y)[0]["accuracy"]
    assert right / n == result.accuracy
    assert not list((tmp_path / "run" / "models").glob("client-*"))  # every client has the same


def mixed_task(names, shape=(1, 8, 8), clients=3):
    data = tiny_data(clients)
    grown = [
        (F.interpolate(c.train.load()[0], shape[1:]).expand(-1, shape[0], -1, -1), c.train.labels) for c in data.clients
    ]
    test = (F.interpolate(data.test.load()[0], shape[1:]).expand(-1, shape[0], -1, -1), data.test.labels)
    return fb.Task.of(ModelBuilder(names, shape, 3), [(pair, pair) for pair in grown], test)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        ("resnet10:width=2,stem=3x3+resnet18:width=2+resnet26:width=2", {}),
        ("resnet10:width=2,stem=3x3+resnet18:width=2+resnet26:width=2", {"adaptor": "average"}),
        ("resnet10:width=2,stem=3x3+resnet18:width=3", {"final_reduce": "concatenate"}),  # other widths
        ("resnet10:width=2,stem=3x3+resnet8:width=4,stem=3x3", {"cuts": "stem"}),
    ],
)
def test_clients_with_different_models_are_fused(names, settings, tmp_path):
    task = mixed_task(names)
    method = fb.FuseFL(ccvr_samples=200, epochs=16, lr=0.05, batch=8, **settings)
    one = fb.run(method, task, rounds=1, out=tmp_path / "one", workers=1)
    two = fb.run(method, task, rounds=1, workers=2)
    same(one.global_model.state_dict(), two.global_model.state_dict())
    assert one.summary["score"]["final"] > 0.6
    loaded = fb.load_model(tmp_path / "one", build=task.problem.build)
    same(loaded.state_dict(), one.global_model.state_dict())


def test_what_cannot_be_fused_is_told(tmp_path):
    cases = [
        ("resnet10:width=2,stem=3x3+resnet18:width=3", {}, "use final_reduce=concatenate"),
        ("resnet10:width=2,stem=3x3+resnet18:width=3", {"adaptor": "average"}, "cannot join features"),
        ("resnet10:width=2,stem=3x3", {"blocks": 9}, "cannot be cut into 9 blocks"),
        ("resnet10:width=2,stem=3x3+mlp:hidden=16,layers=4", {}, "cannot join features"),
        ("resnet10:width=2,stem=3x3", {"cuts": "layers.7"}, "no unit 'layers.7'"),
    ]
    for names, settings, words in cases:
        method = fb.FuseFL(ccvr_samples=0, epochs=9, batch=8, **settings)
        with pytest.raises(UserError, match=words):  # before anything is trained or written
            fb.run(method, mixed_task(names), rounds=1, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_models_of_equal_name_start_alike_whoever_has_them():
    task = mixed_task("resnet10:width=2,stem=3x3+resnet18:width=2", clients=4)
    same(task.problem.model(0).state_dict(), task.problem.model(2).state_dict())
    same(task.problem.model(1).state_dict(), task.problem.model(3).state_dict())
    assert task.problem.architecture(0) != task.problem.architecture(1)


METHOD = fb.FuseFL(blocks=3, ccvr_samples=20, epochs=6, **LOCAL)


def run_with_faults(folder, lost):
    """Over Flower's messages in memory; `lost(round, client)` says whose replies never arrive."""
    task = tiny_task()

    def fault(message, reply):
        gone = lost(int(message.metadata.group_id or 0), message.metadata.dst_node_id - 1000)
        return [] if gone and message.metadata.message_type.startswith("train.") else [reply]

    grid = MemoryGrid(client_app(METHOD, task, folder / "nodes"), 4, fault)
    policy = fb.Policy(min_replies=0.5, round_timeout=0.4, connect_timeout=0.4)
    return serve_run(
        grid, Run.of(METHOD, task, Settings(rounds=3, out=folder / "run"), policy), exchange=Exchange(poll=0.001)
    )


def branches(result):
    return [len(block.branches) for block in result.global_model.blocks]


def test_a_client_lost_between_stages_is_not_waited_for(tmp_path):
    result = run_with_faults(tmp_path, lambda t, i: i == 1 and t >= 2)
    assert branches(result) == [4, 3, 3]  # its first block stays, later adaptors take those present
    assert result.accuracy > 0.9
    assert [left["client"] for row in result.rounds for left in row.get("left_out", [])] == [1] * 4
    loaded = fb.load_model(tmp_path / "run", build=TinyNet)
    same(loaded.state_dict(), result.global_model.state_dict())


def test_a_client_that_returns_gets_what_it_missed_and_takes_part_again(tmp_path):
    result = run_with_faults(tmp_path, lambda t, i: i == 1 and t == 2)
    assert branches(result) == [4, 3, 4]
    columns = result.ledger.columns()
    third = columns["round"] == 3
    down = dict(zip(columns["client"][third], columns["bytes_down"][third], strict=True))
    assert down[1] > down[0]  # two blocks at once
    assert result.accuracy > 0.9


def test_a_client_that_was_never_there_at_first_joins_at_a_later_stage(tmp_path):
    result = run_with_faults(tmp_path, lambda t, i: i == 3 and t == 1)
    assert branches(result) == [3, 4, 4]
    assert result.accuracy > 0.9


def test_the_fused_network_can_be_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    task = mixed_task("resnet10:width=2,stem=3x3+resnet18:width=3")
    method = fb.FuseFL(final_reduce="concatenate", ccvr_samples=0, epochs=4, batch=8)
    result = fb.run(method, task, rounds=1, out=tmp_path / "run")
    model = fb.load_model(tmp_path / "run", build=task.problem.build)
    x, _ = task.data.test.load()
    file = tmp_path / "fused.onnx"
    torch.onnx.export(model, (x,), file, dynamic_shapes=({0: torch.export.Dim("n")},), dynamo=True)
    found = onnxruntime.InferenceSession(file).run(None, {"x": x[:7].numpy()})[0]
    torch.testing.assert_close(
        torch.from_numpy(found), outputs(result.global_model, task.data.test)[:7], rtol=1e-4, atol=1e-5
    )


def test_a_plan_counts_every_stage_for_all_clients():
    task, method = tiny_task(clients=6), fb.FuseFL(blocks=2, ccvr_samples=20, epochs=2, **LOCAL)
    planned = make_plan(method, task, 20, 1e6, 1e6)
    totals = fb.run(method, task, rounds=20).ledger.totals()
    assert planned.rounds == 2
    assert planned.nominal_up * 12 == totals["uplink_nominal_bytes"]
    assert planned.nominal_down * 12 == totals["downlink_nominal_bytes"]
    assert 0.9 < planned.up * 12 / totals["uplink_bytes"] < 1.1


def test_blocks_that_work_in_place_do_not_disturb_other_branches():
    def build(inplace):
        torch.manual_seed(0)
        activation = nn.LeakyReLU(0.5, inplace=inplace)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 3))

    method = fb.FuseFL(cuts="1,3", adaptor="average", ccvr_samples=0, epochs=3, **LOCAL)
    nets = [fb.run(method, fb.Task.on(tiny_data(), lambda i=i: build(i)), rounds=1).global_model for i in (True, False)]
    assert torch.equal(*(outputs(net, tiny_data().test) for net in nets))


def test_a_file_that_lacks_entries_is_told(tmp_path):
    fb.run(fb.FuseFL(blocks=2, ccvr_samples=0, epochs=2, **LOCAL), tiny_task(), rounds=1, out=tmp_path / "run")
    path = tmp_path / "run" / "models" / "global.safetensors"
    with safe_open(path, "pt") as file:
        metadata, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for lost in ("blocks.0.branches.0.block", "blocks.1.branches.2.adaptor", "classifier.weight"):
        save_file({k: v for k, v in state.items() if not k.startswith(lost)}, path, metadata)
        with pytest.raises(UserError, match=r"lacks|cannot be built"):
            fb.load_model(tmp_path / "run", build=TinyNet)


class Wrong(TinyNet):
    """Each of the ways in which units() can be wrong."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "cuts":
            self.default_cuts = {2: ()}

    def units(self):
        units = super().units()
        changed = {
            "list": list(units.values()),
            "new": units | {"flat": nn.Linear(4, 4)},
            "order": {"flat": units["flat"]},
        }
        return changed.get(self.how, units)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("list", "by name in a dict"),
        ("new", "layers that are not"),
        ("cuts", "default cuts"),
        ("order", "do not compute|shape"),
    ],
)
def test_a_module_of_ones_own_that_is_wrong_is_told(how, words):
    blocks = 1 if how == "order" else 2
    with pytest.raises((UserError, RuntimeError), match=words):
        fb.run(fb.FuseFL(blocks=blocks, epochs=2, **LOCAL), fb.Task.on(tiny_data(), lambda: Wrong(how)), rounds=1)


def test_single_samples_and_batch_normalisation_do_not_go_together():
    data = tiny_data(2)
    one = dataclasses.replace(data.clients[0], train=data.clients[0].train.take([0]))
    task = fb.Task.on(
        dataclasses.replace(data, clients=(one, data.clients[1])),
        ModelBuilder("resnet10:width=2,stem=3x3", (1, 4, 4), 3),
    )
    with pytest.raises(fb.FewbytesError, match=r"client 0 .*batch normalisation"):
        fb.run(fb.FuseFL(epochs=4, **LOCAL), task, rounds=1)


def test_what_a_new_part_is_does_not_depend_on_what_was_drawn_before(tmp_path):
    """A reply is refused by the norm of a new part: by the same norm in every run of a seed."""
    method, task = CASES["fusefl"], task_of("fusefl")
    fb.run(method, task, rounds=2, out=tmp_path / "run", workers=1, save_models=False)
    state = unpack(FusedBlocks, read_checkpoint(tmp_path / "run").server, limit=1 << 40)
    state.fused = state.fused[:1]
    parts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        parts.append(method.untrained(state, task.problem, 0).branch)
    assert parts[0].adaptor.state
    for what in ("adaptor", "block"):
        for name, value in getattr(parts[0], what).state.items():
            assert torch.equal(value, getattr(parts[1], what).state[name])
