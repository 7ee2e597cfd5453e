"""Data sets of users' own: read as they are used, their transforms anew each time, integers as integers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import opened
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.data import Split


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise that is drawn each time, as a random transform does, from all three generators."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.y = torch.arange(samples) % 2
        self.x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed)) + 3 * self.y[:, None]
        self.reads: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.randn(6) + random.random() + np.random.rand()
        self.reads.append((i, noise.numpy().tobytes()))
        return self.x[i] + 0.1 * noise, int(self.y[i])


def test_items_are_read_anew_in_every_epoch():
    own = Noisy(20)
    task = fb.Task.of(lambda: nn.Linear(6, 2), [(own, Noisy(4))], Noisy(10))
    labels = len(own.reads)
    assert labels == 1 + 20  # the shape, and every label once
    site = opened(task, 0, 1, "train")
    site.fit(site.model(), fb.Local(epochs=5, lr=0.1, batch=4))
    trained = own.reads[labels:]
    assert sorted(i for i, _ in trained) == sorted(5 * list(range(20)))
    assert len({noise for _, noise in trained}) == 100  # not the same draw twice


def test_runs_on_data_sets_do_not_depend_on_workers_or_on_what_was_drawn_before():
    totals, finals = [], []
    for workers in (1, 2):
        torch.manual_seed(workers)
        random.seed(workers)
        np.random.seed(workers)
        task = fb.Task.of(lambda: nn.Linear(6, 2), [(Noisy(20, i), Noisy(4, i)) for i in range(3)], Split.of(Noisy(10)))
        result = fb.run(fb.FedPURIN(epochs=2, lr=0.1, batch=5), task, rounds=3, workers=workers)
        totals.append(result.ledger.totals())
        finals.append([row["loss"] for row in result.rounds])
    assert totals[0] == totals[1]
    assert finals[0] == finals[1]


def test_reading_labels_leaves_the_generators_as_they_were():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    Split.of(Noisy(3))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


@pytest.mark.parametrize(
    "x", [torch.randint(9, (5, 7)), np.random.default_rng(0).integers(9, size=(5, 7)).astype(np.uint16)]
)
def test_integers_stay_integers(x):
    split = Split.of((x, torch.tensor([0, 1, 0, 1, 0])))
    for loaded in (split.load()[0], split.take([0, 1, 2, 3, 4]).load()[0]):
        assert loaded.dtype == torch.int64
        assert torch.equal(loaded, torch.as_tensor(x.astype(np.int64) if isinstance(x, np.ndarray) else x))


class Bag(nn.Module):
    """A classifier of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(30) % 2
    return torch.randint(4, (30, 7), generator=g) + 4 * y[:, None], y


@pytest.mark.parametrize("method", [fb.FedAvg(lr=0.5, batch=5), fb.FML(lr=0.5, batch=5), fb.FedPURIN(lr=0.5, batch=5)])
@pytest.mark.parametrize("as_items", [False, True])
def test_token_ids_reach_an_embedding_and_are_learnt(method, as_items):
    def given(seed: int) -> Any:
        x, y = tokens(seed)
        return torch.utils.data.StackDataset(x, y.tolist()) if as_items else (x, y)

    task = fb.Task.of(Bag, [(given(i), given(10 + i)) for i in range(2)], given(20))
    assert fb.run(method, task, rounds=3, workers=1).accuracy > 0.8


def test_feddf_makes_no_noise_of_token_ids():
    task = fb.Task.of(Bag, [(tokens(0), tokens(1))], tokens(2))
    with pytest.raises(fb.UserError, match="samples are integers"):
        fb.run(fb.FedDF(), task, rounds=1, workers=1)


def test_integers_for_a_model_of_floats_are_told():
    task = fb.Task.of(lambda: nn.Linear(7, 2), [(tokens(0), tokens(1))], tokens(2))
    with pytest.raises(fb.FewbytesError, match="samples are integers"):
        fb.run(fb.FedAvg(), task, rounds=1, workers=1)


def test_a_model_in_place_of_a_function_is_refused():
    with pytest.raises(fb.UserError, match=r"lambda: MyModel\(\).* Linear"):
        fb.Task.of(nn.Linear(2, 2), [((torch.rand(4, 2), torch.tensor([0, 1, 0, 1])),) * 2])  # type: ignore[arg-type]


def test_integers_of_a_data_set_for_a_model_of_floats_are_told():
    x, y = tokens(0)
    task = fb.Task.of(lambda: nn.Linear(7, 2), [(torch.utils.data.StackDataset(x, y.tolist()), tokens(1))])
    with pytest.raises(fb.FewbytesError, match="samples are integers"):
        fb.run(fb.FedAvg(), task, rounds=1, workers=1)


class Holding(Noisy):
    """Keeps its file open, whose place forked processes would share."""

    def __init__(self, path: Path) -> None:
        super().__init__(3)
        self.file = path.open("rb")


def test_a_data_set_that_holds_an_open_file_is_refused(tmp_path):
    (tmp_path / "samples").write_bytes(b"123")
    holding = Holding(tmp_path / "samples")
    with holding.file, pytest.raises(fb.UserError, match=r"Holding .*\(file\).*__getitem__"):
        Split.of(holding)


def test_a_server_s_noisy_test_set_is_scored_alike_every_time():
    finals = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        task = fb.Task.of(lambda: nn.Linear(6, 2), [(Noisy(20, i), Noisy(4, i)) for i in range(2)], Very(30))
        finals.append(fb.run(fb.FedAvg(lr=0.1), task, rounds=2, workers=1).accuracy)
    assert finals[0] == finals[1]


class Very(Noisy):
    """So noisy that its accuracy hangs on what is drawn."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(i)
        return x + 20 * torch.randn(6), y
