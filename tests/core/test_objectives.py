"""What is learnt other than one of several classes: each kind learns real data, and metrics say what others' do."""

import math
import sys

import numpy as np
import pytest
import torch
from runs import fingerprint
from torch import nn
from torch.utils.data import TensorDataset

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.core.metric_names import KNOWN
from fewbytes.core.metrics import value_of
from fewbytes.core.objectives import class_weights, objective_for
from fewbytes.models.unet import UNet
from fewbytes.running.settings import Watcher

FAST = {"lr": 0.05, "batch": 16, "momentum": 0.9}


def halves(x, y, clients=3):
    """(train, test) of each client, and the server's test set."""
    parts = [(x[i :: clients + 1], y[i :: clients + 1]) for i in range(clients + 1)]
    return [((a[10:], b[10:]), (a[:10], b[:10])) for a, b in parts[:-1]], parts[-1]


def diabetes():
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return torch.tensor(x * 20).float(), torch.tensor((y - y.mean()) / y.std()).float()


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images[:, None] / 16).float(), torch.tensor(data.target)


def linear(inputs, outputs):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def test_numbers_are_learnt():
    clients, test = halves(*diabetes())
    task = fb.Task.of(linear(10, 1), clients, test, metrics=["mae", "r2"])
    result = fb.run(fb.FedAvg(**FAST), task, rounds=8)
    guess = float((test[1] - test[1].mean()).abs().mean())
    assert result.summary["score"]["metric"] == "mae"
    assert result.score < 0.8 * guess
    assert result.summary["score"]["best"] == min(row["scores"]["mae"]["global"] for row in result.rounds)
    assert result.summary["further"]["r2"]["global"]["final"] > 0.3
    with pytest.raises(UserError, match="scored by mae"):
        _ = result.accuracy


def test_any_of_several_labels_is_learnt():
    x, y = digits()
    labels = torch.stack([y % 2 == 0, y > 4, (y == 0) | (y == 6) | (y == 8) | (y == 9)], 1)
    clients, test = halves(x, labels)
    task = fb.Task.of(linear(64, 3), clients, test, metrics=["f1", "exact-match", "auc"])
    result = fb.run(fb.FedAvg(**FAST, epochs=3), task, rounds=6)
    assert result.score > 0.9
    assert 0.5 < result.summary["further"]["exact-match"]["global"]["final"] < result.score


def test_a_class_of_every_pixel_is_learnt():
    x, _ = digits()
    masks = ((x[:, 0] > 0.3).long() + (x[:, 0] > 0.7).long())[:600]
    masks[:, 0, 0] = 255  # not known
    clients, test = halves(x[:600], masks, clients=2)
    task = fb.Task.of(lambda: UNet((1, 8, 8), 3, width=4), clients, test)
    result = fb.run(fb.FedAvg(**FAST | {"lr": 0.1}, epochs=3), task, rounds=6)
    assert result.summary["score"]["metric"] == "iou"
    assert result.score > 0.8
    with torch.no_grad():
        found = result.global_model.eval()(test[0]).argmax(1)
    known = test[1] != 255
    overlaps = [
        ((found == c) & (test[1] == c) & known).sum() / (((found == c) | (test[1] == c)) & known).sum()
        for c in range(3)
    ]
    assert result.score == pytest.approx(float(sum(overlaps) / 3), abs=1e-5)


class NextOfTwo(nn.Module):
    """Tokens (n, length) to logits (n, length, tokens), each from the token alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, x):
        return self.table(x)


def test_next_tokens_are_learnt():
    walk = torch.arange(2000) % 5
    x = walk[:-1].reshape(-1)[:1990].view(-1, 10)
    y = walk[1:1991].view(-1, 10).clone()
    y[:, 0] = -100  # not asked for
    clients, test = halves(x, y)
    result = fb.run(fb.FedAvg(lr=2.0, batch=4), fb.Task.of(NextOfTwo, clients, test), rounds=4)
    assert result.summary["score"]["metric"] == "perplexity"
    assert 1 <= result.score < 1.5  # 5 at first
    with torch.no_grad():
        loss = nn.functional.cross_entropy(result.global_model(test[0]).flatten(0, 1), test[1].flatten())
    assert result.score == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_loss_of_ones_own_is_trained_with():
    clients, test = halves(*diabetes())
    pinned = fb.Task.of(linear(10, 1), clients, test, loss=lambda outputs, targets: (outputs[:, 0] - 3).square().mean())
    result = fb.run(fb.FedAvg(**FAST), pinned, rounds=6)
    with torch.no_grad():
        assert (result.global_model(test[0]) - 3).abs().mean() < 0.3


def test_targets_of_any_shape_need_a_loss_and_metrics_of_ones_own():
    from torchmetrics import MeanSquaredError

    x = torch.randn(80, 4)
    clients, test = halves(x, x[:, :, None] * torch.ones(1, 4, 3), clients=2)
    model = lambda: nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (4, 3)))  # noqa: E731
    with pytest.raises(UserError, match="give a loss"):
        fb.run(fb.FedAvg(), fb.Task.of(model, clients, test), rounds=1)
    task = fb.Task.of(model, clients, test, loss=nn.functional.mse_loss, metrics={"error": MeanSquaredError})
    result = fb.run(fb.FedAvg(**FAST), task, rounds=5)
    assert result.summary["score"]["metric"] == "error"
    assert result.summary["metrics"] == {"error": {"higher": False, "share": False, "percent": False}}
    assert result.score < result.rounds[0]["scores"]["error"]["global"]


def test_a_data_set_of_items_may_have_numbers_for_targets():
    x, y = diabetes()
    task = fb.Task.of(linear(10, 1), [(TensorDataset(x[:300], y[:300]), (x[300:], y[300:]))])
    assert task.data.learns == "numbers"
    assert fb.run(fb.FedAvg(**FAST), task, rounds=4, workers=1).score < 0.8


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("accuracy", lambda metrics, y, p: metrics.accuracy_score(y, p.argmax(1))),
        ("balanced-accuracy", lambda metrics, y, p: metrics.balanced_accuracy_score(y, p.argmax(1))),
        ("f1", lambda metrics, y, p: metrics.f1_score(y, p.argmax(1), average="macro")),
        ("auc", lambda metrics, y, p: metrics.roc_auc_score(y, p, multi_class="ovr")),
        ("kappa", lambda metrics, y, p: metrics.cohen_kappa_score(y, p.argmax(1))),
    ],
)
def test_metrics_of_classes_are_scikit_learns(name, theirs):
    from sklearn import metrics

    rng = np.random.default_rng(0)
    y, logits = rng.integers(0, 3, 400), torch.tensor(rng.normal(size=(400, 3))).float()
    logits[range(400), y] += 1
    objective = objective_for("classes", [name])
    scores, loss = objective.evaluate(nn.Identity(), logits, torch.tensor(y))
    total, n = scores[name]
    assert total / n == pytest.approx(theirs(metrics, y, logits.softmax(1).numpy()), abs=1e-5)
    assert loss / n == pytest.approx(metrics.log_loss(y, logits.softmax(1).numpy()), rel=1e-5)


def test_a_client_that_lacks_classes_is_ranked_by_those_it_has():
    objective = objective_for("classes", ["auc"])
    y, logits = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([[3, 0, 0], [2, 0, 0], [0, 1, 0], [0, 4, 0], [0, 3, 1.0]])
    scores, _ = objective.evaluate(nn.Identity(), logits, y)
    assert scores["auc"] == (5.0, 5)  # every pair in order
    assert objective.evaluate(nn.Identity(), logits[:2], y[:2])[0] == {}  # of one class alone nothing can be said


def test_every_metric_by_name_can_be_computed():
    given = {
        "multiclass": (torch.randn(20, 3).softmax(1), torch.arange(20) % 3),
        "multilabel": (torch.rand(20, 3), torch.randint(0, 2, (20, 3))),
        "regression": (torch.randn(20), torch.randn(20)),
        "segmentation": (torch.randn(4, 3, 8, 8).softmax(1), torch.randint(0, 3, (4, 8, 8))),
        "text": (torch.randn(4, 6, 9), torch.randint(0, 9, (4, 6))),
    }
    for learns, kind in (("classes", "multiclass"), ("labels", "multilabel"), ("numbers", "regression"),
                         ("masks", "segmentation"), ("tokens", "text")):  # fmt: skip
        names = [f"{name}=0.9" if "@" in name else name for name in KNOWN[kind]]
        for metric in objective_for(learns, names, positive=1 if learns == "classes" else None).metrics:
            measure = metric.make(given[kind][0])
            measure.update(*given[kind])
            assert math.isfinite(value_of(measure)), metric.name


def test_balanced_weights_make_every_class_count_alike():
    targets = torch.tensor([0] * 8 + [2] * 2)
    weights = class_weights("balanced", targets)
    torch.testing.assert_close(weights, torch.tensor([10 / 16, 0, 10 / 4]))
    assert float(weights[targets].mean()) == 1
    x = torch.cat([torch.randn(190, 2), torch.randn(10, 2) + 1.5])
    y = torch.tensor([0] * 190 + [1] * 10)
    how = {"metrics": ["balanced-accuracy"]}
    scores = {
        weights: fb.run(
            fb.FedAvg(**FAST, epochs=5), fb.Task.of(linear(2, 2), [((x, y), (x, y))], weights=weights, **how), rounds=4
        ).summary["score"]["all"]["personalised"]["final"]
        for weights in (None, "balanced", (1.0, 19.0))
    }
    assert scores["balanced"] > scores[None] + 0.1
    assert scores["balanced"] == pytest.approx(scores[(1.0, 19.0)], abs=0.05)


@pytest.mark.parametrize("method", [fb.FedKTL, fb.FedProto, fb.FedGen, fb.FedDF, fb.FedDistill])
def test_a_method_that_needs_labels_says_so_and_leaves_nothing(method, tmp_path):
    clients, test = halves(*diabetes())
    with pytest.raises(UserError, match="such as fedavg"):
        fb.run(method(), fb.Task.of(linear(10, 1), clients, test), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_metrics_whose_package_lacks_are_refused_before_a_run_begins(tmp_path, monkeypatch):
    x, y = diabetes()
    clients, test = halves(x, (y > 0).long())
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    numbers = [((a[0], a[1].float()), (b[0], b[1].float())) for a, b in clients]
    with pytest.raises(UserError, match=r"mae .*pip install 'fewbytes\[metrics\]'"):
        fb.run(fb.FedAvg(), fb.Task.of(linear(10, 1), numbers, metrics="mae"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    task = fb.Task.of(linear(10, 2), clients, test, metrics=["auc", "sensitivity@specificity=0.9", "brier"], positive=1)
    assert 0 <= fb.run(fb.FedAvg(), task, rounds=1).score <= 1  # metrics of classes need no package


def test_what_cannot_be_is_refused():
    from torchmetrics import Accuracy, MeanSquaredError

    x, y = diabetes()
    pair = ((x, y), (x, y))
    for how, says in (
        ({"metrics": ["acuracy"]}, "no metric 'acuracy'"),
        ({"metrics": [3]}, "a metric is a name, or, of your own, {name: metric}, not 3"),
        ({"metrics": MeanSquaredError()}, "{name: metric}, not a MeanSquaredError"),
        ({"metrics": {"mine": Accuracy}}, "the metric 'mine' cannot be made .*task"),
        ({"loss": 3}, "loss is a function, .* not 3"),
        ({"transform": 3}, "transform is a function, .* not 3"),
        ({"precision": "tf32"}, "precision tf32 needs a GPU"),
        ({"precision": "fp16"}, "precision is one of float32, bf16, tf32, not 'fp16'"),
        ({"device": "gpu"}, "device 'gpu' is neither cpu nor cuda"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here: .*: use cpu"),
        ({"seed": "first"}, "seed must be a whole number, not 'first'"),
        ({"presence": [1]}, "presence of client 0 must be its first and last round"),
        ({"metrics": ["auc"]}, "there are mae, rmse"),
        ({"metrics": {"mine": 3}}, "the metric 'mine' is a int"),
        ({"weights": "balanced"}, "class weights are for"),
    ):
        with pytest.raises(UserError, match=says):
            fb.Task.of(linear(10, 1), [pair], **how)
    with pytest.raises(UserError, match="classes, others numbers"):
        fb.Task.of(linear(10, 1), [pair, ((x, (y > 0).long()), (x, (y > 0).long()))])
    labelled = ((x, (y > 0).long()), (x, (y > 0).long()))
    task = fb.Task.of(linear(10, 2), [labelled], loss=nn.functional.cross_entropy, metrics=["f1"])
    with pytest.raises(UserError, match="place of yours"):
        fb.run(fb.FML(), task)


def test_numbers_that_are_not_finite_are_told_by_client_and_sample():
    x, y = diabetes()
    broken = x.clone()
    broken[7, 2] = math.nan
    infinite = y.numpy().copy()
    infinite[5] = math.inf
    for clients, test, says in (
        ([((x, y), (x, y)), ((broken, y), (x, y))], None, "^client 1's training samples: 1 of 442 .* sample 7"),
        ([((x, y), (x, infinite))], None, "^the targets of client 0's test samples: 1 of 442 .* sample 5"),
        ([(({"a": x, "b": broken}, y), ({"a": x, "b": x}, y))], None, r"^client 0's training samples \(b\)"),
        ([((x, y), (x, y))], (broken.numpy(), y), "^the server's samples"),
    ):
        with pytest.raises(UserError, match=says):
            fb.Task.of(linear(10, 1), clients, test)
    fb.Task.of(linear(10, 1), [((x, infinite), (x, y))], loss=nn.functional.mse_loss)  # it may mean something there


def test_a_memory_map_is_not_read_to_look_for_such(tmp_path):
    x, y = diabetes()
    np.save(tmp_path / "x.npy", np.full((442, 10), np.nan, np.float32))
    on_disk = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert len(fb.Task.of(linear(10, 1), [((on_disk, y), (x, y))]).data.clients) == 1


def not_a_number(outputs, targets):
    return outputs.sum() * math.nan


@pytest.mark.parametrize(
    ("outputs", "y", "how", "says"),
    [
        (3, "classes", {"weights": (1.0,)}, r"4 classes, .*not \(1.0,\)"),
        (4, "classes", {"weights": (1, 2, 3, math.nan)}, "0 or more for each of the 4 classes"),
        (4, "classes", {"weights": "balance"}, "'balanced', .* not 'balance'"),
        (4, "classes", {"weights": (1, 2, 3, 4, 5)}, "5 class weights"),
        (3, "classes", {}, "^client 1.* is 3: .*4 outputs"),
        (
            2,
            "numbers",
            {},
            r"\(8, 2\), .*\(8,\): .*number",
        ),
        (2, "labels", {}, r"\(8, 3\): .*logit"),
        (4, "classes", {"loss": not_a_number}, "not_a_number returns nan"),
        (
            4,
            "classes",
            {"loss": nn.CrossEntropyLoss(reduction="none")},
            "CrossEntropyLoss returns a tensor",
        ),
        (4, "classes", {"loss": lambda outputs, targets: 3.0}, "returns 3.0"),
        (4, "classes", {"loss": lambda outputs, targets: outputs.detach().mean()}, "no gradient"),
        (4, "classes", {"loss": nn.functional.mse_loss}, r"cannot be computed .*\(.*, 4\)"),
    ],
)
def test_what_no_model_could_learn_is_refused_before_a_run(outputs, y, how, says, tmp_path):
    x, numbers = diabetes()
    classes = torch.arange(442) % 3
    later = classes.clone()
    later[100] = 3
    kinds = {"classes": (classes, later), "numbers": (numbers,) * 2, "labels": (torch.eye(3).bool()[classes],) * 2}
    clients = [((x, each), (x, kinds[y][0])) for each in kinds[y]]
    with pytest.raises(UserError, match=says) as error:
        fb.run(fb.FedAvg(), fb.Task.of(linear(10, outputs), clients, **how), out=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_breaks_in_training_is_named_beside_the_learning_rate():
    x, y = diabetes()

    calls = []

    def breaks(outputs, targets):
        calls.append(len(outputs))
        return outputs.square().mean() * (1 if len(calls) < 3 else math.nan)  # good when tried

    task = fb.Task.of(linear(10, 1), [((x, y), (x, y))], loss=breaks)
    with pytest.raises(fb.FewbytesError, match=r"lr .*breaks"):
        fb.run(fb.FedAvg(), task, rounds=1, workers=1)


def test_one_metric_may_be_named_without_a_list_and_targets_may_stand_in_a_column():
    x, y = diabetes()
    pair = (x, y[:, None])
    task = fb.Task.of(linear(10, 1), [(pair, pair)], pair, metrics="r2")
    alone = fb.Task.of(linear(10, 1), [((x, y), (x, y))], (x, y), metrics=["r2"])
    assert fb.run(fb.FedAvg(), task, rounds=1).score == pytest.approx(fb.run(fb.FedAvg(), alone, rounds=1).score)


def test_a_client_with_one_test_sample_has_no_r2_and_is_left_out_of_its_mean():
    x, y = diabetes()
    train, tests = (x[:100], y[:100]), ((x[100:200], y[100:200]), (x[200:201], y[200:201]))

    def scored(*tests):
        task = fb.Task.of(linear(10, 1), [(train, test) for test in tests], tests[0], metrics=["r2", "mae"])
        return fb.run(fb.FedAvg(lr=0.05), task, rounds=1, workers=1).rounds[-1]["by_client"]

    both, alone = scored(*tests), scored(tests[0])
    assert both["r2"]["personalised"] == {"0": alone["r2"]["personalised"]["0"]}
    assert set(both["mae"]["personalised"]) == {"0", "1"}


class StopsAfterTwo(Watcher):
    def scored(self, row):
        if row["round"] == 2:
            raise KeyboardInterrupt


def test_runs_with_several_metrics_are_equal_with_workers_and_resumed(tmp_path):
    clients, test = halves(*diabetes())
    task = fb.Task.of(linear(10, 1), clients, test, metrics=["rmse", "mae"])
    fb.run(fb.FedPURIN(lr=0.05, batch=16), task, rounds=3, workers=1, out=tmp_path / "whole")
    parts = {"rounds": 3, "workers": 2, "out": tmp_path / "parts"}
    with pytest.raises(KeyboardInterrupt):
        fb.run(fb.FedPURIN(lr=0.05, batch=16), task, watcher=StopsAfterTwo(), **parts)
    other = fb.Task.of(linear(10, 1), clients, test, metrics=["mae"])
    with pytest.raises(UserError, match="another configuration"):
        fb.run(fb.FedPURIN(lr=0.05, batch=16), other, resume=True, **parts)
    fb.run(fb.FedPURIN(lr=0.05, batch=16), task, resume=True, **parts)
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")
