"""A federation without any table at its server: a survey's schema, early stopping on the sites' validation data, and
the best model's answer for one patient in a plain PyTorch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commands import fewbytes
from runs import PATIENCE, until
from started import started
from surveyed import patients

import fewbytes as fb

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from fewbytes.flower.children import free_port

SITES = ("north", "south", "west")
PLAIN = """
import json, sys
sys.modules["fewbytes"] = None  # so that importing it fails
import torch
about, patient = json.load(open("model.json")), json.loads(sys.argv[1])
x = []
for column in about["table"]["columns"]:
    value = patient[column["name"]]
    if "categories" in column:
        x += [float(value == each) for each in column["categories"]]
    else:
        x.append((value - column["mean"]) / column["std"])
model = torch.export.load("model.pt2").module()
probabilities = model(torch.tensor([x]))[0].double().softmax(0).tolist()
print(dict(zip(about["classes"], probabilities)))
"""


def deployed(folder: Path, *arguments: str) -> None:
    log = folder / "server.log"
    with ExitStack() as stack:
        command = [sys.executable, "-m", "fewbytes", *arguments, "--federation", "federation", "--min-replies", "1"]
        server = started(command, log, stack, cwd=folder)
        assert until(lambda: server.poll() is not None, PATIENCE)
    assert server.returncode == 0, log.read_text()


def test_the_best_model_of_sites_answers_for_a_new_patient(tmp_path):
    fewbytes("federation", "init", "--address", f"127.0.0.1:{free_port('127.0.0.1')}", cwd=tmp_path)
    for number, name in enumerate(SITES):
        invitation = fewbytes("federation", "invite", name, cwd=tmp_path).stdout
        request = fewbytes("node", "init", name, "--invitation", invitation.strip(), cwd=tmp_path).stdout
        assert fewbytes("federation", "join", request.strip(), cwd=tmp_path).returncode == 0
        patients(200, 6 * number - 6, number).to_csv(tmp_path / name / "patients.csv", index=False)
        file = tmp_path / name / "node.toml"
        text = file.read_text().replace('tell = "sizes"\n', "")
        file.write_text(text + 'tell = "figures"\nclient-data = "patients.csv"\n')
    with ExitStack() as stack:
        files = [str(tmp_path / name / "node.toml") for name in SITES]
        started([sys.executable, "-m", "fewbytes", "node", *files], tmp_path / "node.log", stack)
        deployed(tmp_path, "survey", "--target", "ill", "--out", "surveys")
        (survey,) = (tmp_path / "surveys").iterdir()
        deployed(
            *(tmp_path, "deploy", "fedavg", "--partition", "local", "--schema", str(survey / "survey.json")),
            *("--validation", "0.2", "--stop-when", "patience=2", "--rounds", "40", "--set", "lr=0.5"),
            *("--set", "batch=5", "--metrics", "auc", "--positive", "yes", "--out", "runs"),
        )
    (run,) = (tmp_path / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    best = result["best_model"]
    assert result["ended_by"] == "stop_when", result
    assert (best["metric"], best["kind"], best["chosen_on"]) == ("auc", "received", "validation")
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    scored = {row["round"] - 1: row["validation"]["auc"]["received"] for row in rows if row["phase"] == "round"}
    first = scored.pop(0)  # of the model that nobody had trained
    assert best["round"] == max(scored, key=lambda t: scored[t])
    assert scored[best["round"]] == best["value"] > first
    assert best["round"] == result["rounds"] - 3  # the round after two scored ones without a better
    assert (run / "models" / "best.safetensors").is_file()
    done = fewbytes("export", str(run), "--torch")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "export" / "model.json").read_text())["round"] == best["round"]
    patient = {"age": 71.0, "mass": 28.4, "dose": 0.3, "sex": "f"}
    words = [sys.executable, "-c", PLAIN, json.dumps(patient)]
    printed = subprocess.run(words, cwd=run / "export", capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    schema = json.loads((run / "export" / "model.json").read_text())["table"]["columns"]
    x = [
        value
        for column in schema
        for value in (
            [float(patient[column["name"]] == each) for each in column["categories"]]
            if "categories" in column
            else [(patient[column["name"]] - column["mean"]) / column["std"]]
        )
    ]
    model, last = fb.load_model(run), fb.load_model(run, round=result["rounds"])
    with torch.no_grad():
        want, other = (each(torch.tensor([x]))[0].double().softmax(0).tolist() for each in (model, last))
    assert ast.literal_eval(printed.stdout) == pytest.approx({"no": want[0], "yes": want[1]}, abs=1e-6)
    assert want != pytest.approx(other, abs=1e-6)
