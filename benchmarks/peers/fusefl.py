"""Compares fewbytes' FuseFL with its authors' code (https://github.com/wizard1203/FuseFL) on a part of CIFAR-10.

    git clone https://github.com/wizard1203/FuseFL
    python benchmarks/peers/fusefl.py --fusefl FuseFL            # writes docs/agreement.json
    python benchmarks/peers/fusefl.py --fusefl FuseFL --same     # only with equal batches
    python benchmarks/peers/page.py

The authors' main.py runs on a processor, with our splits and first weights. Replaced are the reading of data, the
device, the loaders (theirs fork four processes each) and, for equal batches, what is drawn at random: the shuffling,
the adaptors' first weights, the virtual features of the calibration. Scores are those of the two moments of `common`:
`sent` is of the fused network, `trained` of the clients' own networks after the last stage's training.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from common import BATCH, SEEDS, Outcome, apart, copy_into, most_apart, record, tensors, whole_batches
from compare import said, scores
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tsingz0 import as_a_program, commit_of

import fewbytes as fb
from fewbytes.base.state import State, state_of
from fewbytes.base.streams import seeded
from fewbytes.core.training import fit, prepared
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.data.split import Split
from fewbytes.methods import fusefl
from fewbytes.methods.parts import ccvr
from fewbytes.models.build import ModelBuilder

CLIENTS, ALPHA, BLOCKS, WIDTH, SIDE = 5, 0.5, 4, 8, 16
TRAIN, TEST, EPOCHS, LR = 1500, 1000, 2, 0.02
SAME_TRAIN, SAME_TEST, SAME_EPOCHS, SAME_LR = 300, 100, 1, 0.005  # with equal batches
DRAWN = 1000  # virtual features of each class
MOMENTUM = 0.9  # fixed in the authors' code
TERMS = {
    "clients": CLIENTS, "alpha": ALPHA, "blocks": BLOCKS, "width": WIDTH, "side": SIDE, "batch": BATCH, "drawn": DRAWN,
    "train": TRAIN, "test": TEST, "epochs": EPOCHS, "lr": LR,
    "same_train": SAME_TRAIN, "same_test": SAME_TEST, "same_epochs": SAME_EPOCHS, "same_lr": SAME_LR,
}  # fmt: skip
METHOD = fb.FuseFL(
    blocks=BLOCKS, ccvr_samples=DRAWN, epochs=BLOCKS * EPOCHS, lr=LR, batch=BATCH, momentum=MOMENTUM, last="kept"
)
AS_RELEASED: dict[str, Any] = {"frozen_bn": "train_shared", "ccvr_covariance": "released"}
"""The settings with which our FuseFL follows the authors' code where it differs from the paper."""
UNUSED = ("wandb", "yaml", "matplotlib", "matplotlib.pyplot", "sklearn", "sklearn.manifold")
MODULES = ("alg_train", "helpers.datasets", "helpers.exp_path", "locals.ccvr", "locals.fl_expandable")


@dataclass
class Seen:
    """What a side's server computed: the classifiers' mean, the classes' means and covariances, and the virtual
    features with labels, in the order of the calibration."""

    classifier: State = field(default_factory=dict)
    statistics: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
    virtual: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))


def task_of(seed: int, same: bool) -> fb.Task:
    """A part of CIFAR-10, its images halved to 16 x 16. `same`: a smaller part, of whole batches for each client."""
    dataset, draw = load_dataset("cifar10"), np.random.default_rng(seed)
    train, test = (
        halved(part.take(draw.permutation(len(part))[:count]))
        for part, count in ((dataset.train, SAME_TRAIN if same else TRAIN), (dataset.test, SAME_TEST if same else TEST))
    )
    data = federate(replace(dataset, train=train, test=test), Partition(clients=CLIENTS, alpha=ALPHA), seed=seed)
    if same:
        data = replace(data, clients=[whole_batches(client, len(client.train)) for client in data.clients])
    return fb.Task.on(data, ModelBuilder(f"resnet18:width={WIDTH},stem=3x3", train.shape, 10), seed=seed)


def halved(split: Split) -> Split:
    """Images of half the height and width, by the mean of four pixels."""
    x, y = split.load("cpu")
    return Split.of((F.avg_pool2d(x, 2).contiguous(), y))


def run_ours(task: fb.Task, seen: Seen | None = None, **changes: Any) -> Outcome:
    """Our side. For equal batches, adaptors begin as `adaptor` says, and `seen` notes what the server computes."""
    with contextlib.ExitStack() as stack:
        if seen is not None:
            stack.enter_context(mock.patch.object(fusefl.FuseFL, "train", with_adaptor(fusefl.FuseFL.train)))
            stack.enter_context(mock.patch.multiple(ccvr, **calibration(seen)))
        result = fb.run(METHOD.changed(**changes), task, rounds=BLOCKS, workers=1)
    kinds = [(row["phase"], row["scores"]["accuracy"]) for row in result.rounds]
    trained = [kind["local"] for phase, kind in kinds if phase == "round"][-1]
    assert result.global_model is not None
    return Outcome(kinds[-1][1]["global"], trained, [], state_of(result.global_model))


def with_adaptor(train: Callable[..., fusefl.Trained]) -> Callable[..., fusefl.Trained]:
    """FuseFL's training at a client, whose adaptor begins with the same weights on both sides."""

    @wraps(train)
    def call(self: fb.FuseFL, state: fusefl.Own, message: fusefl.Fused | None, site: fb.Site) -> fusefl.Trained:
        def made(*given: Any) -> nn.Module | None:
            with adaptor(site.problem.seed, site.me, site.round - 1):
                return make(*given)

        make = fusefl.make_adaptor
        with mock.patch.object(fusefl, "make_adaptor", made):
            return train(self, state, message, site)

    return call


def adaptor(seed: int, client: int, stage: int) -> contextlib.AbstractContextManager[None]:
    """The randomness of a client's adaptor for equal batches; stages from 0."""
    return seeded(seed, "adaptor", client, stage)


def calibration(seen: Seen) -> dict[str, Callable[..., Any]]:
    """Parts of our calibration, which note what they are given."""
    draw = ccvr.virtual_features

    def drawn(totals: Tensor, means: Tensor, covariances: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        seen.statistics = means, covariances
        return draw(totals, means, covariances, *given)

    def fitted(classifier: nn.Module, x: Tensor, y: Tensor, local: fb.Local) -> float:
        with torch.random.fork_rng(devices=[]):
            order = torch.randperm(len(y))  # the one that `fit` draws
        seen.classifier, seen.virtual = state_of(classifier), (x[order], y[order])
        return fit(classifier, x, y, local)

    return {"virtual_features": drawn, "fit": fitted}


class Watch:
    """Sees the authors' side: gives it our first weights, and what we drew if batches are equal (`seen`)."""

    def __init__(self, task: fb.Task, seen: Seen | None) -> None:
        self.task, self.seen = task, seen
        self.said: list[dict[str, float]] = []
        self.mine = Seen()
        self.fused: nn.Module | None = None

    def built(self, build: Callable[..., Any], args: Any, client: int, **given: Any) -> Any:
        """Their network of a client, with our first weights; its layout in memory is ours, as in `tsingz0`."""
        model = prepared(build(args, client, **given))
        copy_into(model, self.task.problem.first_state())
        if self.seen is not None:
            model.add_local_layer_adaptor = partial(self.stitched, model, model.add_local_layer_adaptor)
        return model

    def stitched(self, model: Any, stitch: Callable[..., None], stage: int, **channels: int) -> None:
        with adaptor(self.task.problem.seed, model.client_idx, stage):
            stitch(stage, **channels)
        prepared(model.layers[stage])

    def calibrated(self, calibrate: Callable[..., None], model: Any, *given: Any) -> None:
        self.mine.classifier, self.fused = state_of(model.classifier), model
        calibrate(model, *given)

    def virtual(self, seen: Seen, means: Sequence[Tensor], covariances: Sequence[Tensor], *_: Any) -> Any:
        self.mine.statistics = torch.stack(list(means)), torch.stack(list(covariances))
        return seen.virtual

    def loader(self, data: Dataset[Any], batch_size: int, shuffle: bool = False, **_: Any) -> DataLoader[Any]:
        """A loader in this process, whose batches in training have our size, also in the calibration."""
        calibrates = type(data).__name__ == "RepresentationDataset"
        return DataLoader(data, BATCH if calibrates else batch_size, shuffle=shuffle and self.seen is None)

    def partition(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Our split in place of theirs: the training set, the test set, and each client's rows of both."""
        clients = self.task.data.clients
        train, test = [client.train for client in clients], [client.test for client in clients]
        return (*map(samples, (train, test)), rows(train), {}, rows(test), {})

    def outcome(self) -> Outcome:
        assert self.fused is not None
        final = [each for each in self.said if "test_acc" in each][-1]
        stage, fused = (each for each in self.said[-4:] if "pfl_acc_on_client_0" in each)
        trained = fmean(stage[f"pfl_acc_on_client_{i}"] for i in range(CLIENTS))
        tested = [len(client.test) for client in self.task.data.clients]
        pooled = sum(fused[f"pfl_acc_on_client_{i}"] * n for i, n in enumerate(tested)) / sum(tested)
        if abs(pooled - final["test_acc"]) > 1e-6:
            raise SystemExit(f"the peer's own score is {final['test_acc']}, not {pooled}")
        return Outcome(pooled / 100, trained / 100, [], in_our_order(self.fused))


def samples(splits: Sequence[Split]) -> list[tuple[Tensor, Tensor]]:
    """The samples of all splits in a row."""
    return list(chain.from_iterable(zip(*tensors(split), strict=True) for split in splits))


def rows(splits: Sequence[Split]) -> dict[int, range]:
    """Each split's places among the samples of all."""
    bounds = accumulate((len(split) for split in splits), initial=0)
    return {i: range(*bound) for i, bound in enumerate(pairwise(bounds))}


def in_our_order(model: Any) -> State:
    """The values of their fused network, in the order of ours: by block and branch the adaptor, then the block."""
    parts: list[nn.Module] = []
    for layer in model.layers:
        for branch in layer.local_layers.values():
            parts += [branch.adapter_nn] if hasattr(branch, "adapter_nn") else []
            parts.append(branch.local_layer)
    found = [state_of(part) for part in [*parts, model.classifier]]
    return {f"{i}.{name}": value for i, state in enumerate(found) for name, value in state.items()}


def run_theirs(checkout: Path, watch: Watch, seed: int, epochs: int, lr: float) -> Outcome:
    """The authors' side, by their command line, with the options of their script fl-exnn.sh."""
    folder = checkout.resolve()
    arguments = {
        "main_task": "train", "type": "fed-expandable", "model": "resnet18", "dataset": "cifar10", "seed": seed,
        "num_users": CLIENTS, "fedexnn_classifer": "avg", "fedexnn_adapter": "cnn1x1", "fedexnn_split_num": BLOCKS,
        "res_base_width": WIDTH, "local_ep": epochs, "local_bs": BATCH, "lr": lr, "sample_per_class": DRAWN,
    }  # fmt: skip
    command = list(chain.from_iterable((f"--{name}", str(value)) for name, value in arguments.items()))
    with as_a_program(folder, command, UNUSED) as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(mock.patch.object(logging.getLogger(), "handlers", []))
        for patch in patches(watch):
            stack.enter_context(patch)
        stack.enter_context(processor())
        runpy.run_path(str(folder / "main.py"), run_name="__main__")
    return watch.outcome()


def patches(watch: Watch) -> Iterator[Any]:
    """What is replaced in their modules."""
    training, data, records, calibration, clients = map(importlib.import_module, MODULES)
    yield mock.patch.object(data, "partition_data", watch.partition)
    yield mock.patch.object(training, "Federated_EXNN", partial(watch.built, training.Federated_EXNN))
    yield mock.patch.object(training, "calibrate_classifier", partial(watch.calibrated, training.calibrate_classifier))
    yield mock.patch.object(records.ExpTool, "record", watch.said.append)
    for module in (clients, calibration, torch.utils.data):
        yield mock.patch.object(module, "DataLoader", watch.loader)
    if watch.seen is not None:
        yield mock.patch.object(calibration, "generate_virtual_representation", partial(watch.virtual, watch.seen))


@contextlib.contextmanager
def processor() -> Iterator[None]:
    """Their main.py asks for a GPU by number: the first device that it asks for is the processor."""
    with contextlib.ExitStack() as until_asked:

        def device(name: str) -> torch.device:
            until_asked.close()
            return torch.device("cpu")

        until_asked.enter_context(mock.patch.object(torch, "device", device))
        yield


def same_batches(checkout: Path) -> dict[str, Any]:
    """How far the fused networks are apart on equal batches, with our settings that follow their code; `parts`: the
    classifiers' mean and the classes' statistics. `default`: with our own settings instead."""
    task, seen, epochs = task_of(seed=1, same=True), Seen(), BLOCKS * SAME_EPOCHS
    terms: dict[str, Any] = {"epochs": epochs, "lr": SAME_LR, "order": "stored"}
    ours = run_ours(task, seen, **terms, **AS_RELEASED)
    watch = Watch(task, seen)
    theirs = run_theirs(checkout, watch, 1, SAME_EPOCHS, SAME_LR)
    mine = watch.mine
    parts = [
        most_apart(list(seen.classifier.values()), list(mine.classifier.values())),
        *(most_apart([a], [b]) for a, b in zip(seen.statistics, mine.statistics, strict=True)),
    ]
    default = apart(run_ours(task, Seen(), **terms), theirs)
    print(f"network {apart(ours, theirs):.1e}, classifiers' mean, means, covariances {parts}, default {default:.1e}")
    distance = float(f"{max(apart(ours, theirs), *parts):.2g}")
    return {
        "same": distance, "same_scores": scores(ours, theirs), "changed": True, "default": float(f"{default:.2g}")
    }  # fmt: skip


def with_seed(checkout: Path, seed: int) -> dict[str, list[float]]:
    """Both sides' scores, ours first; each shuffles and draws as it does. `released`: ours with the settings that
    follow their code."""
    task = task_of(seed, same=False)
    theirs = run_theirs(checkout, Watch(task, None), seed, EPOCHS, LR)
    found = scores(run_ours(task), theirs)
    following = scores(run_ours(task, **AS_RELEASED), theirs)
    return found | {f"released_{way}": pair for way, pair in following.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fusefl", metavar="PATH", type=Path, required=True, help="a checkout of the authors' code")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--same", action="store_true", help="only with equal batches")
    parts.add_argument("--seeds", action="store_true", help="only the three seeds")
    asked = parser.parse_args()
    commit, began = commit_of(asked.fusefl, "main.py"), time.monotonic()
    sys.path.insert(0, str(asked.fusefl.resolve()))
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if not asked.seeds:
        found |= same_batches(asked.fusefl)
    if not asked.same:
        found["seeds"] = [with_seed(asked.fusefl, seed) for seed in SEEDS]
    record("fusefl", commit, "fusefl", found, TERMS)
    print(f"fusefl: {said(found)}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
