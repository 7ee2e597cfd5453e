"""Partitions by a column, by folders and by sizes; label noise and feature shift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data import ClientData, FederatedData, Partition, Split, federate, hold_out, load_dataset, table
from fewbytes.data.datasets import Splitting
from fewbytes.data.datasets import load_dataset as read
from fewbytes.data.partition import quantity
from fewbytes.data.settings import Shift
from fewbytes.data.shift import with_label_noise, with_shift
from fewbytes.experiments.groups import DataSettings, ModelSettings
from fewbytes.experiments.loading import load


def hospitals(rows: int = 120) -> dict[str, list[object]]:
    """A table's columns: three hospitals of different sizes, by name."""
    return {
        "age": [float(i % 40) for i in range(rows)],
        "hospital": [("north", "south", "south", "east")[i % 4] for i in range(rows)],
        "ill": ["yes" if i % 40 > 20 else "no" for i in range(rows)],
    }


def test_each_value_of_a_column_is_a_client_in_training_and_in_test():
    columns = hospitals()
    whole = table(columns, target="ill", leave_out="hospital")
    data = federate(whole, Partition("column:hospital"))
    assert data.names == ("east", "north", "south")
    train, test = whole.values("hospital")
    for name, client in zip(data.names, data.clients, strict=True):
        assert client.train.shape == (1,)
        assert len(client.train) == (train == name).sum() > 0
        assert len(client.test) == (test == name).sum() > 0
        of = np.array(columns["hospital"])[client.train.rows]
        assert set(of) == {name}


def test_numbers_name_clients_in_their_order():
    columns = {**hospitals(), "site": [float(i % 12) for i in range(120)]}
    data = federate(table(columns, target="ill", leave_out=["site", "hospital"]), Partition("column:site"))
    assert data.names == tuple(map(str, range(12)))


def test_a_value_may_have_several_clients_that_share_its_samples():
    whole = table(hospitals(), target="ill", leave_out="hospital")
    partition = Partition("column:hospital", clients_per_value=3)
    data, one = federate(whole, partition, seed=2), federate(whole, Partition("column:hospital"))
    assert data.names[:4] == ("east-1", "east-2", "east-3", "north-1")
    assert len(data.clients) == 9
    for value, alone in enumerate(one.clients):
        mine = data.clients[3 * value : 3 * value + 3]
        for split in ("train", "test"):
            rows = [getattr(client, split).rows for client in mine]
            assert sorted(np.concatenate(rows)) == sorted(getattr(alone, split).rows)
            assert max(map(len, rows)) - min(map(len, rows)) <= 1
    other = federate(whole, partition, seed=3)
    assert sorted(data.clients[0].train.rows) != sorted(other.clients[0].train.rows)
    assert len(federate(whole, Partition("column:hospital", clients_per_value=3, clients=9)).clients) == 9
    with pytest.raises(UserError, match="has 3 values, so 9 clients: leave clients out"):
        federate(whole, Partition("column:hospital", clients_per_value=3, clients=3))
    with pytest.raises(UserError, match="is left without a training sample"):
        federate(whole, Partition("column:hospital", clients_per_value=40))


def test_clients_per_value_is_for_values_and_folders():
    settings, model = DataSettings(dataset="digits"), ModelSettings()
    with pytest.raises(UserError, match="clients_per_value is for partition column:<name> and folders, and iid does"):
        load(settings, Partition("iid", clients_per_value=2), model, None)


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        (Partition("column:ward"), "no column 'ward'"),
        (Partition("column:hospital", clients=5), "has 3 values, so 3 clients"),
        (Partition("column:row"), "120 values in|96 values in 96 training samples, too many"),
        (Partition("column:gap"), "column 'gap' is missing in"),
        (Partition("folders"), "is a table, without folders: use column:NAME"),
    ],
)
def test_columns_that_name_no_clients_are_refused(partition, says):
    columns = {**hospitals(), "row": [f"r{i}" for i in range(120)], "gap": ["a", None] * 60}
    whole = table(columns, target="ill", leave_out=["hospital", "row", "gap"])
    with pytest.raises(UserError, match=says):
        federate(whole, partition)


def test_a_natural_partition_takes_no_newcomers_and_no_options():
    with pytest.raises(UserError, match="makes no newcomers"):
        Partition("column:hospital", newcomers=2)
    with pytest.raises(UserError, match="does not take these options: min_samples"):
        Partition("folders", partition_options={"min_samples": 3})
    with pytest.raises(UserError, match="digits has no column 'hospital'"):
        federate(load_dataset("digits"), Partition("column:hospital"))


def pictures(folder: Path, domains: list[str], classes: list[str], each: int = 6) -> Path:
    rng = np.random.default_rng(0)
    for domain in domains:
        for name in classes:
            (folder / domain / name).mkdir(parents=True)
            for i in range(each):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / domain / name / f"{i}.png")
    return folder


@pytest.mark.parametrize("domains", [["art", "photo"], ["writer1", "writer2", "writer3", "writer4"]])
def test_each_folder_of_a_domain_or_a_group_is_a_client(tmp_path, domains):
    """Groups, too, have samples for training and for testing then."""
    folder = pictures(tmp_path / "pacs", domains, ["cat", "dog"])
    data = federate(read(str(folder), splitting=Splitting(apart=False)), Partition("folders"))
    assert data.names == tuple(domains)
    assert sum(len(client.train) + len(client.test) for client in data.clients) == 12 * len(domains)
    assert all(len(client.train) for client in data.clients)
    assert sum(len(client.test) for client in data.clients) == len(data.test) > 0


def test_a_partition_that_cannot_be_is_found_before_images_are_decoded(tmp_path, monkeypatch):
    folder = pictures(tmp_path / "pictures", ["."], ["cat", "dog"])
    (folder / "cat" / "0.png").write_bytes(b"no picture")
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))
    settings, model = DataSettings(dataset=str(folder)), ModelSettings()
    with pytest.raises(UserError, match="11 clients but 10 training samples"):
        load(settings, Partition("iid", clients=11), model, None)
    with pytest.raises(UserError, match=r"0\.png is not a readable image"):
        load(settings, Partition("iid", clients=2), model, None)


def test_folders_without_domains_name_no_clients(tmp_path):
    folder = pictures(tmp_path, ["cat", "dog"], ["."])
    with pytest.raises(UserError, match="no folders above or below those of classes"):
        federate(load_dataset(str(folder)), Partition("folders"))


def test_sizes_are_drawn_and_classes_are_not():
    labels = np.arange(4000) % 4
    parts = quantity(labels, 8, 0.5, np.random.RandomState(1))
    assert sorted(np.concatenate(parts)) == list(range(4000))
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 10
    assert max(sizes) > 3 * min(sizes)
    for part in parts:
        if len(part) > 400:
            assert np.bincount(labels[part], minlength=4).min() > 0.15 * len(part)
    even = [len(part) for part in quantity(labels, 8, 1e4, np.random.RandomState(1))]
    assert max(even) < 1.1 * min(even)
    for alpha in (1e-300, 0.01):
        with pytest.raises(UserError, match="raise alpha, use fewer clients"):
            quantity(labels[:50], 8, alpha, np.random.RandomState(1))


def numbered(clients: int, samples: int = 200, classes: int = 5) -> FederatedData:
    def part(seed: int) -> Split:
        generator = torch.Generator().manual_seed(seed)
        return Split(torch.rand(samples, 1, 8, 8, generator=generator), torch.arange(samples) % classes)

    held = [ClientData(part(i), part(i + 100)) for i in range(clients)]
    return FederatedData(tuple(held), part(1000), tuple(map(str, range(classes))))


def test_a_share_of_training_labels_becomes_other_classes_and_tests_stay():
    data = numbered(4)
    noisy = with_label_noise(data, (0.25, 0.0), seed=3)
    for i, (client, before) in enumerate(zip(noisy.clients, data.clients, strict=True)):
        changed = (client.train.labels != before.train.labels).sum()
        assert changed == (50 if i % 2 == 0 else 0)  # rates are repeated over the clients
        assert torch.equal(client.test.labels, before.test.labels)
        assert torch.equal(before.train.labels, torch.arange(200) % 5)
    first, third = (noisy.clients[i].train.labels for i in (0, 2))
    assert not torch.equal(first, third)
    wrong = first[first != torch.arange(200) % 5]
    assert set(wrong.tolist()) == set(range(5))
    again = with_label_noise(data, (0.25, 0.0), seed=3)
    assert torch.equal(again.clients[0].train.labels, first)
    with pytest.raises(UserError, match="5 rates for 4 clients"):
        with_label_noise(data, (0.1,) * 5, seed=3)
    numbers = FederatedData(
        (ClientData(Split.of((torch.rand(4, 2), torch.rand(4))), Split.of((torch.rand(4, 2), torch.rand(4)))),),
        Split.of((torch.rand(4, 2), torch.rand(4))),
        ("y",),
    )
    with pytest.raises(UserError, match="label_noise needs at least two classes, and the targets here are numbers"):
        with_label_noise(numbers, (0.1,), seed=3)


def test_validation_data_are_noisy_as_the_clients_labels_are():
    whole = load_dataset("digits")
    data = hold_out(federate(whole, Partition("iid", 4, label_noise=(0.5,))), 0.2, seed=1)
    clean = hold_out(federate(whole, Partition("iid", 4)), 0.2, seed=1)
    rows = data.clients[0].train.rows
    assert (whole.train.y[torch.from_numpy(rows)] != data.clients[0].train.labels).float().mean() > 0.4
    assert torch.equal(data.test.labels, clean.test.labels)


def test_a_rotation_grows_from_client_to_client_in_training_and_in_test():
    x = torch.zeros(3, 1, 9, 9)
    x[:, 0, 4, 4:] = 1  # a line from the centre to the right
    split = Split(x, torch.arange(3))
    data = FederatedData((ClientData(split, split),) * 3, split, ("a", "b", "c"))
    shifted = with_shift(data, Shift.read("rotation=90"), seed=0)
    assert shifted.clients[0] is data.clients[0]
    for client in shifted.clients[2:]:
        for half in (client.train, client.test):
            turned = half.load()[0][0, 0]
            assert turned[4, 4:].sum() == 1  # only the centre is left of it
            assert max(turned[:5, 4].sum(), turned[4:, 4].sum()) == 5
            assert torch.equal(half.labels, torch.arange(3))
    assert shifted.test is data.test


def test_noise_is_of_its_level_and_images_stay_bytes():
    data = numbered(3)
    shifted = with_shift(data, Shift.read("noise=0.5"), seed=7)
    for i, client in enumerate(shifted.clients):
        change = client.train.load()[0] - data.clients[i].train.load()[0]
        assert float(change.std()) == pytest.approx(0.25 * i, abs=0.01)
    again = with_shift(data, Shift.read("noise=0.5"), seed=7)
    assert torch.equal(again.clients[1].test.load()[0], shifted.clients[1].test.load()[0])
    images = np.full((6, 3, 4, 4), 200, dtype=np.uint8)
    split = Split(images, torch.arange(6)).take([1, 3, 5])
    of = with_shift(FederatedData((ClientData(split, split),), split, tuple("abcdef")), Shift.read("noise=1"), seed=7)
    assert of.clients[0].train.x.dtype == torch.uint8
    assert of.clients[0].train.labels.tolist() == [1, 3, 5]
    assert len(np.unique(of.clients[0].train.x)) > 20


@pytest.mark.parametrize("text", ["", "noise", "noise=0", "noise=-1", "noise=nan", "rotation=181", "blur=1", "=3"])
def test_shifts_are_read_or_refused(text):
    assert str(Shift.read("rotation=60")) == "rotation=60"
    with pytest.raises(UserError, match=r"^shift is noise=LEVEL or rotation=DEGREES"):
        Shift.read(text)


def test_shifts_that_do_not_fit_the_samples_are_refused():
    features = table(hospitals(), target="ill", leave_out="hospital")
    with pytest.raises(UserError, match="rotation needs images"):
        federate(features, Partition("iid", 2, shift=Shift("rotation", 30.0)))
    tokens = Split.of((torch.arange(24).view(6, 4), torch.arange(6) % 2))
    data = FederatedData((ClientData(tokens, tokens),), tokens, ("a", "b"))
    with pytest.raises(UserError, match="samples here are integers"):
        with_shift(data, Shift("noise", 1.0), seed=0)


def test_settings_are_written_and_read_as_text():
    given = Partition.read({"label_noise": "0.4,0", "shift": "rotation=30"})
    assert given.label_noise == (0.4, 0.0)
    assert given.written()["label_noise"] == (0.4, 0.0)
    assert Partition.read(given.in_text()) == given
    for wrong in ("2", "a", "0.1,,", "-0.1"):
        with pytest.raises(UserError, match="label_noise"):
            Partition.read({"label_noise": wrong})
