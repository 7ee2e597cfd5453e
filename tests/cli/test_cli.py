"""The command line as its user meets it: results, resuming, and one clear line for every mistake."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_origin

import pyarrow.parquet as pq
import pytest
from commands import ended, fewbytes

import fewbytes as fb
from fewbytes.__main__ import main
from fewbytes.experiments import terms
from fewbytes.experiments.display import Display
from fewbytes.experiments.settings import make_method
from fewbytes.experiments.study import ASKED
from fewbytes.methods import METHODS
from fewbytes.report import read_runs
from fewbytes.report.table import badges

QUICK = ["--dataset", "digits", "--clients", "4", "--alpha", "1", "--rounds", "3", "--set", "batch=20"]


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def timeless(result: dict) -> dict:
    return {k: v for k, v in result.items() if k not in ("seconds", "peak_memory_bytes")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = fewbytes("run", "fedpurin", *QUICK, "--keep-frames", cwd=folder)
    assert done.returncode == 0, done.stderr
    return only_run(folder)


def test_commands_import_only_what_they_need(tmp_path: Path) -> None:
    slow = "{'torchvision', 'sklearn', 'scipy', 'flwr', 'ray', 'torch._dynamo'}"
    loaded = "fewbytes.cli.app, fewbytes.experiments.compare, fewbytes.reproduce"
    code = f"import sys, {loaded}; print(sorted({slow} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_told(tmp_path, monkeypatch, capsys):
    assert ended(capsys, monkeypatch, tmp_path, "--version") == (0, f"{fb.__version__}\n", "")


def test_a_run_leaves_its_folder(finished):
    names = {"config.toml", "rounds.jsonl", "ledger.parquet", "result.json", "report.html", "partition.json"}
    assert names <= {p.name for p in finished.iterdir()}
    result = json.loads((finished / "result.json").read_text())
    assert result["method"] == "fedpurin"
    assert result["rounds"] == 3
    assert result["status"] == "done"
    assert 0 < result["uplink_bytes"] < result["uplink_nominal_bytes"]
    assert result["score"]["final"] <= result["score"]["best"] <= 1
    assert {"dataset", "seed", "uplink_bytes_per_client_round", "seconds", "versions"} <= result.keys()
    assert result["peak_memory_bytes"] > 10**8
    ledger = pq.read_table(finished / "ledger.parquet").to_pydict()
    assert sum(ledger["bytes_up"]) == result["uplink_bytes"]
    assert sum(ledger["bytes_down"]) == result["downlink_bytes"]
    rows = [json.loads(line) for line in (finished / "rounds.jsonl").read_text().splitlines()]
    ended = {row["round"]: row["time"] for row in rows}
    assert [f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in ledger["time"]] == [ended[t] for t in ledger["round"]]
    assert {p.name for p in (finished / "models").iterdir()} == {f"client-{i}.safetensors" for i in range(4)}


def test_the_config_of_a_run_makes_the_same_run(finished, tmp_path):
    done = fewbytes("run", "-c", str(finished / "config.toml"), "--workers", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert timeless(json.loads(done.stdout)) == timeless(json.loads((finished / "result.json").read_text()))


def test_inspect_tells_what_a_frame_holds(finished, tmp_path):
    done = fewbytes("inspect", str(finished / "frames" / "2-train-0-up.frame"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Critical" in done.stdout
    assert "mask of" in done.stdout
    assert "theta" in done.stdout
    frame = tmp_path / "damaged.frame"
    data = bytearray((finished / "frames" / "2-train-0-up.frame").read_bytes())
    data[len(data) // 2] ^= 1
    frame.write_bytes(data)
    damaged = fewbytes("inspect", str(frame), cwd=tmp_path)
    assert damaged.returncode == 2
    assert "damaged" in damaged.stderr


def test_report_of_several_runs(finished, tmp_path):
    assert fewbytes("run", "separate", *QUICK, cwd=tmp_path).returncode == 0
    done = fewbytes("report", str(finished), str(only_run(tmp_path)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "separate" in done.stdout


def test_compare_beats_guessing(tmp_path):
    done = fewbytes(
        "compare", "--dataset", "digits", "--clients", "5", "--alpha", "0.5", "--rounds", "8", "--json",
        "--set", "epochs=2", "--set", "lr=0.1", "--set", "batch=20", "--set", "momentum=0.9",
        "--set", "fedpurin.tau=0.4",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = {r["method"]: r for r in json.loads(done.stdout)}
    assert set(results) == {"fedavg", "fedpurin", "separate"}
    assert results["fedpurin"]["parameters"]["tau"] == 0.4
    for result in results.values():
        kind = "global" if result["score"]["kind"] == "global" else "personalised"
        assert result["score"]["final"] > result["majority_class_accuracy"][kind] + 0.2
    assert results["separate"]["uplink_bytes"] == 0 < results["fedpurin"]["uplink_bytes"]
    assert (only_run(tmp_path) / "report.html").stat().st_size > 500_000


@dataclass(frozen=True)
class Broken(fb.Method):
    """A method whose server fails in its first round."""

    def round(self, state: None, net: fb.Network, t: int) -> None:
        raise ZeroDivisionError("nothing to divide by")


@pytest.mark.parametrize(("given", "counted"), [({"epochs": 2, "steps": 0}, "epochs"), ({"steps": 2}, "steps")])
def test_equal_terms_are_as_many_epochs_or_steps_in_all(given, counted):
    training = terms.TRAINING | given
    for name, length in {"fedavg": 2, "fedkgf": 2, "ensemble": 12, "fusefl": 12, "fedma": 12}.items():
        method = make_method(name, terms.equal_parameters(name, 6, training))
        assert method.local.length == method.parameters[counted] == length
        assert (counted == "steps") == (method.local.steps > 0)
    assert terms.equal_parameters("fedrep", 6, training)["head_epochs"] == 2
    assert make_method("fedma", terms.equal_parameters("fedma", 1, training)).local.length == 3  # one a layer
    assert f"one-shot methods: 12 {counted})" in terms._terms(["fedavg"], 6, training)


def test_compare_all_goes_on_without_those_that_cannot(tmp_path, monkeypatch, capsys):
    kept = ("fedavg", "fedkgf", "ensemble", "separate")
    monkeypatch.setattr(terms, "METHODS", [*kept, f"{__name__}:Broken"])
    options = ["--model", "mlp", "--clients", "3", "--rounds", "2", "--fraction", "0.7", "--set", "lr=0.05", "--json"]
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "compare", "all", *options)
    assert code == 1, errors
    results = {r["method"]: r for r in json.loads(out)}
    assert {name: r["status"] for name, r in results.items()} == {
        "fedavg": "done", "ensemble": "done", "separate": "done", "fedkgf": "left out", "broken": "failed",
    }  # fmt: skip
    assert "no Conv2d" in results["fedkgf"]["why"]
    assert "nothing to divide by" in results["broken"]["why"]
    assert "fedkgf is left out" in errors
    assert results["fedavg"]["parameters"]["fraction"] == 0.7
    assert [results[name]["parameters"]["epochs"] for name in ("fedavg", "ensemble")] == [2, 4]
    assert {results[name]["parameters"]["lr"] for name in ("fedavg", "ensemble", "separate")} == {0.05}
    assert {results[name]["model"] for name in ("fedavg", "separate")} == {"mlp"}
    assert any("use" in r["recommended"].get("personalised", "") for r in results.values())
    run = only_run(tmp_path)
    partitions = {path.read_text() for path in run.glob("*/partition.json")}
    assert len(partitions) == 1  # the same clients, with the same samples
    page = (run / "report.html").read_text()
    assert ">failed</span>" in page
    assert "nothing to divide by" in page


def test_a_named_method_that_cannot_run_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    command = ["compare", "fedkgf", "fedavg", "--model", "mlp", "--clients", "3", "--rounds", "1", "--json"]
    code, out, errors = ended(capsys, monkeypatch, tmp_path, *command)
    assert code == 1, errors
    assert [r["status"] for r in json.loads(out)] == ["left out", "done"]
    assert "fedkgf is left out: a Mlp has no convolution" in " ".join(errors.split())
    asked = only_run(tmp_path) / ASKED
    for damage in ("[]", "{}", '{"methods": 3, "settings": {}}', asked.read_text()[:9]):
        asked.write_text(damage)
        code, _, errors = ended(capsys, monkeypatch, tmp_path, "compare", "--resume", str(asked.parent))
        assert (code, "is damaged" in errors) == (2, True)
    code, _, errors = ended(capsys, monkeypatch, tmp_path, "compare", "fedkgf", "--model", "mlp", "--clients", "3")
    assert (code, "no method can run here; fedkgf: a Mlp" in errors) == (2, True)
    assert only_run(tmp_path) == asked.parent


@pytest.mark.parametrize("methods", [["fedavg", "separate", "fedper"], ["all"]])
def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch, capsys, methods):
    names = ["fedavg", "fedkgf", "fedper", "separate"]  # fedkgf cannot train this model
    monkeypatch.setattr(terms, "METHODS", names)
    command = ["compare", *methods, "--model", "mlp", "--clients", "3", "--rounds", "3", "--json"]
    whole = json.loads(ended(capsys, monkeypatch, tmp_path, *command, "--out", "whole")[1])
    scored = Display.scored

    def interrupt(self: Display, row: dict[str, object]) -> None:
        scored(self, row)
        if self._name == "separate" and row["round"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "scored", interrupt)
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *command)
    folder = only_run(tmp_path)
    assert (code, f"resume with: fewbytes compare --resume {folder.relative_to(tmp_path)}" in errors) == (130, True)
    assert "fedavg" in (folder / "report.html").read_text()  # of what is done
    (folder / "report.html").unlink()
    monkeypatch.setattr(Display, "scored", scored)
    first = next(result for result in folder.glob("fed*/result.json"))
    written = first.stat().st_mtime_ns
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "compare", "--resume", str(folder), "--json")
    assert code == 0, errors
    assert first.stat().st_mtime_ns == written
    assert (folder / "report.html").exists()
    kept = ("method", "score", "uplink_bytes", "downlink_bytes", "recommended", "status", "rounds")
    assert [{k: r.get(k) for k in kept} for r in json.loads(out)] == [{k: r.get(k) for k in kept} for r in whole]
    for wrong in (["--resume", str(folder), "--rounds", "4"], ["fedavg", "--resume", str(folder)], ["--resume", "."]):
        code, _, errors = ended(capsys, monkeypatch, tmp_path, "compare", *wrong)
        assert (code, errors.startswith("fewbytes: ")) == (2, True)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_parameters_of_equal_terms(name):
    parameters = terms.equal_parameters(name, 6, terms.TRAINING)
    assert make_method(name, parameters).parameters.items() >= parameters.items()
    make_method(name, terms.equal_parameters(name, 1, terms.TRAINING | {"epochs": 1}))  # fusefl in one block


@pytest.mark.parametrize("name", METHODS)
def test_a_word_for_a_number_is_refused_in_words(name):
    kinds = METHODS[name].kinds()
    numbers = [key for key, default in METHODS[name].defaults().items() if type(default) in (int, float)]
    numbers = [key for key in numbers if get_origin(kinds[key]) is not Literal]
    for key in numbers:
        with pytest.raises(fb.UserError, match=f"^{name}: {key} .*number .*, not abc$"):
            make_method(name, {key: "abc"})
        with pytest.raises(fb.UserError, match=f"^{key} .*number .*, not 'abc'$"):
            METHODS[name](**{key: "abc"})


def test_equal_terms_that_are_given_hold_for_methods_of_one_shot_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terms, "METHODS", ["ensemble", "fedavg", "fusefl"])
    given = ["--set", "epochs=1", "--set", "ensemble.lr=0.2", "--rounds", "3", "--model", "mlp", "--clients", "3"]
    code, _, errors = ended(capsys, monkeypatch, tmp_path, "compare", "all", *given)
    assert code == 0, errors
    assert "3 rounds (one-shot methods: 3 epochs)" in " ".join(errors.split())
    assert "fusefl in 3 rounds" in " ".join(errors.split())
    parameters = {
        name: json.loads((only_run(tmp_path) / name / "result.json").read_text())["parameters"]
        for name in ("fedavg", "ensemble")
    }
    assert (parameters["fedavg"]["epochs"], parameters["ensemble"]["epochs"]) == (1, 3)
    assert (parameters["fedavg"]["lr"], parameters["ensemble"]["lr"]) == (0.1, 0.2)
    code, _, errors = ended(capsys, monkeypatch, tmp_path, "compare", "all", "--set", "epochs=few")
    assert (code, "at least 1, not few" in errors) == (2, True)


def test_a_budget_is_kept_and_told(tmp_path, monkeypatch, capsys):
    options = ["--clients", "3", "--rounds", "3", "--budget", "130kB", "--set", "epochs=1"]
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "compare", "fedavg", "ensemble", *options)
    assert code == 0, errors
    assert "ends with round 1:" in " ".join(errors.split())
    assert "For a global model, use" in out
    assert "over the budget" in out
    folder = only_run(tmp_path)
    result = json.loads((folder / "fedavg" / "result.json").read_text())
    assert (result["budget"], result["ended_by"], result["rounds"]) == (130_000, "budget", 1)
    resume = ["run", "--resume", str(folder / "fedavg"), "--budget"]
    assert ended(capsys, monkeypatch, tmp_path, *resume, "0.13MB", "--json")[0] == 0
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *resume, "1MB")
    assert code == 2
    assert "another budget" in errors


def test_a_resumed_run_may_round_by_steps_where_it_rounded_by_bits(tmp_path, monkeypatch, capsys):
    options = ["--clients", "2", "--rounds", "2", "--set", "epochs=1", "--uplink-bits", "2", "--json"]
    assert ended(capsys, monkeypatch, tmp_path, "run", "fedavg", *options)[0] == 0
    folder, go_on = only_run(tmp_path), ["run", "--resume", str(only_run(tmp_path)), "--json"]
    go_on += ["--from-round", "1"]
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *go_on, "--uplink-step", "4")
    assert code == 0, errors
    assert "uplink_bits" not in (folder / "config.toml").read_text()
    first, second = (
        json.loads(line)["measured"]["uplink bits a value"]
        for line in (folder / "rounds.jsonl").read_text().splitlines()
    )
    assert first > 2 * second
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *go_on, "--uplink-bits", "1", "--uplink-step", "4")
    assert (code, "leave one out" in errors) == (2, True)


def test_a_resumed_run_may_replace_one_direction_of_bits_and_an_ended_one_none(tmp_path, monkeypatch, capsys):
    options = ["--clients", "2", "--rounds", "2", "--set", "epochs=1", "--bits", "0.5", "--json"]
    assert ended(capsys, monkeypatch, tmp_path, "run", "fedavg", *options)[0] == 0
    folder = only_run(tmp_path)
    before = (folder / "result.json").read_bytes(), (folder / "config.toml").read_bytes()
    again = ["run", "--resume", str(folder), "--json", "--uplink-bits", "2"]
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *again)
    assert (code, "has ended, so nothing is left to round otherwise: go back with --from-round" in errors) == (2, True)
    assert before == ((folder / "result.json").read_bytes(), (folder / "config.toml").read_bytes())
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *again, "--from-round", "1")
    assert code == 0, errors
    settings = tomllib.loads((folder / "config.toml").read_text())
    assert (float(settings["uplink_bits"]), settings["downlink_bits"], "bits" in settings) == (2, 0.5, False)
    rows = [json.loads(line)["measured"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
    first, second = (row["uplink bits a value"] for row in rows)
    assert second > 2 * first
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *again[:-2], "--from-round", "1", "--bits", "1")
    assert code == 0, errors
    settings = tomllib.loads((folder / "config.toml").read_text())
    assert (settings["bits"], settings.keys() & {"uplink_bits", "downlink_bits"}) == (1, set())
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *again[:-2], "--from-round", "1", "--downlink-bits", "2")
    assert code == 0, errors
    settings = tomllib.loads((folder / "config.toml").read_text())
    assert (float(settings["uplink_bits"]), settings["downlink_bits"], "bits" in settings) == (1, 2, False)
    rows = [json.loads(line)["rounding"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rows == [{"bits": 0.5}, {"uplink_bits": "1", "downlink_bits": 2.0}]
    assert [badges(run) for run in read_runs([folder])] == [["0.5 bits, then 1 bit and 2 bits down"]]


def test_the_last_live_line_is_the_result(tmp_path, monkeypatch, capsys):
    options = ["--clients", "2", "--model", "mlp:layers=2", "--set", "blocks=2", "--set", "batch=20"]
    given = [*options, "--set", "epochs=2", "--set", "ccvr_samples=50", "--json"]
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "run", "fusefl", *given)
    assert code == 0, errors
    told = " ".join(errors.split()).rpartition("fusefl: ")[2]
    assert told.startswith("after round 2/2 ")
    scores = json.loads(out)["score"]["all"]
    assert set(scores) == {"local", "global", "personalised"}
    for kind in ("global", "personalised"):  # FuseFL's models are scored once more after the last round
        assert f"{kind} {scores[kind]['final']:.1%} " in told
    code, _, errors = ended(capsys, monkeypatch, tmp_path, "run", "fusefl", *options, "--set", "epochs=1")
    assert (code, "epochs 1 cannot be divided among 2 blocks" in errors) == (2, True)
    assert only_run(tmp_path)  # the second has left no folder


def test_plan_measures_real_payloads(tmp_path):
    asked = ["plan", "fedavg", "--model", "mlp", "--clients", "50", "--rounds", "10", "--json"]
    done = fewbytes(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    values = 4 * (64 * 200 + 200 + 200 * 10 + 10)
    assert plan["nominal_up"] == plan["nominal_down"] == values
    assert 0 < plan["up"] < plan["down"] < values
    assert not (tmp_path / "runs").exists()
    budget = str(round(3.5 * 50 * plan["up"]))
    done = fewbytes(*asked, "--budget", budget, cwd=tmp_path)
    assert (json.loads(done.stdout)["rounds"], json.loads(done.stdout)["asked"]) == (3, 10)


def test_compare_rounds_what_can_be_rounded(tmp_path, monkeypatch, capsys):
    options = ["--model", "mlp", "--clients", "3", "--rounds", "2", "--uplink-bits", "0.5", "--json"]
    options += ["--set", "batch=20"]
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "compare", "fedavg", "fedpurin", "dgc", *options)
    assert code == 0, errors
    fedavg, fedpurin, dgc = json.loads(out)
    for result in (fedavg, fedpurin):
        assert result["uplink_bits"] == "0.5"
        assert 0 < result["uplink_bits_per_value"] < 2
        assert result["uplink_bytes"] < result["uplink_nominal_bytes"] / 16
    assert not {"uplink_bits", "uplink_bits_per_value"} & dgc.keys()
    assert re.search("dgc: .* runs without uplink_bits", " ".join(errors.split()))
    (folder,) = (tmp_path / "runs").iterdir()
    assert "<h2>Rounding</h2>" in (folder / "report.html").read_text()
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "plan", "fedavg", *options)
    assert code == 0, errors
    plan = json.loads(out)
    assert (code, plan["up"] < plan["nominal_up"] / 16, 0 < plan["uplink_rounding_error"] < 1) == (0, True, True)


def test_plan_of_more_clients_than_there_are_samples(tmp_path):
    options = ["plan", "fedavg", "--model", "mlp", "--rounds", "10", "--json"]
    many = fewbytes(*options, "--clients", "1000000", "--set", "fraction=0.0001", cwd=tmp_path)
    assert many.returncode == 0, many.stderr
    assert "1000000 clients" in " ".join(many.stderr.split())
    plan, few = json.loads(many.stdout), json.loads(fewbytes(*options, "--clients", "10", cwd=tmp_path).stdout)
    assert (plan["clients"], plan["cohort"]) == (1_000_000, 100)
    assert (plan["up"], plan["down"]) == (few["up"], few["down"])
    refused = fewbytes("plan", "fusefl", "--clients", "1000000", cwd=tmp_path)
    assert refused.returncode == 2
    assert "all clients" in refused.stderr


def test_plan_of_a_deployment_counts_what_flower_takes(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    options = ["plan", "fedavg", "--clients", "2", "--json"]
    here = json.loads(fewbytes(*options, cwd=tmp_path).stdout)
    there = json.loads(fewbytes(*options, "--engine", "flower-deployment", cwd=tmp_path).stdout)
    assert here["waiting_seconds"] == 0
    assert 0 < there["waiting_seconds"] < 1  # a message of Flower's on its way
    assert there["up"] == here["up"]


NEWCOMERS = ["--newcomers", "6", "--known-classes", "0,1,2,3,4,5"]


def test_newcomers_come_in_the_second_half_of_a_run(tmp_path):
    done = fewbytes("run", "fedavg", *QUICK, "--rounds", "4", *NEWCOMERS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round 3: joined: clients 4 to 9" in " ".join(done.stderr.split())
    run = only_run(tmp_path)
    result = json.loads((run / "result.json").read_text())
    assert {key: result[key] for key in ("newcomers", "arrival", "clients")} == {
        "newcomers": 6, "arrival": 3, "clients": 10,
    }  # fmt: skip
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [row["cohort"] for row in rounds if row["phase"] == "round"] == [4, 4, 6, 6]
    assert "Clients 4 to 9 joined before round 3." in (run / "report.html").read_text()
    held = json.loads((run / "partition.json").read_text())["train"]
    assert not any(sum(client[6:]) for client in held[:4])
    assert not any(sum(client[:6]) for client in held[4:])
    again = fewbytes("run", "--resume", str(run), "--rounds", "4", "--known-classes", "0,1,2,3,4,5", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    other = fewbytes("run", "--resume", str(run), "--stay", cwd=tmp_path)
    assert other.returncode == 2
    assert "another stay" in other.stderr


def test_newcomers_come_one_after_another(tmp_path):
    how = ["--rounds", "5", "--arrival", "3", "--newcomers-a-round", "2", "--set", "clusters=2"]
    done = fewbytes("run", "genefl", *QUICK, *NEWCOMERS, *how, "--fraction", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in (only_run(tmp_path) / "rounds.jsonl").read_text().splitlines()]
    assert [row["cohort"] for row in rounds if row["phase"] == "round"] == [4, 4, 2, 4, 6]
    assert [(row["round"], row["client"]) for row in rounds if row["phase"] == "join"] == [
        (3, 4), (3, 5), (4, 6), (4, 7), (5, 8), (5, 9),
    ]  # fmt: skip


def test_a_run_without_newcomers_says_nothing_of_them(finished):
    said = (finished / "config.toml").read_text() + (finished / "result.json").read_text()
    assert not any(word in said for word in ("newcomers", "arrival", "stay", "known_classes"))


def test_plan_counts_who_is_there(tmp_path):
    options = ["--model", "mlp", "--clients", "4", "--rounds", "4", "--arrival", "2", "--stay"]
    done = fewbytes("plan", "fedavg", *options, *NEWCOMERS, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["clients"] == plan["cohort"] == 8  # 4, and then 10 for three rounds: 8.5


def test_methods_lists_every_method(tmp_path):
    names = {row["name"] for row in json.loads(fewbytes("methods", "--json", cwd=tmp_path).stdout)}
    assert names == set(METHODS)


MISTAKES = {
    "unknown method": (["run", "fedpurrin"], "fedpurin"),
    "unknown data set": (["run", "fedavg", "--dataset", "digitz"], "digits"),
    "unknown option": (["run", "fedavg", "--alhpa", "1"], "--alpha"),
    "unknown parameter": (["run", "fedpurin", "--set", "tua=0.5"], "tau"),
    "tau above 1": (["run", "fedpurin", "--set", "tau=1.5"], "(0, 1]"),
    "a word for a number": (["run", "fedpurin", "--set", "tau=half"], "(0, 1], not half"),
    "a fraction named twice": (["run", "fedavg", "--fraction", "0.5", "--set", "fraction=0.2"], "given twice"),
    "a fraction named twice in a config": (["run", "-c", "twice.toml"], "given twice"),
    "neither true nor false": (["run", "fedpurin", "--set", "hessian=yes"], "true or false, not yes"),
    "a set without value": (["run", "fedpurin", "--set", "tau"], "KEY=VALUE"),
    "an alpha that the partition does not use": (
        ["run", "fedavg", "--partition", "iid", "--alpha", "0.3"],
        "dirichlet",
    ),
    "more clusters than clients": (["run", "genefl", "--clients", "3"], "more than the 3 clients"),
    "a module of a method that is not there": (["run", "no.such:Thing"], "no.such"),
    "two methods of one name": (["compare", "fedavg", "fewbytes:FedAvg"], "two of the methods"),
    "a method that looks like markup": (["run", "[/x]"], "unknown method '[/x]'"),
    "a data set that looks like markup": (["run", "fedavg", "--dataset", "[red]:bug:"], "'[red]:bug:'"),
    "an option that looks like markup": (["run", "--[/x]"], "--[/x]"),
    "unknown model": (["run", "fedavg", "--model", "resnet9"], "resnet"),
    "unknown device": (["run", "fedavg", "--device", "tpu9"], "tpu9"),
    "config that is not there": (["run", "-c", "nowhere.toml"], "nowhere.toml"),
    "config that is not TOML": (["run", "-c", "broken.toml"], "broken.toml"),
    "config with an unknown key": (["run", "-c", "misspelt.toml"], "rounds"),
    "report of no run": (["report", "."], "not a run folder"),
    "resume of no run": (["run", "--resume", "."], "not a run folder"),
    "back to a round of no run": (["run", "fedavg", "--from-round", "3"], "add --resume RUN"),
    "inspect of no frame": (["inspect", "broken.toml"], "broken.toml"),
    "no method": (["run"], "method"),
    "more fixed samples than there are": (["run", "fedavg", "--samples", "100000/10"], "100000"),
    "a device that does not compute": (["run", "fedavg", "--device", "meta"], "meta"),
    "newcomers in no round of the run": (["run", "fedavg", "--newcomers", "2", "--arrival", "21"], "2 to 20"),
    "newcomers after the run": (
        ["run", "fedavg", "--rounds", "4", "--newcomers", "5", "--newcomers-a-round", "2"],
        "until round 5",
    ),
    "an arrival of nobody": (["run", "fedavg", "--arrival", "3"], "newcomers"),
    "newcomers of one round": (["run", "ensemble", "--newcomers", "2"], "ensemble has only one"),
    "rounding of what is summed unseen": (
        ["compare", "fedavg", "--secure-aggregation", "--uplink-bits", "0.5"],
        "leave out --uplink-bits",
    ),
    "no budget": (["compare", "--budget", "0"], "200MB"),
    "all and a parameter that none has": (["compare", "all", "--set", "tua=0.5"], "tau"),
    "a seed twice": (["compare", "fedavg", "--seeds", "1,1"], "a seed is given twice"),
    "seeds that are words": (["run", "fedavg", "--seeds", "one,two"], "such as 1,2,3"),
    "a seed and seeds": (["compare", "fedavg", "--seed", "1", "--seeds", "1,2"], "leave one out"),
    "a parameter both set and tuned": (["compare", "fedavg", "--set", "lr=1", "--tune", "lr=1,2"], "set and tuned"),
    "a parameter to tune that none has": (["compare", "fedavg", "--tune", "mu=1,2"], "--tune mu: no method"),
    "a value to try that a method refuses": (["compare", "fedavg", "--tune", "lr=0.1,-1"], "above 0"),
    "a range without a number of trials": (["compare", "fedavg", "--tune", "lr=0.1..0.3"], "--trials 20"),
    "trials of nothing": (["compare", "fedavg", "--trials", "3"], "--tune lr="),
    "a shard that there is not": (["compare", "fedavg", "--seeds", "1,2", "--shard", "3/2"], "such as 2/4"),
    "no jobs": (["compare", "fedavg", "--jobs", "0"], "at least 1"),
    "a monitor of several runs": (["run", "fedavg", "--seeds", "1,2", "--monitor", "9100"], "for one run"),
    "a merge of nothing": (["compare", "--merge", "nowhere"], "nowhere is not a comparison's folder"),
    "a comparison to resume that is not there": (["compare", "--resume", "nowhere"], "not a comparison's folder"),
    "out that is a file": (["run", "fedavg", "--out", "broken.toml"], "broken.toml"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_clear_line_and_code_2(mistake, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.toml").write_text("rounds = [")
    (tmp_path / "misspelt.toml").write_text('method = "fedavg"\nround = 3')
    (tmp_path / "twice.toml").write_text('method = "fedavg"\nfraction = 0.5\n[parameters]\nfraction = 0.2')
    arguments, told = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fewbytes", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:  # in this process: starting one takes longer than finding a mistake
        main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2, errors
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1, errors
    assert told in lines[0]
    assert not list((tmp_path / "runs").glob("*")), "a run folder was left behind"


def test_brackets_and_colons_are_printed_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fewbytes", "run", "fedavg", "--partition", "flwr:IidPartitioner"])
    with pytest.raises(SystemExit):
        main()
    assert "pip install 'fewbytes[flower-datasets]'" in capsys.readouterr().err
    out = tmp_path / "[bold]runs[/x] :bug:"
    done = fewbytes("compare", "fedavg", "fedpurin", *QUICK, "--rounds", "1", "--set", "fedavg.lr=0.2", "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"report: {out}" in done.stdout
    assert "note: lr differs: 0.2 (fedavg), " in done.stderr


def test_a_data_set_without_labels(tmp_path):
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "bare").mkdir()
    pq.write_table(pa.table({"image": [b"x"]}), tmp_path / "bare" / "train-00000-of-00001.parquet")
    done = fewbytes("run", "fedavg", "--dataset", "bare", cwd=tmp_path, env={"FEWBYTES_DATA": str(tmp_path)})
    assert done.returncode == 2
    assert "label" in done.stderr


def test_a_checkpoint_of_another_config_or_damaged(finished, tmp_path):
    done = fewbytes("run", "--resume", str(finished), "--alpha", "0.2", cwd=tmp_path)
    assert done.returncode == 2
    assert "alpha" in done.stderr
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(finished), str(copy)], check=True)
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(config.replace("seed = 0", "seed = 1"))
    other = fewbytes("run", "--resume", str(copy), cwd=tmp_path)
    assert other.returncode == 2
    assert "another configuration" in other.stderr
    (copy / "config.toml").write_text(config)
    for state in (copy / "checkpoint").glob("round-*.state"):
        state.write_bytes(state.read_bytes()[:-1])
    damaged = fewbytes("run", "--resume", str(copy), cwd=tmp_path)
    assert damaged.returncode == 2
    assert "checkpoint" in damaged.stderr


def test_back_to_an_earlier_round(finished, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(finished), str(copy)], check=True)
    before = json.loads((copy / "result.json").read_text())
    last = before["rounds"]
    gone = fewbytes("run", "--resume", str(copy), "--from-round", "0", cwd=tmp_path)
    assert gone.returncode == 2
    assert f"round 0 to go back to, only those of {last - 1} and {last}" in gone.stderr
    back = fewbytes("run", "--resume", str(copy), "--from-round", str(last - 1), "--json", cwd=tmp_path)
    assert back.returncode == 0, back.stderr
    assert timeless(json.loads(back.stdout)) == timeless(before)


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> dict:
    """The result of a run long enough to be interrupted."""
    done = fewbytes("run", "fedpurin", *QUICK, "--rounds", "25", "--json", cwd=tmp_path_factory.mktemp("long"))
    assert done.returncode == 0, done.stderr
    return timeless(json.loads(done.stdout))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_cleanly_and_resumed(stop, long, tmp_path):
    arguments = [sys.executable, "-m", "fewbytes", "run", "fedpurin", *QUICK, "--rounds", "25"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where these tests run behind nohup
    process = subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    rows: list[Path] = []
    while not (rows and rows[0].read_text()) and process.poll() is None:
        rows = list(tmp_path.glob("runs/*/rounds.jsonl"))
        time.sleep(0.002)
    process.send_signal(stop)
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    run = only_run(tmp_path)
    done = fewbytes("run", "--resume", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert timeless(json.loads((run / "result.json").read_text())) == long


def test_a_damaged_or_missing_client_state(finished, tmp_path):
    for damage in (lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-9] + bytes(9))):
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        subprocess.run(["cp", "-r", str(finished), str(copy)], check=True)
        damage(max((copy / "checkpoint" / "clients").glob("2-*.state"), key=lambda p: int(p.stem[2:])))
        done = fewbytes("run", "--resume", str(copy), cwd=tmp_path)
        assert done.returncode == 2
        assert "client 2" in done.stderr


def test_two_processes_do_not_run_in_one_folder(finished, tmp_path):
    with open(finished / "checkpoint" / "lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = fewbytes("run", "--resume", str(finished), cwd=tmp_path)
    assert done.returncode == 2
    assert "another process is running" in done.stderr


def test_json_has_standard_output_for_itself_and_models_come_from_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef net(shape, classes):\n    print('hello')\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
    )
    done = fewbytes("run", "fedavg", *QUICK, "--model", "mine:net", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "mine:net"
    assert "hello" in done.stderr


def test_config_spellings_of_the_command_line(tmp_path):
    (tmp_path / "c.toml").write_text('method = "fedavg"\nsamples = "30/10"\nfraction = 0.5\nclients = 4\nrounds = 1')
    for given, fraction in ([], 0.5), (["--set", "fraction=0.75"], 0.75):
        done = fewbytes("run", "-c", "c.toml", *given, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["parameters"]["fraction"] == fraction


def test_a_diverging_run_says_so_and_writes_json(tmp_path):
    done = fewbytes("run", "separate", *QUICK, "--set", "lr=1e18", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not finite" in done.stderr
    assert "NaN" not in (only_run(tmp_path) / "rounds.jsonl").read_text()


def test_a_run_whose_replies_diverge_stops_in_one_line(tmp_path):
    done = fewbytes("run", "fedavg", *QUICK, "--set", "lr=1e18", cwd=tmp_path)
    assert done.returncode == 1
    assert "are not all finite (is lr too high?)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_no_space_left(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        done = fewbytes("run", "separate", *QUICK, "--out", str(small), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "space" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_who_is_excluded_stays_so_when_the_run_is_resumed_again(tmp_path):
    run = ["run", "fedavg", "--dataset", "digits", "--clients", "4", "--rounds", "3", "--samples", "40/10"]
    assert fewbytes(*run, "--keep-checkpoints", "4", "--workers", "1", "--out", tmp_path / "runs").returncode == 0
    refused = fewbytes(*run, "--exclude", "4", "--out", tmp_path / "none")
    assert "clients 0 to 3" in refused.stderr
    assert not (tmp_path / "none").exists()  # nothing is begun
    folder = only_run(tmp_path)
    back = ("run", "--resume", folder, "--from-round", "1")
    for wrong, words in (("7", "clients 0 to 3"), ("0,1,2,3", "every client")):
        refused = fewbytes(*back, "--exclude", wrong)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3  # nothing was forgotten
    assert fewbytes(*back, "--exclude", "2").returncode == 0
    assert fewbytes(*back).returncode == 0
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [[left["client"] for left in row.get("left_out", [])] for row in rows] == [[], [2], [2]]
