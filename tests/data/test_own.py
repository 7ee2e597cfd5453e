"""Data sets that a function makes: `package.module:function`, on each node that of its client."""

from __future__ import annotations

import pytest
import torch

import fewbytes as fb
from fewbytes.data import load_dataset, own_data
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

MODULE = """
import torch
from torch.utils.data import Dataset as Items
from fewbytes.data import table

def scans(number, count=12, labels=3):
    y = torch.arange(count) % labels
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(number)), y

def site(number):
    return scans(number, 12, 2 if number else 3), scans(number, 3)

def server():
    return scans(7), scans(8, 6)

class Noisy(Items):  # with a transform of its own
    classes = ["benign", "malignant"]

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((4,), float(i)) + torch.rand(4), i % 2

def images(number):
    return Noisy(10 + number), Noisy(4)

def ward(number):
    return table({"age": [20, 30, 40], "ill": ["no", "yes", "no"]}, "ill", test={"age": [25], "ill": ["no"]})

def costs():
    x = torch.randn(9, 4)
    return (x, x[:, 0]), (x, x[:, 0])

def nothing(number):
    return None

def empty(number):
    return (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)), scans(0)

def strange(number):
    return scans(number, 12, 5), scans(number)

def broken(number):
    raise OSError("the archive is\\nnot mounted")
"""


@pytest.fixture(autouse=True)
def hospital(tmp_path, monkeypatch) -> None:
    (tmp_path / "our_hospital.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def settings(client_data: str, **more):
    where = {"dataset": "our_hospital:server", "client_data": f"our_hospital:{client_data}"}
    return {"method": "fedavg", "partition": "local", "clients": 3} | where | more


def test_each_client_has_what_the_function_makes_for_it():
    task = find(make_experiment(settings("site"))).task
    assert task.data.label_counts()["train"] == [[4, 4, 4], [6, 6, 0], [6, 6, 0]]
    assert task.data.classes == ("0", "1", "2")
    made = fb.run(fb.FedAvg(batch=4), task, rounds=1)
    assert made.summary["left_out"] == 0
    node = find(make_experiment(settings("site", class_names=["0", "1", "2"])), here=(1,)).task
    assert [len(client.train) for client in node.data.clients] == [0, 12, 0]
    assert node.problem.agreed == task.problem.agreed


def test_labels_without_names_are_numbers_of_the_runs_classes():
    data = own_data("our_hospital:site", 1, ["red", "green", "blue"])
    assert data.classes == ("red", "green", "blue")
    with pytest.raises(fb.UserError, match=r"up to 4, .* 3 classes, red, green, blue"):
        own_data("our_hospital:strange", 0, ["red", "green", "blue"])


def test_a_data_set_that_names_its_classes_is_numbered_by_them_and_keeps_its_transforms():
    task = find(make_experiment(settings("images", class_names=["malignant", "benign"])), here=(2,)).task
    train = task.data.clients[2].train
    assert task.data.label_counts()["train"][2] == [6, 6]
    assert train.labels.tolist()[:4] == [1, 0, 1, 0]
    assert not torch.equal(train.load()[0], train.load()[0])
    with pytest.raises(fb.UserError, match=r"benign, malignant; .* a, b"):
        find(make_experiment(settings("images", class_names=["a", "b"])), here=(2,))


def test_a_function_may_give_a_whole_data_set_or_one_to_deal_out():
    assert own_data("our_hospital:ward", 0).classes == ("no", "yes")
    assert load_dataset("our_hospital:costs").learns == "numbers"
    dealt = find(
        make_experiment({"method": "fedavg", "dataset": "our_hospital:server", "clients": 2, "partition": "iid"})
    ).task
    assert sum(map(sum, dealt.data.label_counts()["train"])) == 12


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("our_hospital:nothing", "NoneType: .*Dataset"),
        ("our_hospital:empty", "no training sample"),
        ("our_hospital:broken", "OSError: the archive is not mounted"),
        ("our_hospital:missing", r"AttributeError: .*missing.*PYTHONPATH"),
        ("no_hospital:site", "ModuleNotFoundError: No module named 'no_hospital'"),
    ],
)
def test_what_a_function_does_wrong_is_one_line(name, says):
    with pytest.raises(fb.UserError, match=says) as error:
        own_data(name, 1)
    assert "\n" not in str(error.value)


def test_of_a_function_must_be_said_how_many_clients_there_are():
    given = settings("site")
    given.pop("clients")
    with pytest.raises(fb.UserError, match="number of clients"):
        make_experiment(given)
