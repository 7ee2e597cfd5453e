"""Every setting of an experiment, group by group."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import BelowOne, Count, Positive, Share
from fewbytes.base.settings import NAMES, Group, Names, Text, setting, whole_numbers
from fewbytes.core.policy import Policy
from fewbytes.core.weights import ClassWeights
from fewbytes.data.settings import Partition
from fewbytes.models.lora import Lora
from fewbytes.models.normalisation import Normalisation
from fewbytes.running.settings import Settings

Table = Annotated[dict[str, Any], Text("a table", json.loads, json.dumps)]
Shape = Annotated[Sequence[int], whole_numbers("x", "a shape, like 3x32x32")]
Labels = Annotated[list[str], Text("a list", json.loads, json.dumps)]  # entries may have commas


@dataclass(frozen=True)
class DataSettings(Group):
    """The dataset, and how its files are read."""

    title: ClassVar[str] = "Data"

    dataset: str = setting(
        "digits",
        "Dataset: digits, a folder or table under FEWBYTES_DATA, a path, package.module:function, or a dataset to "
        "download.",
        metavar="NAME",
    )
    image_size: Annotated[int, Meta(ge=1, le=4096)] | None = setting(
        None,
        "Resize and crop images to this many pixels a side (object detection: letter-boxed).",
        brief=True,
    )
    part: Share = setting(1.0, "Fraction of the dataset to use, e.g. 0.1; sampled with the seed.", brief=True)
    public: str | Count | None = setting(
        None,
        "Public data for methods that distil on the server: a dataset, or a number of samples to hold out.",
        metavar="NAME",
    )
    augment: Literal["none", "crop-flip", "flip-rotate15-crop", "rotate20-flip"] = setting(
        "none",
        "Random augmentation of training images: none, crop-flip, flip-rotate15-crop or rotate20-flip.",
        metavar="NAME",
        brief=True,
    )
    backdoor: int = setting(
        0, "Poison the first N clients: stamp a label-dependent shape on their training images.", brief=True
    )
    masks: bool = setting(
        False,
        "Convert boxes to masks and learn segmentation.",
        option="--masks/--boxes",
        brief=True,
    )
    target: Names | None = setting(
        None,
        "Tables only: column to predict, or several, comma-separated (default: target or label).",
        metavar="LIST",
        brief=True,
    )
    group: str | None = setting(
        None,
        "Tables only: column (e.g. a patient ID) whose rows with equal values stay together in training or test.",
        metavar="COLUMN",
        brief=True,
    )
    missing: Literal["refuse", "drop", "mean"] = setting(
        "refuse",
        "Tables only: rows with missing values: refuse, drop, or fill in the column's mean.",
        metavar="NAME",
        brief=True,
    )
    uncertain: Literal["refuse", "zero", "one", "drop"] = setting(
        "refuse",
        "Uncertain image labels (-1): refuse, read as zero or one, or drop the row.",
        metavar="NAME",
        brief=True,
    )
    leave_out: Names | None = setting(None, "Tables only: columns to ignore.", metavar="LIST", brief=True)
    columns: Names | None = setting(
        None, "Tables only: columns to learn from (default: all).", metavar="LIST", brief=True
    )
    categories: Names | None = setting(
        None,
        "Tables only: columns that hold categories, although they look like numbers or dates.",
        metavar="LIST",
        brief=True,
    )
    missing_marks: Names | None = setting(
        None,
        "Tables only: values that mean missing (default: empty, NA, N/A, NaN, null, None, ?, - and a single point).",
        metavar="LIST",
        brief=True,
    )
    limits: Literal["refuse", "half", "value", "missing"] = setting(
        "refuse",
        "Tables only: values like <0.5: refuse, or read as half the limit, the limit's value, or missing.",
        metavar="NAME",
        brief=True,
    )
    decimal: Literal["found", "point", "comma"] = setting(
        "found", "Decimal separator in text tables: point or comma (default: detected).", metavar="NAME", brief=True
    )
    date_order: Literal["found", "day-first", "month-first"] = setting(
        "found",
        "Order of dates like 02/03/2024: day-first or month-first (default: detected).",
        metavar="NAME",
        brief=True,
    )
    encoding: str | None = setting(
        None, "Encoding of CSV files, e.g. windows-1252 (default: detected).", metavar="NAME", brief=True
    )
    separator: str | None = setting(
        None, "Column separator of CSV files: a character, or tab (default: detected).", metavar="MARK", brief=True
    )
    sheet: str | None = setting(None, "Sheet of an Excel file (default: the first).", metavar="NAME", brief=True)
    schema: Table | None = setting(
        None,
        "Tables only: meaning of the columns, as `fewbytes.data.Schema` (default: read from the dataset).",
        option=None,
        brief=True,
    )
    text: str | None = setting(
        None,
        "Tables only: text column; the model learns to predict the next token, or with --target the class.",
        metavar="COLUMN",
        brief=True,
    )
    length: Count = setting(128, "Text only: tokens per sample.", brief=True)
    tokenizer: str | None = setting(
        None,
        "Text only: folder with a tokenizer, or its name on the hub (default: that of the hf: model).",
        metavar="NAME",
        brief=True,
    )
    client_data: str | None = setting(
        None,
        "With --partition local: a folder with one dataset per client, or a package.module:function that takes a "
        "client's number (default: DATASET on each node).",
        metavar="PLACE",
        brief=True,
    )
    class_names: Labels | None = setting(
        None,
        "With partition local: the classes in label order (default: those of the server's dataset).",
        option=None,
        brief=True,
    )
    sample_shape: Shape | None = setting(
        None,
        "With partition local: the shape of samples, for a server without data (default: that of its dataset's).",
        option=None,
        brief=True,
    )


@dataclass(frozen=True)
class LearningSettings(Group):
    """The loss and the metrics."""

    title: ClassVar[str] = "Learning"

    metrics: Names | None = setting(
        None,
        "Metrics, e.g. auc,f1; result tables use the first (default: accuracy, mae, iou, … depending on the task).",
        metavar="LIST",
        brief=True,
    )
    positive: str | None = setting(
        None,
        "Positive class of the metrics: auc, sensitivity, specificity, sensitivity@specificity=0.9, f1, brier, …",
        metavar="CLASS",
        brief=True,
    )
    validation: BelowOne = setting(
        0.0,
        "Fraction of each client's training samples to hold out, to choose the best model and the time to stop by.",
        metavar="FRACTION",
        brief=True,
    )
    class_weights: ClassWeights | None = setting(
        None,
        "Weight of each class in the loss, e.g. 1,5,1; balanced: by the class frequencies of each client.",
        metavar="LIST",
        brief=True,
    )


@dataclass(frozen=True)
class ModelSettings(Group):
    """The model, and how and on which device it is trained."""

    title: ClassVar[str] = "Model and training"

    model: str | None = setting(
        None,
        "Model: mlp, vgg9, resnet8:width=32, torchvision:<name>, hf:<folder or name>, package.module:callable; "
        "@512 pools features; a+b or HtFE8 mixes architectures (default: chosen by the shape of the data).",
        metavar="NAME",
    )
    lora: Lora | None = setting(
        None,
        "Train low-rank adapters (rank=8,alpha=16,targets=q_proj+v_proj; default: all layers but the last) and, "
        "for classification, the last layer; other weights are frozen and never sent. Variants: core=xs (LoRA-XS), "
        "train=B (FFA-LoRA), send=A (FedSA-LoRA).",
        metavar="RANK",
        brief=True,
    )
    weights: str | None = setting(
        None,
        "Pretrained weights to start from, where shapes match: a .safetensors file or a PyTorch state dict.",
        metavar="FILE",
        brief=True,
    )
    normalise: Normalisation | None = setting(
        None,
        "Normalise samples inside the model: imagenet, MEAN/STD (0.5,0.5,0.5/0.25,0.25,0.25), or data (their own).",
        metavar="HOW",
        brief=True,
    )
    kgf: Count | None = setting(
        None, "Number of base kernels to generate convolution kernels from, as in Fed-KGF.", brief=True
    )
    clusters: Count | None = setting(
        None, "Number of clusters: group clients with similar data and run the method in each group.", brief=True
    )
    secure_aggregation: bool = setting(
        False,
        "Show the server only the sum of the clients' messages (for methods that need only the sum).",
        option="--secure-aggregation",
        brief=True,
    )
    secure_range: Positive = setting(64.0, "With secure aggregation: largest value that a client may send.", brief=True)
    seed: int = setting(0, "Random seed; the same seed gives the same results, bit for bit.")
    precision: Literal["float32", "bf16", "tf32"] = setting(
        "float32", "Precision of training: float32, bf16, or tf32 (GPUs).", metavar="NAME"
    )
    device: str = setting("cpu", "Device: cpu or cuda.", metavar="NAME")
    recalibrate: bool = setting(
        False,
        "Re-estimate batch-norm statistics on each client's training data before its own model is scored.",
        option="--recalibrate",
        brief=True,
    )


GROUPS: dict[str, type[Group]] = {
    "data": DataSettings,
    "partition": Partition,
    "learning": LearningSettings,
    "model": ModelSettings,
    "run": Settings,
    "policy": Policy,
}
"""The groups of an experiment's settings, by the fields of `fewbytes.experiments.settings.Experiment`."""
DECLARED = {key: each for group in GROUPS.values() for key, each in group.declared().items()}
"""All settings by key, except the method and its parameters."""
KEYS = ("method", *DECLARED, "parameters", "fraction")
"""Keys allowed in a config file; `fraction` is short for the method's parameter of that name."""


@dataclass(frozen=True)
class Reproducing(Group):
    """Which runs of a paper's table to do, and how."""

    title: ClassVar[str] = "Runs of the table"

    rows: Names | None = setting(None, "Only these rows, comma-separated; FedP* matches a prefix.", metavar="LIST")
    columns: Names | None = setting(None, "Only these columns, likewise.", metavar="LIST")
    seeds: Annotated[Sequence[str | int], NAMES] | None = setting(None, "Only these seeds, e.g. 1,2,3.", metavar="LIST")
    until: int | None = setting(None, "Pause each run after this round; the same command resumes it.")
    parameters: dict[str, str] = setting(
        {}, "Parameter of all methods, or of one (METHOD.KEY).", option="--set", metavar="KEY=VALUE"
    )
    workers: Count | None = setting(None, "Number of worker processes (default: one per core).")
    device: str = setting("cpu", "Device: cpu or cuda.", metavar="NAME")


@dataclass(frozen=True)
class Shard:
    """One of several shares of a comparison's runs: `number` 1 to `of`."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse text like 2/4. Raises UserError."""
        found = re.fullmatch(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"shard is NUMBER/OF, from 1/OF to OF/OF, such as 2/4, not {text!r}")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def has(self, unit: int) -> bool:
        """Whether this share has the unit of work of this index, from 0."""
        return unit % self.of == self.number - 1


@dataclass(frozen=True)
class Repeating(Group):
    """Several seeds, tuned parameters, and how runs are shared among processes and machines."""

    title: ClassVar[str] = "Seeds and tuning"

    seeds: Annotated[Sequence[int], whole_numbers(",", "whole numbers with commas, such as 1,2,3")] | None = setting(
        None, "Run with each of these seeds, e.g. 1,2,3; results are means with intervals.", metavar="LIST"
    )
    tune: dict[str, str] = setting(
        {},
        "Values to try for a parameter (KEY or METHOD.KEY), e.g. lr=0.01,0.03,0.1; each method takes its best, on "
        "validation data.",
        metavar="KEY=VALUES",
    )
    trials: Count | None = setting(
        None, "Settings to try per method, suggested by Optuna; allows ranges, e.g. --tune lr=0.001..0.3.", metavar="N"
    )
    jobs: Count = setting(1, "Number of runs at the same time, in processes of their own.", metavar="N")
    shard: Shard | None = setting(None, "Do only this share of the runs, e.g. 2/4.", metavar="I/N")
    merge: Names | None = setting(
        None, "Folders with other shards of the comparison, comma-separated: take over their runs.", metavar="LIST"
    )
