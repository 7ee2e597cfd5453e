"""Files that name code: it is imported where whoever runs the command says so, and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from commands import fewbytes
from safetensors.torch import save

import fewbytes as fb
from fewbytes.base.named import imported, only_allowed, places

WORDS = "is code that a file or a server names"
CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
import torch
def net(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """Where a module of somebody's leaves a mark when it is imported."""
    (tmp_path / "theirs.py").write_text(CODE.format(mark=str(tmp_path / "imported")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "imported"
    sys.modules.pop("theirs", None)


@pytest.fixture
def ended(own, tmp_path) -> Path:
    """The folder of a run on a model of one's own, named on the command line, that has a round to go."""
    options = ["--clients", "2", "--rounds", "2", "--set", "epochs=1", "--workers", "1", "--out", tmp_path / "runs"]
    done = fewbytes("run", "fedavg", "--model", "theirs:net", *options)
    assert done.returncode == 0, done.stderr
    own.unlink()
    return next((tmp_path / "runs").iterdir())


def test_a_model_file_that_names_code_imports_and_calls_nothing(tmp_path):
    (tmp_path / "models").mkdir()
    about = {"model": "os:abort", "sample_shape": [1, 8, 8], "classes": 10, "seed": 0}
    for model in ("os:abort", "os:abort@4", "theirs:a b"):
        file = save({"w": torch.zeros(1)}, metadata={"fewbytes": json.dumps(about | {"model": model})})
        (tmp_path / "models" / "global.safetensors").write_bytes(file)
        with pytest.raises(fb.UserError, match=WORDS):
            fb.load_model(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ["probe", "--epochs", "1", "--linear-epochs", "1", "--samples", "20"],
        ["attack", "--images", "1", "--iterations", "1"],
        ["export", "--safetensors"],
        ["run", "--resume"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_folder_that_names_code_needs_it_to_be_allowed(command, ended, own):
    refused = fewbytes(*command, ended)
    assert refused.returncode == 2
    assert WORDS in refused.stderr.replace("\n", " ")
    assert "--allow" in refused.stderr
    assert not own.exists()
    allowed = fewbytes(*command, ended, "--allow", "other,theirs")
    assert allowed.returncode == 0 or "uploads no" in allowed.stderr, allowed.stderr
    assert own.exists()


def test_within_a_block_more_may_be_allowed_and_after_it_all_is(own, tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path))
    with only_allowed("theirs"):
        with only_allowed("other"):
            assert imported("theirs:net")
        with pytest.raises(fb.UserError, match=WORDS):
            imported("json:loads")
        assert places("/etc") == [Path("/etc"), Path("/etc")]
        with only_allowed(anywhere=False), pytest.raises(fb.UserError, match="FEWBYTES_DATA"):
            places("/etc")
        with only_allowed("/etc", anywhere=False):
            assert Path("/etc/x") in places("/etc/x")
    assert imported("json:loads") is json.loads
