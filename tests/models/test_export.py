"""Exported models give what the run's model gives, and say what they take; one clear line for what cannot be."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import PATIENCE
from safetensors.torch import load_file
from torch import nn

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.data import Partition, Schema, federate, federate_local, table
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.models.export import export_model
from fewbytes.running.settings import Watcher

RESNET = "resnet8:width=8,stem=3x3"


def trained(folder: Path, method: str = "fedavg", **more: Any) -> fb.Task:
    """Two clients' run on some of the digits, normalised inside the model."""
    how = {"model": RESNET, "rounds": 1, "normalise": "0.3/0.4", "parameters": {"batch": 20}} | more
    experiment = make_experiment({"method": method, "dataset": "digits", "clients": 2, "part": 0.1, **how})
    found = find(experiment)
    run_with(found.run(folder, False, Watcher()))
    return found.task


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, fb.Task]:
    folder = tmp_path_factory.mktemp("export") / "run"
    return folder, trained(folder)


@pytest.mark.parametrize(
    ("method", "client", "more"),
    [
        ("fedavg", None, {}),
        ("fedavg", None, {"kgf": 4}),
        ("fedkgf", None, {"parameters": {"base": 4, "batch": 20}}),
        ("fusefl", None, {"parameters": {"epochs": 2, "blocks": 2, "batch": 20}}),
        ("ensemble", None, {"model": "lenet", "parameters": {"epochs": 1, "batch": 20}}),
        ("fedper", 1, {"model": "mlp"}),
        ("fedproto", 1, {"model": "mlp@8+mlp:layers=2@8", "parameters": {"batch": 20}}),
        ("fedktl", 0, {"model": "mlp@8", "parameters": {"transfer": "none", "batch": 20}}),
    ],
)  # fmt: skip
def test_a_methods_model_predicts_the_same_from_its_file(method, client, more, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    x = trained(tmp_path / "run", method, **more).data.test.load()[0]
    paths = {path.name: path for path in export_model(tmp_path / "run", client, out=tmp_path / "out")}
    with torch.no_grad():
        want = fb.load_model(tmp_path / "run", client)(x)
        torch.testing.assert_close(torch.export.load(paths["model.pt2"]).module()(x), want)
    session = onnxruntime.InferenceSession(paths["model.onnx"])
    (found,) = session.run(["outputs"], {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), want, rtol=1e-3, atol=1e-4)
    assert (found.argmax(1) == want.argmax(1).numpy()).all()


def test_the_description_says_what_the_model_takes_and_gives(finished):
    run, task = finished
    paths = export_model(run, formats=["torch", "safetensors"])
    folder = run / "export"
    assert sorted(paths) == [folder / n for n in ("README.md", "model.json", "model.pt2", "model.safetensors")]
    said = json.loads((folder / "model.json").read_text())
    assert said["classes"] == list(task.data.classes)
    assert said["input"]["shape"] == ["n", 1, 8, 8]
    assert said["normalise"]["mean"] == [0.3]
    assert said["normalise"]["std"] == [0.4]
    result = json.loads((run / "result.json").read_text())
    assert said["scores"]["accuracy"]["global"] == result["score"]["all"]["global"]["final"]
    assert (said["method"], said["architecture"]) == ("fedavg", RESNET)


def test_weights_are_the_models_by_its_names(finished, tmp_path):
    run, _ = finished
    export_model(run, formats=["safetensors"], out=tmp_path)
    found, want = load_file(tmp_path / "model.safetensors"), fb.load_model(run).state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_there_is_no_pickle_in_pytorchs_file(finished, tmp_path):
    export_model(finished[0], formats=["torch"], out=tmp_path)
    with zipfile.ZipFile(tmp_path / "model.pt2") as file:
        parts = {name: file.read(name) for name in file.namelist()}
    pickled = [
        part.startswith(b"PK") or re.fullmatch(rb"\x80[\x02-\x05].*\.", part, re.DOTALL) for part in parts.values()
    ]
    assert not any(pickled)  # a weight may begin by chance as a pickle does, but not end so as well
    assert not [name for name in parts if name.endswith(".pkl")]


def test_a_folder_holds_one_models_files(finished, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "tokenizer.json").write_text("{}")  # of a model that takes text
    export_model(finished[0], formats=["torch", "safetensors"], out=tmp_path)
    export_model(finished[0], formats=["safetensors"], out=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "model.json", "model.safetensors", "notes.txt"]


def test_a_module_of_ones_own_that_learns_numbers(tmp_path):
    def sites(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(n))
        return x, x.sum(1)

    task = fb.Task.of(lambda: nn.Linear(4, 1), [(sites(i), sites(i)) for i in (0, 1)], test=sites(2))
    fb.run(fb.FedAvg(), task, rounds=1, out=tmp_path / "run", workers=1)
    with pytest.raises(UserError, match="build="):
        export_model(tmp_path / "run")
    export_model(tmp_path / "run", formats=["torch"], build=lambda: nn.Linear(4, 1))
    made = torch.export.load(tmp_path / "run" / "export" / "model.pt2").module()
    x = sites(2)[0]
    torch.testing.assert_close(made(x), fb.load_model(tmp_path / "run", build=lambda: nn.Linear(4, 1))(x))
    said = json.loads((tmp_path / "run" / "export" / "model.json").read_text())
    assert said["learns"] == "numbers"
    assert "argmax" not in (tmp_path / "run" / "export" / "README.md").read_text()


class Weighed(nn.Module):
    """Of samples of two tensors, one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.last((self.embedding(tokens) * weights[..., None]).sum(1))


def test_samples_of_several_tensors_are_taken_by_position_and_by_name(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    drawn = torch.Generator().manual_seed(0)
    x = {"tokens": torch.randint(5, (12, 3), generator=drawn), "weights": torch.rand(12, 3, generator=drawn)}
    samples = (x, torch.arange(12) % 2)
    fb.run(
        fb.FedAvg(), fb.Task.of(Weighed, [(samples, samples)], test=samples), rounds=1, out=tmp_path / "run", workers=1
    )
    folder = export_model(tmp_path / "run", formats=["torch", "onnx"], build=Weighed)[0].parent
    assert json.loads((folder / "model.json").read_text())["input"]["tensors"] == {
        "tokens": {"shape": ["n", 3], "dtype": "int64"},
        "weights": {"shape": ["n", 3], "dtype": "float32"},
    }
    want = fb.load_model(tmp_path / "run", build=Weighed)(**x)
    torch.testing.assert_close(torch.export.load(folder / "model.pt2").module()(*x.values()), want)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (found,) = session.run(None, {name: value.numpy() for name, value in x.items()})
    torch.testing.assert_close(torch.from_numpy(found), want.detach(), rtol=1e-3, atol=1e-4)
    snippets = (folder / "README.md").read_text().split("```python\n")[1:]
    assert all('numpy.zeros((1, 3), "int64")' in snippet for snippet in snippets)


@pytest.mark.parametrize("own", [False, True], ids=["dealt out", "each its own"])
def test_a_table_from_python_says_what_its_columns_mean(own, tmp_path):
    frame = {"age": [30, 50, 70, 50] * 5, "sex": ["f", "m", "f", "m"] * 5, "cost": [1.5, 2.5, 4.5, 5.5] * 5}
    data = table(frame, "cost", schema=Schema(target=("cost",), missing="mean"))
    dealt = federate_local([data, data], data.test, data.classes) if own else federate(data, Partition("iid", 2))
    task = fb.Task.on(dealt, lambda: nn.Linear(3, 1))
    fb.run(fb.FedAvg(), task, rounds=1, out=tmp_path / "run", workers=1)
    export_model(tmp_path / "run", formats=["safetensors"], build=lambda: nn.Linear(3, 1))
    said = json.loads((tmp_path / "run" / "export" / "model.json").read_text())["table"]
    assert said["columns"] == [
        {"name": "age", "mean": 50, "std": pytest.approx(200**0.5)},
        {"name": "sex", "categories": ["f", "m"]},
    ]
    assert said["target"] == [{"name": "cost", "mean": 3.5, "std": pytest.approx(2.5**0.5)}]
    assert (said["missing"]["rule"], said["unknown_category"]) == ("mean", "refused")
    assert "NaN" in said["missing"]["written"]


def test_the_program_for_a_tables_rows_takes_what_the_run_took_with_pytorch_alone(tmp_path):
    frame = {"age": [30, 50, 70, 50] * 5, "sex": ["f", "m", "f", "m"] * 5, "ill": ["no", "yes", "yes", "no"] * 5}
    schema = Schema(target=("ill",), missing="mean", categories={"sex": ("f", "m")}, unknown="none")
    data = table(frame, "ill", schema=schema)
    task = fb.Task.on(federate(data, Partition("iid", 2)), lambda: nn.Linear(3, 2))
    fb.run(fb.FedAvg(), task, rounds=1, out=tmp_path / "run", workers=1)
    out = tmp_path / "run" / "export"
    export_model(tmp_path / "run", formats=["torch"], build=lambda: nn.Linear(3, 2))
    said = json.loads((out / "model.json").read_text())
    assert said["table"]["unknown_category"] == "zeros, no category"
    (out / "rows.csv").write_text("age,sex\n61,x\n")
    code = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "numpy" not in code
    done = subprocess.run([sys.executable, "-c", code], cwd=out, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    age = said["table"]["columns"][0]
    x = torch.tensor([[(61 - age["mean"]) / age["std"], 0.0, 0.0]])
    wanted = fb.load_model(tmp_path / "run", build=lambda: nn.Linear(3, 2))(x).softmax(1)[0].tolist()
    assert ast.literal_eval(done.stdout) == pytest.approx(dict(zip(["no", "yes"], wanted, strict=True)))


def test_what_cannot_be_exported_is_told_in_one_line_and_leaves_nothing(finished, tmp_path, monkeypatch):
    run, _ = finished
    trained(tmp_path / "own", "fedper", model="mlp")
    for folder, client, words in (
        (tmp_path / "none", None, "there is no run folder"),
        (tmp_path, None, "is not a run folder: it has no config.toml"),
        (tmp_path / "own", None, r"name a client, such as --client \d"),
        (tmp_path / "own", 7, r"no model client-7.safetensors; it has client-0.safetensors, client-1"),
        (run, 0, "leave out --client"),
    ):
        with pytest.raises(UserError, match=words):
            export_model(folder, client, out=tmp_path / "out")
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'fewbytes\[onnx\]'"):
        export_model(run, formats=["onnx"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_decides_by_its_samples_is_refused(tmp_path):
    class Choosy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)

    x, y = torch.randn(12, 4), torch.arange(12) % 2
    fb.run(
        fb.FedAvg(),
        fb.Task.of(lambda: Choosy(4, 2), [((x, y), (x, y))], test=(x, y)),
        rounds=1,
        out=tmp_path / "run",
        workers=1,
    )
    with pytest.raises(UserError, match="safetensors has") as error:
        export_model(tmp_path / "run", formats=["torch"], build=lambda: Choosy(4, 2))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "export").exists()
