"""A run that rounds what clients send says to how many bits, and what was lost, and refuses methods that send nothing
to round."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import pytest
from cases import CASES, tiny_data, tiny_task
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.ranges import EXACT, SENT
from fewbytes.core.network import Network
from fewbytes.core.site import Site
from fewbytes.experiments.plan import make_plan
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.methods.parts.secure import SecureAggregation
from fewbytes.running.rounding import overshot
from fewbytes.wire import Dense, Masked, payload

LOCAL: dict[str, Any] = {"epochs": 1, "lr": 0.1, "batch": 20}


@payload
class Inside:
    theta: Masked


@payload
class InAList:
    parts: list[Inside | None]


@payload
class Itself:
    others: list[Itself]
    count: int


@payload
class Left:
    theta: Annotated[Dense, SENT, EXACT]
    shift: Tensor


@dataclass(frozen=True)
class Replying(fb.Method):
    def round(self, state: None, net: Network, t: int) -> None: ...


def wide() -> nn.Module:
    """A model of 40,003 values."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2000), nn.ReLU(), nn.Linear(2000, 3))


def replying(kind: type) -> fb.Method:
    def answer(self, state: None, message: None, site: Site): ...

    answer.__annotations__["return"] = kind
    return type("Made", (Replying,), {"answer": answer, "__module__": __name__})()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "rounded"), [(Inside, True), (InAList, True), (Itself, False), (Left, False)])
def test_what_is_rounded_is_told_by_the_types_of_replies(kind: type, rounded: bool) -> None:
    assert replying(kind).roundable("uplink") is rounded


def test_what_wraps_a_method_is_rounded_if_what_travels_can_be() -> None:
    assert Clustered(fb.FedAvg(), 2).roundable("uplink")
    assert not SecureAggregation(fb.FedAvg()).roundable("uplink")


def test_the_result_has_the_means_of_the_rounds(tmp_path: Any) -> None:
    out = tmp_path / "run"
    fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=3, workers=1, out=out, uplink_bits=2.0, save_models=False)
    rows = [json.loads(line)["measured"] for line in (out / "rounds.jsonl").read_text().splitlines()]
    result = json.loads((out / "result.json").read_text())
    assert result["uplink_bits_per_value"] == fmean(row["uplink bits a value"] for row in rows)
    assert result["uplink_rounding_error"] == fmean(row["uplink rounding error"] for row in rows)
    assert 0 < result["uplink_rounding_error"] < 0.2
    plain = fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=1, workers=1, save_models=False)
    assert "uplink_bits_per_value" not in plain.summary


def test_a_run_notes_that_small_messages_take_more_bits_than_asked_for(tmp_path: Any) -> None:
    def notes(task: fb.Task, much: bool) -> dict[str, str]:
        out = tmp_path / str(much)
        fb.run(fb.FedAvg(**LOCAL), task, rounds=2, workers=1, out=out, bits=0.5, save_models=False)
        row = json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])
        for way in ("uplink", "downlink"):
            assert (row["measured"][f"{way} bits a value"] > 1.5 * 0.5) is much
        return row.get("notes", {})

    up, down = notes(tiny_task(), much=True).items()
    assert re.fullmatch(r"the uplink took more bits than asked for, .*: \d\.\d\d per value, not 0.5", ": ".join(up))
    assert down[0].startswith("the downlink took more bits")
    assert not notes(fb.Task.on(tiny_data(4), wide), much=False)
    assert overshot({"uplink": 1.0}, {"uplink bits a value": 1.5}) == {}


def test_a_plan_measures_rounded_frames() -> None:
    task = tiny_task()
    whole, rounded = (
        make_plan(fb.FedAvg(**LOCAL), task, 5, 1e6, 1e6, rounding=how) for how in ({}, {"uplink_step": 1.0})
    )
    assert rounded.up < whole.up / 2
    assert rounded.nominal_up == whole.nominal_up
    assert whole.uplink_bits_per_value is None
    values = sum(value.numel() for value in task.problem.first_state().values())
    assert rounded.uplink_bits_per_value == pytest.approx(8 * rounded.up / values, rel=0.05)
    with pytest.raises(fb.UserError, match=r"dgc: .*send no"):
        make_plan(CASES["dgc"], task, 5, 1e6, 1e6, rounding={"uplink_bits": 1.0})
