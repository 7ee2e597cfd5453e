"""The filters between a server and clients that lose messages, fail, restart, and send what is not a message."""

from __future__ import annotations

import copy
import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare.apis", reason="nvflare is not installed: pip install 'fewbytes[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_copy, make_reply
from nvflare.apis.utils.fl_context_utils import gen_new_peer_ctx
from nvflare.app_common.np.np_trainer import NPTrainer
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils import fobs
from nvflare.job_config.api import FedJob

from fewbytes.base.errors import FrameError, UserError
from fewbytes.codec import encode
from fewbytes.nvflare.filters import ModelDecoder, ModelEncoder, add_filters
from fewbytes.nvflare.messages import KEY, encoded, parts_of

TRAIN = "train"


class Place:
    """A server or client of a job, with its filters, as NVFlare's runners call them."""

    def __init__(self, name: str, data_filter, result_filter, job: str = "job") -> None:
        self.manager = FLContextManager(identity_name=name, job_id=job)
        self.name, self.data_filter, self.result_filter = name, data_filter, result_filter
        for each, chain in (
            (data_filter, FilterChainType.TASK_DATA_CHAIN), (result_filter, FilterChainType.TASK_RESULT_CHAIN),
        ):  # fmt: skip
            if each is not None:
                each.set_prop(FilterContextKey.CHAIN_TYPE, chain)
                each.handle_event(EventType.START_RUN, self.manager.new_context())

    def context(self, peer: Place, task: tuple[str, str]):
        found = self.manager.new_context()
        found.set_peer_context(gen_new_peer_ctx(peer.manager.new_context()))
        found.set_prop(FLContextKey.TASK_NAME, task[0], private=True, sticky=False)
        found.set_prop(FLContextKey.TASK_ID, task[1], private=True, sticky=False)
        return found


def server(bits=None, **values) -> Place:
    return Place("server", ModelEncoder(bits, **values), ModelDecoder())


def client(name="site-1", bits=None) -> Place:
    return Place(name, ModelDecoder(), ModelEncoder(bits))


class Job:
    """Tasks between a server and clients, whose messages are serialised as NVFlare does."""

    def __init__(self, at: Place) -> None:
        self.server, self.count = at, 0

    def send(self, to: Place, message: Shareable, name=TRAIN) -> tuple[tuple[str, str], Shareable]:
        """What leaves the server for a client."""
        self.count += 1
        task = name, str(self.count)
        sent = make_copy(message)
        sent.set_header(ReservedHeaderKey.TASK_ID, task[1])
        if self.server.data_filter is not None:
            sent = self.server.data_filter.process(sent, self.server.context(to, task))
        return task, travelled(sent)

    def receive(self, at: Place, task: tuple[str, str], sent: Shareable):
        """What the client's executor gets."""
        if at.data_filter is not None:
            sent = at.data_filter.process(sent, at.context(self.server, task))
        return from_shareable(sent).data if "DXO" in sent else None

    def reply(self, at: Place, task: tuple[str, str], message: Shareable) -> Shareable:
        """What leaves the client."""
        if at.result_filter is not None:
            message = at.result_filter.process(message, at.context(self.server, task))
        return travelled(message)

    def accept(self, at: Place, task: tuple[str, str], sent: Shareable):
        """What the server's workflow gets."""
        if self.server.result_filter is not None:
            sent = self.server.result_filter.process(sent, self.server.context(at, task))
        return from_shareable(sent).data

    def round(self, at: Place, model: dict, train, kind=DataKind.WEIGHTS, name=TRAIN):
        """A whole task: what the client got, and what the server got back."""
        task, sent = self.send(at, weights(model), name)
        got = self.receive(at, task, sent)
        return got, self.accept(at, task, self.reply(at, task, weights(train(got), kind)))


def travelled(message: Shareable) -> Shareable:
    """As NVFlare serialises it; arrays need its running cells, so plain ones are copied."""
    whole = "DXO" in message and KEY not in from_shareable(message).data
    return copy.deepcopy(message) if whole else fobs.loads(fobs.dumps(message))


def weights(data: dict, kind=DataKind.WEIGHTS) -> Shareable:
    return DXO(kind, data, {"NUM_STEPS_CURRENT_ROUND": 3}).to_shareable()


def model(seed: int = 0, kind: str = "torch") -> dict:
    generator = torch.Generator().manual_seed(seed)
    made = {
        "w": torch.randn(40, 30, generator=generator), "norm.running_mean": torch.rand(5, generator=generator),
        "steps": torch.tensor(seed), "b": torch.randn(7, generator=generator).half(),
    }  # fmt: skip
    if kind == "numpy":
        return {name: value.numpy() for name, value in made.items()}
    if kind == "mixed":
        return made | {"w": made["w"].numpy(), "names": ["a", "b"], "empty": None, "type": "x"}
    return made


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(type(one[n]) is type(other[n]) and same(one[n], other[n]) for n in one)


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


def moved(state: dict, by: float = 0.01, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    noise = {"w": torch.randn(40, 30)}
    noise = {name: value.numpy() if isinstance(state["w"], np.ndarray) else value for name, value in noise.items()}
    return state | {"w": state["w"] + by * noise["w"]}


def size(message: Shareable) -> int:
    return len(from_shareable(message).data[KEY])


@pytest.mark.parametrize("kind", ["torch", "numpy", "mixed"])
@pytest.mark.parametrize("of", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_without_bits_both_ends_get_what_was_sent(kind, of):
    job, at, state = Job(server()), client(), model(kind=kind)
    for number in range(3):
        result = moved(state, seed=number)
        got, back = job.round(at, state, lambda _, result=result: result, of)
        assert equal(got, state)
        assert equal(back, result)
        state = back


def test_results_and_later_models_travel_as_differences():
    job, at, state = Job(server(1)), client(bits=0.5), model()
    sizes = []
    for number in range(3):
        task, sent = job.send(at, weights(state))
        got = job.receive(at, task, sent)
        result = job.reply(at, task, weights(moved(got, seed=number)))
        sizes.append((size(sent), size(result)))
        state = job.accept(at, task, result)
        assert same(state["norm.running_mean"], got["norm.running_mean"])
    assert sizes[0][0] > 5 * sizes[1][0]
    assert all(up < sizes[0][0] / 5 for _, up in sizes)


@pytest.mark.parametrize("bits", [None, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_lost_a_client_trains_on_the_servers_model(bits, seed):
    """Clients come late, lose messages and results, fail, and restart without their state; each model that is decoded
    is the same at all clients, near the server's, and no task fails."""
    chance, job = random.Random(seed), Job(server(bits))
    clients = [client(f"site-{i}", bits) for i in range(3)]
    state, first = model(), 0
    for number in range(12):
        got, results = [], []
        for i, at in enumerate(clients):
            event = chance.choice(["", "", "absent", "data lost", "result lost", "restart", "fails"])
            if event == "absent":
                continue
            if event == "restart":
                clients[i] = at = client(at.name, bits)
            task, sent = job.send(at, weights(state))
            if event == "data lost":
                task, sent = job.send(at, weights(state))  # NVFlare sends the task again when the client asks again
            got.append(job.receive(at, task, sent))
            if event == "fails":
                reply = job.reply(at, task, make_reply(ReturnCode.EXECUTION_EXCEPTION))
                assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
                continue
            result = moved(got[-1], seed=100 * number + i)
            reply = job.reply(at, task, weights(result))
            if event != "result lost":
                results.append(job.accept(at, task, reply))
                assert bits is not None or equal(results[-1], result)
        assert all(equal(each, got[0]) for each in got)
        first += len(got)
        if got:
            assert (got[0]["w"] - state["w"]).norm() < (1e-9 if bits is None else 0.5)
        if results:
            state = state | {"w": torch.stack([each["w"] for each in results]).mean(0)}
    assert first > 12


def test_a_result_that_was_lost_has_not_happened():
    """Its rounding error is what it was before, so the next result says the same as the first of a new client."""
    job, at, state = Job(server()), client(bits=1), model()
    task, sent = job.send(at, weights(state))
    job.receive(at, task, sent)
    lost = job.reply(at, task, weights(moved(state)))
    again, sent = job.send(at, weights(state))
    job.receive(at, again, sent)
    assert from_shareable(job.reply(at, again, weights(moved(state)))).data[KEY] == from_shareable(lost).data[KEY]


def test_what_rounding_loses_is_sent_later():
    job, at, state = Job(server()), client(bits=1), model()
    results = [job.round(at, state, moved)[1]["w"] - moved(state)["w"] for _ in range(20)]
    assert torch.stack(results).mean(0).norm() < 0.3 * results[0].norm()


def test_a_damaged_model_ends_the_task_and_the_next_comes_whole(caplog):
    job, at, state = Job(server(1)), client(), model()
    job.round(at, state, moved)
    task, sent = job.send(at, weights(moved(state)))
    small = size(sent)
    dxo = from_shareable(sent)
    dxo.data[KEY] = dxo.data[KEY][:-9] + bytes([dxo.data[KEY][-9] ^ 1]) + dxo.data[KEY][-8:]
    with pytest.raises(FrameError):
        job.receive(at, task, sent)
    assert "a message of task train cannot be decoded, so the task ends here" in caplog.text
    task, sent = job.send(at, weights(moved(state)))
    assert size(sent) > 5 * small
    assert (job.receive(at, task, sent)["w"] - moved(state)["w"]).abs().max() < 0.03


def test_a_result_of_another_task_is_refused():
    job, at = Job(server()), client()
    task, sent = job.send(at, weights(model()))
    job.receive(at, task, sent)
    result = job.reply(at, task, weights(moved(model())))
    later, _ = job.send(at, weights(moved(model(), seed=5)))
    with pytest.raises(FrameError, match="not sent last"):
        job.accept(at, task, result)
    with pytest.raises(FrameError):
        job.accept(at, later, result)  # it is coded against the model of the earlier task


def test_a_result_that_is_sent_twice_is_decoded_twice():
    job, at = Job(server()), client(bits=1)
    task, sent = job.send(at, weights(model()))
    job.receive(at, task, sent)
    result = job.reply(at, task, weights(moved(model())))
    assert equal(job.accept(at, task, copy.deepcopy(result)), job.accept(at, task, result))


def test_the_message_of_several_clients_stays_as_it_is():
    """The server's filter gets one dict for all clients, each in a thread of its own."""
    job, state = Job(server(1)), model(kind="mixed")
    clients, shared = [client(f"site-{i}") for i in range(6)], weights(state)
    before, got = copy.deepcopy(shared), {}

    def run(at: Place) -> None:
        task, sent = job.send(at, shared)
        got[at.name] = job.receive(at, task, sent)

    threads = [threading.Thread(target=run, args=[at]) for at in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(from_shareable(shared).data, from_shareable(before).data)
    assert from_shareable(shared).meta == from_shareable(before).meta
    assert shared.keys() == before.keys()
    assert len(got) == 6
    one = got["site-1"]
    assert all(equal(each, one) for each in got.values())
    assert equal(one | {"w": state["w"], "b": state["b"]}, state)
    assert np.abs(one["w"] - state["w"]).max() < 1e-5  # with bits, a first model moves to a grid


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_trainer_may_change_the_model_in_place(kind):
    job, at, state = Job(server(1)), client(bits=4), model(kind=kind)

    def train(got: dict) -> dict:
        for name in ("w", "b"):
            got[name] += 1
        return got

    for _ in range(3):
        got, back = job.round(at, state, train)
        assert np.abs(np.asarray(back["w"]) - np.asarray(got["w"])).max() < 0.5
        back["w"] *= 1  # and so may an aggregator
        state = back
    assert np.abs(np.asarray(state["w"]) - np.asarray(model(kind=kind)["w"]) - 3).max() < 0.5


def test_an_end_without_filters_gets_plain_messages():
    for ends in ((server(), Place("site-1", None, None)), (Place("server", None, None), client())):
        got, back = Job(ends[0]).round(ends[1], model(), moved)
        assert equal(got, model())
        assert equal(back, moved(model()))
    half = Place("server", ModelEncoder(), None)  # it cannot decode, so results are plain
    job, at = Job(half), client(bits=1)
    task, sent = job.send(at, weights(model()))
    job.receive(at, task, sent)
    assert equal(from_shareable(job.reply(at, task, weights(moved(model())))).data, moved(model()))


def test_other_messages_pass_through():
    job, at = Job(server(1)), client(bits=1)
    task, sent = job.send(at, Shareable())
    assert job.receive(at, task, sent) is None
    for message in (
        DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable(), weights({"model_data": b"bytes"}),
        make_reply(ReturnCode.EXECUTION_EXCEPTION),
    ):  # fmt: skip
        reply = job.reply(at, task, copy.deepcopy(message))
        assert {k: v for k, v in reply.items() if k == "DXO"} == {k: v for k, v in message.items() if k == "DXO"}
        assert reply.get_return_code() == message.get_return_code()


def test_models_of_cross_site_evaluation_are_not_rounded():
    job, at = Job(server(0.5)), client(bits=0.5)
    job.round(at, model(), moved)
    for seed in range(3):
        got, back = job.round(at, moved(model(), seed=seed), lambda got: got, name="validate")
        assert equal(got, moved(model(), seed=seed))
        assert equal(back, got)


def test_jobs_do_not_mix():
    """Two jobs of one process, whose filters share a class and no state."""
    jobs = [Job(server(1)), Job(server(1))]
    sites = [client(bits=1), client(bits=1)]
    for number in range(4):
        for job, at, seed in zip(jobs, sites, (1, 2), strict=True):
            got, back = job.round(at, moved(model(seed), 0.1 * number), moved)
            assert (got["w"] - model(seed)["w"]).abs().mean() < 0.5
            assert (back["w"] - got["w"]).abs().mean() < 0.1


class Workspace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_run_dir(self, job: str) -> str:
        return str(self._folder)


def test_a_client_that_is_swapped_out_resumes(tmp_path):
    """As NVFlare's simulator does with fewer threads than clients: each task has a new process."""

    def swapped(event: str, at: Place) -> Place:
        context = at.manager.new_context()
        context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(tmp_path), private=True, sticky=False)
        at.data_filter.handle_event(event, context)
        return at

    replies = {}
    for swaps in (False, True):
        job, at, sizes = Job(server(1)), client(bits=1), []
        for number in range(4):
            if swaps:
                at = swapped(EventType.SWAP_IN, client(bits=1))
            task, sent = job.send(at, weights(moved(model(), seed=number)))
            got = job.receive(at, task, sent)
            reply = job.reply(at, task, weights(moved(got, seed=10 + number)))
            if number != 2:  # this one is lost
                job.accept(at, task, reply)
            swapped(EventType.AFTER_SEND_TASK_RESULT, at)
            sizes.append((size(sent), from_shareable(reply).data[KEY]))
        assert sizes[1][0] < sizes[0][0] / 3
        replies[swaps] = sizes
    assert replies[True] == replies[False]
    (tmp_path / "fewbytes.state").write_bytes(b"damaged")
    at = swapped(EventType.SWAP_IN, client(bits=1))
    assert (job.round(at, got, moved)[0]["w"] - got["w"]).abs().max() < 0.05  # what rounding had lost


def test_a_server_that_restarts_sends_the_whole_model():
    at, sizes = client(), []
    for _ in range(2):
        job = Job(server(1))
        for number in range(2):
            task, sent = job.send(at, weights(moved(model(), number)))
            job.receive(at, task, sent)
            sizes.append(size(sent))
    assert sizes[2] > 5 * sizes[1]


def test_a_false_report_of_what_is_held_harms_its_sender_only():
    job, at, other = Job(server(1)), client(), client("site-2")
    for place in (at, other):
        job.round(place, model(), moved)
    context = at.manager.new_context()
    for report in ({TRAIN: ["no such", 1]}, {TRAIN: [5, None]}, {TRAIN: "x"}, {}, {7: 8}):
        context.set_prop(KEY, report, private=False, sticky=True)
        task, sent = job.send(at, weights(moved(model())))
        job.receive(at, task, sent)
        assert job.round(other, moved(model()), moved)[1]["w"].isfinite().all()


def test_tampered_results_are_refused():
    """Whatever a client sends, the server's filter raises nothing but FrameError."""
    chance, refused = random.Random(1), 0
    job, at = Job(server()), client(bits=1)
    task, sent = job.send(at, weights(model()))
    job.receive(at, task, sent)
    result = job.reply(at, task, weights(moved(model())))
    for _ in range(400):
        tampered = copy.deepcopy(result)
        data = from_shareable(tampered).data
        frame = bytearray(data[KEY])
        match chance.randrange(5):
            case 0:
                frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
            case 1:
                del frame[chance.randrange(len(frame)) :]
            case 2:
                data["numpy"] = chance.choice([None, 3, ["x"], [3], "w", {}])
            case 3:
                data["others"] = chance.choice([None, 3, [1], {"w": 1}])
            case 4:
                frame = bytearray(parts_of({"x": torch.zeros(3)}).nbytes)
        data[KEY] = bytes(frame)
        try:
            job.accept(at, task, tampered)
        except FrameError:
            refused += 1
    assert refused == 400
    parts = parts_of({"w": torch.zeros(3, dtype=torch.bfloat16)})
    false = weights(encoded(encode(parts.tensors), parts) | {"numpy": True})
    with pytest.raises(FrameError, match="bfloat16"):
        job.accept(at, task, false)


def test_bits_out_of_range_are_refused_where_they_are_written():
    with pytest.raises(UserError, match="bits"):
        ModelEncoder(0)


@pytest.mark.filterwarnings("ignore:NPTrainer:DeprecationWarning")
def test_the_job_api_writes_the_config(tmp_path):
    """`job.to` with a `filter_type`, through `add_filters`; none of this package's source goes into the job."""
    job = FedJob(name="job", min_clients=2)
    job.to_server(FedAvg(num_clients=2, num_rounds=1))
    job.to_clients(NPTrainer())
    add_filters(job, up=0.5, down=1, exact=["w"], feedback=False)
    job.export_job(str(tmp_path))
    ends = {}
    for end in ("server", "client"):
        (file,) = tmp_path.rglob(f"config_fed_{end}.json")
        ends[end] = json.loads(file.read_text())
    path = "fewbytes.nvflare.filters.Model"
    encoder, decoder = f"{path}Encoder", {"path": f"{path}Decoder", "args": {}}
    down = {"path": encoder, "args": {"bits": 1, "exact": ["w"], "feedback": False}}
    up = {"path": encoder, "args": {"bits": 0.5, "exact": ["w"]}}
    for end, (data, result) in {"server": (down, decoder), "client": (decoder, up)}.items():
        assert ends[end]["task_data_filters"] == [{"tasks": [TRAIN], "filters": [data]}]
        assert ends[end]["task_result_filters"] == [{"tasks": [TRAIN], "filters": [result]}]
    assert not [*tmp_path.rglob("*.py")]


def test_the_config_names_the_first_network(tmp_path):
    """By its class and arguments, at the server's encoder and the clients' decoder; its source goes into the job."""
    job = FedJob(name="job", min_clients=2)
    job.to_server(FedAvg(num_clients=2, num_rounds=1))
    add_filters(job, first=Seeded(7))
    job.export_job(str(tmp_path))
    for end, kind in {"server": "Encoder", "client": "Decoder"}.items():
        (file,) = tmp_path.rglob(f"config_fed_{end}.json")
        ((filter_,),) = (each["filters"] for each in json.loads(file.read_text())["task_data_filters"])
        assert filter_["path"] == f"fewbytes.nvflare.filters.Model{kind}"
        assert filter_["args"]["first"] == {"path": f"{__name__}.Seeded", "args": {"seed": 7}}
    assert {file.name for file in tmp_path.rglob("*.py")} == {Path(__file__).name}


class Seeded(torch.nn.Linear):
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        super().__init__(3, 2)


def network(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(60, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 10))


def state_of_network(seed: int) -> dict:
    return {name: value.detach().clone() for name, value in network(seed).state_dict().items()}


def client_from(seed: int | None, name: str = "site-1") -> Place:
    return Place(name, ModelDecoder(None if seed is None else network(seed)), ModelEncoder())


@pytest.mark.parametrize("bits", [None, 1.0])
def test_first_weights_that_both_ends_hold_are_not_sent(bits):
    """Not at first, nor to a client that comes later; others get the whole model, and no task is lost."""
    job, state = Job(server(bits, first=network(0))), state_of_network(0)
    at, late, stranger, plain = (client_from(seed, f"site-{i}") for i, seed in enumerate((0, 0, 1, None)))
    sizes = {}
    for number in range(3):
        for name, place in {"at": at, "stranger": stranger, "plain": plain}.items():
            task, sent = job.send(place, weights(state))
            sizes[name, number] = size(sent)
            got = job.receive(place, task, sent)
            assert equal(got, state) if bits is None else (got["0.weight"] - state["0.weight"]).norm() < 0.5
            job.accept(place, task, job.reply(place, task, weights(got)))
        state = state | {"0.weight": state["0.weight"] + 0.01 * torch.randn(40, 60)}
    whole = sum(value.nbytes for value in state.values())
    assert sizes["at", 0] < 400
    assert min(sizes["stranger", 0], sizes["plain", 0]) > whole / 2
    assert all(sizes["at", number] == sizes["stranger", number] for number in (1, 2))
    task, sent = job.send(late, weights(state))
    assert size(sent) < (0.95 if bits is None else 0.3) * sizes["plain", 0]
    assert equal(job.receive(late, task, sent), job.receive(at, *job.send(at, weights(state))))


def test_averaged_counters_of_batch_norm_leave_the_model_what_it_was():
    """NVFlare averages them to scalars with fractions; clients get whole numbers, and a difference."""
    job, at, sizes = Job(server(1)), client_from(None), []
    state = {name: value.numpy() for name, value in state_of_network(0).items()}
    for _ in range(2):
        task, sent = job.send(at, weights(state))
        sizes.append(size(sent))
        got = job.receive(at, task, sent)
        assert got["1.num_batches_tracked"].dtype == np.int64
        state = state | {"1.num_batches_tracked": np.mean([np.float64(13), np.float64(14)])}
    assert got["1.num_batches_tracked"] == 13
    assert sizes[1] < sizes[0] / 4


def test_first_weights_after_a_restart():
    """Of a client, or of a server: what both hold before the first message is there again."""
    state = state_of_network(0)
    job, at = Job(server(1, first=network(0))), client_from(0)
    for _ in range(2):
        task, sent = job.send(at, weights(state))
        assert size(sent) < 400
        job.receive(at, task, sent)
        at = client_from(0)
    job = Job(server(1, first=network(0)))
    task, sent = job.send(at, weights(state))
    assert size(sent) < 400
    assert equal(job.receive(at, task, sent), job.receive(at, *job.send(at, weights(state))))


def test_first_weights_at_one_end_alone():
    state = state_of_network(0)
    for job, at in ((Job(server(1)), client_from(0)), (Job(server(1, first=network(0))), client_from(None))):
        task, sent = job.send(at, weights(state))
        assert size(sent) > 4000
        assert (job.receive(at, task, sent)["0.weight"] - state["0.weight"]).abs().max() < 1e-5


def test_first_weights_are_a_network():
    for filter_of in (ModelEncoder, ModelDecoder):
        with pytest.raises(UserError, match="first must be the network that the job starts from, not a dict"):
            filter_of(first=state_of_network(0))
