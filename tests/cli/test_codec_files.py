"""`fewbytes encode`, `decode` and `inspect` on files: what comes back, what is printed, a line for each mistake."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ended
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fewbytes.codec import Stream, encode
from fewbytes.wire import Dense, pack

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


def state(seed: int) -> dict[str, torch.Tensor]:
    """A layer with batch norm, and a tensor of every type, a scalar and an empty one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {f"of {dtype}": torch.randn(7, generator=generator).to(dtype) for dtype in TYPES}
    return drawn | {
        "layer.weight": torch.randn(120, 80, generator=generator),
        "norm.running_mean": torch.randn(120, generator=generator),
        "norm.num_batches_tracked": torch.tensor(seed),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `fewbytes …` beside two rounds, before.safetensors and after.safetensors: its code, output and errors."""
    for seed, name in enumerate(("before", "after")):
        save_file(state(seed), tmp_path / f"{name}.safetensors")

    def run(*arguments: str) -> tuple[int, str, str]:
        return ended(capsys, monkeypatch, tmp_path, *arguments)

    return run


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


@pytest.mark.parametrize("sender", [(), ("--base", "before.safetensors"), ("--base", "before.frame")])
@pytest.mark.parametrize("receiver", ["before.safetensors", "before.frame"])
def test_a_file_comes_back_to_the_bit_whatever_form_the_base_has(command, tmp_path, sender, receiver):
    assert command("encode", "before.safetensors")[0] == 0
    assert command("encode", "after.safetensors", *sender, "--out", "sent.frame")[0] == 0
    code, printed, errors = command("decode", "sent.frame", *(("--base", receiver) if sender else ()))
    assert (code, errors) == (0, "")
    assert equal(load_file(tmp_path / "sent.safetensors"), state(1))
    with safe_open(tmp_path / "sent.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers asks for
    sizes = [(tmp_path / f"sent.{end}").stat().st_size for end in ("frame", "safetensors")]
    assert printed == f"wrote sent.safetensors: {sizes[0]:,} bytes became {sizes[1]:,}\n"


def test_bits_make_it_small_and_statistics_stay_exact(command, tmp_path):
    code, printed, _ = command("encode", "after.safetensors", "--base", "before.safetensors", "--bits", "1")
    assert code == 0
    found = re.fullmatch(
        r"wrote after\.frame: ([\d,]+) bytes became ([\d,]+) \(([\d.]+) times fewer bytes than the file\); "
        r"rounding error 0\.\d+\n",
        printed,
    )
    before, after = ((tmp_path / f"after.{end}").stat().st_size for end in ("safetensors", "frame"))
    assert found is not None
    assert [int(each.replace(",", "")) for each in found.groups()[:2]] == [before, after]
    assert after < before / 8
    assert command("decode", "after.frame", "--base", "before.safetensors", "--out", "back.safetensors")[0] == 0
    received = load_file(tmp_path / "back.safetensors")
    assert torch.equal(received["norm.running_mean"], state(1)["norm.running_mean"])
    assert not torch.equal(received["layer.weight"], state(1)["layer.weight"])


@pytest.mark.parametrize("exact", ["layer.weight", "layer.weight, norm.running_mean", ""])
def test_exact_names_what_is_not_rounded(command, tmp_path, exact):
    assert command("encode", "after.safetensors", "--bits", "1", "--exact", exact)[0] == 0
    assert command("decode", "after.frame", "--out", "back.safetensors")[0] == 0
    received = load_file(tmp_path / "back.safetensors")
    for name in ("layer.weight", "norm.running_mean"):
        assert torch.equal(received[name], state(1)[name]) == (name in exact)


@pytest.mark.parametrize("numbered", [False, True])
def test_arrays_encoded_in_python_become_a_safetensors_file(command, tmp_path, numbered):
    arrays = {str(i): np.arange(6.0).reshape(2, 3) + i for i in range(2)}
    base = {name: value + 1 for name, value in arrays.items()}
    data = encode(list(arrays.values()), list(base.values())) if numbered else encode(arrays, base)
    (tmp_path / "arrays.frame").write_bytes(data)
    save_file({name: torch.from_numpy(value) for name, value in base.items()}, tmp_path / "base.safetensors")
    assert command("decode", "arrays.frame", "--base", "base.safetensors")[0] == 0
    assert equal(
        load_file(tmp_path / "arrays.safetensors"), {name: torch.from_numpy(value) for name, value in arrays.items()}
    )


def test_inspect_names_the_fields_of_the_codecs_messages(command, tmp_path):
    command("encode", "after.safetensors", "--base", "before.safetensors", "--bits", "1")
    stream = Stream()
    stream.advance(state(0))
    (tmp_path / "stream.frame").write_bytes(stream.message("a"))
    for name, words in {
        "after.frame": ["Tensors", "values", "rounded:"],
        "stream.frame": ["Versions", "stream", stream.name, "version", "whole", "frames"],
    }.items():
        code, printed, _ = command("inspect", name)
        assert code == 0
        assert "unknown class" not in printed
        assert not [word for word in words if word not in printed]


def test_a_limit_is_set_by_the_receiver(command):
    command("encode", "after.safetensors")
    code, _, errors = command("decode", "after.frame", "--limit", "10kB", "--out", "back.safetensors")
    assert (code, "raise --limit" in errors) == (2, True)
    assert command("decode", "after.frame", "--limit", "1MB", "--out", "back.safetensors")[0] == 0


MISTAKES = {
    "no such file": (["encode", "nowhere.safetensors"], "nowhere.safetensors cannot be read: No such file"),
    "no such encoded file": (["decode", "nowhere.frame"], "nowhere.frame cannot be read: No such file"),
    "no such base": (["encode", "after.safetensors", "--base", "nowhere", "--out", "x"], "nowhere cannot be read"),
    "a folder": (["encode", "."], "directory"),
    "not safetensors": (["encode", "words.txt"], "words.txt is not a safetensors file"),
    "an empty file": (["encode", "empty.safetensors"], "empty.safetensors is not a safetensors file"),
    "a base that is not safetensors": (["encode", "after.safetensors", "--base", "words.txt", "--out", "x"], "words"),
    "encoded already": (["encode", "whole.frame"], "fewbytes decode whole.frame"),
    "not encoded": (["decode", "before.safetensors"], "not an encoded file"),
    "cut off": (["decode", "cut.frame", "--base", "before.safetensors"], "cut.frame is damaged"),
    "a bit flipped": (["decode", "flipped.frame", "--base", "before.safetensors"], "flipped.frame is damaged"),
    "no base": (["decode", "difference.frame"], "with --base"),
    "another base": (["decode", "difference.frame", "--base", "after.safetensors"], "than after.safetensors"),
    "a base of another model": (["decode", "difference.frame", "--base", "other.safetensors"], "than other"),
    "a base that needs a base": (["decode", "whole.frame", "--base", "difference.frame"], "use the decoded file"),
    "out is there": (["encode", "after.safetensors", "--out", "words.txt"], "words.txt exists"),
    "the usual out is there": (["encode", "whole.safetensors"], "name another file with --out"),
    "out is a broken link": (["decode", "whole.frame", "--out", "link"], "link exists"),
    "no folder for out": (["encode", "after.safetensors", "--out", "no/x.frame"], "there is no folder no"),
    "too few bits": (["encode", "after.safetensors", "--bits", "0.01"], "--bits"),
    "bits that are not a number": (["encode", "after.safetensors", "--bits", "nan"], "bits must be"),
    "an unknown exact name": (["encode", "after.safetensors", "--bits", "1", "--exact", "layr"], "'layr'"),
    "exact without bits": (["encode", "after.safetensors", "--exact", "layer.weight"], "add --bits"),
    "a type that cannot travel": (["encode", "complex.safetensors"], "'w'"),
    "a stream's message": (["decode", "stream.frame"], "fewbytes.codec.Decoder"),
    "a method's message": (["decode", "method.frame"], "fewbytes inspect"),
    "a name that safetensors files cannot have": (["decode", "metadata.frame"], "'__metadata__'"),
    "a limit that is not a size": (["decode", "whole.frame", "--limit", "much"], "not 'much'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_and_leaves_no_file(mistake, command, tmp_path):
    before, stream = state(0), Stream()
    stream.advance(before)
    difference = encode(state(1), before)
    for name, data in {
        "words.txt": b"words and more words",
        "empty.safetensors": b"",
        "whole.frame": encode(before),
        "difference.frame": difference,
        "cut.frame": difference[:-40],
        "flipped.frame": difference[:200] + bytes([difference[200] ^ 1]) + difference[201:],
        "stream.frame": stream.message(0),
        "method.frame": bytes(pack(Dense(before))),
        "metadata.frame": encode({"__metadata__": torch.ones(2)}),
    }.items():
        (tmp_path / name).write_bytes(data)
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    save_file({"w": torch.ones(2, dtype=torch.complex64)}, tmp_path / "complex.safetensors")
    save_file(before, tmp_path / "whole.safetensors")
    (tmp_path / "link").symlink_to("nowhere")
    there = {path: path.lstat().st_mtime_ns for path in tmp_path.iterdir()}
    arguments, told = MISTAKES[mistake]
    if arguments[0] == "decode" and "--out" not in arguments:
        arguments = [*arguments, "--out", "x.safetensors"]
    code, printed, errors = command(*arguments)
    assert (code, printed) == (2, ""), errors
    assert len(errors.splitlines()) == 1
    assert told in errors
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.iterdir()} == there


def test_whatever_bit_is_flipped_nothing_is_written(command, tmp_path):
    rng, data = random.Random(0), encode(state(1), state(0), 1)
    for _ in range(60):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        (tmp_path / "bad.frame").write_bytes(bad)
        code, _, errors = command("decode", "bad.frame", "--base", "before.safetensors")
        assert (code, len(errors.splitlines())) == (2, 1)
        assert not (tmp_path / "bad.safetensors").exists()


def test_several_rounds_by_files(command, tmp_path):
    """A server sends rounded differences from what its receivers hold: both ends have the same file after each."""
    wanted = {"w": torch.randn(200, 50)}
    save_file(wanted, tmp_path / "held-0.safetensors")
    for n in range(1, 5):
        wanted = {"w": wanted["w"] + 0.01 * torch.randn(200, 50)}
        save_file(wanted, tmp_path / f"round-{n}.safetensors")
        base = ("--base", f"held-{n - 1}.safetensors")
        assert command("encode", f"round-{n}.safetensors", *base, "--bits", "2")[0] == 0
        assert command("decode", f"round-{n}.frame", *base, "--out", f"held-{n}.safetensors")[0] == 0
    off = load_file(tmp_path / "held-4.safetensors")["w"] - wanted["w"]
    assert float(off.norm()) < 0.5 * 0.01 * wanted["w"].numel() ** 0.5  # of the last round only: errors do not add up


def test_the_folder_of_an_encoded_file_may_be_elsewhere(command, tmp_path):
    (tmp_path / "mail").mkdir()
    assert command("encode", "after.safetensors", "--out", str(Path("mail", "a.frame")))[0] == 0
    assert command("decode", "mail/a.frame")[0] == 0
    assert equal(load_file(tmp_path / "mail" / "a.safetensors"), state(1))
