"""Run folders from strangers: links that lead elsewhere, pipes, ledgers that unfold, machines that a config names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import CASES, tiny_task
from commands import fewbytes

import fewbytes as fb
from fewbytes.base.files import check_own
from fewbytes.base.named import check_address, only_allowed
from fewbytes.report import read_run

FILES = ("config.toml", "rounds.jsonl", "result.json", "ledger.parquet", "models/global.safetensors", "checkpoint/lock")


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A run."""
    out = tmp_path_factory.mktemp("ended")
    options = ["--clients", "2", "--rounds", "1", "--set", "epochs=1", "--workers", "1", "--out", out]
    done = fewbytes("run", "fedavg", "--dataset", "digits", "--samples", "20/10", *options)
    assert done.returncode == 0, done.stderr
    return next(out.iterdir())


@pytest.fixture
def folder(ended, tmp_path) -> Path:
    """A copy of it, for a stranger to change."""
    return shutil.copytree(ended, tmp_path / "theirs")


def commands(folder: Path) -> dict[str, list[str | Path]]:
    small = ["--images", "1", "--iterations", "1"]
    return {
        "resume": ["run", "--resume", folder], "report": ["report", folder],
        "export": ["export", folder, "--safetensors"], "attack": ["attack", folder, *small],
        "compare": ["compare", "--resume", folder], "deploy": ["deploy", "--resume", folder],
    }  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_out_of_a_run_folder_or_a_pipe_in_it_stops_every_command_at_once(name, kind, folder, tmp_path):
    away = tmp_path / "mine"
    shutil.move(folder / name, away)
    before = away.read_bytes()
    os.symlink(away, folder / name) if kind == "link" else os.mkfifo(folder / name)
    words = f"leads out of the folder {folder}, to {away}" if kind == "link" else "is a pipe or a device"
    given = commands(folder)
    for command in given if name == "config.toml" else ("report",):
        done = fewbytes(*given[command])
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    with pytest.raises(fb.UserError, match=r"leads out|is a pipe"):
        fb.load_model(folder)
    assert away.read_bytes() == before


def test_a_run_folder_that_is_a_link_or_has_one_within_it_is_gone_on_with(folder, tmp_path):
    (folder / "rounds.jsonl").rename(folder / "lines")
    (folder / "rounds.jsonl").symlink_to("lines")
    (tmp_path / "link").symlink_to(folder)
    given = commands(tmp_path / "link")
    for name in ("report", "export", "resume"):
        done = fewbytes(*given[name])
        assert done.returncode == 0, done.stderr


def test_a_run_that_is_gone_on_with_in_python_writes_through_no_link(tmp_path):
    run, mine = tmp_path / "run", tmp_path / "mine"
    fb.run(CASES["fedavg"], tiny_task(), rounds=1, out=run)
    shutil.move(run / "checkpoint" / "rows", mine)
    (run / "checkpoint" / "rows").symlink_to(mine)
    before = mine.read_bytes()
    with pytest.raises(fb.UserError, match="leads out"):
        fb.run(CASES["fedavg"], tiny_task(), rounds=2, out=run, resume=True)
    assert mine.read_bytes() == before


def test_a_ledger_that_unfolds_to_far_more_than_it_looks_is_refused_before_it_is_read(folder):
    read_run(folder)  # control
    schema = pq.read_schema(folder / "ledger.parquet")
    rows = 5_000_000
    part = pa.table([pa.array(np.zeros(rows, np.int64)).cast(field.type) for field in schema], schema)
    with pq.ParquetWriter(folder / "ledger.parquet", schema) as file:
        for _ in range(1 + (1 << 30) // (8 * rows * len(schema))):
            file.write_table(part, row_group_size=rows)
    with pytest.raises(fb.UserError, match=r"ledger\.parquet .*GB in memory"):
        read_run(folder)


def test_a_folder_that_is_no_run_is_refused_as_that_whatever_is_in_it(tmp_path):
    (tmp_path / "python3").symlink_to("/usr/bin/env")
    for command in commands(tmp_path).values():
        done = fewbytes(*command)
        assert done.returncode == 2
        assert "is not a run folder" in done.stderr or "is not a comparison" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("config.toml", "method = " + "[" * 100_000, "report"),
        ("config.toml", "method = " + "[" * 100_000, "resume"),
        ("rounds.jsonl", "[" * 100_000 + "\n", "report"),
        ("result.json", "[" * 100_000, "report"),
        ("probe.json", '{"a":' * 100_000, "report"),
        ("config.toml", 'method = "fedavg"\n[[parameters]]\nlr = 1', "report"),
        ("partition.json", f'{{"classes": ["a"], "train": [[1{"0" * 400}]], "test": [[1]]}}', "report"),
        ("result.json", '{"score": [1]}', "export"),
        ("result.json", '{"score": {"metric": "a", "all": {"global": 3}}}', "export"),
        ("result.json", "[" * 100_000, "export"),
    ],
)
def test_what_no_run_writes_is_damaged_and_named(name, text, command, folder):
    (folder / name).write_text(text)
    done = fewbytes(*commands(folder)[command])
    assert done.returncode == 2
    assert str(folder / name) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_machine_that_only_a_file_names_is_not_called(folder):
    pytest.importorskip("ray", reason="Ray is not installed")
    text = (folder / "config.toml").read_text()
    text = text.replace('engine = "local"', "")
    (folder / "config.toml").write_text('engine = "flower-simulation"\nray_address = "192.0.2.1:6379"\n' + text)
    command = commands(folder)["resume"]
    done = fewbytes(*command)
    assert done.returncode == 2
    assert "'192.0.2.1:6379'" in done.stderr.replace("\n", " ")
    check_address("192.0.2.1:6379")  # control: who runs a command may name any
    with only_allowed("192.0.2.1:6379"):
        check_address("192.0.2.1:6379")


def test_links_within_a_folder_and_one_that_is_not_there_are_its_own(tmp_path):
    check_own(tmp_path / "absent")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to(".")
    (tmp_path / "a" / "c").symlink_to("not there")
    check_own(tmp_path / "a")


def test_a_link_to_itself_is_no_way_out(folder):
    (folder / "loop").symlink_to("loop")
    done = fewbytes(*commands(folder)["report"])
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "models" / "global.safetensors").unlink()
    (folder / "models" / "global.safetensors").symlink_to("global.safetensors")
    done = fewbytes(*commands(folder)["export"])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


LIBRARIES = (
    "torch",
    "numpy",
    "typer",
    "rich",
    "pyarrow",
    "flwr",
    "click",
    "winreg",
    "torchcomms",
    "gmpy2",
    "tensorflow",
)
"""Names that this package or its libraries import, or try to."""


DEPLOY = ["deploy", "fedavg", "--dataset", "digits", "--clients", "2", "--rounds", "1", "--set", "epochs=1"]
MODULE, SCRIPT = ["-m", "fewbytes"], [str(Path(sys.executable).parent / "fewbytes")]


@pytest.mark.parametrize(
    ("how", "command"),
    [
        (MODULE, ["report", "."]), (MODULE, ["export", ".", "--torch"]), (MODULE, ["methods"]), (MODULE, DEPLOY),
        (SCRIPT, ["methods"]), (SCRIPT, ["export", ".", "--torch"]),  # Python puts the script's folder first
    ],
    ids=lambda words: Path(words[0]).name,
)  # fmt: skip
def test_no_file_of_the_current_folder_stands_for_a_library(how, command, folder):
    for name in LIBRARIES:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write({name!r})")
    done = subprocess.run([sys.executable, *how, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("how", [MODULE, SCRIPT], ids=["module", "script"])
def test_what_is_named_lies_in_the_current_folder(how, tmp_path):
    made = "import torch\nimport helper\ndef net(shape, classes):\n    return helper.net(shape, classes)\n"
    layers = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))"
    flat = f"import torch\ndef net(shape, classes):\n    return {layers}\n"
    for name, text in (("mine", made), ("helper", flat), ("code", made)):
        (tmp_path / f"{name}.py").write_text(text)
    terms = ["--dataset", "digits", "--clients", "2", "--rounds", "1", "--set", "epochs=1"]
    command = [sys.executable, *how, "run", "fedavg", *terms, "--model"]
    done = subprocess.run([*command, "mine:net"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([*command, "code:net"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "another module code" in done.stderr


def test_what_a_strangers_run_names_is_not_fetched(folder, monkeypatch):
    monkeypatch.delenv("FEWBYTES_DATA", raising=False)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('"digits"', '"nobody/of-this-name"'))
    done = fewbytes(*commands(folder)["resume"])
    assert done.returncode == 2
    assert "'nobody/of-this-name', which a file names" in done.stderr
