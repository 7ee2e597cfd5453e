"""StyleGAN3 and StyleGAN-XL: checkpoints give the official code's images, and no file makes its code run.

`tests/generators/stylegan-*.npz` hold small random networks: `modules` (JSON: class, attributes, tensors of every
module), each tensor by `module/name`, and what the official code (github.com/NVlabs/stylegan3 and
github.com/autonomousvision/stylegan-xl, in float32 on a CPU) made of them: `z` and `labels` in, `w` and images `x` out.
`t` and `r` are StyleGAN3's configurations of that name at 32x32 pixels, `xl` is a StyleGAN-XL: a stem of 16x16 pixels,
six classes, layers up to 32x32 pixels on top.
"""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.pickles import Record, read_pickle
from fewbytes.generators import ConditionalGenerator, ImageGenerator, load_generator
from fewbytes.generators.stylegan import load_stylegan

NAMES = ["t", "r", "xl"]


@cache
def vectors(name: str) -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / f"stylegan-{name}.npz") as file:
        return dict(file)


# Checkpoints as NVIDIA's training code writes them: a function's name, and what to call it with.


def _reconstruct_persistent_obj(meta: object) -> object:
    raise AssertionError("the pickle was executed")


class EasyDict(dict[str, Any]):
    pass


class Persistent:
    """An object whose class travels as source code."""

    def __init__(self, class_name: str, state: dict[str, Any], source: str = "raise SystemExit") -> None:
        self.meta = EasyDict(type="class", version=6, module_src=source, class_name=class_name, state=state)

    def __reduce__(self) -> tuple[object, ...]:
        return _reconstruct_persistent_obj, (self.meta,), None


def dumped(content: object, protocol: int = 4) -> bytes:
    """A pickle, in which the two things above have the names that they have in NVIDIA's code."""
    with pytest.MonkeyPatch.context() as patch:  # pickle writes a name only where it finds the thing
        for module, thing in (("torch_utils.persistence", _reconstruct_persistent_obj), ("dnnlib.util", EasyDict)):
            for name in (module.partition(".")[0], module):
                patch.setitem(sys.modules, name, ModuleType(name))
            patch.setattr(thing, "__module__", module)
            setattr(sys.modules[module], thing.__name__, thing)
        return pickle.dumps(content, protocol)


Change = Callable[[str, dict[str, Any]], None]


def network(name: str, change: Change = lambda module, state: None) -> Persistent:
    """The network of a vector file. `change` may alter the state of each module, its tensors included."""
    data = vectors(name)
    modules = json.loads(data["modules"].tobytes())
    made: dict[str, Any] = {}
    for path in sorted(modules, reverse=True):  # parts before the whole
        module = modules[path]
        state: dict[str, Any] = {"_parameters": collections.OrderedDict(), "_buffers": collections.OrderedDict()}
        for key, found in module["attributes"].items():  # numpy's scalars and arrays are marked
            marked = isinstance(found, dict)
            state[key] = np.array(*found.values())[() if "scalar" in found else ...] if marked else found
        for key, (kind, exists) in module["tensors"].items():
            tensor = torch.from_numpy(data[f"{path}/{key}"].copy()) if exists else None
            state[kind][key] = nn.Parameter(tensor, False) if exists and kind == "_parameters" else tensor
        parts = [part for part in made if part and part.rpartition(".")[0] == path]
        state["_modules"] = collections.OrderedDict((part.rpartition(".")[2], made[part]) for part in parts)
        state["_non_persistent_buffers_set"] = set()
        change(path, state)
        if module["class"] == "torch.nn.modules.sparse.Embedding":
            made[path] = nn.Embedding.from_pretrained(state["_parameters"]["weight"])
        else:
            made[path] = Persistent(module["class"], state)
    return made[""]


def checkpoint(network: object, protocol: int = 4, discriminator: object = None) -> bytes:
    kwargs = EasyDict(path="images.zip", resolution=32)
    return dumped({"G": network, "D": discriminator, "G_ema": network, "training_set_kwargs": kwargs}, protocol)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        (tmp_path / "network.pkl").write_bytes(content)
        return tmp_path / "network.pkl"

    return write


Save = Callable[[bytes], Path]


@cache
def content(name: str) -> bytes:
    return checkpoint(network(name))


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_gives_what_the_official_code_gave(save: Save, name: str, protocol: int) -> None:
    generator = load_stylegan(save(checkpoint(network(name), protocol)))
    v = {key: torch.from_numpy(vectors(name)[key]) for key in vectors(name) if key in ("z", "labels", "w", "x")}
    torch.testing.assert_close(generator.mapping(v["z"], v.get("labels")), v["w"], rtol=1e-4, atol=1e-6)
    shown = (v["x"] + 1) * 127.5 if name == "xl" else v["x"] * 127.5 + 128
    torch.testing.assert_close(generator.synthesise(v["w"]), shown.clamp(0, 255) / 255, rtol=1e-4, atol=1e-5)


def test_latents_of_a_class_are_those_of_its_embedding(save: Save) -> None:
    generator = load_stylegan(save(content("xl")))
    assert isinstance(generator, ConditionalGenerator)
    labels = torch.arange(generator.classes)
    torch.manual_seed(3)
    latents = generator.class_latents(labels)
    torch.manual_seed(3)
    assert torch.equal(latents, generator.mapping(torch.randn(len(labels), generator.mapping.z_dim), labels))
    assert load_stylegan(save(content("t"))).classes == 0


def test_is_an_image_generator(save: Save) -> None:
    path = save(content("t"))
    generator = load_generator(str(path))
    assert isinstance(generator, ImageGenerator)
    assert generator is load_generator(str(path))
    torch.manual_seed(3)
    latents = generator.sample_latents(6)
    torch.manual_seed(3)
    assert torch.equal(latents, generator.sample_latents(6))
    assert latents.shape == (6, generator.latent_dim) == (6, 8)
    images = generator.synthesise(latents.requires_grad_())
    assert images.shape == (6, 3, 32, 32)
    assert not images.requires_grad
    assert 0 <= images.min() < images.max() <= 1
    for i in range(6):  # whatever else is in the batch
        torch.testing.assert_close(generator.synthesise(latents[i : i + 1])[0], images[i], rtol=1e-4, atol=1e-5)
    assert generator.synthesise(latents[:0]).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("shape", [(2, 7), (8,), (2, 7, 8)])
def test_refuses_latents_of_another_size(save: Save, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"\(n, 8\)"):
        load_stylegan(save(content("t"))).synthesise(torch.zeros(shape))


def test_draws_classes_uniformly(save: Save) -> None:
    generator = load_stylegan(save(content("xl")))
    torch.manual_seed(0)
    z = torch.randn(2000, 4)
    by_class = torch.stack([generator.mapping(z, torch.full((2000,), label)).mean(0) for label in range(6)])
    w = generator.sample_latents(6000)
    assert (w.mean(0) - by_class.mean(0)).abs().max() < 5 * w.std(0).max() / 2000**0.5
    assert by_class.std(0).max() > 5 * w.std(0).max() / 2000**0.5  # the classes differ enough to tell


# What is in a file never runs.


class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def touch(marker: Path) -> Call:
    return Call(os.system, f"touch {marker}")


ATTACKS: dict[str, Callable[[Path], Call]] = {
    "posix.system": touch,
    "builtins.eval": lambda marker: Call(eval, f"__import__('pathlib').Path({str(marker)!r}).touch()"),
    "builtins.exec": lambda marker: Call(exec, f"__import__('pathlib').Path({str(marker)!r}).touch()"),
    "subprocess.check_output": lambda marker: Call(subprocess.check_output, ["touch", str(marker)]),
    "a storage": lambda marker: Call(torch.storage._load_from_bytes, pickle.dumps(touch(marker))),
    "a parameter": lambda marker: Call(torch._utils._rebuild_parameter, torch.zeros(1), touch(marker), {}),
}


@pytest.mark.skipif(os.name != "posix", reason="the attacks are commands of Unix")
@pytest.mark.parametrize("place", ["network", "discriminator", "attribute"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_is_refused(save: Save, tmp_path: Path, attack: str, place: str) -> None:
    marker = tmp_path / "marker"
    evil = ATTACKS[attack](marker)
    parts: dict[str, object] = {"network": network("t"), "discriminator": None, place: evil}
    if place == "attribute":
        parts = {"network": Persistent("Generator", {"attribute": evil})}
    with pytest.raises(UserError, match=f"{attack if '.' in attack else 'posix.system'}.*nothing was run") as caught:
        load_stylegan(save(checkpoint(**parts)))
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    with suppress(Exception):
        pickle.loads(pickle.dumps(evil))  # a real attack: this does run it
    assert marker.exists()


def test_sources_and_names_in_known_packages_are_not_run(save: Save, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    source = f"open({str(marker)!r}, 'w')"
    held = read_pickle(
        save(dumped({"G_ema": Persistent("Generator", {"a": Call(setattr, nn.Module, "b", 1)}, source)}))
    )
    assert held["G_ema"].name == "Generator"
    assert isinstance(held["G_ema"].state["a"], Record)
    # torch.serialization imports os: a name with a dot reaches it
    reached = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93X" + text(f"touch {marker}") + b"\x85R."
    assert read_pickle(save(reached)).name == "torch.serialization.os.system"
    assert not marker.exists()
    assert not hasattr(nn.Module, "b")
    pickle.loads(reached)
    assert marker.exists()


def text(string: str) -> bytes:
    return struct.pack("<I", len(string)) + string.encode()


# Any other file is answered with one line.

STORED = nn.Parameter(torch.arange(3.0)).data


def zipped() -> bytes:
    stream = io.BytesIO()
    torch.save({"G_ema": STORED}, stream)
    return stream.getvalue()


def legacy() -> bytes:
    stream = io.BytesIO()
    torch.save({"G_ema": STORED}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


OTHER: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "pickle"),
    "text": (b"G_ema: none\n", "not a pickle"),
    "torch.save": (zipped(), "not a pickle"),
    "torch.save of old": (legacy(), "G_ema"),
    "safetensors": (safetensors.torch.save({"G_ema": STORED}), "not a pickle"),
    "protocol 0": (pickle.dumps({"G_ema": None}, 0), "not a pickle"),
    "a list": (pickle.dumps([1]), "G_ema"),
    "no G_ema": (pickle.dumps({"G": 1}), "G_ema"),
    "no network": (pickle.dumps({"G_ema": torch.zeros(3)}), "G_ema"),
    "state": (pickle.dumps({"G_ema": nn.Linear(2, 2)}), "mapping"),
    "TensorFlow": (b"\x80\x03cdnnlib.tflib.network\nNetwork\n.", "TensorFlow"),
    "other classes": (pickle.dumps({"G_ema": Path()}), "pathlib"),
    "no end": (b"\x80\x04", "damaged"),
    "too few values": (b"\x80\x04\x86.", "damaged"),
    "no such value": (b"\x80\x04h\x07.", "damaged"),
    "big-endian": (pickle.dumps({"G_ema": np.arange(3, dtype=">i4")}), "damaged"),
    "objects": (pickle.dumps({"G_ema": np.array([None])}), "damaged"),
}


@pytest.mark.parametrize("kind", OTHER)
def test_other_files_are_refused(save: Save, kind: str) -> None:
    data, reason = OTHER[kind]
    path = save(data)
    with pytest.raises(UserError, match=reason) as caught:
        load_generator(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def drop(part: str, kind: str, key: str) -> Change:
    return lambda module, state: state[kind].pop(key) if module == part else None  # type: ignore[return-value]


def put(part: str, key: str, value: object, kind: str = "") -> Change:
    def change(module: str, state: dict[str, Any]) -> None:
        if module == part:
            (state[kind] if kind else state)[key] = value

    return change


L0 = "synthesis.L0_36_6"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("t", put("", "synthesis", None, "_modules"), "synthesis"),
        ("t", drop("synthesis.input", "_buffers", "freqs"), "freqs"),
        ("t", put("synthesis.input", "transform", torch.eye(3).roll(1, 0), "_buffers"), "transform"),
        ("t", put("synthesis.input", "size", np.array([36, 40])), "square"),
        ("t", put("synthesis", "layer_names", []), "layers"),
        ("t", put("synthesis", "layer_names", ["L9"]), "L9"),
        ("t", put("synthesis", "layer_names", [L0[10:]] * 101), "layers"),
        ("t", put("mapping", "c_dim", 4), "classes"),
        ("t", put("mapping", "num_layers", 10**9), "num_layers"),
        ("t", put("mapping", "w_dim", 9), "shape"),
        ("xl", put("mapping", "c_dim", 7), "7 classes"),
        ("t", put(L0, "weight", torch.zeros(6, 5, 3, 3), "_parameters"), "shape"),
        ("t", put(L0, "up_factor", 4), "centred"),
        ("t", put(L0, "down_factor", 10**6), "down_factor"),
        ("t", put(L0, "padding", [9, 8, 9, 7]), "centred"),
        ("t", put(L0, "padding", [-90, -91, -90, -91]), "size"),
        ("t", put(L0, "padding", [19, 18, 19, 18]), "size"),
        ("t", put(L0, "up_filter", torch.zeros(0), "_buffers"), "up_filter"),
        ("t", put(L0, "conv_clamp", float("nan")), "conv_clamp"),
        ("t", put(L0, "magnitude_ema", "1", "_buffers"), "magnitude_ema"),
    ],
)
def test_networks_of_another_kind_are_refused(save: Save, name: str, change: Change, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        load_stylegan(save(checkpoint(network(name, change))))
    assert "\n" not in str(caught.value)


def test_damage_is_a_user_error_or_harmless(save: Save) -> None:
    whole = content("t")
    rng = np.random.default_rng(0)
    refused = 0
    for end in [*range(1, 8), *rng.integers(0, len(whole), 20)]:
        with pytest.raises(UserError):
            load_stylegan(save(whole[:end]))
    for at in rng.integers(0, len(whole), 30):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.integers(8)
        try:
            load_stylegan(save(bytes(flipped))).synthesise(torch.zeros(1, 8))
        except UserError:
            refused += 1
    assert 3 < refused < 30  # there is no checksum: a weight may have another value


def view(numbers: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    storage = torch.zeros(numbers)._typed_storage()
    return dumped({"G_ema": Call(torch._utils._rebuild_tensor_v2, storage, 0, size, stride, False, {})})


LIMIT = 10_000  # instructions, in place of the million that takes its time

TUPLES = b"N" + b"2\x86" * 200  # a pair of the same pair of the same pair ...: 2^200 items to whoever walks through

BOMBS: dict[str, Callable[[], bytes]] = {
    "a far memo": lambda: b"\x80\x04Nr\xff\xff\xff\x7f.",
    "long bytes": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"....",
    "instructions": lambda: b"\x80\x04" + b"\x8f" * (LIMIT) + b".",
    "a wide tensor": lambda: view(1, (10**6, 10**6), (0, 0)),
    "a tensor beyond its storage": lambda: view(4, (4,), (2,)),
    "tuples as a key": lambda: b"\x80\x04}" + TUPLES + b"Ns.",
    "tuples as a name": lambda: b"\x80\x04" + TUPLES + b"\x8c\x01a\x93.",
    "tuples as an attribute": lambda: b"\x80\x04cnumpy\ndtype\n" + TUPLES + b"\x85R.",
    "tuples as a storage": lambda: b"\x80\x04ctorch.storage\n_load_from_bytes\n" + TUPLES + b"\x85R.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_at_little_cost(save: Save, bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fewbytes.base.pickles.INSTRUCTIONS", LIMIT)
    path = save(BOMBS[bomb]())
    tracemalloc.start()
    with pytest.raises(UserError):
        load_stylegan(path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_a_storage_is_held_once(save: Save) -> None:
    _, (payload,) = torch.arange(1000.0)._typed_storage().__reduce__()
    held = read_pickle(save(dumped([Call(torch.storage._load_from_bytes, payload) for _ in range(50)])))
    assert len({tensor.data_ptr() for tensor in held}) == 1
    assert torch.equal(held[0], torch.arange(1000.0))
