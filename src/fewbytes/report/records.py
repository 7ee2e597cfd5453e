"""The contents of a run folder's files, as far as a report reads them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import msgspec


class LeftOut(TypedDict):
    """A client whose reply was not used in an exchange: the outcome, and the reason as text."""

    client: int
    handler: str
    outcome: str
    why: str


class Round(TypedDict):
    """One line of `rounds.jsonl`: scores by metric and kind, bytes are those of this phase only.

    `client`, if present, joined before the round of the line.
    """

    round: int
    phase: Literal["start", "join", "round", "finish"]
    uplink_bytes: int
    downlink_bytes: int
    uplink_nominal_bytes: NotRequired[int]
    downlink_nominal_bytes: NotRequired[int]
    cohort: NotRequired[int]
    scores: NotRequired[dict[str, dict[str, float | None]]]
    pooled: NotRequired[dict[str, dict[str, float]]]
    by_client: NotRequired[dict[str, dict[str, dict[str, float | None]]]]
    measured: NotRequired[dict[str, float]]
    seconds: NotRequired[float]
    simulated_seconds: NotRequired[float]
    client: NotRequired[int]
    left_out: NotRequired[list[LeftOut]]
    notes: NotRequired[dict[str, str]]
    rounding: NotRequired[dict[str, float | str]]


Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Partition(TypedDict):
    """`partition.json`: per client the number of samples of each class, in the train and in the test split, and its
    name if it has one. For data on a client's own node, only the total if the node reports that, or None. Only
    `fewbytes partition` counts the samples held out for validation."""

    classes: list[str]
    train: list[list[Number] | Number | None]
    test: list[list[Number] | Number | None]
    names: NotRequired[list[str]]
    validation: NotRequired[list[list[Number] | Number | None]]


class Judged(TypedDict, total=False):
    """The main metric and kind of score, which only `result.json` states. The values are in the rounds."""

    metric: str | None
    kind: str | None


class Traits(TypedDict):
    """A metric's traits: whether higher is better, whether it is a share, 0..1, and whether that is shown in per cent
    (results of earlier versions do not say)."""

    higher: bool
    share: bool
    percent: NotRequired[bool]


class BestModel(TypedDict):
    """The round whose model is kept as the best, and by what score it was chosen."""

    round: int
    chosen_on: Literal["validation", "test"]
    metric: str
    kind: str
    value: float


class Details(TypedDict, total=False):
    """More about the last global model on the server's test set: numbers of samples by true class (row) and predicted
    class (column), and 95 % intervals by metric."""

    classes: Required[list[str]]
    confusion: list[list[int]]
    intervals: dict[str, tuple[float, float]]


class Result(TypedDict, total=False):
    """`result.json`, as far as a report reads it."""

    method: str
    parameters: dict[str, Any]
    dataset: Any
    model: Any
    clients: int
    seed: Any
    rounds: int
    score: Judged
    metrics: dict[str, Traits]
    best_model: BestModel
    global_model: Details
    majority_class_accuracy: dict[str, float | None]
    guessing: dict[str, dict[str, float]]
    rarest_class: dict[str, int]
    test_samples: dict[str, int]
    uplink_nominal_bytes: int
    downlink_nominal_bytes: int
    seconds: float
    versions: dict[str, str]
    versions_at_clients: dict[str, dict[str, dict[str, str]]]
    status: str
    stands_out: dict[str, str]


Probed = Literal["information_x", "information_y", "linear_accuracy"]
"""The drawn fields of a `ProbePoint`."""


class ProbePoint(TypedDict):
    """The results of `fewbytes.analysis.probe` after one unit; None if not measurable."""

    point: str
    units: int
    information_x: float | None
    information_y: float | None
    auxiliary_accuracy: float | None
    linear_accuracy: float | None


class Probe(TypedDict):
    """`probe.json`, as far as a report reads it: the probed model, and the results per point."""

    model: str
    points: list[ProbePoint]


class Local(TypedDict):
    """One client of `local.json`: its model's accuracy on its own training samples, and on the server's test set;
    None without samples."""

    client: int
    own: float | None
    test: float | None


class AttackedImage(TypedDict):
    """One image of `Attack`."""

    sample: int
    psnr: float | None


class Attack(TypedDict):
    """`attack.json`, as far as a report reads it: how images were reconstructed. A PSNR of None is infinite;
    older files have no control."""

    model: str
    client: int
    noise: float
    observed_values: int
    values: int
    label: str
    psnr_mean: float | None
    psnr_median: float | None
    control: NotRequired[float | None]
    recognised: float
    attacked: list[AttackedImage]


class Inferred(TypedDict):
    """How well one attack distinguished members from others, for the run's model and the control."""

    attack: str
    auc: float
    tpr: float
    control_auc: float
    control_tpr: float
    void: bool


class Membership(TypedDict):
    """`membership.json`, as far as a report reads it: the attacked model, the number of members, the results."""

    model: str
    members: int
    shadows: int
    attacks: list[Inferred]


class Poisoned(TypedDict):
    """A run with a rule: its accuracy (None: diverged), a backdoor's success rate, and the number of malicious replies
    left out."""

    rule: str
    accuracy: float | None
    success: float | None
    uplink_bytes: int | None
    downlink_bytes: NotRequired[int | None]  # older files lack it
    refused: int


class Poison(TypedDict):
    """`poison.json`, as far as a report reads it: the attack, the run without it, the runs with it (mean first)."""

    poison: str
    malicious: list[int]
    clients: int
    chance: float
    clean: Poisoned
    poisoned: Annotated[list[Poisoned], msgspec.Meta(min_length=1)]


class Figure(TypedDict):
    """A score or a difference of scores, and its interval; None where undefined."""

    value: float | None
    low: float | None
    high: float | None


class EvaluatedSite(TypedDict):
    """A site of `Evaluation`: its name, number of test samples (None: not reported), and whether it took part in the
    training."""

    name: str
    samples: int | None
    trained: bool


class Models(TypedDict):
    """Models of one origin. `kind`: one shared model, each site's own, each site's from training alone, one from pooled
    data, or the shared one without a site. `run`: the label of their run."""

    name: str
    kind: Literal["shared", "own", "alone", "pooled", "without"]
    run: str


class Cell(TypedDict):
    """One model on one site's test set: of which `Models`, of which site (None: of all), the figures by metric, samples
    by true and predicted class, and the calibration curve (predicted, observed, number of samples, by bin)."""

    models: str
    of: str | None
    site: str
    scores: dict[str, Figure]
    confusion: list[list[Number]] | None
    calibration: NotRequired[list[tuple[float, float, int]]]


class Gain(TypedDict):
    """By how much `models` are better than `over` at a site (None: on average over sites), by the main metric."""

    models: str
    over: str
    site: str | None
    gain: Figure


class Group(TypedDict):
    """Models on a subgroup of test samples, by the main metric, at a site (None: all sites together)."""

    group: str
    models: str
    site: str | None
    samples: int
    score: Figure


class Evaluation(TypedDict):
    """`evaluation.json`: models of some runs, named as their folders, on the sites' test sets; the first metric is the
    main one. `unreported`: of an evaluation at real sites, why a site has no figures, in a sentence."""

    runs: list[str]
    metrics: dict[str, Traits]
    level: float
    sites: list[EvaluatedSite]
    models: list[Models]
    cells: list[Cell]
    gains: list[Gain]
    by: str | None
    groups: list[Group]
    classes: list[str]
    unreported: NotRequired[list[str]]
