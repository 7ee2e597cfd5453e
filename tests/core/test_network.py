"""What a server half may use: the network and nothing else, a part of it, and messages that wait."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from cases import LOCAL, scheduled_task, tiny_task

import fewbytes as fb
from fewbytes.base.ranges import Positive
from fewbytes.core.network import LazyMapping
from fewbytes.engines.local import local_engine
from fewbytes.engines.terms import Terms


@fb.payload
class News:
    values: fb.Dense

    @classmethod
    def of(cls, number: float) -> News:
        return cls(fb.Dense({"x": torch.tensor([float(number)])}))


@fb.payload
class Heard:
    """What a client has been told so far, in order."""

    numbers: list[float]


@dataclass
class Memory:
    numbers: list[float] = field(default_factory=list)


@dataclass
class Server:
    heard: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Gossip(fb.Method):
    """Tells everybody the number of the round with the next request, and every second client something more."""

    fraction: float = 0.5

    def server(self, problem: fb.Problem) -> Server:
        return Server()

    def client(self, site: fb.Site) -> Memory:
        return Memory()

    def round(self, state: Server, net: fb.Network, t: int) -> None:
        for client, reply in net.call(self.ask, to=net.sample(self.fraction)):
            state.heard[client] = reply.numbers
        net.tell(self.told, send=News.of(t), when="next")
        net.tell(self.more, to={i: News.of(100 * t + i) for i in net.clients if i % 2}, when="next")

    def told(self, state: Memory, message: News, site: fb.Site) -> None:
        state.numbers.append(float(message.values.dense()["x"][0]))

    def more(self, state: Memory, message: News, site: fb.Site) -> None:
        self.told(state, message, site)

    def ask(self, state: Memory, message: None, site: fb.Site) -> Heard:
        return Heard(list(state.numbers))


@pytest.fixture
def engine(tmp_path):
    with local_engine(Terms(Gossip(), tiny_task(clients=6), tmp_path), workers=2) as made:
        made.begin(1)
        yield made


def heard(engine) -> dict[int, list[float]]:
    return {i: reply.numbers for i, reply in engine.network.call(engine.method.ask, to=engine.roster.clients)}


def test_a_server_half_reaches_no_more_than_it_may_use(engine):
    names = {name for name in dir(engine.network) if not name.startswith("_")}
    assert names == {
        "among", "call", "clients", "clipped", "entry_means", "mean", "note", "problem", "rng", "sample",
        "show", "stream", "tell", "votes",
    }  # fmt: skip
    assert not hasattr(engine.network.problem, "data")


def test_what_waits_runs_before_the_next_handler_once_and_only_the_newest_of_a_handler(engine):
    net, method = engine.network, engine.method
    net.tell(method.told, to=[0, 1], send=News.of(1), when="next")
    net.tell(method.told, to={1: News.of(2)}, when="next")
    net.tell(method.more, to=[1], send=News.of(3), when="next")
    assert len(engine.ledger) == 0  # nothing has been sent yet
    assert heard(engine) == {0: [1], 1: [2, 3], 2: [], 3: [], 4: [], 5: []}
    assert heard(engine) == {0: [1], 1: [2, 3], 2: [], 3: [], 4: [], 5: []}
    assert len(engine.ledger) == 12  # no exchange of their own
    down = engine.ledger.columns()["value_bytes_down"].tolist()
    assert down == [4, 8, 0, 0, 0, 0, *[0] * 6]


def test_what_is_left_with_everybody_takes_the_place_of_all_that_waits(engine):
    net, method = engine.network, engine.method
    net.tell(method.told, to=[0], send=News.of(1), when="next")
    net.tell(method.told, send=News.of(2), when="next")
    net.tell(method.told, to=[3], send=News.of(3), when="next")
    assert [reply.numbers for _, reply in net.call(method.ask, to=[0, 3])] == [[2], [3]]
    assert heard(engine) == {0: [2], 1: [2], 2: [2], 3: [3], 4: [2], 5: [2]}


def test_what_waits_is_sent_by_itself_in_the_end(engine):
    net, method = engine.network, engine.method
    net.tell(method.told, to=[2, 4], send=News.of(7), when="next")
    engine.scheduler.deliver()
    columns = engine.ledger.columns()
    assert columns["client"].tolist() == [2, 4]
    assert [engine.ledger.handlers[i] for i in columns["handler"]] == ["told", "told"]
    assert heard(engine)[4] == [7]
    engine.scheduler.deliver()
    assert len(engine.ledger) == 8  # nothing waits any more


def test_a_message_sent_at_once_takes_the_place_of_one_that_waits(engine):
    net, method = engine.network, engine.method
    net.tell(method.told, to=[0, 1], send=News.of(1), when="next")
    net.tell(method.told, to=[0], send=News.of(2))
    assert heard(engine) == {0: [2], 1: [1], 2: [], 3: [], 4: [], 5: []}


def test_who_joins_later_gets_what_was_left_with_everybody(tmp_path):
    result = fb.run(Gossip(fraction=1.0), scheduled_task(), rounds=4, out=tmp_path / "run")
    columns = result.ledger.columns()
    first = {(int(t), int(i)) for t, i in zip(columns["round"], columns["client"], strict=True)}
    assert (3, 3) in first  # comes in round 3
    down = {
        (int(t), int(i)): int(n)
        for t, i, n in zip(columns["round"], columns["client"], columns["value_bytes_down"], strict=True)
    }
    assert down[3, 3] == 4  # the number of round 2, though nobody knew of it then
    assert down[3, 2] == 4
    assert down[2, 1] == 8


def test_wrong_messages_are_refused(engine):
    net, method = engine.network, engine.method
    with pytest.raises(fb.MethodError, match="'ask' replies"):
        net.tell(method.ask, to=[0], when="next")
    with pytest.raises(fb.MethodError, match=r"'told' takes a News, .* int"):
        net.tell(method.told, to=[0], send=7, when="next")


def test_a_message_waits_as_it_was_left(engine):
    net, method = engine.network, engine.method
    news = News.of(1)
    net.tell(method.told, to=[0], send=news, when="next")
    news.values.state["x"].add_(1)
    assert heard(engine)[0] == [1]


def test_each_message_that_waits_is_written_once(engine, tmp_path):
    net, method, folder = engine.network, engine.method, tmp_path / "checkpoint" / "waiting"
    one = News.of(1)
    net.tell(method.told, to={0: one, 1: News.of(2), 2: one}, when="next")
    files = sorted(folder.iterdir())
    assert len(files) == 2
    before = [file.stat().st_mtime_ns for file in files]
    engine.outbox.waiting.packed()
    assert [file.stat().st_mtime_ns for file in sorted(folder.iterdir())] == before
    assert {i: said for i, said in heard(engine).items() if said} == {0: [1], 1: [2], 2: [1]}


def test_messages_may_be_made_as_they_are_left(engine):
    net, method, made = engine.network, engine.method, []

    def make(client):
        made.append(client)
        return News.of(client)

    net.tell(method.told, to=LazyMapping([3, 1], make), when="next")
    assert made == [3, 1]
    assert {i: said for i, said in heard(engine).items() if said} == {1: [1], 3: [3]}
    assert made == [3, 1]


def test_a_message_that_is_gone_is_told(engine, tmp_path):
    net, method = engine.network, engine.method
    net.tell(method.told, to=[0], send=News.of(1), when="next")
    for file in (tmp_path / "checkpoint" / "waiting").iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        (file.parent / "notes.state").write_bytes(b"somebody's")
        (file.parent / "folder").mkdir()
    with pytest.raises(fb.UserError, match=r"damaged: .*earlier round"):
        heard(engine)


def test_a_message_is_sent_now_or_next(engine):
    with pytest.raises(fb.MethodError, match="now or next, not 'later'"):
        engine.network.tell(engine.method.told, to=[0], send=News.of(1), when="later")


@dataclass(frozen=True)
class Strict(fb.Method):
    """A method with checks of its own."""

    rho: Positive = 0.1

    def __post_init__(self) -> None:
        if self.rho > 5:
            raise fb.UserError("rho is too large")

    def round(self, state: None, net: fb.Network, t: int) -> None:
        """Nothing."""


@pytest.mark.parametrize(("rho", "words"), [(-7.0, "above 0"), (float("nan"), "finite"), (6.0, "too large")])
def test_checks_of_ones_own_do_not_switch_off_ranges(rho, words):
    with pytest.raises(fb.UserError, match=words):
        Strict(rho=rho)


def test_a_part_of_the_network_samples_the_same_cohort_and_reaches_only_its_clients(engine):
    net = engine.network
    cohort, parts = net.sample(0.5), [net.among([0, 1, 2], "low"), net.among([3, 4, 5], "high")]
    assert len(cohort) == 3
    assert sorted(i for part in parts for i in part.sample(0.5)) == cohort == net.sample(0.5)
    assert [part.clients for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert parts[0].among([1, 5], "one").clients == [1]
    parts[1].tell(engine.method.told, send=News.of(1), when="next")
    assert heard(engine) == {0: [], 1: [], 2: [], 3: [1], 4: [1], 5: [1]}
    net.among([2, 3, 4, 5], "high")  # client 2 is in it now
    assert heard(engine) == {0: [], 1: [], 2: [1], 3: [1], 4: [1], 5: [1]}
    engine.begin(2)
    assert {tuple(net.sample(0.5)) for _ in range(3)} == {tuple(net.sample(0.5))}


def test_terms_of_local_training_are_given_by_their_plain_names():
    method = fb.FedPURIN(lr=0.3, tau=0.2)
    assert method.local == fb.Local(epochs=5, lr=0.3, batch=100, momentum=0.9)
    assert fb.FedPURIN(local=fb.Local(epochs=2), lr=0.3).local == fb.Local(epochs=2, lr=0.3)
    assert fb.FedPURIN(**method.parameters) == method
    for wrong in ({"lr": -1.0}, {"epochs": 0}, {"steps": -1}, {"optimiser": "lbfgs"}, {"momentum": float("nan")}):
        with pytest.raises(fb.UserError, match=next(iter(wrong))):
            fb.FedAvg(**wrong)
    with pytest.raises(TypeError, match="no parameter 'learning_rate'"):
        fb.FedAvg(learning_rate=0.1)
    assert fb.FedAvg(0.5, fb.Local(epochs=2), lr=0.3) == fb.FedAvg(fraction=0.5, epochs=2, lr=0.3)
    for values, named in (((0.5,), {"fraction": 0.5}), (tuple(range(9)), {})):
        with pytest.raises(TypeError, match=r"FedAvg takes fraction, local, .* each once"):
            fb.FedAvg(*values, **named)
    with pytest.raises(TypeError, match="Clustered needs inner"):
        fb.Clustered(clusters=2)


@dataclass(frozen=True)
class OwnWords(fb.Method):
    """A method whose hyper-parameters have names of the package's, with other meanings."""

    local: bool = True
    lr: str = "high"

    def round(self, state: None, net: fb.Network, t: int) -> None:
        """Nothing."""


def test_a_method_may_give_those_names_other_meanings():
    assert OwnWords(lr="low", local=False).parameters == {"local": False, "lr": "low"}
    assert OwnWords.defaults() == {"local": True, "lr": "high"}


@pytest.mark.parametrize(
    "terms",
    [{"optimiser": "adamw"}, {"clip": 0.01}, {"lr_rounds": 3}, {"lr_warmup": 2}, {"weight_decay": 0.3}, {"steps": 1}],
)
def test_every_method_takes_all_terms(terms):
    plain, other = (
        fb.run(fb.FedBN(**LOCAL, **given), tiny_task(), rounds=2, workers=1).rounds[-1]["loss"]["train"]
        for given in ({}, terms)
    )
    assert plain != other
