"""Splits a dataset among clients, by a named partition or by given indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.random import RandomState

from fewbytes.base.errors import UserError
from fewbytes.base.streams import stream
from fewbytes.data.clients import Dataset, FederatedData
from fewbytes.data.natural import by_value, described
from fewbytes.data.partition import (
    Indices,
    balanced,
    dirichlet,
    dirichlet_fixed,
    flower,
    flower_by_name,
    held_classes,
    iid,
    main_category,
    match_test,
    pathological,
    quantity,
    shards,
)
from fewbytes.data.settings import Partition
from fewbytes.data.shift import with_label_noise, with_shift
from fewbytes.data.split import ClientData, Split


def federate(dataset: Dataset, partition: Partition, seed: int = 0) -> FederatedData:
    """Split `dataset` over clients; their test samples follow their training labels, the server tests on
    `dataset.test`.

    With `partition.test` held-classes, a client tests on all test samples of its training classes (GENE-FL).
    `partition.partition` is one of PARTITIONS (`dirichlet` and `quantity` have the option `min_samples`), or
    `column:<name>`: each value of that column is a client, in training and in test (`folders`: each folder of a domain
    or group); or `flwr:<Name>`, a flwr-datasets partitioner built from its options (`num_partitions`, `partition_by`,
    `alpha` and `seed` are filled in). `samples` is (train, test) per client. With `dirichlet` every client draws
    exactly these numbers (FedPURIN's split). Other partitions' subsets are cut to at most these numbers, and fewer
    training samples are an error; held-classes are cut likewise. `label_noise` and `shift` then change the clients'
    samples. The result depends only on the arguments. Raises UserError for a wrong argument, a client without training
    samples, or held-classes if no classes are learnt.

    `newcomers`: this number of additional clients joins in round `arrival` (default: 2), or `newcomers_a_round` of them
    per round from then on. The other clients leave before it, unless `stay` is set (GENE-FL, Guo et al. 2025).
    Newcomers have samples of `newcomer_classes`; other clients and the server's test set those of `known_classes`. If
    one list is given, the other has the remaining classes; without both, a seeded permutation is halved (the known half
    is larger). Each half is partitioned separately, in the same way.

    >>> from fewbytes.data import Partition, federate, load_dataset
    >>> data = federate(load_dataset("digits"), Partition("iid", clients=4), seed=1)
    >>> [len(client.train) for client in data.clients], len(data.test)
    ([360, 360, 359, 359], 359)
    """
    if partition.test == "held-classes" and dataset.learns != "classes":
        raise UserError(f"test held-classes needs classes, but {dataset.name} has {dataset.learns}: leave it out")
    if dataset.learns == "classes" and len(dataset.classes) < 2 and dataset.groups is None:
        raise UserError(
            f"{dataset.name} has one class, {dataset.classes[0]}: nothing can be learnt; if its folders mean "
            "something else, name the folder that holds those of the classes"
        )
    groups = len(dataset.classes if dataset.groups is None else dataset.groups)
    clients, newcomers, arrival = partition.clients, partition.newcomers, partition.arrival or 2
    at_once = newcomers if partition.newcomers_a_round is None else partition.newcomers_a_round

    def split(classes: Sequence[int], clients: int, seed: int) -> tuple[list[Indices], list[Indices]]:
        """Per client the training and the test samples, among samples of these classes."""
        train, test = _of_classes(dataset.train, classes), _of_classes(dataset.test, classes)
        half, labels = replace(partition, clients=clients), (dataset.train.labels, dataset.test.labels)
        _check(half, seed, len(train))
        y, tests = labels[0].numpy()[train], labels[1].numpy()[test]
        mine, own = _split_indices(y, tests, classes, half, seed)
        return [train[part] for part in mine], [test[part] for part in _tested(half, y, mine, tests, own, seed)]

    if partition.column is not None:
        return _changed(_natural(dataset, partition, seed), partition, seed)
    if not newcomers:
        return _changed(_federated(dataset, *split(range(groups), clients, seed)), partition, seed)
    if arrival < 2:
        raise UserError(f"newcomers cannot join in round {arrival}: choose round 2 or later")
    known, new = _halves(groups, partition.known_classes, partition.newcomer_classes, seed)
    train, test = split(known, clients, seed)
    try:
        others = split(new, newcomers, int(stream(seed, "newcomers").integers(1 << 32)))
    except UserError as error:
        raise UserError(f"newcomers: {error}") from None
    data = _federated(dataset, train + others[0], test + others[1])
    presence = (
        *[(1, None if partition.stay else arrival - 1)] * clients,
        *[(arrival + number // at_once, None) for number in range(newcomers)],
    )
    test_of_known = dataset.test.take(_of_classes(dataset.test, known))
    return _changed(replace(data, test=test_of_known, presence=presence), partition, seed)


def _natural(dataset: Dataset, partition: Partition, seed: int) -> FederatedData:
    """One or more clients per value of the partition's column. Raises UserError for another number of clients."""
    column, each = str(partition.column), partition.clients_per_value
    names, train, test = by_value(*dataset.values(column), described(column))
    usual, clients = Partition.declared()["clients"].default, each * len(names)
    if partition.clients not in (clients, usual):
        raise UserError(f"{described(column)} has {len(names)} values, so {clients} clients: leave clients out")
    if each > 1:
        rng = RandomState(seed)
        train, test = ([part[piece] for part in parts for piece in iid(part, each, rng)] for parts in (train, test))
        names = tuple(f"{name}-{number}" for name in names for number in range(1, each + 1))
    labels = dataset.train.labels.numpy(), dataset.test.labels.numpy()
    train, test = _cut_to(partition, train, test)
    data = _federated(dataset, train, _tested(partition, labels[0], train, labels[1], test, seed))
    return replace(data, names=names)


def _changed(data: FederatedData, partition: Partition, seed: int) -> FederatedData:
    """`data` with the partition's label noise and feature shift."""
    data = data if partition.label_noise is None else with_label_noise(data, partition.label_noise, seed)
    return data if partition.shift is None else with_shift(data, partition.shift, seed)


def _tested(
    partition: Partition, y: Indices, train: list[Indices], tests: Indices, test: list[Indices], seed: int
) -> list[Indices]:
    """Clients' test samples: as they are, or all of the classes that they hold."""
    if partition.test != "held-classes":
        return test
    most = partition.samples[1] if partition.samples else None
    return [part[:most] for part in held_classes(y, train, tests, RandomState(seed))]


def _cut_to(partition: Partition, train: list[Indices], test: list[Indices]) -> tuple[list[Indices], list[Indices]]:
    """At most the partition's numbers of samples per client. Raises UserError for fewer training samples."""
    if not (samples := partition.samples):
        return train, test
    for i, part in enumerate(train):
        if len(part) < samples[0]:
            raise UserError(f"client {i} has {len(part)} training samples, fewer than {samples[0]}; lower samples")
    return [part[: samples[0]] for part in train], [part[: samples[1]] for part in test]


def _halves(
    classes: int, known: Sequence[int] | None, new: Sequence[int] | None, seed: int
) -> tuple[list[int], list[int]]:
    """The known clients' classes and the newcomers', ascending, as given or drawn. Raises UserError."""
    for name, given in (("known_classes", known), ("newcomer_classes", new)):
        unknown = [c for c in given or () if not 0 <= c < classes]
        if unknown:
            raise UserError(f"{name}: there is no class {_listed(unknown)}; the data set has 0 to {classes - 1}")
    overlap = set(known or ()) & set(new or ())
    if overlap:
        raise UserError(
            f"known_classes and newcomer_classes both name {_listed(overlap)}: give each class to one of them"
        )
    if known is None and new is None:
        known = [int(c) for c in stream(seed, "known classes").permutation(classes)[: (classes + 1) // 2]]
    early = set(range(classes)) - set(new or ()) if known is None else set(known)
    late = set(range(classes)) - early if new is None else set(new)
    for name, these in (("known_classes", early), ("newcomer_classes", late)):
        if not these:
            raise UserError(f"no class of 0 to {classes - 1} is left for {name}: newcomers need their own classes")
    return sorted(early), sorted(late)


def _listed(classes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(classes)))


def _of_classes(split: Split, classes: Sequence[int]) -> Indices:
    """The indices of the samples of these classes."""
    return np.flatnonzero(np.isin(split.labels.numpy(), classes))


def _split_indices(
    labels: Indices,
    test_labels: Indices,
    classes: Sequence[int],
    partition: Partition,
    seed: int,
) -> tuple[list[Indices], list[Indices]]:
    """`federate` on labels, all of `classes`: per client the indices of its training and test samples."""
    name, clients = partition.partition, partition.clients
    samples, options = partition.samples, partition.partition_options
    rng = RandomState(seed)
    if name == "dirichlet" and samples:
        train, test = (
            dirichlet_fixed(of, clients, partition.alpha, number, seed, classes)
            for of, number in zip((labels, test_labels), samples, strict=True)
        )
        return train, test
    if name == "dirichlet":
        train = dirichlet(labels, clients, partition.alpha, rng, **options)
    elif name == "quantity":
        train = quantity(labels, clients, partition.alpha, rng, **options)
    elif name == "iid":
        train = iid(labels, clients, rng)
    elif name == "balanced":
        train = balanced(labels, clients, rng, partition.shots)
    elif name == "pathological":
        train = pathological(labels, clients, partition.classes_per_client, rng)
    elif name == "main-category":
        train = main_category(labels, clients, partition.main_share, rng)
    elif name == "shards":
        train = shards(labels, clients, partition.shards_per_client, rng)
    else:
        train = flower(labels, flower_by_name(name.removeprefix("flwr:"), clients, partition.alpha, seed, options))
        if len(train) != clients:
            raise UserError(f"{name} makes {len(train)} parts; set clients={len(train)} or change its options")
    return _cut_to(partition, train, match_test(labels, train, test_labels, rng))


def federate_partition(dataset: Dataset, parts: Sequence[Indices], seed: int = 0) -> FederatedData:
    """Split `dataset` by your own `parts`: per client the indices of its samples in `dataset.train`.

    Each client's test samples follow its training labels (`match_test`, drawn by `seed`); the server tests on
    `dataset.test`. Raises UserError for a client without training samples or an index out of range.
    """
    labels, test_labels = dataset.train.labels.numpy(), dataset.test.labels.numpy()
    parts = [np.asarray(part, dtype=np.int64) for part in parts]
    for i, part in enumerate(parts):
        if len(part) and not 0 <= part.min() <= part.max() < len(labels):
            raise UserError(f"client {i} has indices outside 0..{len(labels) - 1}, the training samples there are")
    return _federated(dataset, parts, match_test(labels, parts, test_labels, RandomState(seed)))


def federate_local(
    clients: Sequence[Dataset | None], test: Split, classes: Sequence[str], groups: Sequence[str] | None = None
) -> FederatedData:
    """Combine clients' own data sets; None for a client whose data are on its own node.

    `test`: the server's test set, possibly empty, whose sample shape all must share. `classes`: the numbering of labels
    at all clients. `groups`: names of labels that are not the classes (default: one group). Raises UserError for
    samples of another shape, targets of another kind, a class that is not in `classes`, and boxes.
    """
    nothing = ClientData(test.take([]), test.take([]))
    local = []
    for i, dataset in enumerate(clients):
        if dataset is not None and dataset.learns == "boxes":
            raise UserError(
                f"client {i}: {dataset.name} is for object detection, which needs a dataset split by the server",
                public="its data are for object detection, which needs a dataset split by the server",
            )
        if dataset is not None and dataset.learns != test.learns:
            raise UserError(
                f"client {i}: {dataset.name} has targets of kind {dataset.learns}, the server's data {test.learns}",
                public=f"its targets are of kind {dataset.learns}, the server's {test.learns}",
            )
        if dataset is not None and dataset.train.shape != test.shape:
            raise UserError(
                f"client {i}: samples of {dataset.name} have shape {dataset.train.shape}, the server's {test.shape}: "
                "make them equal",
                public=f"its samples have shape {dataset.train.shape}, the server's {test.shape}: make them equal",
            )
        own = None if dataset is None else dataset.numbered(classes)
        local.append(nothing if own is None else ClientData(own.train, own.test))
    named = None if test.learns == "classes" else tuple(groups or ("samples",))
    schemas = [each.schema for each in clients if each is not None]
    schema = schemas[0] if schemas and all(each == schemas[0] for each in schemas) else None
    return FederatedData(tuple(local), test, tuple(classes), groups=named, schema=schema)


def _federated(dataset: Dataset, train: Sequence[Indices], test: Sequence[Indices]) -> FederatedData:
    for i, part in enumerate(train):
        if not len(part):
            raise UserError(f"client {i} is left without a training sample; use fewer clients or another partition")
    if dataset.learns == "boxes":  # detection is scored on the server's test set alone
        test = [np.empty(0, np.int64)] * len(train)
    clients = tuple(
        ClientData(dataset.train.take(mine), dataset.test.take(own)) for mine, own in zip(train, test, strict=True)
    )
    return FederatedData(clients, dataset.test, dataset.classes, groups=dataset.groups, schema=dataset.schema)


def _check(partition: Partition, seed: int, available: int) -> None:
    clients, samples = partition.clients, partition.samples
    if partition.partition == "local":
        raise UserError("partition local splits nothing: pass clients' own datasets to federate_local")
    if clients > available:
        raise UserError(f"{clients} clients but {available} training samples; use at most as many clients as samples")
    if samples and min(samples) < 1:
        raise UserError(f"samples per client are {samples}; give two positive numbers, train and test")
    if samples and samples[0] > available:
        raise UserError(f"{samples[0]} training samples per client, but there are {available} in all; lower samples")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed {seed} must lie in 0..2^32-1")
