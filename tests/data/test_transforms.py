"""Random transforms of training samples: what they do to an image, and that they change nothing else."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import opened
from commands import fewbytes
from PIL import Image
from runs import fingerprint
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.core.training import fit
from fewbytes.data import (
    ClientData,
    Dataset,
    FederatedData,
    Split,
    chain,
    crop_flip,
    flip_rotate15_crop,
    rotate20_flip,
    stamp_shapes,
    with_transforms,
)
from fewbytes.data.transforms import COLOURS, SHAPES, draw_shapes
from fewbytes.experiments import loading
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.models import build_model

FORMATS = (torch.channels_last, torch.contiguous_format)
LOCAL = {"epochs": 2, "lr": 0.05, "batch": 8}


def images(n: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Images without any colour of a shape: values strictly between those of 8 bits."""
    g = torch.Generator().manual_seed(0)
    return (torch.randint(255, (n, channels, height, width), generator=g) + 0.5) / 255


def image_data(clients: int = 3) -> FederatedData:
    def split(n: int) -> Split:
        return Split(images(n, height=16, width=16), torch.arange(n) % 3)

    return FederatedData(tuple(ClientData(split(20 + i), split(6)) for i in range(clients)), split(9), ("a", "b", "c"))


def small_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))


# Augmentation ---------------------------------------------------------------------------------------------------------


def test_crop_flip_gives_every_crop_of_the_padded_image_and_its_mirror_image_equally_often() -> None:
    torch.manual_seed(0)
    x = images(1800, height=8, width=12)
    before = x.clone()
    got = crop_flip(x, torch.zeros(1800, dtype=torch.long))
    assert torch.equal(x, before)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    found = torch.zeros(1800)
    for top in range(3):
        for left in range(3):
            crop = padded[:, :, top : top + 8, left : left + 12]
            for expected in (crop, crop.flip(3)):
                equal = (got == expected).flatten(1).all(1)
                assert 60 < equal.sum() < 140  # 100 are expected
                found += equal
    assert found.eq(1).all()


@pytest.mark.parametrize(("side", "pad"), [(64, 4), (32, 4), (28, 3), (8, 1), (4, 0)])
def test_padding_of_a_crop_is_four_pixels_and_less_on_small_images(side: int, pad: int) -> None:
    torch.manual_seed(0)
    got = crop_flip(torch.ones(500, 1, side, side), torch.zeros(500, dtype=torch.long))
    assert got.sum((1, 2, 3)).min() == (side - pad) ** 2
    assert got.sum((1, 2, 3)).max() == side**2


def angles(x: Tensor) -> Tensor:
    """Of images (n, 1, side, side) of a bright bar on black, by how many degrees each bar is turned, clockwise."""
    ys, xs = torch.meshgrid(*(torch.arange(x.shape[2]) - (x.shape[2] - 1) / 2,) * 2, indexing="ij")
    yy, xx, xy = (x[:, 0] * product for product in (ys * ys, xs * xs, xs * ys))
    return torch.rad2deg(torch.atan2(2 * xy.sum((1, 2)), (xx - yy).sum((1, 2))) / 2)


@pytest.mark.parametrize(("transform", "most"), [(flip_rotate15_crop, 15), (rotate20_flip, 20)])
def test_images_are_turned_by_up_to_so_many_degrees_both_ways_alike(transform: Any, most: int) -> None:
    torch.manual_seed(0)
    bars = torch.zeros(2000, 1, 65, 65)
    bars[:, :, 31:34, 10:55] = 1
    turned = angles(transform(bars, torch.zeros(2000, dtype=torch.long)))
    if transform is rotate20_flip:  # a crop may move a bar, but not turn it
        assert turned.abs().max() < most + 0.5
    shares = torch.histc(turned, 4, min=-most, max=most) / 2000
    assert (shares - 0.25).abs().max() < 0.05


def test_turned_images_are_their_own_pixels_about_the_middle_and_black_outside() -> None:
    torch.manual_seed(0)
    x = images(200, height=24, width=40)
    got = rotate20_flip(x, torch.zeros(200, dtype=torch.long))
    for image, before in zip(got, x, strict=True):
        assert set(image.unique().tolist()) <= {0.0, *before.unique().tolist()}
        assert torch.equal(image[:, 11:13, 19:21].sort().values, before[:, 11:13, 19:21].sort().values)
    white = rotate20_flip(torch.ones(200, 1, 24, 40), torch.zeros(200, dtype=torch.long))
    assert 0.8 < white.mean() < 1


def test_images_are_mirrored_half_of_the_time() -> None:
    torch.manual_seed(0)
    x = torch.zeros(1000, 1, 64, 64)
    x[:, :, :, :32] = 1
    for transform in (flip_rotate15_crop, rotate20_flip):
        left = transform(x, torch.zeros(1000, dtype=torch.long))[:, 0, 32, 16]
        assert 430 < left.sum() < 570


# The backdoor's shapes ------------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_shapes_are_fusefls(golden: Any) -> None:
    vectors = golden("fusefl/backdoor_shapes")
    assert vectors["label_to_shape"].tolist() == list(SHAPES)
    assert vectors["colors"].tolist() == list(COLOURS)
    for number, case in enumerate(json.loads(str(vectors["meta_json"]))["cases"]):
        expected = torch.from_numpy(vectors[f"case{number}/images_u8"]).permute(0, 3, 1, 2)
        n = len(expected)
        colours = torch.full((n,), COLOURS.index(case["color"]))
        left, top = (torch.full((n,), place) for place in case["location"])
        dark, bright = (
            draw_shapes(torch.full(expected.shape, level), torch.arange(n), colours, left, top, case["size"])
            for level in (0.0, 1.0)
        )
        drawn, mask = (dark == bright).all(1), torch.from_numpy(vectors[f"case{number}/mask"])
        for i, shape in enumerate(SHAPES):
            overlap = (drawn[i] & mask[i]).sum() / (drawn[i] | mask[i]).sum()
            assert overlap >= 0.9, (case, shape, overlap)
        both = (drawn & mask)[:, None].expand_as(dark)
        assert torch.equal(dark[both], (expected.float() / 255)[both])


def stamped(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(x with shapes, where they are)."""
    got = stamp_shapes(x, labels)
    return got, (got != x).any(1)


def test_the_label_decides_the_shape() -> None:
    torch.manual_seed(0)
    labels = torch.arange(200) % 20
    _, where = stamped(images(200, height=64, width=64), labels)  # no shape reaches the border
    seen: dict[int, set[tuple[Any, ...]]] = {}
    for label, mask in zip((labels % 10).tolist(), where, strict=True):
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        box = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        seen.setdefault(label, set()).add((box.shape, tuple(box.flatten().tolist())))
    assert all(len(boxes) == 1 for boxes in seen.values())
    assert len(set().union(*seen.values())) == 10


def test_colours_and_corners_are_uniform() -> None:
    torch.manual_seed(0)
    n = 4600
    got, where = stamped(images(n), torch.full((n,), 2))  # squares
    top, left = where.any(2).int().argmax(1), where.any(1).int().argmax(1)
    for corner in (top, left):
        counts = torch.bincount(corner)
        assert len(counts) == 23
        assert 140 < counts.min() < counts.max() < 260  # 200 are expected
    assert torch.equal(where.sum((1, 2)), (32 - top).clamp(max=11) * (32 - left).clamp(max=11))
    colours = [tuple(got[i, :, top[i], left[i]].mul(255).round().int().tolist()) for i in range(n)]
    counts = {colour: colours.count(colour) for colour in colours}
    assert set(counts) == {
        (255, 0, 0), (0, 0, 255), (0, 128, 0), (255, 255, 0), (128, 0, 128), (255, 165, 0), (255, 192, 203),
        (165, 42, 42), (0, 0, 0), (128, 128, 128),
    }  # fmt: skip
    assert 380 < min(counts.values()) < max(counts.values()) < 540  # 460 are expected
    flat = torch.where(where[:, None], got, torch.nan)
    assert torch.equal(flat.nan_to_num(-1).amax((2, 3)), flat.nan_to_num(2).amin((2, 3)))  # one colour all over
    drawn = got[where[:, None].expand_as(got)]
    assert torch.equal(drawn.mul(255).round().div(255), drawn)  # the very floats of an image's 8-bit values


def test_on_small_images_the_corner_leaves_room() -> None:
    torch.manual_seed(0)
    _, where = stamped(images(500, height=11, width=17), torch.full((500,), 2))
    assert where.any(2).int().argmax(1).unique().tolist() == [0, 1]
    assert where.any(1).int().argmax(1).unique().tolist() == list(range(8))


def test_grey_images_get_the_colours_luminance() -> None:
    torch.manual_seed(0)
    got, where = stamped(images(300, channels=1), torch.zeros(300, dtype=torch.long))
    values = got[:, 0][where].mul(255).round().unique().tolist()
    assert {76, 29, 75, 226, 0, 128} <= set(values)  # 0.299 R + 0.587 G + 0.114 B of red, blue, green, yellow, …
    assert len(values) == 10


# What holds for all ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform", [crop_flip, flip_rotate15_crop, rotate20_flip, stamp_shapes, chain(crop_flip, stamp_shapes)]
)
def test_transforms_repeat_from_a_seed_and_leave_their_input_and_its_format(transform: Any) -> None:
    labels = torch.arange(16) % 10
    for channels in (1, 3):
        results = []
        for memory_format in FORMATS:
            x = images(16, channels).contiguous(memory_format=memory_format)
            before = x.clone()
            torch.manual_seed(1)
            first, second = transform(x, labels), transform(x, labels)
            torch.manual_seed(1)
            assert torch.equal(transform(x, labels), first)
            assert not torch.equal(first, second)
            assert torch.equal(x, before)
            assert first.stride() == x.stride()
            assert (first.dtype, first.shape) == (x.dtype, x.shape)
            results.append(first)
        assert torch.equal(*results)


def test_a_chain_crops_first_and_stamps_then() -> None:
    labels = torch.full((300,), 2)
    torch.manual_seed(0)
    got = chain(crop_flip, stamp_shapes)(images(300), labels)
    torch.manual_seed(0)
    assert torch.equal(got, stamp_shapes(crop_flip(images(300), labels), labels))


def test_fit_transforms_every_batch_anew_and_splits_do_not_transform_what_they_load() -> None:
    batches = []

    def spy(x: Tensor, labels: Tensor) -> Tensor:
        batches.append((x.clone(), labels))
        return x + 1

    x, y = torch.arange(10.0)[:, None], torch.arange(10) % 2
    model, seen = nn.Linear(1, 2), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    fit(model, x, y, fb.Local(epochs=2, lr=0.1, batch=4), transform=spy)
    assert [len(labels) for _, labels in batches] == [4, 4, 2] * 2
    assert all(torch.equal(inputs[:, 0].long() % 2, labels) for inputs, labels in batches)
    assert all(torch.equal(got, inputs + 1) for got, (inputs, _) in zip(seen, batches, strict=True))
    split = Split(x, y, transform=spy).take([3, 1]).take([1])
    assert split.transform is spy
    assert split.load()[0].tolist() == [[1.0]]


def test_a_frozen_part_sees_the_transformed_samples_of_every_epoch() -> None:
    torch.manual_seed(0)
    frozen, seen = nn.Identity(), []
    frozen.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x, y = images(8, height=16, width=16), torch.arange(8) % 3
    fit(small_net(), x, y, fb.Local(epochs=3, lr=0.1, batch=8), frozen=frozen, transform=stamp_shapes)
    assert len(seen) == 3
    assert len({tuple(batch.sum((1, 2, 3)).sort().values.tolist()) for batch in seen}) == 3


def test_the_outputs_of_a_clients_samples_are_of_transformed_ones() -> None:
    data = with_transforms(image_data(), backdoor=1)
    poisoned, clean = (opened(fb.Task.on(data, small_net), client, 1, "statistics") for client in (0, 1))
    for site, changed in ((poisoned, True), (clean, False)):
        got, labels = site.outputs(nn.Identity())
        x, y = site.train.load()
        assert torch.equal(labels, y)
        assert (got != x).flatten(1).any(1).tolist() == [changed] * len(y)


def test_batches_reach_a_clients_model_channels_last() -> None:
    data = with_transforms(image_data(), crop_flip, backdoor=1)
    site = opened(fb.Task.on(data, small_net), 0, 1, "train")
    model, seen = site.model(), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    site.fit(model, fb.Local(**LOCAL))
    assert len(seen) == 6
    assert all(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() for x in seen)


def test_only_training_samples_of_the_first_clients_are_backdoored() -> None:
    data = image_data()
    changed = with_transforms(data, backdoor=2)
    assert changed.clients[2] is data.clients[2]
    assert changed.test is data.test
    for client in changed.clients[:2]:
        assert client.test.transform is None
        x, y = client.train.load()
        assert client.train.transform is not None
        assert (client.train.transform(x, y) != x).flatten(1).any(1).all()


@pytest.mark.parametrize(
    "method",
    [fb.FedAvg(**LOCAL), fb.Separate(**LOCAL), fb.FuseFL(blocks=2, ccvr_samples=20, **(LOCAL | {"epochs": 4}))],
)
def test_any_number_of_workers_gives_the_same_run(method: fb.Method, tmp_path: Path) -> None:
    runs = {}
    for name, backdoor, workers in (("one", 2, 1), ("two", 2, 2), ("clean", 0, 1)):
        task = fb.Task.on(
            with_transforms(image_data(), crop_flip, backdoor), lambda: build_model("cnn4", (3, 16, 16), 3)
        )
        fb.run(method, task, rounds=2, out=tmp_path / name, workers=workers)
        runs[name] = fingerprint(tmp_path / name)
    assert runs["one"] == runs["two"]
    assert runs["one"]["models"] != runs["clean"]["models"]
    if isinstance(method, fb.Separate):
        last = "client-2.safetensors"
        assert runs["one"]["models"][last] == runs["clean"]["models"][last]  # a clean client's run is its own


def test_a_run_goes_on_with_its_own_transforms_only(tmp_path: Path) -> None:
    def task(*given: Any) -> fb.Task:
        return fb.Task.on(with_transforms(image_data(), *given), small_net)

    fb.run(fb.FedAvg(**LOCAL), task(crop_flip, 1), rounds=1, out=tmp_path / "run", workers=1)
    for given in ((), (crop_flip,), (None, 1), (crop_flip, 2)):
        with pytest.raises(UserError, match="another configuration"):
            fb.run(fb.FedAvg(**LOCAL), task(*given), rounds=1, out=tmp_path / "run", resume=True)
    fb.run(fb.FedAvg(**LOCAL), task(crop_flip, 1), rounds=1, out=tmp_path / "run", resume=True)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def spots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a data set of 36 images 16 x 16, named spots."""
    for c in range(3):
        place = tmp_path / "spots" / "train" / str(c)
        place.mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (16, 16), (80 * c, 5 * i, 7)).save(place / f"{i}.png")
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path))
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))
    return tmp_path


SPOTS = {"method": "fedavg", "dataset": "spots", "partition": "iid", "clients": 3, "model": "mlp"}


def test_settings_say_who_gets_which_transform_and_are_told_only_if_not_the_defaults(spots: Path) -> None:
    made = find(make_experiment({**SPOTS, "augment": "crop-flip", "backdoor": 1}))
    task = made.task
    names = [getattr(client.train.transform, "__qualname__", None) for client in task.data.clients]
    assert names == ["chain(crop_flip, stamp_shapes)", "chain(crop_flip)", "chain(crop_flip)"]
    assert 'augment = "crop-flip"\nbackdoor = 1\n' in made.experiment.toml()
    assert made.about().items() >= {"augment": "crop-flip", "backdoor": 1}.items()
    default = find(make_experiment({**SPOTS, "augment": "none", "backdoor": 0}))
    assert not {"augment", "backdoor"} & {*default.experiment.settings(), *default.about()}
    assert all(client.train.transform is None for client in default.task.data.clients)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"backdoor": 4}, "backdoor .*0 to 3 .*not 4"),
        ({"backdoor": -1}, "backdoor .*0 to 3 .*not -1"),
        ({"backdoor": "some"}, "backdoor"),
        (
            {"augment": "crop_flip"},
            "augment .*none, crop-flip, .*, not 'crop_flip'",
        ),
        ({"dataset": "digits", "backdoor": 1}, "backdoor .*11 x 11 .*8 x 8"),
        ({"dataset": "flat", "backdoor": 1}, r"backdoor needs images .*\(5,\)"),
        ({"dataset": "flat", "augment": "crop-flip"}, r"crop-flip needs images .*\(5,\)"),
        ({"dataset": "four channels", "backdoor": 1}, "1 or 3 channels, .*4"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    given: dict[str, Any], says: str, spots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"flat": torch.rand(30, 5), "four channels": torch.rand(30, 4, 16, 16)}
    if given.get("dataset") in made:
        split = Split(made[given["dataset"]], torch.arange(30) % 3)
        monkeypatch.setattr(loading, "load_dataset", lambda name, *_: Dataset(name, split, split, ("a", "b", "c")))
    with pytest.raises(UserError, match=says) as caught:
        find(make_experiment({**SPOTS, **given}))
    assert "\n" not in str(caught.value)


def test_digits_are_cropped_and_mirrored(spots: Path) -> None:
    task = find(make_experiment({**SPOTS, "dataset": "digits", "augment": "crop-flip"})).task
    x, y = task.data.clients[0].train.load()
    transform = task.data.clients[0].train.transform
    assert transform is not None
    assert transform(x, y).shape == x.shape == (len(y), 1, 8, 8)


def test_a_client_whose_data_lie_elsewhere_needs_no_images() -> None:
    x, y = images(4), torch.arange(4)
    task = fb.Task.of(small_net, [None, ((x, y), (x, y))])
    first, second = with_transforms(task.data, crop_flip, backdoor=2).clients
    assert first.train.transform is None
    assert second.train.transform is not None


def test_options_of_the_command_line_and_what_a_run_is_resumed_with(spots: Path) -> None:
    run_here = functools.partial(fewbytes, "run", "--workers", "1", cwd=spots)

    (spots / "spots.toml").write_text("".join(f'{k} = "{v}"\n' for k, v in SPOTS.items() if k != "clients"))
    with_config = ["-c", "spots.toml", "--clients", "3", "--rounds", "1"]
    done = run_here(*with_config, "--augment", "crop-flip", "--backdoor", "2")
    assert done.returncode == 0, done.stderr
    (run,) = (spots / "runs").glob("[!.]*")
    result = json.loads((run / "result.json").read_text())
    assert (result["augment"], result["backdoor"]) == ("crop-flip", 2)
    other = run_here("--resume", str(run), "--augment", "none")
    assert other.returncode == 2
    assert "another augment ('crop-flip', not 'none')" in " ".join(other.stderr.split())
    assert run_here("--resume", str(run), "--augment", "crop-flip", "--backdoor", "2").returncode == 0
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("backdoor = 2\n", ""))
    assert "another configuration" in run_here("--resume", str(run)).stderr
    (spots / "runs").rename(spots / "earlier")
    assert run_here(*with_config).returncode == 0
    (clean,) = (spots / "runs").iterdir()
    assert not {"augment", "backdoor"} & set(json.loads((clean / "result.json").read_text()))
    assert "backdoor" not in (clean / "config.toml").read_text()
    assert run_here("--resume", str(clean), "--backdoor", "0", "--augment", "none").returncode == 0
    assert run_here("--resume", str(clean), "--backdoor", "1").returncode == 2
