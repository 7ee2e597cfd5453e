"""Object detection: data in COCO's format, YOLOX, average precision, and federated runs of all three."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import MemoryGrid
from modules import needs
from PIL import Image, ImageDraw
from runs import fingerprint

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.cli import app as cli
from fewbytes.core import detection
from fewbytes.core.gallery import kept
from fewbytes.core.training import fit
from fewbytes.data import Dataset, Partition, federate, load_dataset
from fewbytes.data.coco import letter_boxed
from fewbytes.experiments.settings import make_experiment, make_method
from fewbytes.experiments.tasks import find
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.models import build_model
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

needs("yolox")

SIZE = 64
COLOURS = {3: (220, 30, 30), 7: (30, 60, 230)}  # of the rectangles of each category


def write(folder: Path, train: int = 12, test: int = 4) -> Path:
    """Images of 128 x 96 pixels with a large red rectangle and a smaller blue one, categories 3 and 7."""
    rng = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("train", train), ("val", test)):
        (folder / split).mkdir()
        images, annotations = [], []
        for i in range(count):
            image = Image.new("RGB", (128, 96), (40, 40, 40))
            images.append({"id": i + 5, "file_name": f"{i}.png", "width": 128, "height": 96})
            for category, low in ((7, 26), (3, 40)):
                width, height = (int(n) for n in rng.integers(low, low + 10, 2))
                left, top = int(rng.integers(128 - width)), int(rng.integers(96 - height))
                corners = (left, top, left + width - 1, top + height - 1)
                ImageDraw.Draw(image).rectangle(corners, fill=COLOURS[category])
                box = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
                annotations.append({"id": len(annotations), "image_id": i + 5, "category_id": category, **box})
            image.save(folder / split / f"{i}.png")
        categories = [{"id": 7, "name": "blue"}, {"id": 3, "name": "red"}]
        file = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(file))
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "coco")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEWBYTES_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_dataset(f"coco:{write(tmp_path_factory.mktemp('data') / 'coco')}", SIZE)


def task(data: Dataset, clients: int = 2) -> fb.Task:
    return fb.Task.on(federate(data, Partition("iid", clients)), lambda: build_model("yolox-nano", (3, SIZE, SIZE), 2))


def true_boxes(data: fb.data.Split) -> list[torch.Tensor]:
    """The ground truth as a perfect detector's output."""
    perfect = []
    for targets in data.targets:
        objects = targets[targets.any(1)]
        centre, half = objects[:, 1:3], objects[:, 3:] / 2
        perfect.append(torch.cat([centre - half, centre + half, torch.ones(len(objects), 1), objects[:, :1]], 1))
    return perfect


# ---- data ----


def test_images_boxes_and_labels_are_read(data: Dataset) -> None:
    assert (len(data.train), len(data.test), data.classes) == (12, 4, ("red", "blue"))
    assert data.train.shape == (3, SIZE, SIZE)
    assert data.train.labels.tolist() == [0] * 12  # the larger rectangle is red
    x, targets = data.train.take([7]).load()
    assert targets.shape == (1, 2, 5)
    for category, cx, cy, width, height in targets[0].tolist():
        inside = x[0, :, int(cy - height / 2) + 2 : int(cy + height / 2) - 1, int(cx - width / 2) + 2 : int(cx)]
        wanted = torch.tensor(list(COLOURS.values())[int(category)]) / 255
        if not category:  # red is drawn last
            assert torch.allclose(inside, wanted.view(3, 1, 1).expand_as(inside), atol=0.01)


def test_letter_box_keeps_proportions_and_the_corner() -> None:
    image = Image.new("RGB", (100, 50), (255, 0, 0))
    pixels = letter_boxed(image, 64)
    assert (pixels[0, :32] == 255).all()
    assert (pixels[:, 32:] == 114).all()


def test_second_load_decodes_nothing_until_an_image_changes(folder: Path) -> None:
    first = load_dataset(str(folder), SIZE)
    Image.new("RGB", (128, 96), "white").save(folder / "train" / "0.png")
    os.utime(folder / "train" / "0.png", (1, 1))
    assert load_dataset(str(folder), SIZE).train.x[0, 0, 0, 0] == 255 != first.train.x[0, 0, 0, 0]
    cached = sorted((Path(os.environ["FEWBYTES_CACHE"])).iterdir())
    for path in cached:  # whatever lies there is taken, so nothing is decoded
        content = np.load(path)
        np.save(path, np.full_like(content, 7))
    assert (load_dataset(str(folder), SIZE).train.x == 7).all()
    cached[0].write_bytes(cached[0].read_bytes()[:1000])
    assert (load_dataset(str(folder), SIZE).test.x != 8).all()


def test_crowds_flat_boxes_and_empty_images(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def changed(file: dict[str, Any]) -> None:
        file["annotations"][0]["iscrowd"] = 1
        file["annotations"][3]["bbox"][2] = 0
        del file["annotations"][4:6]
        file["annotations"][4]["bbox"] = [120, 90, 8.5, 6.5]  # out of the image by rounding

    for split in ("train", "val"):
        edit(folder, changed, split)
    data = load_dataset(str(folder), SIZE)
    assert (len(data.train), len(data.test)) == (11, 4)
    assert data.test.labels.tolist() == [0, 1, -1, 0]
    assert [int(targets.any(1).sum()) for targets in data.test.targets] == [1, 1, 0, 2]
    assert data.test.targets[3, 0].tolist() == [1, 62, 46.5, 4, 3]
    assert "boxes of no area are left out: 1" in caplog.text
    assert detection.average_precision(true_boxes(data.test), data.test)["mAP"] == pytest.approx(1)


def test_coco_2017_as_it_is_downloaded(folder: Path) -> None:
    plain = load_dataset(str(folder), SIZE)

    def as_published(file: dict[str, Any]) -> None:
        file["info"], file["licenses"] = {"year": 2017}, [{"id": 1, "name": "a licence"}]
        for image in file["images"]:
            image |= {"license": 1, "coco_url": "http://images.cocodataset.org/x.jpg", "date_captured": "2013-11-14"}
        for annotation in file["annotations"]:
            annotation["segmentation"] = [[1.0, 2.0, 3.5, 2.0, 3.5, 4.0]]
        crowd = {"segmentation": {"counts": [272, 2, 4], "size": [96, 128]}, "iscrowd": 1, "area": 600}
        file["annotations"].append({**file["annotations"][0], **crowd, "bbox": [10.5, 20.25, 30.0, 20.0], "id": 9001})
        file["categories"] = [{**category, "supercategory": "thing"} for category in file["categories"]]

    for split in ("train", "val"):
        edit(folder, as_published, split)
        annotations = folder / "annotations"
        (annotations / f"instances_{split}.json").rename(annotations / f"instances_{split}2017.json")
        for other in ("captions", "person_keypoints"):
            (annotations / f"{other}_{split}2017.json").write_text("{}")
        (folder / split).rename(folder / f"{split}2017")
    data = load_dataset(str(folder), SIZE)
    assert data.classes == plain.classes
    for ours, theirs in ((data.train, plain.train), (data.test, plain.test)):
        assert np.array_equal(ours.x, theirs.x)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.targets, theirs.targets)
    assert data.test.learnt is not None
    assert data.test.learnt.truth is not None
    assert [o["iscrowd"] for o in data.test.learnt.truth["annotations"]].count(1) == 1
    assert detection.average_precision(true_boxes(data.test), data.test)["mAP"] == pytest.approx(1)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], split: str = "train") -> None:
    path = folder / "annotations" / f"instances_{split}.json"
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "outside": (lambda f: f["annotations"][0].update(bbox=[120, 10, 20, 20]), "lies outside the image, 128 x 96"),
    "left of it": (lambda f: f["annotations"][0].update(bbox=[-3, 10, 20, 20]), "lies outside"),
    "negative": (lambda f: f["annotations"][0].update(bbox=[20, 10, -5, 20]), "not left, top, width and height"),
    "three numbers": (lambda f: f["annotations"][0].update(bbox=[20, 10, 5]), "not in COCO's format"),
    "no number": (lambda f: f["annotations"][0].update(bbox=[20, 10, "a", 5]), "not in COCO's format"),
    "category": (lambda f: f["annotations"][0].update(category_id=4), "of category 4, which the file does not list"),
    "image": (lambda f: f["annotations"][0].update(image_id=99), "of image 99, which the file does not list"),
    "twice": (lambda f: f["images"][1].update(id=5), "two images or two categories of one id"),
    "sizeless": (lambda f: f["images"][1].update(width=0), r"image 1\.png is 0 x 96 pixels large"),
    "another size": (lambda f: f["images"][1].update(width=129), "is 128 x 96 pixels large, .* says 129 x 96"),
    "no file": (lambda f: f["images"][1].update(file_name="x.png"), r"lists x\.png, which is not in"),
    "no images": (lambda f: f.update(images=[], annotations=[]), "has no images"),
    "no objects": (lambda f: f.update(annotations=[]), "has no images with objects"),
    "no categories": (lambda f: f.pop("categories"), "missing required field `categories`"),
    "other categories": (lambda f: f["categories"].append({"id": 9, "name": "x"}), "other categories than"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_annotations_end_in_one_line(folder: Path, case: str) -> None:
    change, words = BAD[case]
    edit(folder, change)
    with pytest.raises(UserError, match=words) as error:
        load_dataset(str(folder), SIZE)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_what_is_missing_or_damaged_ends_in_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "val" / "2.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"val/2\.png .*readable"):
        load_dataset(str(folder), SIZE)
    (folder / "annotations" / "instances_val.json").write_bytes(b'{"images": [')
    with pytest.raises(UserError, match=r"instances_val\.json .*truncated"):
        load_dataset(str(folder), SIZE)
    (folder / "annotations" / "instances_val.json").unlink()
    with pytest.raises(UserError, match=r"instances_test\*\.json or instances_val\*\.json"):
        load_dataset(str(folder), SIZE)
    with pytest.raises(UserError, match="no such folder"):
        load_dataset(f"coco:{tmp_path / 'nothing'}")
    with pytest.raises(UserError, match=r"multiple of 32 .*not 100"):
        load_dataset(str(folder), 100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no instances_train\*\.json"):
        load_dataset(f"coco:{tmp_path / 'empty'}")


@pytest.mark.skipif("FEWBYTES_DATA" not in os.environ, reason="needs FEWBYTES_DATA with bccd")
def test_bccd() -> None:
    data = load_dataset("bccd", 96)
    assert (len(data.train), len(data.test), data.classes) == (205, 72, ("RBC", "WBC", "Platelets"))
    counts = [split.targets[split.targets.any(2)][:, 0].int().bincount().tolist() for split in (data.train, data.test)]
    assert counts == [[2381, 214, 209], [805, 71, 69]]


# ---- scores ----


def test_perfect_detections_score_one_none_score_nothing(data: Dataset) -> None:
    perfect = true_boxes(data.test)
    scores = detection.average_precision(perfect, data.test)
    assert set(scores) == {"mAP", "AP50", "AP75", "APM"}  # no rectangle is small or large
    assert scores == pytest.approx(dict.fromkeys(scores, 1))
    none = detection.average_precision([torch.zeros(0, 6)] * 4, data.test)
    assert none == dict.fromkeys(scores, 0)


def test_boxes_off_by_a_fifth_count_at_the_lower_overlap_only(data: Dataset) -> None:
    shifted = true_boxes(data.test)
    for boxes in shifted:
        boxes[:, :4:2] += 0.2 * (boxes[:, 2:3] - boxes[:, :1])  # an overlap of 0.8 / 1.2
    scores = detection.average_precision(shifted, data.test)
    assert (scores["AP50"], scores["AP75"]) == pytest.approx((1, 0))
    some = data.test.take([2, 0])
    assert detection.average_precision([true_boxes(some)[0], torch.zeros(0, 6)], some)["mAP"] == pytest.approx(
        0.5, abs=0.01
    )


# ---- model ----


def test_training_lowers_the_loss_and_leaves_the_packages_state(data: Dataset) -> None:
    from yolox.config import YoloxConfig

    torch.manual_seed(0)
    model = build_model("yolox-nano", (3, SIZE, SIZE), 2)
    config = YoloxConfig.get_named_config("yolox-nano")
    config.num_classes = 2
    assert list(model.state_dict()) == list(config.get_model().state_dict())
    x, y = data.train.load()
    losses = [fit(model, x, y, fb.Local(epochs=2, lr=0.003, batch=2, momentum=0.9)) for _ in range(3)]
    assert losses[-1] < 0.95 * losses[0]
    lazy = data.train.lazy()[0]
    assert torch.equal(lazy[torch.tensor([3, 1])], x[[3, 1]])
    assert torch.equal(lazy[2:5], x[2:5])
    found = detection.detections(model, data.test)
    assert len(found) == 4
    assert all(boxes.shape[1] == 6 for boxes in found)


def test_weights_follow_the_seed() -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build_model("yolox-nano", (3, SIZE, SIZE), 2).state_dict()["backbone.lateral_conv0.conv.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_diverged_training_is_told(data: Dataset) -> None:
    model = build_model("yolox-nano", (3, SIZE, SIZE), 2)
    x, y = data.train.load()
    with pytest.raises(UserError, match=r"diverged.* lr"):
        fit(model, x, y, fb.Local(epochs=5, lr=1e6, batch=4))


def test_missing_packages_are_told(monkeypatch: pytest.MonkeyPatch, data: Dataset) -> None:
    for name in ("yolox.config", "pycocotools.coco"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install 'fewbytes\[detection\]'"):
        build_model("yolox-s", (3, SIZE, SIZE), 2)
    with pytest.raises(UserError, match=r"pip install 'fewbytes\[detection\]'"):
        detection.average_precision([], data.test)


# ---- runs ----


def test_command_line_trains_scores_draws_and_reports(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", "fedavg", "--dataset", f"coco:{folder}", "--image-size", "64", "--model", "yolox-nano"]
    arguments += ["--clients", "2", "--partition", "iid", "--rounds", "2", "--set", "batch=4", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["fewbytes", *arguments, "--out", str(tmp_path / "runs"), "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["score"]["metric"], result["score"]["kind"]) == ("mAP", "global")
    assert set(result["further"]) == {"AP50", "AP75", "APM", "APL"}
    assert (result["image_size"], result["majority_class_accuracy"]) == (64, {})
    assert "warn" not in printed.err.lower()
    [run] = (tmp_path / "runs").iterdir()
    assert [(t, name) for t, name, _, _ in kept(run)] == [(2, "detections")]
    page = (run / "report.html").read_text()
    assert "images 1 to 4" in page
    assert "White: the true boxes." in page
    assert "0.0% global mAP and" in page


def test_flower_is_the_local_engine(data: Dataset, tmp_path: Path) -> None:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    method, settings = make_method("fedavg", {"batch": 6, "lr": 0.01}), Settings(rounds=1, out=tmp_path / "flower")
    fb.run(method, task(data), rounds=1, workers=1, out=tmp_path / "local")
    grid = MemoryGrid(client_app(method, task(data), tmp_path), 2)
    serve_run(
        grid,
        Run.of(method, task(data), settings, fb.Policy(round_timeout=60, connect_timeout=60)),
        (),
        exchange=Exchange(poll=0.001),
    )
    assert fingerprint(tmp_path / "flower") == fingerprint(tmp_path / "local")


def test_pictures_show_true_and_found_boxes(data: Dataset) -> None:
    images, labels = detection.drawn([torch.zeros(0, 6), *true_boxes(data.test)[1:]], data.test, data.classes)
    assert labels == ["images 1 to 4"] * 4
    white = [int((image == 255).all(0).sum()) for image in images]
    assert white[0] > 100  # the true boxes
    assert all(int((image[0] == 255).sum()) > n for image, n in zip(images[1:], white[1:], strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "cnn4"}, "detector, .*not cnn4"),
        ({"augment": "crop-flip"}, "boxes"),
        ({"model": "yolox-nano@64"}, "no Linear"),
        ({"image_size": 48}, "multiple of 32"),
    ],
)
def test_settings_that_do_not_fit_are_told(folder: Path, settings: dict[str, Any], words: str) -> None:
    experiment = make_experiment(
        {"method": "fedavg", "dataset": str(folder), "image_size": SIZE, "model": "yolox-nano", "clients": 2}
        | {"partition": "iid"}
        | settings
    )
    with pytest.raises(UserError, match=words):
        find(experiment)


def test_detectors_need_boxes() -> None:
    with pytest.raises(UserError, match="colour images"):
        find(make_experiment({"method": "fedavg", "model": "yolox-nano"}))


@pytest.mark.parametrize("method", ["genefl", "feddf", "ensemble", "fedproto", "feddistill", "fml"])
def test_methods_for_classes_refuse_boxes(data: Dataset, method: str) -> None:
    parameters = {"clusters": 1} if method == "genefl" else {}
    with pytest.raises(UserError, match=r"detectors|no features|logits"):
        fb.run(make_method(method, parameters), task(data), rounds=1, workers=1)
