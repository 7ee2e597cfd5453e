"""Weights of a file: which entries are taken, who starts from them, and one clear line for what cannot be."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from cases import TinyNet, opened, tiny_data
from safetensors.torch import save_file
from torch import nn

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.base.state import state_of
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower.node import in_common
from fewbytes.models import build_model
from fewbytes.models.pretrained import read_pretrained
from fewbytes.running.checkpoint import fingerprint

SHAPE = (1, 8, 8)


def weights_of(model: nn.Module, path: Path) -> Path:
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    return path


def settings(**more: object) -> dict:
    return {"method": "fedavg", "dataset": "digits", "clients": 2, "part": 0.1, "model": "mlp:hidden=16", **more}


def test_every_node_starts_from_the_weights_whatever_is_drawn(tmp_path):
    given = TinyNet()
    task = fb.Task.on(
        tiny_data(), TinyNet, pretrained=read_pretrained(str(weights_of(given, tmp_path / "w.safetensors")))
    )
    want = state_of(given)
    site = opened(task, 1, 1, "train")
    for model in (task.problem.first_model(), site.model(), site.model(fresh=True), task.problem.model(0, "newcomers")):
        torch.testing.assert_close(state_of(model), want, rtol=0, atol=0)


@pytest.mark.parametrize("inside", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
def test_torchs_files_are_read_and_are_the_same_weights(inside, tmp_path):
    given = build_model("mlp", SHAPE, 10)
    torch.save(inside(given.state_dict()), tmp_path / "w.pth")
    other = read_pretrained(str(weights_of(given, tmp_path / "w.safetensors")))
    read = read_pretrained(str(tmp_path / "w.pth"))
    assert read.digest == other.digest
    assert read.entries.keys() == given.state_dict().keys()


def test_a_file_lies_in_the_data_folder_too(tmp_path, monkeypatch):
    weights_of(TinyNet(), tmp_path / "w.safetensors")
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path))
    assert read_pretrained("w.safetensors").name == "w.safetensors"


def test_a_classifier_of_another_size_is_drawn_and_named(tmp_path):
    path = weights_of(build_model("mlp:hidden=16", SHAPE, 3), tmp_path / "w.safetensors")
    job = PreparedRun(settings(weights=str(path)))
    without = find(make_experiment(settings())).task.problem.first_state()
    first, given = job.task.problem.first_state(), read_pretrained(str(path)).entries
    drawn = [name for name in first if first[name].shape != given[name].shape]
    assert 0 < len(drawn) < len(first)
    for name, value in first.items():
        assert torch.equal(value, without[name] if name in drawn else given[name])
    (line,) = job.notes
    assert all(name in line for name in drawn)
    assert not any(name in line for name in first.keys() - set(drawn))


def test_pooled_models_take_the_weights_of_what_they_pool(tmp_path):
    given = build_model("resnet8:width=4,stem=3x3", (1, 8, 8), 5)
    pretrained = read_pretrained(str(weights_of(given, tmp_path / "w.safetensors")))
    pooled = build_model("resnet8:width=4,stem=3x3@6", (1, 8, 8), 10)
    pretrained.into(pooled)
    for name, value in given.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(pooled.state_dict()[f"body.{name}"], value)


def test_generated_kernels_are_not_said_to_be_pretrained(tmp_path):
    """Fed-KGF makes base kernels of its own, whose shape no plain model's file has."""
    model = "resnet8:width=8,stem=3x3"
    path = weights_of(build_model(model, SHAPE, 10), tmp_path / "w.safetensors")
    job = PreparedRun(settings(method="fedkgf", model=model, weights=str(path), parameters={"base": 4}))
    assert any("conv" in line and "random" in line for line in job.notes)


def test_nodes_and_checkpoints_know_the_weights(tmp_path):
    files = [weights_of(build_model("mlp:hidden=16", SHAPE, 10), tmp_path / f"{i}.safetensors") for i in (0, 1)]
    tasks = [find(make_experiment(settings(weights=str(path)))).task for path in files]
    method = fb.FedAvg()
    words = [in_common(method, task, 0) for task in tasks]
    differing = {what for what in words[0] if words[0][what] != words[1][what]}
    assert differing == {"weights (of which models start)"}
    assert fingerprint(method, tasks[0], "") != fingerprint(method, tasks[1], "")
    assert fingerprint(method, tasks[0], "") == fingerprint(
        method, find(make_experiment(settings(weights=str(files[0])))).task, ""
    )


def test_weights_that_unfold_to_far_more_than_their_file_are_refused(tmp_path):
    weights, packed, spread = (tmp_path / f"{name}.pt" for name in ("weights", "packed", "spread"))
    torch.save({"w": torch.zeros(300_000)}, weights)
    with zipfile.ZipFile(weights) as given, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in given.infolist():
            archive.writestr(member.filename, given.read(member))
    assert read_pretrained(str(packed)).digest == read_pretrained(str(weights)).digest  # control: it is not much
    with (
        zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("archive/data/1", "w", force_zip64=True) as file,
    ):
        for _ in range(65):
            file.write(bytes(1 << 24))
    torch.save({"w": torch.zeros(1).expand(1 << 29)}, spread)
    for path in (packed, spread):
        assert path.stat().st_size < 10_000_000
        with pytest.raises(UserError, match=f"{path.name} .*GB in memory"):
            read_pretrained(str(path))


def test_a_file_that_is_no_weights_is_told_in_one_line(tmp_path):
    (tmp_path / "code.pt").write_bytes(pickle.dumps(Path("x")))
    (tmp_path / "torn.safetensors").write_bytes(b"{}")
    torch.save([1, 2], tmp_path / "list.pt")
    weights_of(build_model("cnn4", (3, 16, 16), 7), tmp_path / "other.safetensors")
    for name, words in (
        ("none.pt", "there is no weights file"),
        ("code.pt", "weights_only=True"),
        ("torn.safetensors", "not a safetensors file"),
        ("list.pt", "hold no tensors by name"),
        ("other.safetensors", "no entry of the weights"),
    ):
        with pytest.raises(UserError, match=words) as error:
            find(make_experiment(settings(weights=str(tmp_path / name))))
        assert "\n" not in str(error.value)
