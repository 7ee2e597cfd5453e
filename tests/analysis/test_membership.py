"""Membership inference: its figures on scores made by hand, and over runs that keep or forget their samples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import fewbytes
from runs import configured

import fewbytes as fb
from fewbytes.analysis.membership import auc, lira, matched, membership, pools, true_positives
from fewbytes.analysis.settings import Inferring
from fewbytes.core.training import outputs
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.report import read_runs, write_report
from fewbytes.report.leaks import membership_words

QUICK = Inferring(shadows=4, samples=100)
TERMS = {"rounds": 1, "clients": 3, "partition": "iid", "samples": "50/20"}


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory) -> Path:
    terms = TERMS | {"clients": 1, "samples": "100/20"}
    parameters = {"epochs": 60, "lr": 0.002, "batch": 20, "optimiser": "adam"}
    return configured(tmp_path_factory.mktemp("over"), "separate", **terms, parameters=parameters)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> Path:
    return configured(tmp_path_factory.mktemp("once"), "fedavg", **TERMS, parameters={"epochs": 1, "batch": 10})


# ---- figures ----


def test_the_area_is_how_often_a_member_scores_higher():
    assert auc(torch.tensor([3.0, 2.0, 1.0, 0.0]), 2) == 1
    assert auc(torch.tensor([0.0, 1.0, 2.0, 3.0]), 2) == 0
    assert auc(torch.tensor([1.0, 3.0, 2.0, 1.0]), 2) == pytest.approx((0.5 + 2) / 4)


def test_members_are_counted_above_all_but_one_in_a_hundred_of_the_others():
    others = torch.arange(200.0)
    members = torch.tensor([196.5, 197.0, 197.5, 300.0]).repeat(50)
    assert true_positives(torch.cat([members, others]), 200) == 0.5  # two of 200 others are above 197


def test_lira_goes_by_what_is_usual_for_each_sample():
    """Samples differ more among each other than by membership: their loss tells nothing, its place does."""
    torch.manual_seed(0)
    n, models = 400, 8
    ease, inside = 10 * torch.randn(n), torch.arange(models)[:, None] % 2 == torch.arange(n) % 2
    shadows = ease + 2 * inside + 0.3 * torch.randn(models, n)
    phi = ease + 2 * (torch.arange(n) < n // 2) + 0.3 * torch.randn(n)
    assert auc(phi, n // 2) < 0.7
    assert auc(lira(phi.double(), shadows.double(), inside), n // 2) > 0.95


def test_members_and_others_are_of_the_same_classes():
    mine, theirs = torch.tensor([0, 0, 0, 1, 1, 3]), torch.tensor([2, 1, 0, 1, 1, 0, 2])
    members, others = matched(mine, theirs, 100, np.random.default_rng(0))
    assert sorted(mine[members].tolist()) == [0, 0, 1, 1]
    assert mine[members].tolist() == theirs[others].tolist()
    assert len(set(members.tolist())) == len(set(others.tolist())) == 4
    assert len(matched(mine, theirs, 3, np.random.default_rng(0))[0]) == 3
    assert len(matched(mine, theirs + 5, 3, np.random.default_rng(0))[0]) == 0


# ---- runs ----


def test_an_overfitted_model_gives_members_away_and_one_hardly_trained_does_not(overfitted, averaged):
    over, once = membership(overfitted, QUICK), membership(averaged, QUICK)
    assert (over["model"], once["model"]) == ("client 0", "global")
    assert over["members"] == once["members"] == 100
    for kept, forgotten in zip(over["attacks"], once["attacks"], strict=True):
        assert kept["attack"] == forgotten["attack"]
        assert min(kept["control_auc"], forgotten["control_auc"]) >= 0.6
        assert forgotten["auc"] < min(kept["auc"], forgotten["control_auc"])
        assert not kept["void"]
    assert over["attacks"][1]["auc"] >= 0.6
    page = write_report(read_runs([overfitted]), overfitted / "report.html").read_text()
    assert "Membership inference" in page
    assert membership_words(over)[0] in page


def test_which_classes_a_client_has_is_not_taken_for_membership(tmp_path):
    """Its own model knows its classes better than others, whether it was trained on a sample or not."""
    terms = {"rounds": 1, "clients": 3, "partition": "shards", "shards_per_client": 4}
    run = configured(tmp_path, "separate", **terms, parameters={"epochs": 1, "batch": 20})
    (loss, _) = membership(run, QUICK)["attacks"]
    assert abs(loss["auc"] - 0.5) < 0.1


def test_shadow_models_are_trained_under_the_run_s_noise_and_the_control_is_not(tmp_path):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")
    run = configured(tmp_path, "fedavg", **TERMS, dp="of=samples,epsilon=0.05,delta=1e-5,clip=1,noise=seeded")
    experiment = experiment_of(run)
    task = find(experiment).task
    both = pools(experiment.build_method(), task, 0, [each.train for each in task.data.clients], 1, QUICK)
    noisy, clear = (
        float((outputs(pool.learn(pool.x, pool.y, "a"), pool.x).argmax(1) == pool.y).double().mean()) for pool in both
    )
    assert noisy < 0.5 < 0.95 < clear


def test_what_the_control_does_not_show_is_void():
    row = {"attack": "LiRA", "auc": 0.7, "tpr": 0.1, "control_auc": 0.59, "control_tpr": 0.0, "void": True}
    (line,) = membership_words({"attacks": [row]})
    assert re.search("^LiRA: void, .*0.59, below 0.60", line)


def test_the_command_line_tells_the_result_and_the_same_seed_the_same(averaged):
    words = "--membership", "--shadows", "4", "--samples", "100"
    done = fewbytes("attack", averaged, *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((averaged / "membership.json").read_text())
    assert [row["attack"] for row in result["attacks"]] == ["loss threshold", "LiRA"]
    again = fewbytes("attack", averaged, *words)
    assert json.loads((averaged / "membership.json").read_text()) == result
    assert "control's AUC" in again.stdout


def test_mistakes_are_told(averaged, tmp_path):
    with pytest.raises(fb.UserError, match="is not a run folder"):
        membership(tmp_path)
    with pytest.raises(fb.UserError, match=r"shadows .*4"):
        Inferring(shadows=3)
    few = configured(tmp_path / "few", "fedavg", **TERMS | {"samples": "20/10"}, parameters={"batch": 10})
    with pytest.raises(fb.UserError, match=r"60 .*too few"):
        membership(few)
    (averaged / "membership.json").write_text("{}")
    with pytest.raises(fb.UserError, match=r"membership\.json is damaged"):
        read_runs([averaged])
