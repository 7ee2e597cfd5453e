"""Data sets, splits and partitions: the papers' own splits exactly, and one clear line for every wrong input."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data import (
    PARTITIONS,
    Dataset,
    FederatedData,
    Partition,
    Split,
    decoding,
    federate,
    federate_partition,
    load_dataset,
    partition,
)
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

USERS_CACHE = os.environ.get("FEWBYTES_CACHE")


def dataset(labels: Any, test_labels: Any = (), classes: int | None = None) -> Dataset:
    """A data set with these labels; a sample's only feature is its own index."""

    def split(y: Any) -> Split:
        y = torch.as_tensor(np.asarray(y, dtype=np.int64))
        return Split(torch.arange(len(y), dtype=torch.float32)[:, None], y)

    number = classes or int(max(labels)) + 1
    return Dataset("made", split(labels), split(test_labels), tuple(f"class {c}" for c in range(number)))


def rows(split: Split) -> np.ndarray:
    return split.load()[0][:, 0].long().numpy()


# Split ----------------------------------------------------------------------------------------------------------------


def test_views_share_one_array_and_load_scaled_copies() -> None:
    x = np.arange(6 * 4, dtype=np.uint8).reshape(6, 1, 2, 2)
    x.setflags(write=False)
    whole = Split(x, torch.tensor([0, 1, 2, 0, 1, 2]))
    view = whole.take([5, 3, 1]).take(np.array([2, 0]))
    assert view.x is x
    assert (len(view), view.shape, view.labels.tolist()) == (2, (1, 2, 2), [1, 2])
    loaded, y = view.load()
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded * 255, torch.from_numpy(x[[1, 5]].copy()).float())
    loaded.zero_()
    y.zero_()
    assert x.sum() == sum(range(24))
    assert view.labels.tolist() == [1, 2]
    assert len(whole.take([])) == 0


@pytest.mark.parametrize("rows", [None, np.array([1, 0])])
def test_float_tensors_load_unscaled_and_fresh(rows: Any) -> None:
    x, y = torch.full((2, 3), 7.0), torch.tensor([0, 1])
    loaded, labels = Split(x, y, rows).load()
    assert loaded.eq(7).all()
    loaded.add_(1)
    labels.add_(1)
    assert x.eq(7).all()
    assert y.tolist() == [0, 1]


def test_split_of_pairs_and_torch_data_sets() -> None:
    x = torch.rand(5, 2, dtype=torch.float64)
    for data in ((x, [0, 1, 0, 1, 2]), torch.utils.data.TensorDataset(x, torch.tensor([0, 1, 0, 1, 2]))):
        split = Split.of(data)
        assert split.labels.tolist() == [0, 1, 0, 1, 2]
        torch.testing.assert_close(split.load()[0], x.float())
    assert Split.of(split) is split
    assert Split.of((np.zeros((2, 1, 4, 4), np.uint8), np.array([1, 0], np.uint8))).x.dtype == np.uint8


@given(st.integers(1, 300), st.integers(1, 50), st.floats(0.001, 1), st.integers(0, 5))
def test_a_part_of_a_data_set_is_a_random_one_of_the_seed(train: int, test: int, share: float, seed: int) -> None:
    whole = dataset(np.arange(train) % 3, np.arange(test) % 3)
    part = whole.part(share, seed)
    for mine, all_of in ((part.train, whole.train), (part.test, whole.test)):
        assert len(mine) == max(1, round(share * len(all_of)))
        assert len(set(mine.load()[0].flatten().tolist())) == len(mine)
    assert torch.equal(part.train.load()[0], whole.part(share, seed).train.load()[0])
    if train > 100 and 0.1 < share < 0.9:
        assert not torch.equal(part.train.load()[0], whole.part(share, seed + 1).train.load()[0])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (torch.utils.data.TensorDataset(torch.rand(3, 2)), "integer label"),
        ([(Image.new("L", (2, 2)), 0)], "arrays"),
        ([(torch.rand(2), 0), (torch.rand(3), 1)], "item 1 has shape"),
        ([], "empty"),
        (42, "cannot use int"),
        ((torch.rand(3, 2), ["a", "b", "c"]), "integer per sample"),
        ((torch.rand(3, 2), [0, 1, -1]), "negative"),
        ((torch.rand(3, 2), [0, 1]), "3 samples but 2 labels"),
        ((np.array([["a"], ["b"]]), [0, 1]), "samples are numbers"),
        ((torch.rand(3), [0, 1, 2]), "two or more"),
        ((1, 2, 3), "a pair"),
    ],
)
def test_split_of_anything_else_is_an_error(data: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Split.of(data)


# Partitions: the papers' own ------------------------------------------------------------------------------------------


def _cases() -> Iterator[dict[str, Any]]:
    yield from json.loads((GOLDEN / "fusefl" / "partition.json").read_text())["cases"]


@pytest.mark.golden
def test_dirichlet_is_fusefls_partition() -> None:
    def sha(indices: np.ndarray) -> str:
        return hashlib.sha256(np.sort(indices).astype(np.int64).tobytes()).hexdigest()[:16]

    for case in _cases():
        classes = case["classes"]
        interleaved = {"sorted": False, "interleaved": True}[case["label_layout"]]
        train, test = (np.tile(np.arange(classes), case[f"{name}_per_class"]) for name in ("train", "test"))
        data = dataset(train, test) if interleaved else dataset(np.sort(train), np.sort(test))
        got = federate(data, Partition("dirichlet", case["M"], alpha=case["alpha"]), seed=case["np_random_seed"])
        counts = got.label_counts()
        for name in ("train", "test"):
            parts = [rows(getattr(client, name)) for client in got.clients]
            assert counts[name] == case[f"{name}_counts"]
            assert [part[:10].tolist() for part in parts] == case[f"{name}_first10"]
            assert [sha(part) for part in parts] == case[f"{name}_sorted_sha256_16"]


@pytest.mark.golden
def test_dirichlet_fixed_is_fedpurins_partition() -> None:
    with np.load(GOLDEN / "fedpurin" / "purin_dirichlet.npz", allow_pickle=False) as file:
        golden = dict(file)
    labels, clients, seed = golden["labels"], int(golden["clients"]), int(golden["seed"])
    alphas = {key.split("/")[0] for key in golden if key.startswith("alpha")}
    assert alphas
    for alpha in alphas:
        train, test = golden[f"{alpha}/train/indices"], golden[f"{alpha}/test/indices"]
        samples, number = (train.shape[1], test.shape[1]), float(alpha.removeprefix("alpha"))
        got = federate(dataset(labels, labels), Partition(clients=clients, alpha=number, samples=samples), seed)
        np.testing.assert_array_equal([rows(client.train) for client in got.clients], train)
        np.testing.assert_array_equal([rows(client.test) for client in got.clients], test)


def test_fedktls_check_numbers() -> None:
    """CIFAR-100 over 20 clients: about 870 to 920 (client, class) pairs with beta 0.1, exactly 200 pathologically."""
    labels = np.repeat(np.arange(100), 600)

    def pairs(parts: list[np.ndarray]) -> int:
        return sum(len(np.unique(labels[part])) for part in parts)

    practical = [pairs(partition.dirichlet(labels, 20, 0.1, RandomState(s), min_samples=1)) for s in range(5)]
    assert 870 <= np.mean(practical) <= 920
    assert pairs(partition.pathological(labels, 20, 10, RandomState(0))) == 200


# Partitions: properties -----------------------------------------------------------------------------------------------

labelled = (
    st.integers(2, 6)
    .flatmap(lambda classes: st.tuples(st.integers(0, 2**32 - 1), st.integers(20, 120), st.just(classes)))
    .map(lambda t: np.concatenate([np.arange(t[2]), RandomState(t[0]).randint(t[2], size=t[1])]))
)
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40, deadline=None)


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    assert len(a) == len(b)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@quick
@given(labels=labelled, clients=st.integers(1, 7), seed=seeds, alpha=st.floats(0.3, 5))
def test_dealing_partitions_are_disjoint_exhaustive_and_reproducible(
    labels: np.ndarray, clients: int, seed: int, alpha: float
) -> None:
    def deal(name: str) -> list[np.ndarray]:
        rng = RandomState(seed)
        if name == "dirichlet":
            return partition.dirichlet(labels, clients, alpha, rng, min_samples=1)
        return partition.shards(labels, clients, 2, rng) if name == "shards" else partition.iid(labels, clients, rng)

    for name in ("dirichlet", "shards", "iid"):
        parts = deal(name)
        assert len(parts) == clients
        assert min(map(len, parts)) >= 1
        assert sorted(np.concatenate(parts)) == list(range(len(labels)))
        np.random.seed(0)  # the global generator has no say
        assert_same(parts, deal(name))


@quick
@given(labels=labelled, clients=st.integers(1, 7), seed=seeds, alpha=st.floats(0.05, 5), samples=st.integers(1, 200))
def test_fixed_partition_has_exact_sizes(
    labels: np.ndarray, clients: int, seed: int, alpha: float, samples: int
) -> None:
    parts = partition.dirichlet_fixed(labels, clients, alpha, samples, seed)
    assert [len(part) for part in parts] == [samples] * clients
    assert all(0 <= part.min() <= part.max() < len(labels) for part in parts)
    for part in parts:
        for c in np.unique(labels):
            drawn = part[labels[part] == c]
            if len(drawn) <= (labels == c).sum():
                assert len(set(drawn)) == len(drawn), "drawn with replacement though the class had enough"
    assert_same(parts, partition.dirichlet_fixed(labels, clients, alpha, samples, seed))


@quick
@given(seed=seeds, classes=st.integers(2, 8), clients=st.integers(1, 9), data=st.data())
def test_pathological_partition(seed: int, classes: int, clients: int, data: st.DataObject) -> None:
    per_client = data.draw(st.integers(1, classes))
    size = 40
    labels = RandomState(seed).permutation(np.repeat(np.arange(classes), size))
    parts = partition.pathological(labels, clients, per_client, RandomState(seed))
    joined = np.concatenate(parts)
    assert len(set(joined)) == len(joined)
    held = [len(np.unique(labels[part])) for part in parts]
    assert all(1 <= n <= per_client for n in held)
    if classes % per_client == 0 and clients * per_client % classes == 0:
        takers = clients * per_client // classes
        assert held == [per_client] * clients
        assert len(joined) == len(labels)
        counts = np.array([np.bincount(labels[part], minlength=classes) for part in parts])
        assert counts[counts > 0].min() >= (size // takers) // 10
    assert_same(parts, partition.pathological(labels, clients, per_client, RandomState(seed)))


@quick
@given(labels=labelled, clients=st.integers(1, 7), seed=seeds, shots=st.integers(1, 3))
def test_balanced_parts_have_as_many_of_each_class(labels: np.ndarray, clients: int, seed: int, shots: int) -> None:
    parts = partition.balanced(labels, clients, RandomState(seed))
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    sizes = np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
    assert np.ptp(sizes, axis=0).max() <= 1
    assert np.ptp(sizes.sum(1)) <= 1
    assert_same(parts, partition.balanced(labels, clients, RandomState(seed)))
    if np.bincount(labels).min() < clients * shots:
        with pytest.raises(UserError, match=f"{shots} shots of {clients} clients"):
            partition.balanced(labels, clients, RandomState(seed), shots)
        return
    few = partition.balanced(labels, clients, RandomState(seed), shots)
    assert all((np.bincount(labels[part]) == shots).all() for part in few)
    assert len(set(np.concatenate(few))) == clients * shots * (labels.max() + 1)


@quick
@given(labels=labelled, tests=labelled, clients=st.integers(1, 5), seed=seeds)
def test_test_parts_follow_the_training_shares(labels: np.ndarray, tests: np.ndarray, clients: int, seed: int) -> None:
    parts = partition.shards(labels, clients, 2, RandomState(seed))
    matched = partition.match_test(labels, parts, tests, RandomState(seed))
    joined = np.concatenate(matched)
    assert sorted(joined) == sorted(np.flatnonzero(np.isin(tests, labels)))
    for c in np.unique(labels):
        share = np.array([(labels[part] == c).sum() for part in parts]) / (labels == c).sum()
        got = np.array([(tests[part] == c).sum() for part in matched])
        assert np.abs(got - share * (tests == c).sum()).max() <= 1 + 1e-6


def test_shards_hold_few_classes() -> None:
    labels = RandomState(0).permutation(np.repeat(np.arange(10), 20))
    parts = partition.shards(labels, 10, 2, RandomState(0))
    assert [len(part) for part in parts] == [20] * 10
    assert max(len(np.unique(labels[part])) for part in parts) <= 2


# federate -------------------------------------------------------------------------------------------------------------

TEN = np.arange(400) % 10


@pytest.mark.parametrize("name", PARTITIONS)
def test_federate_by_name(name: str) -> None:
    data = dataset(TEN, TEN[:100])
    made = federate(data, Partition(name, 5), seed=3)
    assert len(made.clients) == 5
    assert made.test is data.test
    assert all(client.train.x is data.train.x for client in made.clients)
    counts = made.label_counts()
    assert counts == json.loads(json.dumps(counts))
    assert counts["classes"] == list(data.classes)
    assert np.sum(counts["train"], axis=0).tolist() == [40] * 10
    for client in made.clients:  # nobody is tested on a class it has not trained on
        assert set(client.test.labels.tolist()) <= set(client.train.labels.tolist())

    def parts(data: FederatedData) -> list[list[int]]:
        return [rows(split).tolist() for client in data.clients for split in (client.train, client.test)]

    assert parts(made) == parts(federate(data, Partition(name, 5), seed=3))
    assert parts(made) != parts(federate(data, Partition(name, 5), seed=4))


def test_a_few_shots_of_each_class_are_tested_on_all_of_the_clients_share() -> None:
    made = federate(dataset(TEN, TEN[:100]), Partition("balanced", 2, shots=3), seed=1)
    for client in made.clients:
        assert client.train.labels.bincount().tolist() == [3] * 10
        assert client.test.labels.bincount().tolist() == [5] * 10
        assert client.train.labels.diff().abs().sum() > 9  # not class by class


def test_samples_cut_the_parts_of_other_partitions() -> None:
    made = federate(dataset(TEN, TEN[:100]), Partition("shards", 5, samples=(30, 7)))
    assert [len(client.train) for client in made.clients] == [30] * 5
    assert max(len(client.test) for client in made.clients) <= 7
    assert min(len(set(client.train.labels.tolist())) for client in made.clients) > 1  # not just the first label


@pytest.mark.parametrize("samples", [None, (20, 15)])
@pytest.mark.parametrize("newcomers", [0, 2])
@pytest.mark.parametrize("name", [*PARTITIONS, "flwr:IidPartitioner"])
def test_held_classes_are_tested_on_whole(name: str, newcomers: int, samples: tuple[int, int] | None) -> None:
    if name.startswith("flwr:"):
        pytest.importorskip("flwr_datasets")
    data, tests = dataset(TEN, TEN[:100]), TEN[:100]
    how = Partition(name, 4, alpha=0.8, samples=samples, newcomers=newcomers, partition_options=(
        {"min_samples": 21} if name == "quantity" or (name == "dirichlet" and not samples) else {}
    ))  # fmt: skip
    made, own = federate(data, replace(how, test="held-classes"), seed=3), federate(data, how, seed=3)
    for client, like in zip(made.clients, own.clients, strict=True):
        assert np.array_equal(rows(client.train), rows(like.train))  # who trains on what is as ever
        theirs = np.flatnonzero(np.isin(tests, client.train.labels))
        tested = rows(client.test)
        assert len(set(tested)) == len(tested) == min(len(theirs), 15 if samples else 100)
        assert set(tested) <= set(theirs)
        if len(tested) < len(theirs):
            assert sorted(tested) != sorted(theirs[: len(tested)])  # drawn, not the first of the data set
    assert made.test.labels.tolist() == own.test.labels.tolist()
    again = federate(data, replace(how, test="held-classes"), seed=3)
    assert all(np.array_equal(rows(a.test), rows(b.test)) for a, b in zip(made.clients, again.clients, strict=True))


def test_held_classes_need_classes() -> None:
    numbers = Split.of((torch.rand(40, 2), torch.rand(40)))
    data = Dataset("prices", numbers, numbers, ("price",), ("samples",))
    with pytest.raises(UserError, match=r"held-classes .*prices"):
        federate(data, Partition("iid", 2, test="held-classes"))
    with pytest.raises(UserError, match="own-share, held-classes"):
        Partition(test="held-class")  # type: ignore[arg-type]


def test_federate_partition_takes_index_lists() -> None:
    data = dataset(TEN, TEN[:100])
    made = federate_partition(data, [np.flatnonzero(TEN < 3), np.flatnonzero(TEN >= 3)])
    assert [sorted(set(client.test.labels.tolist())) for client in made.clients] == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
    with pytest.raises(UserError, match=r"client 1 .*without a training sample"):
        federate_partition(data, [np.arange(10), np.array([])])
    with pytest.raises(UserError, match=r"client 0 .*outside"):
        federate_partition(data, [np.array([400])])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"partition": "dirichelt"}, "'dirichelt'.*did you mean 'dirichlet'"),
        ({"alpha": 0}, "alpha .*above 0, not 0"),
        ({"alpha": -1, "samples": (5, 5)}, "alpha .*above 0, not -1"),
        ({"main_share": 1.5}, r"main_share .*\(0, 1\], not 1.5"),
        ({"clients": 0}, "clients .*at least 1, not 0"),
        ({"clients": 401, "partition": "iid"}, "401 clients .*400 training samples"),
        ({"clients": 100}, "alpha 0.5 .*100 clients.*raise alpha"),
        ({"clients": 20, "alpha": 0.001}, "raise alpha"),
        ({"partition": "pathological", "classes_per_client": 11}, "11.*1..10"),
        ({"partition": "pathological", "classes_per_client": 0}, "classes_per_client .*at least 1, not 0"),
        ({"partition": "pathological", "classes_per_client": 10, "clients": 50}, "40 samples for 50 clients"),
        ({"partition": "shards", "clients": 100, "shards_per_client": 5}, "cannot be cut from 400"),
        ({"partition": "shards", "shards_per_client": 0}, "shards_per_client .*at least 1, not 0"),
        ({"partition": "balanced", "shots": 9}, "class 0 .*40 samples, .*9 shots of 10 clients"),
        ({"partition": "balanced", "shots": 0}, "shots .*at least 1, not 0"),
        ({"partition": "iid", "samples": (41, 5)}, "client 0 .*40 training samples, .*41"),
        ({"samples": (0, 5)}, "two positive numbers"),
        ({"seed": -1}, "seed -1"),
        ({"partition": "iid", "partition_options": {"beta": 1}}, "does not take these options.*beta"),
        ({"partition_options": {"beta": 1}}, "does not take these options.*beta"),
        ({"partition": "local"}, "partition local"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "TRIES", 20)
    with pytest.raises(UserError, match=says) as caught:
        federate(dataset(TEN, TEN[:100]), seed=arguments.pop("seed", 0), partition=Partition(**arguments))
    assert "\n" not in str(caught.value)


def test_fixed_partition_needs_every_class() -> None:
    with pytest.raises(UserError, match="class 10"):
        federate(dataset(TEN, TEN, classes=11), Partition(alpha=100.0, samples=(50, 50)))


def test_flower_partitioners() -> None:
    pytest.importorskip("flwr_datasets")
    from flwr_datasets.partitioner import IidPartitioner

    data = dataset(TEN, TEN[:100])
    made = federate(
        data, Partition("flwr:DirichletPartitioner", 4, alpha=1.0, partition_options={"min_partition_size": 5})
    )
    assert sorted(np.concatenate([rows(client.train) for client in made.clients])) == list(range(400))
    assert [len(part) for part in partition.flower(TEN, IidPartitioner(num_partitions=8))] == [50] * 8
    with pytest.raises(UserError, match="did you mean 'IidPartitioner'"):
        federate(data, Partition("flwr:IdPartitioner"))
    with pytest.raises(UserError, match="takes num_partitions"):
        federate(data, Partition("flwr:IidPartitioner", partition_options={"nonsense": 1}))
    with pytest.raises(UserError, match="makes 2 parts"):
        federate(data, Partition("flwr:SizePartitioner", partition_options={"partition_sizes": [200, 200]}))


def test_flower_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(UserError, match=r"fewbytes\[flower-datasets\]"):
        federate(dataset(TEN, TEN), Partition("flwr:IidPartitioner"))


# Newcomers ------------------------------------------------------------------------------------------------------------


def with_newcomers(labels: np.ndarray, name: str, *, tests: np.ndarray = TEN[:100], **how: Any) -> FederatedData:
    extra, seed = {"min_samples": 1} if name == "dirichlet" else {}, how.pop("seed", 0)
    partition = Partition(name, how.pop("clients", 3), partition_options=extra, **how)
    return federate(dataset(labels, tests), partition, seed)


def assert_halves(made: FederatedData, clients: int) -> None:
    """Nobody shares a class, or a sample, with the other half; the server tests on what the known clients know."""
    known, new = made.clients[:clients], made.clients[clients:]
    held = [set(np.concatenate([s.labels for c in half for s in (c.train, c.test)])) for half in (known, new)]
    assert not held[0] & held[1]
    assert set(made.test.labels.numpy()) <= held[0]


balanced = st.tuples(seeds, st.integers(40, 120), st.integers(2, 6)).map(
    lambda t: RandomState(t[0]).permutation(np.arange(t[1]) % t[2])
)


@settings(max_examples=20, deadline=None)
@given(labels=balanced, clients=st.integers(1, 4), newcomers=st.integers(1, 4), seed=seeds, stay=st.booleans())
@pytest.mark.parametrize("name", ["dirichlet", "shards", "iid"])
def test_newcomers_hold_other_classes_and_all_samples_are_dealt(
    name: str, labels: np.ndarray, clients: int, newcomers: int, seed: int, stay: bool
) -> None:
    how: dict[str, Any] = {"clients": clients, "newcomers": newcomers, "seed": seed, "stay": stay, "arrival": 4}
    how |= {"tests": labels, "shards_per_client": 1, "alpha": 5.0}
    made = with_newcomers(labels, name, **how)
    assert_halves(made, clients)
    assert made.presence == ((1, None if stay else 3),) * clients + ((4, None),) * newcomers
    for split in ("train", "test"):
        dealt = np.concatenate([rows(getattr(client, split)) for client in made.clients])
        assert sorted(dealt) == list(range(len(labels)))
    classes = len(made.classes)
    held = {c for client in made.clients[:clients] for c in client.train.labels.tolist()}
    assert (classes, len(held)) == (labels.max() + 1, (classes + 1) // 2)
    assert made.label_counts() == with_newcomers(labels, name, **how).label_counts()


@pytest.mark.parametrize(
    ("name", "samples"),
    [("pathological", None), ("shards", (20, 5)), ("dirichlet", (30, 10)), ("flwr:IidPartitioner", None)],
)
def test_newcomers_come_with_every_partition(name: str, samples: Any) -> None:
    if name.startswith("flwr:"):
        pytest.importorskip("flwr_datasets")
    how: dict[str, Any] = {"samples": samples, "newcomers": 2, "known_classes": [9, 0, 3], "newcomer_classes": [1, 4]}
    made = federate(dataset(TEN, TEN[:100]), Partition(name, 3, **how))
    assert_halves(made, 3)
    assert {c for client in made.clients for c in client.train.labels.tolist()} == {0, 1, 3, 4, 9}
    assert set(made.test.labels.tolist()) == {0, 3, 9}
    assert len(made.classes) == 10
    if samples:
        assert [len(client.train) for client in made.clients] == [samples[0]] * 5


def test_shards_of_newcomers_are_those_of_their_own_half() -> None:
    """Sharding(s): sorted by label, cut into N s equal shards, s for each."""
    labels = np.repeat(np.arange(10), 100)
    made = federate(dataset(labels, labels), Partition("shards", 5, shards_per_client=4, newcomers=5))
    assert [len(client.train) for client in made.clients] == [100] * 10
    for client in made.clients:
        assert len(client.train.labels.unique()) <= 4
        assert {int(n) % 25 for n in client.train.labels.bincount()} == {0}  # whole shards of 5 * 100 / (5 * 4)


def test_one_list_of_classes_leaves_the_rest_to_the_others_and_the_known_clients_stay_as_they_are() -> None:
    data, train = dataset(TEN, TEN[:100]), range(5)
    made = federate(data, Partition("iid", 3, newcomers=2, newcomer_classes=[5, 6, 7, 8, 9]))
    assert {c for client in made.clients[:3] for c in client.train.labels.tolist()} == set(train)
    more = federate(data, Partition("iid", 3, newcomers=4, known_classes=train))
    for ours, theirs in zip(made.clients[:3], more.clients[:3], strict=True):
        assert np.array_equal(rows(ours.train), rows(theirs.train))
    drawn = [federate(data, Partition("iid", 1, newcomers=1), seed=s).test.labels.unique().tolist() for s in range(4)]
    assert len({tuple(half) for half in drawn}) > 1


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"known_classes": [0, 1, 2], "newcomer_classes": [2, 3, 1]}, "both .*1, 2"),
        ({"known_classes": [0, 10, -1]}, "known_classes: .*class -1, 10"),
        ({"newcomer_classes": []}, "0 to 9 .*newcomer_classes"),
        ({"known_classes": range(10)}, "left for newcomer_classes"),
        ({"newcomer_classes": range(10)}, "left for known_classes"),
        ({"arrival": 1}, "round 2 or"),
        ({"newcomers": -1}, "newcomers .*at least 0"),
        ({"newcomers": 0, "stay": True}, "need newcomers"),
        ({"newcomers": 0, "known_classes": [1]}, "need newcomers"),
        ({"newcomers": 0, "newcomers_a_round": 1}, "need newcomers"),
        ({"newcomers": 300}, "^newcomers: 300 clients"),
        ({"clients": 300}, "^300 clients"),
        ({"samples": (150, 10)}, "fewer than 150"),
    ],
)
def test_newcomers_that_cannot_be(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        with_newcomers(TEN, "iid", **{"newcomers": 2, **how})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("presence", "says"),
    [(((1, None),), "1 of 2 clients"), (((1, None), (3, 2)), "client 1 .*3 to 2"), (((0, 2), (1, 1)), "client 0")],
)
def test_a_presence_that_cannot_be(presence: Any, says: str) -> None:
    made = federate(dataset(TEN, TEN), Partition("iid", 2))
    with pytest.raises(UserError, match=says):
        FederatedData(made.clients, made.test, made.classes, presence=presence)


# Data sets ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


def png(value: int, mode: str = "L", size: tuple[int, int] = (6, 5)) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(out, "PNG")
    return out.getvalue()


def write_parquet(
    path: Path, images: list[Any], columns: dict[str, Any], image: str = "image", names: Any = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({image: images, **columns})
    if names:
        features = {key: {"_type": "ClassLabel", "names": value} for key, value in names.items()}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)


def structs(*blobs: bytes) -> list[dict[str, Any]]:
    return [{"bytes": blob, "path": "x.png"} for blob in blobs]


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A Parquet data set of two classes: grey images, one of another mode."""
    folder = tmp_path / "pets"
    labels = {"label": [0, 1, 1]}
    names = {"label": ["cat", "dog"]}
    odd = structs(png(10), png(20), png(30, mode="RGB"))
    write_parquet(folder / "train-00000-of-00002.parquet", odd, labels, names=names)
    write_parquet(folder / "train-00001-of-00002.parquet", structs(png(40)), {"label": [0]}, names=names)
    write_parquet(folder / "test-00000-of-00001.parquet", structs(png(50)), {"label": [1]}, names=names)
    return folder


def test_parquet_folder(pets: Path) -> None:
    data = load_dataset(str(pets))
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.test), data.train.shape, data.test.shape) == (4, 1, (3, 5, 6), (3, 5, 6))
    assert data.train.x.dtype == np.uint8
    assert isinstance(data.train.x, np.memmap)
    assert data.train.labels.tolist() == [0, 1, 1, 0]
    assert data.train.x[[0, 1, 3], 0, 0, 0].tolist() == [10, 20, 40]
    assert data.test.x[0, 0, 4, 5] == 50


def test_folder_of_images_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", 10), ("val", 2)):
        for c, name in enumerate(("ant", "bee")):
            place = tmp_path / "bugs" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                (place / f"{i}.PNG").write_bytes(png(100 * c + i, mode="RGB", size=(4, 3)))
            (place / "notes.txt").write_text("not an image")
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path))
    data = load_dataset("bugs")
    assert (data.name, data.classes, data.train.shape) == ("bugs", ("ant", "bee"), (3, 3, 4))
    assert data.train.labels.tolist() == [0] * 10 + [1] * 10
    assert data.train.x[:, :, 0, 0].tolist() == [[100 * c + i, 0, 255] for c in (0, 1) for i in range(10)]
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    (tmp_path / "bugs" / "val").rename(tmp_path / "bugs" / "other")
    whole = load_dataset("bugs")  # without test images a fifth of each class, always the same
    assert sorted(whole.test.labels.tolist()) == [0, 0, 1, 1]
    assert len(whole.train) == 16
    assert torch.equal(whole.test.load()[0], load_dataset("bugs").test.load()[0])
    extra = tmp_path / "bugs" / "test" / "wasp"
    extra.mkdir(parents=True)
    (extra / "0.png").write_bytes(png(0))
    with pytest.raises(UserError, match=r"train/.*: wasp"):
        load_dataset("bugs")


@pytest.mark.parametrize("place", ["data", "plain_text"])
def test_parquet_in_a_subfolder_with_plain_binary_and_validation(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "set"
    columns = {"coarse_label": [1, 1], "fine_label": [3, 0]}
    write_parquet(folder / place / "train-0.parquet", [png(1, "RGB"), png(2, "RGB")], columns, image="img")
    write_parquet(folder / place / "validation-0.parquet", [png(3)] * 2, columns, image="img")
    data = load_dataset(str(folder))
    assert data.classes == ("0", "1", "2", "3")
    assert data.train.labels.tolist() == [3, 0]
    assert data.train.shape == data.test.shape == (3, 5, 6)
    assert data.test.x[0, :, 0, 0].tolist() == [3, 3, 3]


def test_label_named_by_metadata_only(tmp_path: Path) -> None:
    columns = {"number": [7, 7], "species": [1, 0]}
    write_parquet(tmp_path / "train-0.parquet", structs(png(1), png(2)), columns, names={"species": ["a", "b"]})
    write_parquet(tmp_path / "test-0.parquet", structs(png(1), png(2)), columns)
    data = load_dataset(str(tmp_path))
    assert (data.classes, data.train.labels.tolist()) == (("a", "b"), [1, 0])


def test_second_load_decodes_nothing_until_a_file_changes(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_dataset(str(pets))

    def refuse(*_: Any) -> Any:
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "read_image", refuse)
        again = load_dataset(str(pets))
        assert again.classes == first.classes
        assert np.array_equal(again.train.x, first.train.x)
        assert torch.equal(again.test.labels, first.test.labels)
        os.utime(pets / "test-00000-of-00001.parquet", (1, 1))
        with pytest.raises(AssertionError, match="decoded again"):
            load_dataset(str(pets))


def test_loading_without_a_writable_cache(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "file" / "cache"))
    assert len(load_dataset(str(pets)).train) == 4
    assert "decoded at every start" in caplog.text


def test_damaged_or_hostile_cache_is_decoded_again(pets: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (tmp_path.joinpath("harm").touch, ())

    load_dataset(str(pets))
    (kept,) = (tmp_path / "cache").iterdir()
    (kept / "train-x.npy").write_bytes((kept / "train-x.npy").read_bytes()[:100])
    assert load_dataset(str(pets)).train.x.shape == (4, 3, 5, 6)
    np.save(kept / "train-y.npy", np.array([Harm()], dtype=object), allow_pickle=True)
    assert load_dataset(str(pets)).train.labels.tolist() == [0, 1, 1, 0]
    assert not (tmp_path / "harm").exists()
    assert list((tmp_path / "cache").iterdir()) == [kept]


@pytest.mark.parametrize(
    ("images", "columns", "says"),
    [
        (structs(b"no image", png(1)), {"label": [0, 1]}, "image 0 .*train-0.parquet .*readable"),
        (structs(png(1), png(1)[:40]), {"label": [0, 1]}, "image 1 of"),
        ([*structs(png(1)), {"bytes": None, "path": "a.png"}], {"label": [0, 1]}, "stored as bytes"),
        (structs(png(1), png(1)), {"text": ["a", "b"]}, r"label column.*text \(string\)"),
        (structs(png(1), png(1)), {"label": [0.5, 1.5]}, "whole numbers"),
        (["a", "b"], {"label": [0, 1]}, "no image column"),
        (structs(png(1), png(1)), {"label": [0, None]}, "1 .*without a label"),
        (structs(png(1), png(1)), {"label": [0, -1]}, "labels outside 0"),
        (pa.array([], pa.binary()), {"label": pa.array([], pa.int64())}, "no samples"),
        (b"nonsense", {}, "cannot be read"),
    ],
)
def test_unusable_parquet(tmp_path: Path, images: Any, columns: dict[str, Any], says: str) -> None:
    if isinstance(images, bytes):
        (tmp_path / "train-0.parquet").write_bytes(images)
    else:
        write_parquet(tmp_path / "train-0.parquet", images, columns)
    with pytest.raises(UserError, match=says) as caught:
        load_dataset(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_labels_of_text_are_classes_in_order(tmp_path: Path, kind: pa.DataType) -> None:
    pictures = structs(png(10), png(20), png(30))
    write_parquet(tmp_path / "train-0.parquet", pictures, {"label": pa.array(["fox", "cat", "fox"]).cast(kind)})
    write_parquet(tmp_path / "test-0.parquet", structs(png(50)), {"label": pa.array(["fox"]).cast(kind)})
    data = load_dataset(str(tmp_path))
    assert data.classes == ("cat", "fox")
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([1, 0, 1], [1])
    write_parquet(tmp_path / "test-0.parquet", structs(png(50)), {"label": ["MEIER"]})
    with pytest.raises(UserError, match=": MEIER") as refused:
        load_dataset(str(tmp_path))
    assert "MEIER" not in str(refused.value.public)


def test_folder_without_labels(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.png").write_bytes(png(1))
    with pytest.raises(UserError, match=r"annotations/, train/ \(1 files "):
        load_dataset(str(tmp_path))


def test_several_configurations_must_be_chosen_from(pets: Path, tmp_path: Path) -> None:
    other = tmp_path / "both" / "two"
    other.parent.mkdir()
    pets.rename(tmp_path / "both" / "one")
    write_parquet(other / "train-0.parquet", structs(png(1)), {"label": [0]})
    with pytest.raises(UserError, match=r"\(one, two\)"):
        load_dataset(str(tmp_path / "both"))
    assert len(load_dataset(str(tmp_path / "both" / "one")).train) == 4


def test_digits() -> None:
    data = load_dataset("digits")
    x, y = data.train.load()
    assert (len(data.train) + len(data.test), data.train.shape, len(data.classes)) == (1797, (1, 8, 8), 10)
    assert (x.dtype, x.min().item(), x.max().item()) == (torch.float32, 0.0, 1.0)
    assert data.train.rows is not None
    assert data.test.rows is not None
    assert not set(data.train.rows.tolist()) & set(data.test.rows.tolist())
    share = torch.bincount(data.test.labels) / (torch.bincount(y) + torch.bincount(data.test.labels))
    assert share.sub(0.2).abs().max() < 0.005
    assert torch.equal(load_dataset("digits").test.load()[0], data.test.load()[0])


# Image folders, CIFAR's files, sizes ----------------------------------------------------------------------------------


def write_images(folder: Path, paths: dict[str, int], size: tuple[int, int] = (4, 3)) -> None:
    """Images of one colour below a folder: the red value of each."""
    for path, value in paths.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(png(value, mode="RGB", size=size))


def reds(split: Split) -> dict[int, int]:
    """The label of every image by its red value."""
    return {int(x[0, 0, 0]): int(y) for x, y in zip((split.load()[0] * 255).round(), split.labels, strict=True)}


def everything(data: Dataset) -> dict[int, int]:
    return reds(data.train) | reds(data.test)


@pytest.mark.parametrize("split", ["valid", "val", "validation", "test"])
def test_test_files_of_any_usual_name_are_the_test_set(tmp_path: Path, split: str) -> None:
    for name, values in (("train", range(10)), (split, [50, 60])):
        columns = {"label": [i % 2 for i in range(len(values))]}
        write_parquet(tmp_path / "hub" / "data" / f"{name}-00000-of-00001.parquet", structs(*map(png, values)), columns)
        write_images(tmp_path / "images", {f"{name}/{'ab'[i % 2]}/{v}.png": v for i, v in enumerate(values)})
    for folder in ("hub", "images"):
        data = load_dataset(str(tmp_path / folder))
        assert (len(data.train), reds(data.test)) == (10, {50: 0, 60: 1})


def test_tiny_imagenet(tmp_path: Path) -> None:
    write_images(tmp_path, {f"train/n0{c}/images/n0{c}_{i}.JPEG": 10 * c + i for c in (1, 2) for i in range(3)})
    write_images(tmp_path, {f"val/images/val_{i}.JPEG": 100 + i for i in range(3)} | {"test/images/test_0.JPEG": 200})
    listed = tmp_path / "val" / "val_annotations.txt"
    listed.write_text("val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t1\t2\t3\t4\nval_2.JPEG\tn02\t0\t0\t9\t9\n")
    data = load_dataset(str(tmp_path))
    assert data.classes == ("n01", "n02")
    assert reds(data.train) == {10: 0, 11: 0, 12: 0, 20: 1, 21: 1, 22: 1}
    assert reds(data.test) == {100: 1, 101: 0, 102: 1}  # not the unlabelled ones of test/
    listed.write_text("val_0.JPEG\tn01\n")  # what is kept does not outlive a change of labels
    assert reds(load_dataset(str(tmp_path)).test) == {100: 0}
    for wrong in ("val_9.JPEG\tn01\n", "val_0.JPEG n01\n", "../../train/n01/images/n01_0.JPEG\tn01\n"):
        listed.write_text("val_0.JPEG\tn01\n" + wrong)
        with pytest.raises(UserError, match=r"val_annotations\.txt, line 2:"):
            load_dataset(str(tmp_path))


@pytest.mark.parametrize(
    "layout", ["{c}/{d}{i}.png", "{c}/images/{d}{i}.png", "{d}/{c}/{i}.png", "{d}/images/{c}/{i}.png"]
)
def test_folders_of_classes_and_of_domains_without_train(tmp_path: Path, layout: str) -> None:
    numbered = [(d, c, i) for d in ("photo", "sketch") for c in ("cat", "dog") for i in range(5)]
    paths = {layout.format(d=d, c=c, i=i): 10 * n for n, (d, c, i) in enumerate(numbered)}
    write_images(tmp_path, paths)
    (tmp_path / "notes").mkdir()
    data = load_dataset(str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert everything(data) == {10 * n: int(c == "dog") for n, (_, c, _) in enumerate(numbered)}
    assert sorted(data.test.labels.tolist()) == [0, 0, 1, 1]  # a fifth of each class, always the same
    assert reds(data.test) == reds(load_dataset(str(tmp_path)).test)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["images/a.png", "images/b.png"], "no labelled images.*images/"),
        (["train/images/a.png", "train/labels.png"], "no labelled images"),
        (["train2017/a.png", "val2017/b.png"], "no labelled images"),
        (["cat/a.png", "dog/b.png", "test/c.png"], r"splits .*\(test\)"),
        (["train/a/b/c/x.png", "train/d/b/e/x.png"], "3 folders deep"),
        (["cat/a.png", "dog/b.png", "sketch/cat/c.png"], "<class>/<image>, "),
    ],
)
def test_folders_that_could_mean_anything_are_refused(tmp_path: Path, paths: list[str], says: str) -> None:
    write_images(tmp_path, dict.fromkeys(paths, 1))
    with pytest.raises(UserError, match=says) as caught:
        load_dataset(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    wide = Image.new("RGB", (8, 4), (200, 0, 0))
    wide.paste((0, 0, 255), (2, 0, 6, 4))  # the middle is blue
    for place in ("train/a/0.png", "train/b/0.png", "test/a/0.png", "test/b/0.png"):
        write_images(tmp_path, {place: 90}, size=(6, 6))
    wide.save(tmp_path / "train" / "b" / "1.png")
    with pytest.raises(UserError, match=r"b/1.png is 8 x 4 .* 6 x 6.*image_size"):
        load_dataset(str(tmp_path))
    data = load_dataset(str(tmp_path), 4)
    assert data.train.shape == data.test.shape == (3, 4, 4)
    assert data.train.x[2].reshape(3, -1).T.tolist() == [[0, 0, 255]] * 16
    assert load_dataset(str(tmp_path), 3).train.shape == (3, 3, 3)  # and not what was kept of the size before
    assert load_dataset("digits", 12).train.shape == (1, 12, 12)
    assert torch.equal(load_dataset("digits", 8).train.load()[0], load_dataset("digits").train.load()[0])
    task = find(
        make_experiment(
            {"method": "fedavg", "dataset": str(tmp_path), "image_size": 4, "clients": 1, "partition": "iid"}
            | {"public": str(tmp_path)}
        )
    ).task
    assert task.data.public is not None
    assert task.data.clients[0].train.shape == task.data.public.shape == (3, 4, 4)


class Python2Pickler(pickle._Pickler):
    """Writes bytes and strings as Python 2 wrote its strings."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text: bytes | str) -> None:
        data = text.encode() if isinstance(text, str) else text
        self.write(b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<i", len(data)) + data)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_string


def pickled(content: Any) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, 2).dump(content)
    return stream.getvalue()


META = b"(dp1\nS'num_cases_per_batch'\np2\nI2\nsS'label_names'\np3\n(lp4\nS'plane'\np5\naS'car'\np6\nas."


def batch(pixels: np.ndarray, key: bytes, labels: Any) -> bytes:
    data = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    return pickled({b"batch_label": b"a batch", key: labels, b"data": data, b"filenames": [b"x.png"] * len(pixels)})


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    folder = tmp_path / "torchvision" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(batch(pixels[2 * i : 2 * i + 2], b"labels", [1, i % 2]))
    (folder / "batches.meta").write_bytes(META)  # protocol 0, as it is published
    return folder


def test_torchvisions_cifar10(cifar10: Path, tmp_path: Path) -> None:
    pixels = np.load(tmp_path / "pixels.npy").transpose(0, 3, 1, 2)
    for folder in (cifar10, cifar10.parent):  # and the folder that torchvision was given
        data = load_dataset(str(folder))
        assert data.classes == ("plane", "car")
        assert np.array_equal(data.train.x, pixels[:10])
        assert np.array_equal(data.test.x, pixels[10:])
        assert data.train.labels.tolist() == [1, 0, 1, 1, 1, 0, 1, 1, 1, 0]
        assert data.test.labels.tolist() == [1, 1]
    assert load_dataset(str(cifar10), 16).train.shape == (3, 16, 16)


def test_torchvisions_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    for name, labels in (("train", [2, 0, 1]), ("test", [1])):
        pixels = np.full((len(labels), 32, 32, 3), 7, np.uint8)
        content = {b"data": pixels.reshape(len(labels), -1), b"fine_labels": labels}
        (tmp_path / name).write_bytes(pickled(content | {b"coarse_labels": [0] * len(labels)}))
    (tmp_path / "meta").write_bytes(
        pickled({b"fine_label_names": [b"apple", b"bear", b"crab"], b"coarse_label_names": [b"thing"]})
    )
    data = load_dataset(str(tmp_path))
    assert (data.classes, data.train.labels.tolist(), data.test.labels.tolist()) == (
        ("apple", "bear", "crab"), [2, 0, 1], [1],
    )  # fmt: skip
    assert data.train.x.shape == (3, 3, 32, 32)


TWO = np.zeros((2, 32, 32, 3), np.uint8)
WRONG_BATCHES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a command": (lambda marker: pickled(Touch(marker)), "asks for '(posix|nt).system'.* nothing was run"),
    "a command among labels": (lambda marker: pickled({b"data": TWO, b"labels": [0, Touch(marker)]}), "was run"),
    "torch's tensors": (lambda _: pickle.dumps({"data": torch.zeros(2)}), "nothing was run"),
    "an extension": (lambda _: b"\x80\x02\x82\x01.", "damaged"),
    "half of it": (lambda _: batch(TWO, b"labels", [0, 1])[:3000], "damaged"),
    "nothing": (lambda _: b"", "damaged"),
    "text": (lambda _: b"plane, car\n", "damaged"),
    "a list": (lambda _: pickled([1]), "no dictionary"),
    "no labels": (lambda _: batch(TWO, b"names", [0, 1]), "no 'labels' of its 2 images"),
    "a label too few": (lambda _: batch(TWO, b"labels", [0]), "no 'labels' of its 2 images"),
    "a class too many": (lambda _: batch(TWO, b"labels", [0, 2]), "labels outside 0..1"),
    "a huge label": (lambda _: batch(TWO, b"labels", [0, 10**40]), "labels outside 0..1"),
    "floats": (lambda _: pickled({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}), "no 'data'"),
    "small images": (lambda _: batch(TWO[:, :16], b"labels", [0, 1]), "no 'data', images of 32 x 32"),
    "objects": (lambda _: pickle.dumps({"data": np.array([None])}), "damaged"),
    "less than it says": (lambda _: batch(TWO, b"labels", [0, 1]).replace(b"M\x00\x0c", b"M\x01\x0c"), "damaged"),
}  # fmt: skip


class Touch:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("wrong", WRONG_BATCHES)
def test_a_wrong_or_hostile_batch_is_one_line_and_runs_nothing(cifar10: Path, tmp_path: Path, wrong: str) -> None:
    make, says = WRONG_BATCHES[wrong]
    (cifar10 / "data_batch_3").write_bytes(make(tmp_path / "marker"))
    with pytest.raises(UserError, match=f"data_batch_3 .*{says}") as caught:
        load_dataset(str(cifar10))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "marker").exists()


def test_cifar_that_is_not_whole(cifar10: Path) -> None:
    (cifar10 / "batches.meta").write_bytes(pickled({b"label_names": b"plane"}))
    with pytest.raises(UserError, match=r"batches\.meta .*'label_names'"):
        load_dataset(str(cifar10))
    (cifar10 / "data_batch_4").unlink()
    with pytest.raises(UserError, match="data_batch_4"):
        load_dataset(str(cifar10))


# Downloads ------------------------------------------------------------------------------------------------------------


class Hub:
    """The parts of huggingface_hub that are used, with the pets on it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def HfApi(self) -> Any:
        def dataset_info(repo: str, timeout: float) -> Any:
            self.asked.append(repo)
            assert timeout <= 10
            if repo != "some/pets":
                raise ConnectionError("Name or service\nnot known")
            return SimpleNamespace(sha="abc")

        return SimpleNamespace(dataset_info=dataset_info)

    def snapshot_download(
        self, repo: str, *, repo_type: str, revision: str, allow_patterns: str, local_dir: Path
    ) -> None:
        assert (repo_type, revision) == ("dataset", "abc")
        self.asked.append(allow_patterns)
        write_parquet(local_dir / "cats" / "train-0.parquet", structs(png(1), png(2)), {"label": [0, 1]})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.delenv("FEWBYTES_DATA", raising=False)
    made = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    return made


def test_downloads_once(hub: Hub) -> None:
    assert len(load_dataset("some/pets").train) == 2
    assert len(load_dataset("some/pets").train) == 2
    assert hub.asked == ["some/pets", "*.parquet"]
    load_dataset("some/pets/cats")
    assert hub.asked[2:] == ["some/pets", "cats/*.parquet"]


PAPERS: dict[str, dict[str, Any]] = {
    "fashion_mnist": {
        "repo": "zalando-datasets/fashion_mnist", "place": "fashion_mnist", "mode": "L", "size": (28, 28),
    },
    "cifar100": {
        "repo": "uoft-cs/cifar100", "place": "cifar100", "image": "img", "labels": ("fine_label", "coarse_label"),
    },
    "svhn": {"repo": "ufldl-stanford/svhn", "place": "cropped_digits", "splits": ("train", "test", "extra")},
    "tiny_imagenet": {"repo": "zh-plus/tiny-imagenet", "place": "data", "splits": ("train", "valid"), "size": (64, 64)},
    "flowers102": {"repo": "nelorth/oxford-flowers", "place": "data", "size": (70, 64)},
}  # fmt: skip
"""The papers' data sets as they lie on the hub, where that is not what most have."""


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_data_sets_by_name(name: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_most = {"splits": ("train", "test"), "image": "image", "labels": ("label",), "mode": "RGB", "size": (32, 32)}
    form = SimpleNamespace(**as_most | PAPERS[name])
    names = {column: ["zebra", "ant", "moth"] for column in form.labels}  # in the order of labels, not of the alphabet

    def images(number: int, split: str) -> list[dict[str, Any]]:
        sizes = [form.size if i % 2 == 0 else form.size[:: -1 if name == "flowers102" else 1] for i in range(number)]
        base = 20 * form.splits.index(split)
        odd = {1: "L"} if name == "tiny_imagenet" else {}  # which has grey images among the coloured
        return structs(*(png(base + i, odd.get(i, form.mode), size) for i, size in enumerate(sizes)))

    def snapshot_download(repo: str, *, local_dir: Path, **asked: Any) -> None:
        hub.asked.append((repo, asked["allow_patterns"]))
        for split, number in zip(form.splits, (5, 3, 9), strict=False):
            columns = {column: [(i + k) % 3 for i in range(number)] for k, column in enumerate(form.labels)}
            path = local_dir / form.place / f"{split}-00000-of-00001-96eeec628415add6.parquet"
            write_parquet(path, images(number, split), columns, form.image, names)

    monkeypatch.setattr(hub, "HfApi", lambda: SimpleNamespace(dataset_info=lambda *_, **__: SimpleNamespace(sha="abc")))
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    size = 64 if name == "flowers102" else None  # whose images differ in size
    data = load_dataset(name, size)
    assert hub.asked == [(form.repo, "cropped_digits/*.parquet" if name == "svhn" else "*.parquet")]
    assert data.classes == ("zebra", "ant", "moth")
    assert data.train.shape == data.test.shape == ({"L": 1, "RGB": 3}[form.mode], *(2 * (size or form.size[0],)))
    assert (reds(data.train), reds(data.test)) == ({i: i % 3 for i in range(5)}, {20 + i: i % 3 for i in range(3)})
    (kept,) = (tmp_path / "cache" / "hub").iterdir()
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path))
    kept.rename(tmp_path / "mine")  # and whoever has the files already names their folder
    assert everything(load_dataset("mine", size)) == everything(data)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "mnist",
            r"FEWBYTES_DATA .*ylecun/mnist .*\(ConnectionError: Name or serv",
        ),
        ("minst", "did you mean mnist"),
        ("digit", "did you mean digits"),
        ("/no/such/folder", "no such folder"),
        ("", "name is needed"),
    ],
)
def test_a_name_that_cannot_be_found(hub: Hub, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_dataset(name)
    assert "\n" not in str(caught.value)
    assert "digits, which is built in" in str(caught.value)


def test_not_found_names_what_lies_there(hub: Hub, pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_DATA", str(pets.parent))
    with pytest.raises(UserError, match=f"FEWBYTES_DATA={pets.parent}.*did you mean pets"):
        load_dataset("petz")


def test_no_hub_client_installed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"ylecun/mnist .*pip install .fewbytes\[hub\]."):
        load_dataset("mnist")


# Real data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape", "mean"), [("mnist", (1, 28, 28), 0.1307), ("cifar10", (3, 32, 32), 0.473)])
def test_real_data_sets(name: str, shape: tuple[int, ...], mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.environ.get("FEWBYTES_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"FEWBYTES_DATA names no folder with {name}")
    if USERS_CACHE:  # decoding takes seconds, so keep it where the user wants it kept
        monkeypatch.setenv("FEWBYTES_CACHE", USERS_CACHE)
    else:
        monkeypatch.delenv("FEWBYTES_CACHE")
    data = load_dataset(name)
    assert (data.train.x.shape, data.test.x.shape[0]) == (({"mnist": 60000, "cifar10": 50000}[name], *shape), 10000)
    assert data.train.x.dtype == np.uint8
    x, y = data.train.take(np.arange(2000)).load()
    assert x.mean().item() == pytest.approx(mean, abs=0.01)
    assert torch.bincount(data.test.labels).tolist() == (
        [1000] * 10 if name == "cifar10" else [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    )
    assert y.max() == 9


def test_a_class_without_images_where_the_others_have_theirs_is_told(tmp_path: Path) -> None:
    for place in ("train/a", "train/b", "train/c/photos"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / place / "1.png")
    with pytest.raises(UserError, match=r"train/c/photos/1.png"):
        load_dataset(str(tmp_path))
