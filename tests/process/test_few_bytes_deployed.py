"""An ordinary Flower app over a SuperLink and SuperNodes, one of which is killed in mid-training and started again
without its state: with the codec no more is lost than without it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from runs import PATIENCE, lines, until

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from fewbytes.flower.application import app_config
from fewbytes.flower.children import family_of, send
from fewbytes.flower.processes import Processes

NODES, ROUNDS = 3, 6
KILLED, IN_ROUND = 1, 2  # the node, and the round in which it is killed
LET_IN = "SuperNode ID"  # in a SuperNode's log
APPS = """
import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fewbytes.data import load_dataset
from fewbytes.flower.few_grid import compressed
from fewbytes.flower.mod import fewbytes_mod

torch.set_num_threads(1)
PLACE, DIGITS = Path({place!r}), load_dataset("digits")
server = {server}
client = ClientApp(mods={mods})


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))


@client.train()
def train(message, context):
    part, number = context.node_config["partition-id"], message.content["config"]["server-round"]
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    (PLACE / f"training-{{part}}-{{number}}").touch()
    time.sleep(2)  # so that it can be killed here
    x, y = DIGITS.train.load()
    x, y = x[part::{nodes}], y[part::{nodes}]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in torch.arange(len(x)).split(20):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    metrics = MetricRecord({{"num-examples": len(x)}})
    return Message(RecordDict({{"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}}), reply_to=message)


class Counting(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.replies = sum(reply.has_content() for reply in replies)
        return super().aggregate_train(server_round, replies)


@server.main()
def main(grid, context):
    strategy = Counting(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes={nodes})

    def evaluate(number, arrays):
        if number == 0:
            return None
        net = network()
        net.load_state_dict(arrays.to_torch_state_dict())
        x, y = DIGITS.test.load()
        accuracy = float((net(x).argmax(1) == y).float().mean())
        with (PLACE / "rounds.jsonl").open("a") as file:
            file.write(json.dumps({{"accuracy": accuracy, "replies": strategy.replies}}) + "\\n")
        while number == {in_round} and not (PLACE / "back").exists():
            time.sleep(0.1)
        return None

    start = ArrayRecord(network().state_dict())
    strategy.start(grid, start, num_rounds={rounds}, timeout={patience}, evaluate_fn=evaluate)
"""


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment")
    with Processes(folder, "127.0.0.1:0") as flower:
        flower.start_superlink()
        flower.register([f"client-{i}" for i in range(NODES)])
        for i in range(NODES):
            flower.start_node(f"client-{i}", {"partition-id": i})
        yield flower


def run(flower: Processes, place: Path, server: str, mods: str) -> tuple[list[int], list[float]]:
    """Run the app while a node is killed and started again; returns each round's number of replies and accuracy."""
    app = place / "app"
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text(app_config("apps:server", "apps:client", {}))
    (app / "LICENSE").write_text("Apache-2.0")
    values = {"place": str(place), "nodes": NODES, "rounds": ROUNDS, "in_round": IN_ROUND, "patience": PATIENCE}
    (app / "apps.py").write_text(APPS.format(**values, server=server, mods=mods))
    number = flower.submit(app)
    assert until((place / f"training-{KILLED}-{IN_ROUND}").exists), flower.run_status(number)
    name = f"client-{KILLED}"
    for process in family_of({flower._nodes[name].process.pid}):
        send(process, signal.SIGKILL)
    flower._nodes[name].process.wait()
    # Flower notices after a minute: the round ends, and the node may connect again
    assert until(lambda: lines(place, "rounds.jsonl") == IN_ROUND), flower.run_status(number)
    log = flower.folder / "logs" / f"{name}.log"
    before = log.read_text().count(LET_IN)
    flower.start_node(name, {"partition-id": KILLED})
    assert until(lambda: log.read_text().count(LET_IN) > before), flower.ended()
    (place / "back").touch()
    assert until(lambda: flower.run_status(number)[0].startswith("finished"), every=1), flower.run_status(number)
    assert flower.run_status(number) == ("finished:completed", "")
    rows = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
    return [row["replies"] for row in rows], [row["accuracy"] for row in rows]


def test_a_supernode_that_is_killed_costs_what_it_costs_without_the_codec(flower, tmp_path):
    replies, before = run(flower, tmp_path / "plain", "ServerApp()", "[]")
    lost = [2 if number == IN_ROUND else 3 for number in range(1, ROUNDS + 1)]
    assert replies == lost  # by the strategy, whatever travels
    replies, exact = run(flower, tmp_path / "exact", "compressed(ServerApp())", "[fewbytes_mod()]")
    assert replies == lost
    assert exact == pytest.approx(before, abs=0.01)  # sums in the order in which replies arrive
    out = tmp_path / "bytes"
    few = f"compressed(ServerApp(), bits=1, out={str(out)!r})"
    replies, rounded = run(flower, tmp_path / "rounded", few, "[fewbytes_mod(bits=0.5)]")
    assert replies == lost
    assert rounded[-1] > before[-1] - 0.03
    rows = [json.loads(line) for line in (out / "bytes.jsonl").read_text().splitlines()]
    down = [row for row in rows if row["way"] == "down" and row["round"] == str(IN_ROUND + 1)]
    whole = [row for row in down if row["bytes"] > row["plain"] / 3]
    assert len(down) == NODES + 1  # the node asked again, for the whole model
    assert len(whole) == 1
