"""What a node's mod keeps: nothing large goes through Flower's context, which has five seconds to travel."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from test_few_bytes import Nodes

from fewbytes.base.errors import UserError
from fewbytes.flower.few_grid import FewGrid, compressed
from fewbytes.flower.kept_state import MOST_IN_CONTEXT, KeptState, load_state, save_state
from fewbytes.flower.mod import fewbytes_mod


def context(run: int = 1, node: int = 2) -> Context:
    return Context(run, node, {}, RecordDict(), {})


def size(of: Context) -> int:
    return sum(len(v) for record in of.state.config_records.values() for v in record.values() if isinstance(v, bytes))


LARGE = KeptState(3, {"arrays": bytes(MOST_IN_CONTEXT)}, {"arrays": b"lost"})


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def files(home) -> list[str]:
    return sorted(path.name for path in (home / "fewbytes").glob("*"))


def test_a_small_state_is_in_the_context_and_a_large_one_in_a_file(home):
    small, of = KeptState(1, {"arrays": b"held"}, {}), context()
    assert load_state(of) == KeptState()
    save_state(of, small)
    assert load_state(of) == small
    assert not (home / "fewbytes").exists()
    save_state(of, LARGE)
    assert size(of) == 0
    assert files(home) == ["1-2.state"]
    assert load_state(of) == LARGE
    save_state(of, small)  # a file that is there stays the place
    assert load_state(of) == small
    assert load_state(context(run=2)) == load_state(context(node=3)) == KeptState()


def test_a_damaged_file_is_no_state(home):
    of = context()
    save_state(of, LARGE)
    path = home / "fewbytes" / "1-2.state"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert load_state(of) == KeptState()


def test_files_of_runs_long_ago_are_removed(home):
    for run in (1, 2):
        save_state(context(run), LARGE)
    os.utime(home / "fewbytes" / "1-2.state", (time.time() - 8 * 86400,) * 2)
    save_state(context(3), LARGE)
    assert files(home) == ["2-2.state", "3-2.state"]


def test_the_end_of_a_run_removes_its_files(home):
    for run in (1, 2):
        save_state(context(run), LARGE)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        raise RuntimeError("it fails")

    with pytest.raises(RuntimeError, match="it fails"):
        compressed(app, 1)(Nodes(ClientApp(), 1), context(1))
    assert files(home) == ["2-2.state"]


def test_a_file_that_cannot_be_written_is_named(home):
    home.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot keep this node's state in .*1-2\.state.*set FLWR_HOME"):
        save_state(context(), LARGE)


def test_a_large_model_is_sent_as_its_difference_and_leaves_the_contexts_empty(home):
    app = ClientApp(mods=[fewbytes_mod(1)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        weight = message.content["arrays"]["weight"].numpy()
        trained = ArrayRecord({"weight": Array(weight + np.float32(0.01))})
        return Message(RecordDict({"arrays": trained, "metrics": MetricRecord({"n": 1})}), reply_to=message)

    nodes = Nodes(app, 2)
    grid, weight = FewGrid(nodes, 1), np.random.default_rng(0).normal(size=2_000_000).astype(np.float32)
    for _ in range(3):
        record = ArrayRecord({"weight": Array(weight)})
        asked = [Message(RecordDict({"arrays": record}), node, "train") for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(asked, timeout=60))
        assert all(reply.has_content() for reply in replies)
        weight = np.mean([reply.content["arrays"]["weight"].numpy() for reply in replies], 0)
    assert len(nodes.asked) == 6  # nobody asked for the whole model again
    assert all(size(each) == 0 for each in nodes.contexts.values())
    assert files(home) == ["1-1000.state", "1-1001.state"]
