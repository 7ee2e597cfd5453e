"""What is rounded: any number of workers, Flower and a resumed run give the same, and the ledger is honest."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import logging
from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from cases import CASES, PRESENCE, scheduled_task, task_of, tiny_data, tiny_task
from rich.console import Console
from runs import Run, StopAfter, fingerprint
from safetensors.torch import load_file
from test_ledger import is_the_bytes_of_the_frames
from torch import nn

import fewbytes as fb
from fewbytes.base.ranges import EXACT
from fewbytes.base.state import State
from fewbytes.engines.handlers import DOWN_BITS, DOWN_ERROR, UP_BITS, UP_ERROR, Kept
from fewbytes.experiments.catalogue import payloads
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.rounding import unrounded
from fewbytes.wire import Parsed, unpack
from fewbytes.wire.inspect import inspect_frame

SHORT = 3
"""Rounds of a run: in the second what the first has lost is added, and in the third messages that wait differ from
those that clients have had."""
UP, DOWN = ([name for name, method in CASES.items() if not unrounded(method, way)] for way in ("uplink", "downlink"))
"""Cases whose clients send dense or masked values, and whose server does."""
ROUNDABLE = [name for name in CASES if name in UP or name in DOWN]


def rounded_run(name, folder, **settings) -> fb.Result:
    how = {"rounds": SHORT, "workers": 1, "uplink_bits": 1, "keep_frames": True} | settings
    return fb.run(CASES[name], task_of(name), out=folder, **how)


def both_ways(name: str) -> dict[str, float]:
    """The settings that round all that can be of a case."""
    return {key: 1.0 if name in cases else None for key, cases in (("uplink_bits", UP), ("downlink_bits", DOWN))}


@pytest.fixture(scope="session")
def rounded(tmp_path_factory):
    """Each case's short Run in which all that travels is rounded, made once."""

    @functools.cache
    def get(name: str) -> Run:
        folder = tmp_path_factory.mktemp("rounded") / name
        result = rounded_run(name, folder, **both_ways(name))
        return Run(result, folder, fingerprint(folder))

    return get


def measured(result: fb.Result, what: str = UP_BITS) -> list[float]:
    return [row["measured"][what] for row in result.rounds if what in row.get("measured", {})]


def lost_of(folder, client: int) -> State | None:
    """What rounding the first field of a client's replies has lost by now; None: nothing is kept."""
    version = read_checkpoint(folder).named().get(client)
    data = (folder / "checkpoint" / "clients" / f"{client}-{version}.state").read_bytes() if version else b""
    return next(iter(unpack(Kept, data).lost.values()), None) if data and Parsed(data).kind == "Kept" else None


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ----------------------------------------------------------------------------------------------- for every case


@pytest.mark.parametrize("name", ROUNDABLE)
def test_any_number_of_workers_gives_the_same(name, rounded, tmp_path):
    rounded_run(name, tmp_path / "run", workers=2, **both_ways(name))
    assert fingerprint(tmp_path / "run") == rounded(name).left
    for frame in (rounded(name).folder / "frames").glob("*"):
        assert (tmp_path / "run" / "frames" / frame.name).read_bytes() == frame.read_bytes()


@pytest.mark.parametrize("name", ROUNDABLE)
def test_the_ledger_is_the_bytes_of_the_frames(name, rounded):
    run = rounded(name)
    is_the_bytes_of_the_frames(run.result, run.folder)


@pytest.mark.parametrize("name", ROUNDABLE)
def test_all_is_finite_and_it_says_what_was_lost(name, rounded):
    run = rounded(name)
    assert run.result.summary["status"] == "done"
    for path in (run.folder / "models").glob("*.safetensors"):
        assert all(bool(value.isfinite().all()) for value in load_file(path).values() if value.is_floating_point())
    for cases, bits, error in ((UP, UP_BITS, UP_ERROR), (DOWN, DOWN_BITS, DOWN_ERROR)):
        assert bool(measured(run.result, bits)) == (name in cases)
        assert all(value > 0 for value in measured(run.result, bits))
        assert all(0 <= value <= 1 for value in measured(run.result, error))


@pytest.mark.parametrize(("key", "cases"), [("uplink_bits", UP), ("downlink_bits", DOWN)])
def test_where_there_is_nothing_to_round_it_is_refused_and_nothing_is_written(key, cases, tmp_path):
    unable = [name for name in CASES if name not in cases]
    assert unable
    for name in unable:
        with pytest.raises(fb.UserError, match=f"^{CASES[name].method_name}: .* round.*{key}$"):
            rounded_run(name, tmp_path / "run", **({"uplink_bits": None} | {key: 1}))
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------- resumed, and on Flower

SEVERAL = ["fedavg", "fedpurin", "scaffold", "genefl", "fedbuff", "fedkd", "clustered", "lg_fedavg", "ditto-sampled"]
"""Cases with states of clients and without, masked values, several fields, a stream, tensors that change shape, parts
of the network, models of several shapes, and clients that miss rounds."""


@pytest.mark.parametrize("name", SEVERAL)
def test_resumed_is_uninterrupted(name, rounded, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        rounded_run(name, tmp_path / "run", workers=2, watcher=StopAfter(2), **both_ways(name))
    rounded_run(name, tmp_path / "run", resume=True, **both_ways(name))
    assert fingerprint(tmp_path / "run") == rounded(name).left


@pytest.mark.parametrize("name", SEVERAL)
def test_flower_gives_the_same(name, rounded, tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import run

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    run(name, tmp_path / "run", rounds=SHORT, **both_ways(name))
    assert fingerprint(tmp_path / "run") == rounded(name).left


@pytest.mark.parametrize("name", ["fedavg", "fedpurin"])
def test_another_rate_may_be_gone_on_with(name, tmp_path):
    """Coarser, finer, in steps, none; what was lost before waits for a rate to come."""
    folder, lost = tmp_path / "run", []
    rates = [{"uplink_bits": 1}, {}, {"uplink_bits": 4}, {"uplink_step": 0.5}, {"uplink_bits": 0.1}]
    for t, rate in enumerate(rates, 1):
        how = {"rounds": len(rates), "resume": t > 1, "uplink_bits": None, **rate}
        with pytest.raises(KeyboardInterrupt):
            rounded_run(name, folder, watcher=StopAfter(t), **how)
        lost.append(lost_of(folder, 0))
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    bits = [row.get("measured", {}).get(UP_BITS) for row in rows if row["phase"] == "round"]
    assert bits[1] is None
    assert bits[4] < bits[0] < bits[2]
    assert equal(lost[0], lost[1])  # it waits while nothing is rounded
    assert not equal(lost[1], lost[2])


def test_a_run_that_did_not_round_may_round_from_now_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        rounded_run("fedpurin", tmp_path / "run", uplink_bits=None, watcher=StopAfter(1))
    assert lost_of(tmp_path / "run", 0) is None
    result = rounded_run("fedpurin", tmp_path / "run", resume=True)
    assert lost_of(tmp_path / "run", 0) is not None
    assert len(measured(result)) == SHORT - 1


# -------------------------------------------------------------------------------------------- who misses rounds


def test_what_a_client_lacks_waits_until_it_is_asked_again(tmp_path):
    """Half of the clients take part in each round."""
    method, folder, lost, asked = dataclasses.replace(CASES["fedavg"], fraction=0.5), tmp_path / "run", [], []

    class Look(fb.Watcher):
        def scored(self, row):
            lost.append({client: lost_of(folder, client) for client in range(4)})
            asked.append(
                {client for client in range(4) if (folder / f"frames/{row['round']}-train-{client}-up.frame").exists()}
            )

    fb.run(method, tiny_task(), rounds=6, out=folder, workers=1, uplink_bits=1, keep_frames=True, watcher=Look())
    waited = 0
    for before, after, here in zip(lost, lost[1:], asked[1:], strict=False):
        for client in range(4):
            if before[client] is not None:
                assert equal(before[client], after[client]) == (client not in here)
                waited += client not in here
    assert waited


@pytest.mark.parametrize("name", ["fedavg", "fedpurin"])
def test_clients_that_come_and_go(name, tmp_path):
    folders = tmp_path / "one", tmp_path / "other"
    for workers, folder in enumerate(folders, 1):
        fb.run(CASES[name], scheduled_task(), rounds=4, out=folder, workers=workers, uplink_bits=1, save_models=False)
    assert fingerprint(folders[0]) == fingerprint(folders[1])
    assert lost_of(folders[0], len(PRESENCE) - 1) is not None


def test_a_client_that_is_excluded_keeps_what_it_lacks(tmp_path):
    folder = tmp_path / "run"
    lost = []
    for t, excluded in enumerate(("", "1", ""), 1):
        policy = fb.Policy(exclude=excluded) if excluded else fb.Policy()
        with pytest.raises(KeyboardInterrupt):
            rounded_run("fedavg", folder, rounds=4, resume=t > 1, policy=policy, watcher=StopAfter(t))
        lost.append(lost_of(folder, 1))
    assert equal(lost[0], lost[1])
    assert not equal(lost[1], lost[2])


# ------------------------------------------------------------------------------------------------- what is rounded


def wide_task(clients: int = 3) -> fb.Task:
    """A model of some ten thousand values, so that headers do not count."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 40), nn.ReLU(),
            nn.Linear(40, 3),
        )  # fmt: skip

    return fb.Task.on(tiny_data(clients), net)


@pytest.mark.parametrize("bits", [2, 6])
def test_the_bytes_are_near_those_asked_for(bits):
    task = wide_task()
    values = sum(value.numel() for value in task.problem.first_state().values() if value.is_floating_point())
    result = fb.run(CASES["fedavg"], task, rounds=3, workers=1, uplink_bits=bits, save_models=False)
    assert measured(result) == pytest.approx([8 * result.summary["uplink_bytes"] / 9 / values] * 3, rel=0.1)
    assert result.summary["uplink_bytes"] / 9 == pytest.approx(values * bits / 8, rel=0.2, abs=1000)
    assert result.summary["score"]["final"] >= 0.75


def test_as_many_bits_lose_hardly_anything_and_few_still_learn():
    how = {"rounds": 4, "workers": 1, "save_models": False}
    exact = fb.run(CASES["fedavg"], wide_task(), **how)
    fine, coarse = (fb.run(CASES["fedavg"], wide_task(), uplink_bits=bits, **how) for bits in (16, 0.1))
    assert fine.rounds[-1]["loss"]["train"] == pytest.approx(exact.rounds[-1]["loss"]["train"], rel=0.02)
    assert coarse.summary["score"]["final"] >= 0.75
    assert 20 * coarse.summary["uplink_bytes"] < exact.summary["uplink_bytes"]


def test_statistics_are_rounded_finely_and_numbers_of_batches_not(tmp_path):
    """With the rest rounded to nothing, statistics reach the server nearly as they would have."""
    ends, first = [], task_of("fedavg").problem.first_state()
    for bits in (None, 0.3):
        rounded_run("fedavg", tmp_path / str(bits), rounds=1, uplink_bits=bits)
        ends.append(load_file(tmp_path / str(bits) / "models" / "global.safetensors"))
    for name, value in ends[0].items():
        kind = name.rpartition(".")[2]
        change, error = (value - first[name]).double().norm(), (value - ends[1][name]).double().norm()
        assert error <= {"running_mean": 0.2, "running_var": 0.2, "num_batches_tracked": 0}.get(kind, 10) * change
        assert (error > 0.2 * change) == (kind not in ("running_mean", "running_var", "num_batches_tracked")), name
    assert lost_of(tmp_path / "0.3", 0).keys() == {
        "conv.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "fc.weight", "fc.bias",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fedktl", "fedkd", "fusefl"])
def test_of_what_is_not_the_models_nothing_is_kept(name, rounded):
    """Of prototypes the server takes the last; a block's tensors are not those of the block before."""
    run = rounded(name)
    assert measured(run.result)
    assert lost_of(run.folder, 0) is None


def test_models_of_their_own_on_every_client(rounded):
    """Each loses of its own shapes."""
    run = rounded("lg_fedavg")
    assert measured(run.result)
    assert run.result.summary["clients"] == 4


@fb.payload
class Both:
    """Client to server: numbers to be rounded, and numbers that must not be."""

    fine: Annotated[fb.Dense, EXACT]
    rough: dict[int, fb.Dense]
    parts: list[fb.Masked]


@dataclass
class Came:
    """What the server got of each client."""

    tensors: State


@dataclass(frozen=True)
class Marked(fb.Method):
    """Every client replies the same numbers in every field; the server remembers how they came."""

    def server(self, problem: fb.Problem) -> Came:
        return Came({})

    def round(self, state: Came, net: fb.Network, t: int) -> None:
        for _, reply in net.call(self.reply, to=net.clients):
            state.tensors |= {"fine": reply.fine.state["x"], "rough": reply.rough[7].state["x"]}
            state.tensors["part"] = reply.parts[0].states()["x"]

    def reply(self, state: None, message: None, site: fb.Site) -> Both:
        numbers = {"x": torch.linspace(-1, 2, 50) ** 3}
        masked = fb.Masked.of(numbers, {"x": torch.arange(50) % 2 == 0})
        return Both(fb.Dense(numbers), {7: fb.Dense(numbers)}, [masked])


def test_a_method_marks_what_is_never_rounded(tmp_path):
    result = fb.run(Marked(), tiny_task(2), rounds=1, workers=1, out=tmp_path / "run", uplink_bits=1)
    came, sent = unpack(Came, read_checkpoint(tmp_path / "run").server).tensors, torch.linspace(-1, 2, 50) ** 3
    assert torch.equal(came["fine"], sent)
    assert not torch.equal(came["rough"], sent)
    assert not torch.equal(came["part"][::2], sent[::2])
    assert measured(result)


def test_replies_that_diverge_end_a_run_as_without():
    for bits in (None, 1):
        with pytest.raises(fb.FewbytesError, match="of 4 clients can still answer"):
            fb.run(fb.FedAvg(epochs=1, lr=1e18, batch=8), tiny_task(), rounds=3, workers=1, uplink_bits=bits)


# ------------------------------------------------------------------------------------------------- with other parts


@pytest.mark.parametrize("of", ["clients", "samples"])
def test_with_differential_privacy(of):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")
    inputs = torch.Generator().manual_seed(0)
    parts = [
        ((torch.randn(20, 6, generator=inputs), torch.arange(20) % 3), (torch.randn(6, 6), torch.arange(6) % 3))
        for _ in range(4)
    ]
    task = fb.Task.of(lambda: nn.Linear(6, 3), parts)
    dp = f"of={of},epsilon=8,delta=1e-5,clip=1.0,noise=seeded"
    result = fb.run(CASES["fedavg"], task, rounds=SHORT, workers=1, dp=dp, uplink_bits=1, save_models=False)
    assert measured(result)
    assert result.summary["epsilon_spent"] <= 8


@pytest.mark.parametrize("how", [{"uplink_bits": 1, "uplink_step": 1}, {"uplink_bits": 1, "coded": False}], ids=str)
def test_what_cannot_be_is_refused_and_nothing_is_written(how, tmp_path):
    with pytest.raises(fb.UserError, match="uplink_bits"):
        rounded_run("fedavg", tmp_path / "run", **how)
    for bits in (0.05, 17, -1, float("nan")):
        with pytest.raises(fb.UserError, match="uplink_bits"):
            rounded_run("fedavg", tmp_path / "run", uplink_bits=bits)
    assert not list(tmp_path.iterdir())


def page(path) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(inspect_frame(path, payloads(path)))
    return console.file.getvalue()


def test_a_kept_frame_tells_how_it_was_rounded(rounded):
    frames = rounded("fedavg").folder / "frames"
    assert "rounded: 5 tensors in steps of 0." in page(frames / "2-train-0-up.frame")
    assert "5 as differences to the base; the others: " in page(frames / "2-train-0-up.frame")
    assert "rounded: 5 tensors" in page(frames / "2-train-0-down.frame")
    assert "rounded" not in page(frames / "1-train-0-down.frame")
    masked = page(rounded("fedpurin").folder / "frames" / "1-train-0-up.frame")
    assert "rounded: 3 tensors in steps of 0." in masked
    assert "mask of " in masked
