"""Comparisons with several seeds, tuned on validation data: what is run, chosen, shared, resumed and merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import ended
from runs import timeless

from fewbytes.base.errors import UserError
from fewbytes.experiments import terms
from fewbytes.experiments.jobs import Job, Outcome, work
from fewbytes.experiments.study import ASKED, Chosen, Study, begin_study, choose
from fewbytes.experiments.tuning import Range, Tried, Validated, chosen_of, grid, read_space, suggested

QUICK = ["--dataset", "digits", "--part", "0.2", "--clients", "3", "--rounds", "1", "--model", "mlp:hidden=8"]
QUICK += ["--set", "epochs=1", "--set", "batch=20", "--workers", "1"]
TUNED = ["compare", "fedavg", "separate", *QUICK, "--seeds", "3,1", "--tune", "fedavg.lr=0.001,0.3"]


def results(folder: Path) -> dict[str, object]:
    """The results of runs, without times, by place."""
    files = sorted(folder.glob("*/result.json"))
    return {path.parent.name: timeless(json.loads(path.read_text())) for path in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished comparison, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        return folder / "it", lambda capsys: ended(capsys, patch, folder, *TUNED, "--resume", "it")


def test_parameters_are_chosen_on_validation_data_and_all_seeds_run_with_them(whole, capsys):
    folder, run = whole
    code, out, errors = run(capsys)
    assert code == 0, errors
    assert "with seed 3" in " ".join(errors.split())
    study = json.loads((folder / ASKED).read_text())
    assert (study["seeds"], study["settings"]["validation"], set(study["chosen"])) == ([3, 1], 0.1, {"fedavg"})
    scores, tested = {}, {}
    for trial in (folder / "tuning").iterdir():
        last = json.loads((trial / "rounds.jsonl").read_text().splitlines()[-1])
        scores[trial.name] = last["validation"]["accuracy"]["global"]
        tested[trial.name] = last["scores"]["accuracy"]["global"]
    assert set(scores) == {"fedavg-lr=0.001", "fedavg-lr=0.3"}
    best = max(scores, key=lambda name: scores[name])
    chosen = study["chosen"]["fedavg"]
    assert f"fedavg-lr={chosen['parameters']['lr']}" == best
    assert (
        f"lr {chosen['parameters']['lr']}, global accuracy {100 * scores[best]:.1f}% on validation data"
        in chosen["why"]
    )
    assert chosen["why"] in " ".join(out.split())
    found = results(folder)
    assert set(found) == {"fedavg-seed-1", "fedavg-seed-3", "separate-seed-1", "separate-seed-3"}
    assert {name: result["seed"] for name, result in found.items() if "fedavg" in name} == {
        "fedavg-seed-1": 1, "fedavg-seed-3": 3,
    }  # fmt: skip
    assert {r["parameters"]["lr"] for n, r in found.items() if "fedavg" in n} == {chosen["parameters"]["lr"]}
    assert found["fedavg-seed-3"] == timeless(json.loads((folder / "tuning" / best / "result.json").read_text()))
    assert "±" in out
    assert "too few to tell methods apart" in out
    page = (folder / "report.html").read_text()
    assert "Differences over seeds" in page
    assert "Tuned parameters" in page


def test_the_same_command_resumes_and_another_is_refused(whole, capsys, monkeypatch, tmp_path):
    folder, run = whole
    assert run(capsys)[0] == 0
    shutil.copytree(folder, tmp_path / "it")
    before = results(tmp_path / "it")
    shutil.rmtree(tmp_path / "it" / "separate-seed-1")
    shutil.rmtree(tmp_path / "it" / "tuning" / "fedavg-lr=0.001")  # is chosen already
    written = (tmp_path / "it" / "fedavg-seed-1" / "result.json").stat().st_mtime_ns
    assert ended(capsys, monkeypatch, tmp_path, "compare", "--resume", "it")[0] == 0
    assert results(tmp_path / "it") == before
    assert (tmp_path / "it" / "fedavg-seed-1" / "result.json").stat().st_mtime_ns == written
    assert not (tmp_path / "it" / "tuning" / "fedavg-lr=0.001").exists()
    code, _, errors = ended(capsys, monkeypatch, tmp_path, *TUNED[:-1], "fedavg.lr=0.1,0.3", "--resume", "it")
    assert (code, 'other tune ({"fedavg.lr":"0.001,0.3"}, not' in errors, len(errors.splitlines())) == (2, True, 1)


def test_shards_in_folders_of_their_own_are_merged_into_the_whole(whole, capsys, monkeypatch, tmp_path):
    folder, run = whole
    assert run(capsys)[0] == 0
    for shard in ("1/2", "2/2"):
        there = f"s{shard[0]}"
        code, _, errors = ended(capsys, monkeypatch, tmp_path, *TUNED, "--shard", shard, "--resume", there)
        assert code == 0, errors
        assert "2 of 4 runs are done" in errors
    assert set(results(tmp_path / "s1")) == {"fedavg-seed-1", "fedavg-seed-3"}
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "compare", "--resume", "all", "--merge", "s1,s2", "--json")
    assert code == 0, errors
    assert [(r["method"], r["seed"]) for r in json.loads(out)] == [
        ("fedavg", 3), ("fedavg", 1), ("separate", 3), ("separate", 1),
    ]  # fmt: skip
    assert results(tmp_path / "all") == results(folder)
    assert json.loads((tmp_path / "all" / ASKED).read_text()) == json.loads((folder / ASKED).read_text())
    code, _, errors = ended(capsys, monkeypatch, tmp_path, "compare", "--merge", "s1,nowhere")
    assert (code, "nowhere is not a comparison's folder" in errors) == (2, True)


def test_one_method_is_repeated(capsys, monkeypatch, tmp_path):
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "run", "fedavg", *QUICK, "--seeds", "1,2,3")
    assert code == 0, errors
    assert "±" in out
    assert "over seeds 1, 2, 3" in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert len({json.dumps(result["score"]) for result in results(folder).values()}) == 3


def test_one_seed_is_said_to_be_one_run(capsys, monkeypatch, tmp_path):
    code, out, errors = ended(capsys, monkeypatch, tmp_path, "run", "fedavg", *QUICK, "--seeds", "3")
    assert (code, "--seeds 3 is one run, with the seed 3" in errors) == (0, True), out + errors


def test_a_setting_that_fails_is_not_chosen():
    scored = Validated(0.2, "rmse", "global", higher=False)
    tried = [Tried({"lr": 1.0}, None), Tried({"lr": 0.1}, scored), Tried({"lr": 0.2}, scored)]
    found = chosen_of("fedavg", {"lr": [1.0, 0.1, 0.2]}, tried)
    assert found is not None
    assert found.parameters == {"lr": 0.1}  # the first of equal ones
    assert "lr 1.0: no score" in found.why
    assert "lr 0.1 is the smallest value tried" in found.why
    assert chosen_of("fedavg", {}, tried[:1]) is None
    worse = Tried({"lr": 0.3}, scored._replace(value=0.3))
    assert chosen_of("fedavg", {}, [worse, tried[1]]).parameters == {"lr": 0.1}  # an error: lower is better


def test_values_to_try():
    assert grid(read_space("fedprox", {"lr": "0.1, 0.2", "mu": "0.5"}, None)) == [
        {"lr": 0.1, "mu": 0.5}, {"lr": 0.2, "mu": 0.5},
    ]  # fmt: skip
    assert read_space("fedavg", {"epochs": "1,2,2"}, None) == {"epochs": [1, 2]}
    for text, told in {
        "0.1..0.3": "--trials", "0.3..0.1": "a range goes from", "0..1": "above 0", "-1": "lr", "": "lr",
        "few": "lr", "0.1,,0.2": "lr",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=told):
            read_space("fedavg", {"lr": text}, None)


def test_optuna_suggests_the_same_settings_for_the_same_scores():
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'fewbytes[tune]'")
    space = read_space("fedavg", {"lr": "0.001..0.3", "epochs": "1..8", "batch": "10,20"}, 14)
    assert space["lr"] == Range(0.001, 0.3)

    def tried(seed: int) -> list[dict]:
        asking, found = suggested(space, 14, seed), []
        parameters = next(asking)
        for _ in range(13):
            found.append(parameters)
            parameters = asking.send(None if parameters["batch"] == 10 else -abs(parameters["lr"] - 0.03))
        with pytest.raises(StopIteration):
            asking.send(0.0)
        return [*found, parameters]

    once = tried(1)
    assert once == tried(1) != tried(2)
    assert all(0.001 <= each["lr"] <= 0.3 and 1 <= each["epochs"] <= 8 and each["batch"] in (10, 20) for each in once)
    assert all(type(each["epochs"]) is int and float(f"{each['lr']:.3g}") == each["lr"] for each in once)
    assert any(each["lr"] < 0.01 for each in once)


def test_what_one_process_has_chosen_no_other_changes(tmp_path):
    study = Study(["fedavg"], {}, tune={"lr": "1,2"})
    assert begin_study(tmp_path / "new", study) == study
    first, second = Chosen({"lr": 1}, "first"), Chosen({"lr": 2}, "second")
    assert choose(tmp_path / "new", "fedavg", first) == first == choose(tmp_path / "new", "fedavg", second)
    assert begin_study(tmp_path / "new", study).chosen == {"fedavg": first}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"holds notes\.txt and no comparison"):
        begin_study(tmp_path / "other", study)


def test_runs_of_other_processes_are_waited_for_only_while_others_need_them(monkeypatch):
    monkeypatch.setattr("fewbytes.experiments.jobs.POLL", 0)
    trial, last, other = (
        Job("a", None, {}, "trial", trial=True),
        Job("a", None, {}, "last"),
        Job("b", None, {}, "other"),
    )
    asked: list[str] = []

    def do(job: Job, position: str) -> Outcome:
        asked.append(job.place)
        return Outcome("taken" if job is other or (asked.count("trial") < 3 and job is trial) else "done")

    outcomes: dict[str, Outcome] = {}
    work([iter([[trial], [last]]), iter([[other]])], 3, do, (do, 1), outcomes)
    assert {place: outcome.status for place, outcome in outcomes.items()} == {
        "trial": "done", "last": "done", "other": "taken",
    }  # fmt: skip
    assert asked.count("trial") == 3
    assert asked.count("last") == 1


def test_all_methods_on_equal_terms_are_tuned_too_and_those_that_cannot_run_are_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(terms, "METHODS", ["fedavg", "fedkgf", "ensemble"])  # fedkgf cannot train this model
    asked = ["compare", "all", *QUICK, "--seeds", "1,2", "--tune", "lr=0.05,0.2", "--json"]
    code, out, errors = ended(capsys, monkeypatch, tmp_path, *asked)
    assert code == 0, errors
    assert errors.count("fedkgf is left out: no setting of it has a validation score (a Mlp has no convolution") == 1
    found = json.loads(out)
    assert [(r["method"], r["status"]) for r in found if r["method"] != "fedkgf"] == [
        ("fedavg", "done"), ("fedavg", "done"), ("ensemble", "done"), ("ensemble", "done"),
    ]  # fmt: skip
    assert {r["status"] for r in found if r["method"] == "fedkgf"} == {"left out"}
    assert {r["parameters"]["momentum"] for r in found if "parameters" in r} == {0.9}  # of the equal terms
    (folder,) = (tmp_path / "runs").iterdir()
    chosen = json.loads((folder / ASKED).read_text())["chosen"]
    assert {name: each["parameters"]["lr"] for name, each in chosen.items()} == {
        r["method"]: r["parameters"]["lr"] for r in found if "parameters" in r
    }
