"""Every setting of an experiment, group by group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from fewbytes.base.ranges import Count, Positive, Share
from fewbytes.base.settings import NAMES, Group, Names, Text, setting
from fewbytes.core.policy import Policy
from fewbytes.core.weights import ClassWeights
from fewbytes.data.settings import Partition
from fewbytes.models.lora import Lora
from fewbytes.models.normalisation import Normalisation
from fewbytes.running.settings import Settings

Table = Annotated[dict[str, Any], Text("a table", json.loads, json.dumps)]
Labels = Annotated[list[str], Text("a list", json.loads, json.dumps)]  # which may have commas


@dataclass(frozen=True)
class DataSettings(Group):
    """What is learnt from."""

    title: ClassVar[str] = "Data"

    dataset: str = setting(
        "digits",
        "digits, a folder or table under FEWBYTES_DATA, a path, package.module:function, or a name to download.",
        metavar="NAME",
    )
    image_size: Annotated[int, Meta(ge=1, le=4096)] | None = setting(
        None, "Pixels a side that images are scaled to and cropped (for detection: letter-boxed).", brief=True
    )
    part: Share = setting(1.0, "Use only this part of the data set, e.g. 0.1, drawn by the seed.", brief=True)
    public: str | Count | None = setting(
        None, "For servers that distil: a data set, or a number of samples held out.", metavar="NAME"
    )
    augment: Literal["none", "crop-flip", "flip-rotate15-crop", "rotate20-flip"] = setting(
        "none",
        "Change training images at random: none, crop-flip, flip-rotate15-crop or rotate20-flip.",
        metavar="NAME",
        brief=True,
    )
    backdoor: int = setting(
        0, "Stamp a shape, by label, on the training images of the first so many clients.", brief=True
    )
    masks: bool = setting(
        False,
        "Of boxes, learn a class for every pixel: that of the box it lies in.",
        option="--masks/--boxes",
        brief=True,
    )
    target: Names | None = setting(
        None,
        "Of a table: the column to learn, or several with commas (default: target or label).",
        metavar="LIST",
        brief=True,
    )
    group: str | None = setting(
        None,
        "Of a table: a column, of patients say, none of whose values is both in training and in test.",
        metavar="COLUMN",
        brief=True,
    )
    missing: Literal["refuse", "drop", "mean"] = setting(
        "refuse",
        "Rows of a table with a missing value are refused, dropped, or get the column's mean.",
        metavar="NAME",
        brief=True,
    )
    uncertain: Literal["refuse", "zero", "one", "drop"] = setting(
        "refuse",
        "What an uncertain label of an image, -1, is: zero, one, or its row dropped.",
        metavar="NAME",
        brief=True,
    )
    leave_out: Names | None = setting(None, "Columns of a table that are not used.", metavar="LIST", brief=True)
    columns: Names | None = setting(
        None, "The only columns of a table to learn from (default: all).", metavar="LIST", brief=True
    )
    categories: Names | None = setting(
        None,
        "Columns of a table that hold categories, though they look like numbers or dates.",
        metavar="LIST",
        brief=True,
    )
    missing_marks: Names | None = setting(
        None,
        "Values that stand for a missing one (default: none at all, NA, N/A, NaN, null, None, ?, - and the point).",
        metavar="LIST",
        brief=True,
    )
    limits: Literal["refuse", "half", "value", "missing"] = setting(
        "refuse",
        "Values like <0.5 in a table are refused, or become half the limit, the limit's value, or missing.",
        metavar="NAME",
        brief=True,
    )
    decimal: Literal["found", "point", "comma"] = setting(
        "found", "What separates decimals in the texts of tables: point or comma.", metavar="NAME", brief=True
    )
    date_order: Literal["found", "day-first", "month-first"] = setting(
        "found", "How dates like 02/03/2024 are written: day-first or month-first.", metavar="NAME", brief=True
    )
    encoding: str | None = setting(
        None, "Encoding of CSV files, like windows-1252 (default: found).", metavar="NAME", brief=True
    )
    separator: str | None = setting(
        None, "What separates columns of CSV files, or tab (default: found).", metavar="MARK", brief=True
    )
    sheet: str | None = setting(None, "Sheet of an Excel file (default: the first).", metavar="NAME", brief=True)
    schema: Table | None = setting(
        None,
        "Of tables: what columns mean, as `fewbytes.data.Schema` (default: read off the dataset).",
        option=None,
        brief=True,
    )
    text: str | None = setting(
        None,
        "Of a table: its column of text, of which the next tokens are learnt, or with target the class.",
        metavar="COLUMN",
        brief=True,
    )
    length: Count = setting(128, "Of text: tokens a sample.", brief=True)
    tokenizer: str | None = setting(
        None,
        "Of text: a folder with a tokenizer, or a name on the hub (default: that of the hf: model).",
        metavar="NAME",
        brief=True,
    )
    client_data: str | None = setting(
        None,
        "For partition local: a folder with a data set for each client, or package.module:function of a client "
        "(default: DATASET on each node).",
        metavar="PLACE",
        brief=True,
    )
    class_names: Labels | None = setting(
        None,
        "For partition local: the classes in label order (default: those of the server's data set).",
        option=None,
        brief=True,
    )


@dataclass(frozen=True)
class LearningSettings(Group):
    """What is learnt of the data, and how good it is."""

    title: ClassVar[str] = "Learning"

    metrics: Names | None = setting(
        None,
        "What models are scored by, e.g. auc,f1; tables go by the first (default: accuracy, mae, iou, … by what "
        "is learnt).",
        metavar="LIST",
        brief=True,
    )
    class_weights: ClassWeights | None = setting(
        None,
        "Of each class in the loss, e.g. 1,5,1; balanced: by how often a client has it.",
        metavar="LIST",
        brief=True,
    )


@dataclass(frozen=True)
class ModelSettings(Group):
    """What is trained, and on what."""

    title: ClassVar[str] = "Model and training"

    model: str | None = setting(
        None,
        "mlp, vgg9, resnet8:width=32, torchvision:<name>, hf:<folder or name>, package.module:callable; @512 "
        "pools features; a+b, HtFE8 (default: by the shape of the data).",
        metavar="NAME",
    )
    lora: Lora | None = setting(
        None,
        "Train adapters of this rank (rank=8,alpha=16,targets=q_proj+v_proj; default: on all layers but the "
        "last) and, to classify, the last layer; all else stays as it is and never travels.",
        metavar="RANK",
        brief=True,
    )
    weights: str | None = setting(
        None,
        "Pretrained weights to start from, where they fit: a .safetensors file or a state dict of torch's.",
        metavar="FILE",
        brief=True,
    )
    normalise: Normalisation | None = setting(
        None,
        "Normalise samples inside the model: imagenet, MEAN/STD (0.5,0.5,0.5/0.25,0.25,0.25), or by the data.",
        metavar="HOW",
        brief=True,
    )
    kgf: Count | None = setting(
        None, "Generate the kernels of convolutions from so many base kernels, as Fed-KGF does.", brief=True
    )
    clusters: Count | None = setting(
        None, "Run the method in each of so many clusters of clients whose data are alike.", brief=True
    )
    secure_aggregation: bool = setting(
        False,
        "Have the server see only the sum of what clients send, of methods that need no more.",
        option="--secure-aggregation",
        brief=True,
    )
    secure_range: Positive = setting(
        64.0, "Of secure aggregation: the largest value that a client may send.", brief=True
    )
    seed: int = setting(0, "Same seed, same results, bit for bit.")
    precision: Literal["float32", "bf16", "tf32"] = setting(
        "float32", "float32, bf16, or a GPU's tf32.", metavar="NAME"
    )
    device: str = setting("cpu", "cpu or cuda.", metavar="NAME")
    recalibrate: bool = setting(
        False,
        "Score each client's own model with batch-norm statistics re-estimated on its training data.",
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
"""Every setting by its key, but the method and what is the method's own."""
KEYS = ("method", *DECLARED, "parameters", "fraction")
"""What a config file may say; `fraction` stands for the method's parameter of that name."""


@dataclass(frozen=True)
class Reproducing(Group):
    """What of a paper's table is run, and how."""

    title: ClassVar[str] = "What is run, and how"

    rows: Names | None = setting(None, "Only these rows, with commas; FedP* is all that begin so.", metavar="LIST")
    columns: Names | None = setting(None, "Only these columns, likewise.", metavar="LIST")
    seeds: Annotated[Sequence[str | int], NAMES] | None = setting(None, "Only these seeds, e.g. 1,2,3.", metavar="LIST")
    until: int | None = setting(None, "Stop each run after this round for now.")
    parameters: dict[str, str] = setting(
        {}, "A field of the methods, or METHOD.KEY.", option="--set", metavar="KEY=VALUE"
    )
    workers: Count | None = setting(None, "Worker processes (default: one per core).")
    device: str = setting("cpu", "cpu or cuda.", metavar="NAME")
