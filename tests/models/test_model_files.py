"""Saved models: what is damaged is told in one line, whatever was damaged; files of older versions load."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fewbytes as fb
from fewbytes.models import build_model
from fewbytes.models.files import _digest, load_model, save_model

ABOUT = {"model": "mlp:hidden=4", "sample_shape": [1, 2, 2], "classes": 3}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small model's file in a run folder."""
    path = tmp_path / "models" / "global.safetensors"
    save_model(build_model("mlp:hidden=4", (1, 2, 2), 3), path, ABOUT)
    return path


def refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(fb.UserError) as told:
        load_model(path.parent.parent)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)


def test_every_flipped_bit_is_told(file: Path) -> None:
    good = file.read_bytes()
    for i in range(len(good)):
        for bit in range(8) if i % 7 == 0 or i < 8 else [i % 8]:
            refused(file, good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :])


def test_every_truncation_and_other_damage_is_told(file: Path) -> None:
    good, rng = file.read_bytes(), random.Random(0)
    for length in range(0, len(good), 3):
        refused(file, good[:length])
    for _ in range(200):
        i, j = rng.randrange(len(good)), rng.randrange(len(good))
        for hole in (bytes(min(64, len(good) - i)), good[j : j + 16]):
            damaged = good[:i] + hole + good[i + len(hole) :]
            if damaged != good:
                refused(file, damaged)


STRANGE = {
    "model": [None, [], 3, "mlp:hidden=1000000000", "hf:nobody/of-this-name", "evil:f"],
    "sample_shape": [None, [], ["a"], [0.5], [-1], [1, 1 << 30, 1 << 30], 3],
    "classes": [None, -1, "3", 1 << 40, [3]],
    "kgf": [10**9, [], "x"],
    "normalise": [3, {}, "nowhere"],
    "lora": [3, "rank=x"],
    "schema": [3, {}, [], {"columns": 3}],
    "tensors": [{"a": {"shape": [1], "dtype": "zz"}}, {"a": {"shape": [1], "dtype": "load"}}, 3],
    "samples": [3, []],
    "method": [{"a": 1}],
    "tokenizer_digest": [3],
    "recipe": ["x", {"kind": "x"}, {"kind": "ensemble"}, {"kind": "ensemble", "clients": "all"}],
}


@pytest.mark.parametrize("key", STRANGE)
def test_what_a_strangers_file_says_is_checked_in_one_line_and_fetches_nothing(key, file, monkeypatch):
    """Its digest is right: whoever writes a file makes that."""
    state = load_model(file.parent.parent).state_dict()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *of, **how: pytest.fail(f"looked up {of[0]}"))
    for value in STRANGE[key]:
        _save(file, state, json.dumps(ABOUT | {key: value}))
        with pytest.raises(fb.UserError) as told:
            load_model(file.parent.parent)
        assert "\n" not in str(told.value), value


def test_a_model_of_far_more_values_than_its_file_has_is_refused_before_it_is_made(file, monkeypatch):
    made = []
    monkeypatch.setattr(torch.nn.Linear, "__init__", _noting(torch.nn.Linear.__init__, made))
    state = {"1.weight": torch.zeros(4, 4)}
    _save(file, state, json.dumps(ABOUT | {"sample_shape": [1, 4000, 4000]}))
    with pytest.raises(fb.UserError, match=r"64,000,019 values, .*16"):
        load_model(file.parent.parent)
    assert set(made) == {"meta"}


def _noting(init, made):
    def noted(self, *given, **how):
        init(self, *given, **how)
        made.append(self.weight.device.type)

    return noted


def test_what_a_strangers_file_nests_without_end_is_refused(file: Path) -> None:
    _save(file, load_model(file.parent.parent).state_dict(), '{"a":' + "[" * 100_000)
    with pytest.raises(fb.UserError, match="cannot be read"):
        load_model(file.parent.parent)


def _save(file: Path, state: dict[str, torch.Tensor], about: str) -> None:
    save_file(state, file, {"fewbytes": _digest(about, state) + about})


def test_files_of_older_versions_load(file: Path) -> None:
    with safe_open(file, "pt") as there:
        state = {name: there.get_tensor(name) for name in there.keys()}  # noqa: SIM118 (not a dict)
        about = there.metadata()["fewbytes"]
    loaded = load_model(file.parent.parent)
    save_file(state, file, {"fewbytes": about[about.index("{") :]})
    old = load_model(file.parent.parent)
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_the_same_model_is_the_same_file(file: Path) -> None:
    first = file.read_bytes()
    for _ in range(8):
        save_model(load_model(file.parent.parent), file, ABOUT)
        assert file.read_bytes() == first
