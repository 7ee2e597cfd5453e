"""The JSON that commands print with --json, as types, and the command that prints their schemas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

import typer

from fewbytes.base.errors import UserError, suggestion
from fewbytes.experiments.display import printed


def schema(
    command: Annotated[
        str | None, typer.Argument(help="Command, like run or 'federation list' (default: list them).")
    ] = None,
) -> None:
    """Print the JSON schema of what a command prints with --json.

    Example: `fewbytes schema run`
    """
    import msgspec

    known = schemas()
    if command is None:
        for name in known:
            printed.print(name)
        return
    if command not in known:
        raise UserError(
            f"there is no JSON of a command {command!r}{suggestion(command, known)}; there are {', '.join(known)}"
        )
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"fewbytes {command} --json"}
    print(json.dumps(about | msgspec.json.schema(known[command]), indent=2))


def schemas() -> dict[str, Any]:
    """The type of what each command prints with --json. Objects may have more keys than these."""
    from fewbytes.experiments.catalogue import About
    from fewbytes.experiments.plan import Plan
    from fewbytes.report import records
    from fewbytes.report.survey_file import SurveyFile
    from fewbytes.running.status import Status

    @dataclass(frozen=True)
    class Planned(Plan):
        """The cost of a run. Seconds of a round, and the round time to take with methods that have one (None: none)."""

        round_seconds: float = 0.0
        round_time: int | None = None

    return {
        "run": RunResult,
        "deploy": RunResult,
        "compare": list[Compared],
        "plan": Planned,
        "partition": records.Partition,
        "methods": list[About],
        "probe": records.Probe,
        "attack": records.Attack,
        "attack --membership": records.Membership,
        "attack --poison": records.Poison,
        "attack --imprint": Imprint,
        "export": dict[str, str],
        "evaluate": records.Evaluation,
        "survey": SurveyFile,
        "check": list[Finding],
        "status": Status,
        "federation list": Members,
        "reproduce": dict[str, Table],
        "reproduce --all": Reproduced,
        "reproduce SYSTEM/TABLE": list[Cell],
    }


class KindOfScore(TypedDict):
    """The last and the best value of a score, and the round of the best."""

    final: float | None
    best: float | None
    best_round: int | None


class Score(KindOfScore):
    """The main score: its metric, its kind, and the values of all kinds."""

    metric: str | None
    kind: str | None
    all: dict[str, KindOfScore]


class RunResult(TypedDict):
    """result.json of a run. Bytes are of all clients together; `nominal` ones are those that papers count,
    `value` ones those of values in these."""

    method: str
    parameters: dict[str, Any]
    clients: int
    seed: int
    device: str
    precision: str
    rounds: int
    status: str
    score: Score
    metrics: dict[str, Any]
    test_samples: dict[str, int]
    uplink_bytes: int
    downlink_bytes: int
    uplink_nominal_bytes: int
    downlink_nominal_bytes: int
    uplink_bytes_per_client_round: float
    downlink_bytes_per_client_round: float
    left_out: int
    seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]
    uplink_value_bytes: int
    downlink_value_bytes: int
    majority_class_accuracy: dict[str, float]
    global_model: NotRequired[dict[str, Any]]
    guessing: NotRequired[dict[str, dict[str, float]]]
    rarest_class: NotRequired[dict[str, int]]
    sample_shape: NotRequired[list[int]]
    classes: NotRequired[int]
    dataset: NotRequired[str]
    model: NotRequired[str | None]
    partition: NotRequired[str]
    notes: NotRequired[list[str]]
    further: NotRequired[dict[str, dict[str, KindOfScore]]]
    simulated_seconds: NotRequired[float]


class Compared(TypedDict):
    """A method of a comparison: as in a run, with what is recommended by kind of score; or why it has no result."""

    method: str
    status: str
    why: NotRequired[str]
    score: NotRequired[Score]
    uplink_bytes: NotRequired[int]
    downlink_bytes: NotRequired[int]
    seconds: NotRequired[float]
    recommended: NotRequired[dict[str, str]]


class Imprint(TypedDict):
    """Images rebuilt by a malicious server: from clients' own updates, from their sum, and in the control."""

    method: str
    clients: int
    images: int
    in_clear: int
    in_a_sum: int
    control: int
    control_images: int
    first_layer_drift: float


class Finding(TypedDict):
    """A thing that was checked, its state, and what was found."""

    about: str
    state: str
    words: str


class Member(TypedDict):
    """A member of a federation: its key's fingerprint, and since when it is one."""

    name: str
    key: str
    since: str


class Members(TypedDict):
    """A federation. `days_left`: of the certificates."""

    address: str
    listen: str | None
    members: list[Member]
    invited: list[str]
    days_left: dict[str, int]


class Table(TypedDict):
    """A paper's table, and its number of runs."""

    title: str
    runs: int


class Reproduced(TypedDict):
    """All tables: the document, and which failed."""

    document: str
    failed: list[str]


class Mean(TypedDict):
    """A figure over seeds, or in a paper, in its unit."""

    mean: float
    deviation: float | None


class Cell(TypedDict):
    """A cell of a table: ours and the paper's figure, values by seed, and the run folders."""

    row: str
    column: str
    values: dict[str, float]
    unfinished: dict[str, int]
    ours: Mean | None
    paper: Mean | None
    runs: list[str]
