"""What tests share: the golden folder, small tasks."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from cases import CASES, COME_AND_GO, scheduled_task, task_of
from levels import is_for_all_alone
from places import places  # noqa: F401 (a fixture of every file)
from runs import ROUNDS, Run, fingerprint
from torch import Tensor
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

import fewbytes as fb
from fewbytes.base.cores import available_cores
from fewbytes.engines import local
from fewbytes.engines.pool import WorkerPool

GOLDEN = Path(os.environ.get("FEWBYTES_GOLDEN") or Path(__file__).parent / "golden")
torch.set_num_threads(1)
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")  # a machine that does other things is no fault
os.environ["OMP_NUM_THREADS"] = "1"  # for servers, too: threads that wait for each other are slow on a busy machine


@pytest.fixture(autouse=True, scope="session")
def _few_processes() -> Iterator[None]:
    """Runs with one worker have it in this process, as forking one of tests is slow, and tests' processes share the
    cores: results are the same, which the laws of resuming show for three workers."""
    share = max(1, available_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "available_cores", lambda: share)
        patch.setattr(local, "WorkerPool", lambda runner, count: WorkerPool(runner, count) if count > 1 else None)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Gives each process a file at a time, but of the laws a case at a time, so that its run is made once, and of what
    needs a GPU a test, as a machine with one is lent for minutes."""

    class ByCase(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "/gpu/" in file:
                return nodeid
            case = test.partition("[")[2].removesuffix("]")
            return case if "/laws/" in file and case in CASES else file

    return ByCase(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what only `make test-all` runs. Flower's processes first: they mostly wait, while the other worker
    computes."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        name = parameters.params.get("name") if parameters else None
        if is_for_all_alone(item.nodeid.removeprefix("tests/"), name):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name != "test_flower_processes.py")


class Vectors:
    """A golden archive: arrays by path, and all tensors below a path."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self._arrays = dict(file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def state(self, prefix: str) -> dict[str, Tensor]:
        prefix = prefix.rstrip("/") + "/"
        return {k[len(prefix) :]: torch.from_numpy(self._arrays[k].copy()) for k in self if k.startswith(prefix)}

    def below(self, prefix: str = "") -> list[str]:
        """Names one level below a path."""
        prefix = prefix.rstrip("/") + "/" if prefix else ""
        return list(dict.fromkeys(k[len(prefix) :].split("/")[0] for k in self if k.startswith(prefix)))


@pytest.fixture
def golden():
    """Open a golden archive by `system/name`."""
    return lambda name: Vectors(GOLDEN / f"{name}.npz")


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Each case's Run with two workers, its frames kept, made once."""

    @functools.cache
    def get(name: str) -> Run:
        folder = tmp_path_factory.mktemp("runs") / name
        result = fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=folder, workers=2, keep_frames=True)
        return Run(result, folder, fingerprint(folder))

    return get


@pytest.fixture(scope="session")
def uninterrupted(reference):
    """The fingerprint of each case's reference run."""
    return lambda name: reference(name).left


@pytest.fixture(scope="session")
def scheduled(tmp_path_factory):
    """The fingerprint of each of COME_AND_GO with two workers, made once."""

    @functools.cache
    def get(name: str) -> dict:
        folder = tmp_path_factory.mktemp("runs") / name
        fb.run(COME_AND_GO[name], scheduled_task(), rounds=ROUNDS, out=folder, workers=2)
        return fingerprint(folder)

    return get
