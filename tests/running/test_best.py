"""The best model is kept, chosen on data that are not the reported test data, the same however the run goes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.data import Partition, federate, hold_out, load_dataset
from fewbytes.report import read_runs, write_report
from fewbytes.report.table import best_models

ROUNDS = 7


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def task(share: float = 0.2, seed: int = 1) -> fb.Task:
    data = federate(load_dataset("digits"), Partition(clients=3), seed=seed)
    return fb.Task.on(hold_out(data, share, seed) if share else data, linear, seed=seed)


def run(out: Path, method: fb.Method, **settings: Any) -> fb.Result:
    return fb.run(method, task(), out=out, **{"rounds": ROUNDS, "workers": 1, **settings})


def weights(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(p.relative_to(folder)): load_file(p) for p in sorted((folder / "models").rglob("*.safetensors"))}


def same(some: dict[str, dict[str, torch.Tensor]], others: dict[str, dict[str, torch.Tensor]]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(value, others[file][name]) for file, of in some.items() for name, value in of.items()
    )


UNSTEADY = fb.FedAvg(lr=2.0)  # its best round is not its last
METHODS = {"global": UNSTEADY, "own": fb.Ditto(lr=0.5)}


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tmp_path_factory) -> tuple[fb.Method, Path]:
    out = tmp_path_factory.mktemp("best") / request.param
    run(out, METHODS[request.param])
    return METHODS[request.param], out


def test_held_out_samples_are_of_every_class_and_in_no_other_set():
    data = federate(load_dataset("digits"), Partition("iid", clients=3))
    held = hold_out(data, 0.1, seed=1)
    for before, after in zip(data.clients, held.clients, strict=True):
        assert sorted([*after.train.rows, *after.validation.rows]) == sorted(before.train.rows)
        counts = torch.bincount(before.train.labels, minlength=10) / 10
        assert (torch.bincount(after.validation.labels, minlength=10) - counts).abs().max() <= 1
        assert after.test is before.test
    assert len(held.validation) == sum(len(each.validation) for each in held.clients)
    assert held.test is data.test
    again = hold_out(data, 0.1, seed=1)
    assert [list(each.validation.rows) for each in again.clients] == [list(c.validation.rows) for c in held.clients]


def test_a_server_without_clients_data_holds_out_a_part_of_its_own():
    data = federate(load_dataset("digits"), Partition("iid", clients=3))
    held = hold_out(data, 0.1, seed=1, apart=True)
    assert sorted([*held.test.rows, *held.validation.rows]) == sorted(data.test.rows if data.test.rows is not None
                                                                       else range(len(data.test)))  # fmt: skip
    assert len(held.validation) == pytest.approx(0.1 * len(data.test), abs=1)


def test_the_best_model_is_that_of_a_run_that_ends_there(whole, tmp_path):
    method, out = whole
    result = json.loads((out / "result.json").read_text())
    best = result["best_model"]
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    curve = {line["round"]: line["validation"]["accuracy"][best["kind"]] for line in lines if line["phase"] == "round"}
    assert best["value"] == max(curve.values()) == curve[best["round"]]
    assert best["chosen_on"] == "validation"
    assert 1 < best["round"] < ROUNDS  # else this shows nothing
    run(tmp_path / "short", method, rounds=best["round"])
    short, kept = weights(tmp_path / "short"), weights(out)
    for name, of in short.items():
        there = kept[name.replace("models/client", "models/best/client").replace("global", "best")]
        assert all(torch.equal(of[entry], there[entry]) for entry in of)
    x = torch.rand(2, 1, 8, 8)
    client = None if "models/global.safetensors" in kept else 0
    assert torch.equal(
        fb.load_model(out, client, build=linear)(x), fb.load_model(out, client, build=linear, round=best["round"])(x)
    )
    assert not torch.equal(
        fb.load_model(out, client, build=linear)(x), fb.load_model(out, client, build=linear, round=ROUNDS)(x)
    )


def test_it_is_the_same_with_any_number_of_workers(whole, tmp_path):
    method, out = whole
    run(tmp_path / "two", method, workers=2)
    assert same(weights(tmp_path / "two"), weights(out))


@pytest.mark.parametrize("at", [2, ROUNDS - 1])
def test_it_is_the_same_if_the_run_is_stopped_and_resumed(whole, tmp_path, at):
    method, out = whole

    class Stop(fb.Watcher):
        def scored(self, row: dict[str, Any]) -> None:
            if row["round"] == at and row["phase"] == "round":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", method, watcher=Stop())
    run(tmp_path / "run", method, resume=True)
    assert same(weights(tmp_path / "run"), weights(out))


def test_a_run_that_goes_back_still_has_the_best_of_the_rounds_before(whole, tmp_path):
    method, out = whole
    again = Path(shutil.copytree(out, tmp_path / "again"))
    run(again, method, resume=True, from_round=ROUNDS - 1)
    assert same(weights(again), weights(out))
    states = sorted(path.name for path in (out / "checkpoint").glob("round-*"))
    best = json.loads((out / "result.json").read_text())["best_model"]["round"]
    assert states == sorted({f"round-{t}.state" for t in (best, ROUNDS - 1, ROUNDS)})


def test_models_of_kept_rounds_are_exported(tmp_path):
    run(tmp_path / "run", UNSTEADY, keep_checkpoints=3)
    for t in (ROUNDS - 2, ROUNDS - 1):
        run(tmp_path / str(t), UNSTEADY, rounds=t)
        file, *_ = [
            each for each in fb.export_model(tmp_path / "run", formats=["safetensors"], build=linear, round=t)
            if each.suffix == ".safetensors"
        ]  # fmt: skip
        then = load_file(tmp_path / str(t) / "models" / "global.safetensors")
        assert all(torch.equal(value, then[name]) for name, value in load_file(file).items())
        described = json.loads((file.parent / "model.json").read_text())
        row = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[t - 1])
        assert described["round"] == t
        assert described["scores"] == row["scores"]
    with pytest.raises(UserError, match=r"keeps no model of round 1; it has those of rounds .*5, 6, 7 \(keep_checkp"):
        fb.export_model(tmp_path / "run", build=linear, round=1)


def test_patience_waits_for_validation_and_the_result_and_report_say_which_is_best(tmp_path):
    result = run(tmp_path / "run", UNSTEADY, rounds=20, stop_when="patience=2")
    best = result.summary["best_model"]
    assert result.summary["ended_by"] == "stop_when"
    assert result.summary["rounds"] == best["round"] + 2
    (line,) = best_models(read_runs([tmp_path / "run"]))
    assert line.startswith(f"best model: round {best['round']}, by global accuracy {best['value']:.1%} on validation")
    page = write_report(read_runs([tmp_path / "run"]), tmp_path / "report.html")
    assert f"Best model: round {best['round']}" in page.read_text()


def test_without_validation_patience_keeps_the_best_and_says_it_is_too_good(tmp_path):
    result = fb.run(UNSTEADY, task(0), rounds=20, stop_when="patience=2", out=tmp_path / "run", workers=1)
    best = result.summary["best_model"]
    assert (best["chosen_on"], best["value"]) == ("test", result.summary["score"]["best"])
    assert (tmp_path / "run" / "models" / "best.safetensors").exists()
    assert "too optimistic" in best_models(read_runs([tmp_path / "run"]))[0]
    plain = fb.run(UNSTEADY, task(0), rounds=2, out=tmp_path / "plain", workers=1)
    assert "best_model" not in plain.summary
    assert not (tmp_path / "plain" / "models" / "best.safetensors").exists()


def test_a_run_holds_out_data_of_any_form():
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    forms: list[tuple[Any, Any, Callable[[], nn.Module]]] = [
        (x, y, lambda: nn.Linear(4, 3)),
        (x, x[:, 0], lambda: nn.Linear(4, 1)),
        (x, torch.stack([y == 0, y == 1], 1), lambda: nn.Linear(4, 2)),
        ({"input": x}, y, lambda: nn.Linear(4, 3)),
    ]
    for inputs, targets, model in forms:
        part = {k: v[:30] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[:30]
        clients = [((inputs, targets), (part, targets[:30])), ((part, targets[:30]), (part, targets[:30]))]
        given = fb.Task.of(model, clients, (part, targets[:30]), validation=0.1)
        assert [len(each.train) for each in given.data.clients] == [54, 27]
        result = fb.run(fb.FedAvg(), given, rounds=2, workers=1)
        assert result.summary["best_model"]["round"] in (1, 2)
        assert len(given.data.validation) == 9
    with pytest.raises(UserError, match="between 0 and 1, not 1"):
        fb.Task.of(forms[0][2], [((x, y), (x, y))], validation=1)


@pytest.fixture(scope="module")
def apart() -> fb.Task:
    """A server without test data."""
    data = federate(load_dataset("digits"), Partition(clients=3), seed=1)
    without = dataclasses.replace(data, test=data.test.take([]))
    return fb.Task.on(hold_out(without, 0.2, 1, apart=True), linear, seed=1)


def test_clients_validate_the_models_that_they_receive(apart, tmp_path):
    result = fb.run(UNSTEADY, apart, rounds=ROUNDS, workers=1, out=tmp_path / "run", keep_checkpoints=ROUNDS)
    found = {}
    for t in range(1, ROUNDS):  # nobody receives the last
        model, right, samples = fb.load_model(tmp_path / "run", build=linear, round=t), 0, 0
        for client in apart.data.clients:
            x, y = client.validation.load()
            right, samples = right + int((model(x).argmax(1) == y).sum()), samples + len(y)
        found[t] = right / samples
    best = max(found, key=lambda t: found[t])
    shown = {row["round"] - 1: row["validation"]["accuracy"]["received"] for row in result.rounds}
    assert {t: value for t, value in shown.items() if t} == pytest.approx(found)
    kept = result.summary["best_model"]
    assert (kept["round"], kept["kind"], kept["value"]) == (best, "received", pytest.approx(found[best]))
    model, again = (fb.load_model(tmp_path / "run", build=linear, round=t).state_dict() for t in (None, best))
    assert all(torch.equal(model[name], again[name]) for name in again)
    stopped = fb.run(UNSTEADY, apart, rounds=ROUNDS, workers=1, stop_when="patience=1")
    first = next(t for t in range(1, ROUNDS) if shown[t] <= max(shown[i] for i in range(t)))
    assert stopped.summary["rounds"] == first + 1  # when it is known
    assert stopped.summary["best_model"]["round"] == first - 1


@dataclass(frozen=True)
class Idle(fb.Method):
    """Clients score a model and do not train it."""

    def round(self, state, net, t):
        list(net.call(self.look, to=net.clients))

    def look(self, state: None, message: None, site: fb.Site) -> None:
        site.score("personalised", site.model())


def test_it_is_said_if_nothing_can_be_validated(apart):
    with pytest.warns(RuntimeWarning, match="no model is validated: the server has no test data") as noted:
        result = fb.run(Idle(), apart, rounds=2, workers=1)
    assert len(noted) == 1
    assert "best_model" not in result.summary
