"""What `fewbytes export` writes runs without this package: in a plain PyTorch, in onnxruntime, as its README says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import fewbytes
from PIL import Image

import fewbytes as fb
from fewbytes.data.images import squared
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.running.settings import Watcher

pytestmark = pytest.mark.process
WITHOUT = "import sys; sys.modules['fewbytes'] = None\n"  # so that importing it fails


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, fb.Task]:
    """A run on coloured image files that differ in size, of two classes."""
    folder = tmp_path_factory.mktemp("export")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for number, name in enumerate(("cells", "dust")):
            (folder / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (20 + i % 3, 18, 3), dtype=np.uint8) + 100 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / "data" / split / name / f"{i}.png")
    experiment = make_experiment(
        {
            "method": "fedavg", "dataset": str(folder / "data"), "image_size": 16, "clients": 2, "partition": "iid",
            "model": "resnet8:width=4,stem=3x3", "normalise": "imagenet", "rounds": 2,
            "parameters": {"batch": 6, "lr": 0.05, "epochs": 4},
        }
    )  # fmt: skip
    task = experiment.task()
    run_with(
        experiment.made(), task, experiment.run_settings(task, folder / "run", False, Watcher()), experiment.policy
    )
    done = fewbytes("export", folder / "run", env={"FEWBYTES_CACHE": str(folder / "cache")})
    assert done.returncode == 0, done.stderr
    assert "model.onnx, model.pt2, model.safetensors" in done.stdout
    return folder / "run", task


def python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "predict",
    [
        "import torch; y = torch.export.load('model.pt2').module()(torch.from_numpy(x)).detach().numpy()",
        "import onnxruntime as o; (y,) = o.InferenceSession('model.onnx').run(None, {'x': x})",
    ],
    ids=["torch", "onnxruntime"],
)
def test_predictions_of_test_samples_are_equal_elsewhere(run, predict, tmp_path):
    folder, task = run
    x = task.data.test.load()[0]
    np.save(tmp_path / "x.npy", x.numpy())
    code = f"import numpy; x = numpy.load(r'{tmp_path}/x.npy'); {predict}; numpy.save(r'{tmp_path}/y.npy', y)"
    python(code, folder / "export")
    with torch.no_grad():
        want = fb.load_model(folder)(x).numpy()
    found = np.load(tmp_path / "y.npy")
    assert (found.argmax(1) == want.argmax(1)).all()
    assert found == pytest.approx(want, rel=1e-3, abs=1e-4)


def test_the_readmes_lines_name_an_images_class(run, tmp_path):
    folder, task = run
    snippets = re.findall(r"```python\n(import .*?)```", (folder / "export" / "README.md").read_text(), re.S)
    assert [len(snippet.splitlines()) for snippet in snippets] == [5, 5]
    for name in task.data.classes:
        picture = next((folder.parent / "data" / "test" / name).iterdir())
        (folder / "export" / "image.png").write_bytes(picture.read_bytes())
        x = torch.from_numpy(np.array(squared(Image.open(picture).convert("RGB"), 16)))
        with torch.no_grad():
            want = fb.load_model(folder)(x.permute(2, 0, 1)[None] / 255).argmax()
        for snippet in snippets:
            assert python(snippet, folder / "export").split() == [task.data.classes[want]]


def test_the_command_says_what_is_wrong_in_one_line(run, tmp_path):
    for arguments, words in (
        ((tmp_path / "none",), "there is no run folder"),
        ((run[0], "--client", "5"), "leave out --client"),
    ):
        done = fewbytes("export", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.strip().count("\n") == 0
    done = fewbytes("export", run[0], "--torch", "--out", tmp_path / "out", "--json")
    assert set(json.loads(done.stdout)) == {"README.md", "model.json", "model.pt2"}
