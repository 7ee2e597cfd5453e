"""An ordinary Flower app, its strategy and its clients, with the mod and over the grid that encode its messages."""

from __future__ import annotations

import copy
import json
import logging
import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flower_grid import MemoryGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from printed_bytes import out_of

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.flower import apps
from fewbytes.flower.few_grid import FewGrid, compressed
from fewbytes.flower.mod import fewbytes_mod
from fewbytes.flower.records import KEY

CLIENTS = 5
TRUE = torch.randn(12, 200, generator=torch.Generator().manual_seed(9))


class Net(torch.nn.Module):
    """With batch norm, as many models that people bring."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(200)
        self.layer = torch.nn.Linear(200, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


def samples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(120, 200, generator=torch.Generator().manual_seed(client))
    return x, (x @ TRUE.t()).argmax(1)


def client_app(mods: list) -> ClientApp:
    """The app as people have it: it trains the model it is sent, and evaluates it."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.manual_seed(1)
        net = Net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = samples(context.node_config["partition-id"])
        optimiser = torch.optim.SGD(net.parameters(), lr=1.0)
        for _ in range(3):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        net = Net().eval()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = samples(100 + context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": len(x), "accuracy": float((net(x).argmax(1) == y).float().mean())})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Nodes(MemoryGrid):
    """Nodes that keep their state between messages, which is copied on its way, as bytes are.

    `before`: called with each message and the node's context; an exception is the client's.
    """

    def __init__(self, app: ClientApp, clients: int = CLIENTS, fault=None, before: Callable | None = None) -> None:
        super().__init__(app, clients, fault)
        self.contexts: dict[int, Context] = {}
        self.before = before or (lambda message, context: None)

    @property
    def run(self):
        return SimpleNamespace(run_id=1)

    def send_and_receive(self, messages, *, timeout=None):
        return list(self.pull_messages(list(self.push_messages(messages))))

    def answer(self, message: Message) -> Message:
        self.asked.append(message)
        client = message.metadata.dst_node_id - 1000
        fresh = Context(1, message.metadata.dst_node_id, {"partition-id": client}, RecordDict(), {})
        context = self.contexts.setdefault(client, fresh)
        self.before(message, context)
        try:
            return copy.deepcopy(self.app(copy.deepcopy(message), context))
        except (KeyError, TypeError) as error:
            return Message(Error(2, str(error)), reply_to=message)


def run(grid, rounds: int = 8, fraction: float = 1.0, timeout: float = 5) -> list[float]:
    """The accuracies of Flower's own FedAvg, by round."""
    torch.manual_seed(0)
    random.seed(3)
    strategy = FedAvg(
        fraction_train=fraction, fraction_evaluate=fraction, min_train_nodes=1, min_available_nodes=1,
        min_evaluate_nodes=1,
    )  # fmt: skip
    start = ArrayRecord(Net().state_dict())
    logging.getLogger("flwr").setLevel(logging.WARNING)
    result = strategy.start(grid, start, num_rounds=rounds, timeout=timeout)
    return [metrics["accuracy"] for _, metrics in sorted(result.evaluate_metrics_clientapp.items())]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return run(Nodes(client_app([])))


def few(bits=None, down=None, **settings) -> tuple[list[float], FewGrid]:
    rounds = {key: settings.pop(key) for key in ("rounds", "fraction", "timeout") if key in settings}
    out = settings.pop("out", None)
    grid = FewGrid(Nodes(client_app([fewbytes_mod(bits)]), **settings), down, out=out)
    return run(grid, **rounds), grid


def test_without_bits_the_app_gets_what_it_had_to_the_bit(plain):
    accuracy, grid = few()
    assert accuracy == plain
    assert grid.ledger.totals["up"] < grid.ledger.totals["plain_up"]
    assert grid.ledger.totals["down"] < 0.7 * grid.ledger.totals["plain_down"]


def start() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Net().state_dict()


@pytest.mark.parametrize("mods", ["equal", "without", "others", "none"])
def test_first_weights_are_not_sent_to_who_has_them(plain, mods):
    """A client that does not have them, or has others, or does not use the mod, gets them, and the same comes of it."""
    made = {"equal": start, "without": None, "others": lambda: Net().state_dict()}
    nodes = Nodes(client_app([] if mods == "none" else [fewbytes_mod(first=made[mods])]))
    grid = FewGrid(nodes, first=start)
    accuracy = run(grid)
    assert accuracy == plain
    whole, down = CLIENTS * sum(value.nbytes for value in start().values()), grid.ledger.totals["down"]
    _, without = few()
    assert down < without.ledger.totals["down"] - 0.9 * whole if mods == "equal" else down > whole


def test_half_a_bit_up_and_one_down_learn_as_well(plain):
    accuracy, grid = few(0.5, 1, rounds=12)
    totals = grid.ledger.totals
    assert max(plain) > 0.35
    assert accuracy[-1] > plain[-1] - 0.03
    assert totals["plain_up"] / totals["up"] > 6  # batch norm's statistics travel exactly: most of this small reply
    assert totals["plain_down"] / totals["down"] > 6


def test_a_model_that_was_just_sent_is_not_sent_again_for_evaluation():
    _, grid = few(1, 1)
    down = dict.fromkeys(("train", "evaluate"), 0)
    for message in grid._grid.asked[CLIENTS:]:
        down[message.metadata.message_type] += sum(len(a.data) for a in message.content["arrays"].values())
    assert down["evaluate"] > 0
    sizes = [sum(len(a.data) for a in m.content["arrays"].values()) for m in grid._grid.asked]
    assert min(sizes) < 400  # after a round without a new model: nothing but the version


@pytest.mark.parametrize("side", ["client", "server"])
def test_with_one_half_alone_the_app_runs_as_it_did(plain, side, caplog):
    """A node without the mod among others, or a server without the grid."""
    if side == "client":
        assert run(Nodes(client_app([fewbytes_mod(0.5)]))) == plain
        return
    grid = FewGrid(Nodes(client_app([])), 1)
    assert max(abs(a - b) for a, b in zip(run(grid), plain, strict=True)) < 0.03
    assert "does not use fewbytes_mod" in caplog.text


def lossy_link(share: float):
    rng = random.Random(4)
    return lambda message, reply: [] if rng.random() < share else [reply]


def test_lost_replies_cost_no_more_than_they_did():
    rounds = 10
    before = run(Nodes(client_app([]), fault=lossy_link(0.3)), rounds)
    accuracy, _ = few(1, 2, fault=lossy_link(0.3), rounds=rounds, timeout=0.2)
    assert accuracy[-1] > before[-1] - 0.06


@pytest.mark.parametrize("what", ["state is lost", "client raises", "state goes back"])
def test_nodes_that_fail_or_forget_are_mended_by_one_whole_message(plain, what):
    rng, kept = random.Random(2), {}

    def before(message: Message, context: Context) -> None:
        client = context.node_config["partition-id"]
        if what == "state is lost" and rng.random() < 0.2:
            context.state = RecordDict()
        elif what == "client raises" and rng.random() < 0.2:
            message.content = RecordDict({"nothing": ConfigRecord({})})
        elif what == "state goes back":
            if rng.random() < 0.3 and client in kept:
                context.state = copy.deepcopy(kept[client])
            kept[client] = copy.deepcopy(context.state)

    accuracy, grid = few(1, 2, before=before)
    assert len(accuracy) == len(plain)
    assert accuracy[-1] > plain[-1] - 0.06
    if what == "state is lost":  # no round lost: the node was asked again at once
        assert len([m for m in grid._grid.asked if m.metadata.message_type == "train"]) > 8 * CLIENTS


def test_three_of_thirty_clients_a_round_catch_up():
    before = run(Nodes(client_app([]), 30), 40, 0.1)
    accuracy, grid = few(1, 2, clients=30, fraction=0.1, rounds=40)
    assert max(before) > 0.35
    assert sum(accuracy[-5:]) / 5 > sum(before[-5:]) / 5 - 0.05
    totals = grid.ledger.totals
    assert totals["down"] < 0.7 * totals["plain_down"]  # most are first contacts, or have missed ten rounds


def tampering(message: Message, reply: Message):
    record = reply.content.array_records.get("arrays")
    if record is None or KEY not in record:
        return [reply]
    data = bytearray(record[KEY].data)
    at = random.Random(len(data)).randrange(len(data))
    data[at] ^= 64
    record[KEY] = Array("uint8", (len(data),), record[KEY].stype, bytes(data))
    return [reply]


def test_a_tampered_reply_is_left_out_and_named(caplog):
    grid = FewGrid(Nodes(client_app([fewbytes_mod(0.5)]), fault=tampering), 1)
    messages = [
        Message(RecordDict({"arrays": ArrayRecord(Net().state_dict()), "config": ConfigRecord({})}), 1000 + i, "train")
        for i in range(CLIENTS)
    ]
    replies = list(grid.send_and_receive(messages, timeout=5))
    assert len(replies) == CLIENTS
    assert all(reply.has_error() for reply in replies)
    assert "is left out" in caplog.text


def test_several_models_in_a_message_and_models_of_their_own():
    """Two records a message; and a strategy that sends each client another model."""
    app = ClientApp(mods=[fewbytes_mod(8)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = {
            name: ArrayRecord({k: Array(a.numpy() + 1) for k, a in record.items()})
            for name, record in message.content.array_records.items()
        }
        return Message(RecordDict(content), reply_to=message)

    grid = FewGrid(Nodes(app), 8)
    for t in range(4):
        messages = []
        for i in range(CLIENTS):
            one = ArrayRecord({"w": Array(np.full(300, t, np.float32))})
            own = ArrayRecord({"v": Array(np.full((2, 50), 10 * i + t, np.float64)), "n": Array(np.arange(3))})
            messages.append(Message(RecordDict({"one": one, "own": own}), 1000 + i, "train"))
        for reply in grid.send_and_receive(messages, timeout=5):
            i = reply.metadata.src_node_id - 1000
            np.testing.assert_allclose(reply.content["one"]["w"].numpy(), t + 1, atol=0.01)
            np.testing.assert_allclose(reply.content["own"]["v"].numpy(), 10 * i + t + 1, atol=0.01)
            np.testing.assert_array_equal(reply.content["own"]["n"].numpy(), np.arange(3) + 1)


def test_push_and_pull_know_messages_by_the_ids_they_were_given():
    lost = []

    def before(message: Message, context: Context) -> None:
        if len(lost) < 2 and KEY in context.state:
            context.state = RecordDict()
            lost.append(1)

    grid = FewGrid(Nodes(client_app([fewbytes_mod(1)]), before=before), 1)
    record = ArrayRecord(Net().state_dict())
    for _ in range(4):
        messages = [Message(RecordDict({"arrays": record}), 1000 + i, "train") for i in range(CLIENTS)]
        ids, found = list(grid.push_messages(messages)), []
        for _ in range(3):
            found += list(grid.pull_messages(ids))
        assert sorted(reply.metadata.reply_to_message_id for reply in found) == sorted(ids)
        arrays = {k: v + 0.01 for k, v in record.to_torch_state_dict().items() if v.is_floating_point()}
        record = ArrayRecord(record.to_torch_state_dict() | arrays)
    assert len(lost) == 2


def test_the_ledger_counts_what_travels(tmp_path):
    few(1, 1, out=tmp_path / "run", rounds=3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "bytes.jsonl").read_text().splitlines()]
    assert {row["way"] for row in rows} == {"up", "down"}
    assert {row["kind"] for row in rows} == {"train", "evaluate"}
    assert {row["round"] for row in rows} == {"1", "2", "3"}
    up = [row for row in rows if row["way"] == "up" and row["kind"] == "train"]
    assert len(up) == 3 * CLIENTS
    assert all(row["bytes"] < row["plain"] / 2 for row in up)


def test_an_exchange_is_a_line_in_the_log_of_the_directions_in_which_something_moved(caplog):
    with caplog.at_level(logging.INFO, logger="flwr.fewbytes"):
        grid = FewGrid(Nodes(client_app([fewbytes_mod(1)])), 1)
        for kind in ("train", "evaluate"):
            arrays = ArrayRecord(Net().state_dict())
            list(grid.send_and_receive([Message(RecordDict({"arrays": arrays}), 1000, kind)], timeout=5))
    lines = [record.message for record in caplog.records if "plain" in record.message]
    assert [(" up" in line, " down" in line) for line in lines] == [(True, True), (False, True)]
    assert "; in both directions " in lines[0]
    for line in lines:
        *of, (nbytes, plain) = out_of(line)
        times = float(re.findall(r", ([\d.]+) times fewer bytes than plain$", line)[0])
        assert times == pytest.approx(plain / nbytes, rel=0.02)
        assert bool(of) == ("both" in line)


def test_compressed_is_the_same_app_before_and_after_it_is_decorated():
    seen = []
    for first in (True, False):
        app = ServerApp()
        if not first:
            app = compressed(app, 1)

        @app.main()
        def main(grid, context) -> None:
            seen.append(grid)

        if first:
            app = compressed(app, 1)
        app(Nodes(client_app([])), Context(1, 0, {}, RecordDict(), {}))
    assert [type(grid) for grid in seen] == [FewGrid, FewGrid]


def test_the_folder_may_be_named_in_the_run_config(tmp_path):
    app = compressed(ServerApp(), 1, out=tmp_path / "code")

    @app.main()
    def main(grid, context) -> None:
        run(grid, rounds=1)

    for config, name in (({"fewbytes-out": str(tmp_path / "config")}, "config"), ({"fewbytes-out": ""}, "code")):
        assert not (tmp_path / name).exists()
        app(Nodes(client_app([fewbytes_mod(1)])), Context(1, 0, {}, RecordDict(), config))
        rows = (tmp_path / name / "bytes.jsonl").read_text().splitlines()
        assert len(rows) == 4 * CLIENTS  # to train and to evaluate, and replies
    with pytest.raises(UserError, match="fewbytes-out"):
        app(Nodes(client_app([])), Context(1, 0, {}, RecordDict(), {"fewbytes-out": True}))


def test_a_mod_that_was_not_called_says_so():
    app, context = client_app([fewbytes_mod]), Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
    with pytest.raises(UserError, match=r"mods=\[fewbytes_mod\(\)\]"):
        app(Message(RecordDict({"arrays": ArrayRecord(Net().state_dict())}), 1000, "train"), context)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: fewbytes_mod(0), "bits"), (lambda: FewGrid(Nodes(client_app([])), 99), "bits"),
        (lambda: compressed(ServerApp(), 0), "bits"), (lambda: compressed(client_app([]), 1), "ServerApp"),
        (lambda: fewbytes_mod(1, exact="bn"), "exact"), (lambda: compressed(ServerApp(), 1, exact=3), "exact"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_where_they_are_written(make, word):
    with pytest.raises(UserError, match=word):
        make()


class OldClient(NumPyClient):
    """A client as Flower's older tutorials have it: parameters are a list of arrays."""

    def __init__(self, client: int) -> None:
        self.net, (self.x, self.y) = Net(), samples(client)

    def get_parameters(self, config):
        return [value.numpy() for value in self.net.state_dict().values()]

    def fit(self, parameters, config):
        values = [torch.tensor(value) for value in parameters]
        self.net.load_state_dict(dict(zip(self.net.state_dict(), values, strict=True)))
        optimiser = torch.optim.SGD(self.net.parameters(), lr=1.0)
        for _ in range(3):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(self.net(self.x), self.y).backward()
            optimiser.step()
        return self.get_parameters(config), len(self.x), {}


@pytest.mark.parametrize("bits", [None, 0.5])
def test_an_app_of_the_old_style_needs_no_more_than_positions(bits):
    """Its arrays are numbered: `exact` names those of batch norm by position."""
    random.seed(1)
    mods = [] if bits is None else [fewbytes_mod(bits, exact=[2, 3, 4])]
    client = ClientApp(client_fn=lambda context: OldClient(context.node_config["partition-id"]).to_client(), mods=mods)
    accuracies: list[float] = []

    def evaluate(number, parameters, config):
        torch.manual_seed(0)
        net = Net().eval()
        values = [torch.tensor(value) for value in parameters]
        net.load_state_dict(dict(zip(net.state_dict(), values, strict=True)))
        x, y = samples(100)
        accuracies.append(float((net(x).argmax(1) == y).float().mean()))
        return 0.0, {}

    def server_fn(context):
        start = ndarrays_to_parameters([value.numpy() for value in Net().state_dict().values()])
        strategy = OldFedAvg(
            fraction_evaluate=0, min_fit_clients=CLIENTS, min_available_clients=CLIENTS, evaluate_fn=evaluate,
            initial_parameters=start,
        )  # fmt: skip
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=6))

    app, nodes = ServerApp(server_fn=server_fn), Nodes(client)
    if bits is not None:
        app = compressed(app, 1, exact=[2, 3, 4])
    app(nodes, Context(1, 0, {}, RecordDict(), {}))
    down = [sum(len(a.data) for r in m.content.array_records.values() for a in r.values()) for m in nodes.asked]
    assert accuracies[-1] > accuracies[0] + 0.1
    assert (down[-1] < down[0] / 4) == (bits is not None)


def test_serve_says_what_it_does_in_flowers_log(tmp_path, caplog):
    """A method of this package in somebody's ServerApp."""
    data = [((torch.eye(4), torch.arange(4)),) * 2] * 2
    task = fb.Task.of(lambda: torch.nn.Linear(4, 4), data, test=data[0][0])
    nodes = MemoryGrid(apps.client_app(fb.FedAvg(), task, tmp_path), 2)
    with caplog.at_level(logging.INFO, logger="flwr.fewbytes"):
        apps.serve(nodes, fb.FedAvg(), task, rounds=2, out=tmp_path / "run")
    lines = [record.message for record in caplog.records if record.message.startswith("fewbytes: round")]
    assert len(lines) == 2
    assert all(word in lines[1] for word in ("round 2", "accuracy", "(global)", " B (", " up, ", " down)"))


def test_a_question_without_arrays_is_left_as_it_is():
    """Its reply says nothing of the node's mods, and may hold arrays."""
    app = ClientApp(mods=[fewbytes_mod(0.5)])

    @app.query()
    def ask(message: Message, context: Context) -> Message:
        assert not message.content.config_records
        return Message(RecordDict({"sums": ArrayRecord({"x": Array(np.arange(3.0))})}), reply_to=message)

    grid = FewGrid(Nodes(app), 1)
    (reply,) = grid.send_and_receive([Message(RecordDict(), 1000, "query")], timeout=5)
    np.testing.assert_array_equal(reply.content["sums"]["x"].numpy(), np.arange(3.0))
    assert grid._nodes[1000].uses_mod is None


def test_messages_that_overtake_replies_lose_nothing(plain):
    """A server that sends the next round before it has the last one's replies."""
    grid = FewGrid(Nodes(client_app([fewbytes_mod(8)])), 8)
    record, ids = ArrayRecord(Net().state_dict()), []
    for _ in range(4):
        ids.append(list(grid.push_messages([Message(RecordDict({"arrays": record}), 1000, "train")])))
    replies = [reply for each in ids for reply in grid.pull_messages(each)]
    assert len(replies) == 4
    assert not any(reply.has_error() for reply in replies)


def test_an_old_model_that_is_sent_again_is_no_new_version():
    """A node asks again for a message after the server has gone on to the next model."""
    nodes = Nodes(client_app([fewbytes_mod(1)]))
    grid, first = FewGrid(nodes, 1), Net().state_dict()
    later = {name: value + 0.01 if value.is_floating_point() else value for name, value in first.items()}

    def push(node: int, arrays: dict) -> list[str]:
        return list(grid.push_messages([Message(RecordDict({"arrays": ArrayRecord(arrays)}), node, "train")]))

    list(grid.pull_messages(push(1000, first)))
    old = push(1000, first)
    nodes.contexts[0].state = RecordDict()
    push(1001, later)
    replies = [*grid.pull_messages(old), *grid.pull_messages(old)]
    assert [reply.has_error() for reply in replies] == [False]
    assert set(replies[0].content["arrays"]) == set(first)
    assert grid._streams["arrays"].version == 2


@pytest.mark.parametrize("kind", ["same", "others"])
def test_a_strategy_that_starts_from_other_weights_than_first_is_logged(kind, caplog):
    made = start if kind == "same" else lambda: {name: value + 1 for name, value in start().items()}
    run(FewGrid(Nodes(client_app([fewbytes_mod(first=made)])), first=made), rounds=1)
    assert ("the first model is not the weights that first= makes" in caplog.text) == (kind == "others")
