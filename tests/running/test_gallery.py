"""What a method shows people is kept with its run, the same however it ran, and changes nothing else."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, tiny_task
from PIL import Image
from runs import fingerprint

import fewbytes as fb
from fewbytes.core import gallery

ROUNDS = 3
FEDAVG: dict[str, Any] = {"epochs": 1, "lr": 0.1, "batch": 8}


@dataclass(frozen=True)
class Shows(fb.FedAvg):
    """FedAvg that shows an image of the round's number a class, and the classifier's weights as points."""

    name: str = "made"

    def start(self, state, net):
        self.show(state, net, 0)

    def round(self, state, net, t):
        super().round(state, net, t)
        self.show(state, net, t)

    def finish(self, state, net):
        self.show(state, net, 100 + ROUNDS + 1)

    def show(self, state, net, t):
        net.show(self.name, gallery.Images(torch.full((3, 1, 4, 4), t, dtype=torch.uint8), ["a", "b", "a"]))
        net.show("none", gallery.Images(torch.zeros(0, 1, 4, 4, dtype=torch.uint8), []))
        weights = self.global_model(state, net.problem).fc.weight
        panels = {"weights": {"of classes": (weights, torch.arange(3)), "others": (torch.zeros(2, 64), None)}}
        net.show("map", gallery.Points(panels | {"halves": {"of classes": (weights[:, :32], torch.arange(3))}}))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "gallery").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was not stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fb.run(Shows(**FEDAVG), tiny_task(), rounds=ROUNDS, out=folder, workers=1)
    return folder


def test_every_scored_round_leaves_a_file_a_name_and_nothing_else_changes(whole, tmp_path):
    assert set(files(whole)) == {f"{t}-{file}" for t in range(1, ROUNDS + 2) for file in ("made.png", "map.json")}
    fb.run(CASES["fedavg"], tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=1)
    assert not (tmp_path / "run" / "gallery").exists()
    shown, plain = fingerprint(whole), fingerprint(tmp_path / "run")
    assert shown["result"]["parameters"].pop("name") == "made"
    assert {shown["result"].pop("method"), plain["result"].pop("method")} == {"shows", "fedavg"}
    assert (set(shown.pop("gallery")), plain.pop("gallery")) == (set(files(whole)), {})
    assert shown == plain


def test_rounds_that_are_not_scored_leave_none(tmp_path):
    fb.run(Shows(**FEDAVG), tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=1, evaluate_every=2)
    assert {name.split("-")[0] for name in files(tmp_path / "run")} == {"2", "3", "4"}


@pytest.mark.parametrize("stop", [1, ROUNDS])
def test_stopped_and_resumed_it_is_the_same(stop, whole, tmp_path):
    class Stop(fb.Watcher):
        def scored(self, row):
            if row["round"] == stop:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.run(Shows(**FEDAVG), tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=1, watcher=Stop())
    later = tmp_path / "run" / "gallery" / f"{stop + 1}-gone.png"  # as if it had been killed before the checkpoint
    later.write_bytes(b"")
    fb.run(Shows(**FEDAVG), tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=2, resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(whole)
    fb.run(Shows(**FEDAVG), tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=2, resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(whole)


def test_what_cannot_be_written_stops_the_run_before_its_checkpoint(tmp_path):
    class Block(fb.Watcher):
        def scored(self, row):
            (tmp_path / "run" / "gallery" / "2-made.png").mkdir()

    with pytest.raises(OSError, match="2-made"):
        fb.run(Shows(**FEDAVG), tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=1, watcher=Block())
    assert {path.name for path in (tmp_path / "run" / "gallery").iterdir()} == {
        "1-made.png",
        "1-map.json",
        "2-made.png",
    }
    (tmp_path / "run" / "gallery" / "2-made.png").rmdir()
    fb.run(Shows(**FEDAVG), tiny_task(), rounds=2, out=tmp_path / "run", workers=1, resume=True)
    assert {"2-made.png", "2-map.json"} < set(files(tmp_path / "run"))


def test_a_new_run_inherits_no_gallery(tmp_path):
    (tmp_path / "gallery").mkdir()
    with pytest.raises(fb.UserError, match="already holds a gallery"):
        fb.run(Shows(**FEDAVG), tiny_task(), rounds=1, out=tmp_path)


@pytest.mark.parametrize("name", ["", "../made", "a/b", "-a", "A", "a b", "a.png", "é", "a\n", "a" * 65])
def test_a_name_that_is_no_safe_file_name_is_refused_scored_or_not(name, tmp_path):
    with pytest.raises(fb.MethodError, match="pictures are named by"):
        fb.run(Shows(**FEDAVG, name=name), tiny_task(), rounds=3, out=tmp_path / "run", evaluate_every=3)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_sheet_has_a_row_a_label(channels):
    images = torch.randint(0, 256, (5, channels, 6, 4), dtype=torch.uint8)
    with Image.open(io.BytesIO(gallery.Images(images, ["é", "a", "é", "a", "a"]).drawn())) as file:
        pixels, text = np.asarray(file).reshape(12, 12, channels), file.text[gallery.ROWS]
    assert json.loads(text) == {"é": 2, "a": 3}
    for i, (row, column) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]):
        tile = pixels[6 * row : 6 * row + 6, 4 * column : 4 * column + 4]
        assert np.array_equal(tile, images[i].permute(1, 2, 0).numpy())
    assert not pixels[:6, 8:].any()


def test_large_images_are_scaled_down():
    with Image.open(io.BytesIO(gallery.Images(torch.zeros(1, 3, 600, 300, dtype=torch.uint8), ["a"]).drawn())) as file:
        assert file.size == (64, 128)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (torch.zeros(2, 1, 4, 4), ["a", "b"]),
        (torch.zeros(2, 2, 4, 4, dtype=torch.uint8), ["a", "b"]),
        (torch.zeros(4, 4, dtype=torch.uint8), ["a"]),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), ["a"]),
    ],
)
def test_what_is_no_images_and_labels_is_refused(images, labels):
    with pytest.raises(fb.MethodError, match="images to show"):
        gallery.Images(images, labels).drawn()


def test_points_keep_their_distances_in_the_plane_they_lie_in():
    plane = torch.randn(7, 2, dtype=torch.float64)
    points = plane @ torch.linalg.qr(torch.randn(50, 2, dtype=torch.float64))[0].T + 5
    panel = json.loads(
        gallery.Points({"p": {"a": (points[:3], torch.arange(3)), "b": (points[3:].float(), None)}}).drawn()
    )["p"]
    assert (panel["a"]["classes"], panel["b"]["classes"]) == ([0, 1, 2], None)
    flat = torch.tensor([panel["a"][axis] + panel["b"][axis] for axis in "xy"], dtype=torch.float64).T
    assert torch.allclose(torch.cdist(flat, flat), torch.cdist(plane, plane), atol=0.01)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (4, 1), (4, 0), (600, 700)])
def test_any_number_of_points_has_a_map(shape):
    torch.manual_seed(0)
    values = torch.randn(shape)
    once, again = (gallery.Points({"p": {"s": (values, None), "none": (values[:0], None)}}).drawn() for _ in range(2))
    series = json.loads(once)["p"]["s"]
    assert len(series["x"]) == len(series["y"]) == len(values)
    assert once == again
    assert len(once) < 100 + 20 * len(values)


def test_points_that_are_alike_or_not_finite_do_not_stop_a_run():
    values = torch.ones(4, 3)
    values[1, 2], values[3, 0] = torch.nan, torch.inf
    series = json.loads(gallery.Points({"p": {"s": (values, torch.arange(4))}}).drawn())["p"]["s"]
    assert series == {"x": [0.0, 0.0], "y": [0.0, 0.0], "classes": [0, 2]}
    ends = torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]], dtype=torch.float64)
    for size in (1e-320, 1e38, 1e90, 1e300):
        series = json.loads(gallery.Points({"p": {"s": (size * ends, None)}}).drawn())["p"]["s"]
        assert np.isfinite(series["x"] + series["y"]).all()


def test_shares_are_kept_by_row_and_layer():
    rows = {"a": {"conv": torch.tensor([[0.0, 1 / 3]])}, "server": {}}
    assert json.loads(gallery.Shares(rows).drawn()) == {"a": {"conv": [0.0, 0.3333]}, "server": {}}
    for wrong in (1.01, -0.01, torch.nan):
        with pytest.raises(fb.MethodError, match="'conv' in the row 'a'"):
            gallery.Shares({"a": {"conv": torch.tensor([0.5, wrong])}}).drawn()


@pytest.mark.parametrize(
    "points",
    [
        {"s": (torch.zeros(3), None)},
        {"s": (torch.zeros(3, 2), torch.arange(2))},
        {"s": (torch.zeros(3, 2), None), "r": (torch.zeros(3, 4), None)},
    ],
)
def test_what_is_no_points_is_refused(points):
    with pytest.raises(fb.MethodError, match="panel 'p' to show must"):
        gallery.Points({"p": points}).drawn()
