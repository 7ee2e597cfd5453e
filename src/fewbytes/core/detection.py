"""Detection: objects in images, their boxes and classes; scored as COCO does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.core.devices import Precision, arithmetic
from fewbytes.core.gallery import Images
from fewbytes.core.metrics import Measure, Metric, Scores
from fewbytes.core.objective import Objective, Show
from fewbytes.core.training import Loss, prepared, ready
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import LazySamples, Split

CONFIDENCE, OVERLAP = 0.01, 0.65
"""Minimum confidence of detections, and maximum overlap with a better one of the class (YOLOX's values)."""
MEASURES = {"mAP": 0, "AP50": 1, "AP75": 2, "APM": 4, "APL": 5}
"""COCO's: mean over IoU 0.50:0.95, at 0.5, at 0.75, of medium and of large objects; values are COCOeval's indices."""
BATCH = 16  # images
DRAWN, ROW, DRAWN_SIZE = 8, 4, 320  # images, images in a row, pixels a side
DRAWN_CONFIDENCE = 0.3


def _scored_as_coco_does(name: str, predictions: Tensor) -> Measure:
    raise MethodError(f"{name} is of a whole test set: see average_precision")


@dataclass(frozen=True)
class Detection(Objective):
    """Boxes of objects of some classes in images: the detector's own loss; COCO's average precision."""

    metrics: tuple[Metric, ...] = tuple(Metric(name, partial(_scored_as_coco_does, name)) for name in MEASURES)
    classes: tuple[str, ...] = ()

    suits: ClassVar[str] = (
        "objects are found by detectors, such as the model yolox-s, and by methods that train a client's model by its "
        "own loss and use no labels or logits, such as fedavg: choose such a model and method"
    )

    def loss(self, model: nn.Module, given: Loss | None, targets: Tensor) -> Loss:
        """The detector's own loss. Raises UserError for a model without one, or if a method gives one."""
        if given is not None:
            raise UserError(self.suits)
        return super().loss(model, given, targets)

    def usual(self, targets: Tensor) -> Loss:
        """Raises UserError: there is none."""
        raise UserError(self.suits)

    def tensors(self, data: Split, device: str) -> tuple[Tensor, Tensor]:
        """Raises UserError: the number of boxes varies, so detectors read images on use."""
        raise UserError(self.suits)

    def samples(self, data: Split, device: str) -> tuple[Tensor | LazySamples, Tensor]:
        """Images, float32 (n, 3, height, width), and their boxes, read on access."""
        return data.lazy(device)

    def evaluate(
        self, model: nn.Module, x: Tensor | NamedTensors | LazySamples, y: Tensor, precision: Precision = "float32"
    ) -> tuple[Scores, float]:
        """Raises UserError: boxes cannot be counted as right or wrong one by one."""
        raise UserError(self.suits)

    def score(
        self, model: nn.Module, test: Split, device: str, precision: Precision, show: Show | None
    ) -> dict[str, float]:
        """`MEASURES` of the test set. `show` receives its first images with true and detected boxes."""
        found = detections(model, test, device, precision)
        if show is not None:
            show("detections", Images(*drawn(found, test, self.classes), DRAWN_SIZE))
        return average_precision(found, test)


def detections(model: nn.Module, data: Split, device: str = "cpu", precision: Precision = "float32") -> list[Tensor]:
    """A detector's results for each image, float32 (found, 6) on the CPU: left, top, right, bottom in pixels of the
    stored image, confidence, class; the most confident first.

    The model runs on `device` and in `precision`, and stays there.
    """
    from yolox.utils import postprocess

    training = model.training
    model = prepared(model).to(device).eval()
    found: list[Tensor] = []
    with torch.no_grad(), arithmetic(precision, device):
        for start in range(0, len(data), BATCH):
            x, _ = data.take(range(start, min(start + BATCH, len(data)))).load(device)
            predictions = model(ready(x)).float()
            for boxes in postprocess(predictions, predictions.shape[2] - 5, CONFIDENCE, OVERLAP):
                if boxes is None:
                    found.append(torch.zeros(0, 6))
                    continue
                boxes = boxes[boxes.isfinite().all(1)]
                confidence = boxes[:, 4:5] * boxes[:, 5:6]
                found.append(torch.cat([boxes[:, :4], confidence, boxes[:, 6:7]], 1).cpu())
    model.train(training)
    return found


def average_precision(found: list[Tensor], data: Split) -> dict[str, float]:
    """COCO's `MEASURES` of `found` in the images of `data`, fractions 0..1, in pixels of the original images.

    Leaves out measures without objects. Raises UserError if pycocotools is not installed or `data` has no ground truth.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        from fewbytes.models.yolox import detection_missing

        raise detection_missing("scoring detections") from error
    from fewbytes.data.coco import ratio

    reference = None if data.learnt is None else data.learnt.truth
    if reference is None:
        raise UserError("detections are scored against the boxes of a test set, and this data set has none")
    rows = np.arange(len(data)) if data.rows is None else data.rows
    images = [reference["images"][row] for row in rows]
    scales = [ratio(image["width"], image["height"], data.shape[-1]) for image in images]
    results = [_result(boxes, row, scale) for boxes, row, scale in zip(found, rows, scales, strict=True)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints tables
        truth = COCO()
        truth.dataset = reference
        truth.createIndex()
        # `loadRes` fails without any detection.
        entries = np.concatenate(results) if sum(map(len, results)) else np.array([[rows[0], 0, 0, 0, 0, 0, 0]])
        evaluation = COCOeval(truth, truth.loadRes(entries), "bbox")
        evaluation.params.imgIds = rows.tolist()
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[i]) for name, i in MEASURES.items() if evaluation.stats[i] >= 0}


def drawn(found: list[Tensor], data: Split, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    """The first images of a test set, uint8 (n, 3, height, width), with true boxes in white and confident detections;
    and the row of each."""
    from torchvision.utils import draw_bounding_boxes  # slow to import

    from fewbytes.data.transforms import COLOURS

    pictures = []
    for i, boxes in enumerate(found[:DRAWN]):
        x, targets = data.take([i]).load()
        scale = DRAWN_SIZE / x.shape[3]
        picture = (F.interpolate(x, (DRAWN_SIZE, DRAWN_SIZE), mode="bilinear", antialias=True)[0] * 255).byte()
        centre, half = targets[0, :, 1:3], targets[0, :, 3:] / 2
        true = torch.cat([centre - half, centre + half], 1)[targets[0].any(1)]
        if len(true):
            picture = draw_bounding_boxes(picture, true * scale, colors="white")
        boxes = boxes[(boxes[:, 4] >= DRAWN_CONFIDENCE) & (boxes[:, :2] < boxes[:, 2:4]).all(1)]
        if len(boxes):
            colours = [COLOURS[int(c) % len(COLOURS)] for c in boxes[:, 5]]
            words = [f"{classes[int(c)]} {confidence:.2f}" for confidence, c in boxes[:, 4:].tolist()]
            picture = draw_bounding_boxes(picture, boxes[:, :4] * scale, words, colours, width=2)
        pictures.append(picture)
    rows = [f"images {i // ROW * ROW + 1} to {min(i // ROW * ROW + ROW, len(pictures))}" for i in range(len(pictures))]
    return torch.stack(pictures), rows


def _result(found: Tensor, row: int, scale: float) -> NDArray[np.float64]:
    """Detections in pycocotools' format: image, left, top, width, height, confidence, class."""
    boxes = found.double().numpy()
    corners = boxes[:, :4] / scale
    return np.column_stack(
        [np.full(len(boxes), row), corners[:, :2], corners[:, 2:] - corners[:, :2], boxes[:, 4], boxes[:, 5]]
    )
