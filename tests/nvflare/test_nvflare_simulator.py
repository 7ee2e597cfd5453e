"""NVFlare's hello example, by its recipe, Client API and simulator, as it is and with the filters."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from printed_bytes import out_of

pytest.importorskip("nvflare.apis", reason="nvflare is not installed: pip install 'fewbytes[nvflare]'")

HELLO = Path(__file__).parent / "hello"
sys.path.append(str(HELLO))
from hello_network import Network, digits  # noqa: E402


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The global model that a run of the example ends with, and what it printed."""

    @functools.cache
    def run(*bits: str) -> tuple[dict[str, torch.Tensor], str]:
        folder = tmp_path_factory.mktemp("hello")
        command = [sys.executable, str(HELLO / "hello_job.py"), "sim", str(folder), *bits]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        files = [*folder.rglob("FL_global_model.pt")]
        assert files, (done.stdout + done.stderr)[-4000:]
        return torch.load(files[0], weights_only=True)["model"], done.stdout + done.stderr

    return run


def accuracy(state: dict[str, torch.Tensor]) -> float:
    net, (images, labels) = Network().eval(), digits(0)
    net.load_state_dict(state)
    return float((net(images).argmax(1) == labels).float().mean())


def sent(printed: str, of: str) -> list[int]:
    lines = re.findall(rf"fewbytes: {of}.*: .* of .*", printed)
    return [nbytes for line in lines for nbytes, _ in out_of(line)]


def test_lossless_is_the_example_as_it_is(ran):
    (plain, printed), (state, lossless) = ran("none"), ran("lossless", "lossless")
    assert not sent(printed, "")
    assert plain.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in plain.items())
    assert accuracy(state) > 0.85
    assert [len(sent(lossless, of)) for of in ("task train for", "result of task train")] == [8, 8]


def test_with_few_bits_it_learns(ran):
    state, printed = ran("1", "2")
    assert accuracy(state) > 0.85
    down, up = sent(printed, "task train for"), sent(printed, "result of task train")
    assert len(down) == len(up) == 8
    assert max(up) < max(down) / 8
    assert sorted(down)[3] < max(down) / 4


def test_a_model_that_clients_can_make_is_not_sent(ran):
    """The same models, and a first message of some hundred bytes."""
    (state, known), (plain, printed) = ran("1", "2", "first"), ran("1", "2")
    assert all(torch.equal(value, state[name]) for name, value in plain.items())
    down, before = sent(known, "task train for"), sent(printed, "task train for")
    assert len(down) == 8
    assert sorted(down)[1] < 200
    assert sorted(down)[2:] == sorted(before)[:6]
    assert max(down) < max(before) / 5
