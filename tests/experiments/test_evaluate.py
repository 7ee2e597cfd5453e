"""`fewbytes evaluate`: models at three made hospitals (tables, pictures) beside pandas and scikit-learn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import ended
from PIL import Image
from places import SITES, images
from safetensors.torch import load_file
from surveyed import patients

from fewbytes.base.errors import UserError
from fewbytes.core import intervals, tested
from fewbytes.experiments.evaluate import Evaluating, evaluate
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.models.export import export_model
from fewbytes.models.files import load_model
from fewbytes.report import read_runs
from fewbytes.running.folder import BASELINES, forget_result

NAMES = ["north", "south", "west"]
FEATURES = ["age", "mass", "dose"]
HERE = {"partition": "local", "target": "ill", "leave_out": "sex", "metrics": "accuracy,auc", "rounds": 3}


@pytest.fixture(autouse=True, scope="module")
def _fewer_resamples():
    """A tenth of them, as tests of intervals are elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (intervals, tested):
            patch.setattr(module, "RESAMPLES", 100)
        yield


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory) -> Path:
    """The tables of three hospitals in `sites`, of another in `others`, and of the server."""
    root = tmp_path_factory.mktemp("hospitals")
    for number, (name, n, shift) in enumerate(zip(NAMES, (150, 90, 40), (-6, 0, 8), strict=True)):
        (root / "sites" / name).mkdir(parents=True)
        patients(n, shift, number).to_csv(root / "sites" / name / "train.csv", index=False)
        patients(n // 2, shift, number + 10).to_csv(root / "sites" / name / "test.csv", index=False)
    (root / "others").mkdir()
    patients(80, 3, 20).to_csv(root / "others" / "east.csv", index=False)
    patients(100, 0, 30).to_csv(root / "server.csv", index=False)
    return root


def settings(root: Path, **more) -> dict:
    own = {"dataset": str(root / "server.csv"), "client_data": str(root / "sites"), "parameters": {"lr": 0.1}}
    return {"method": "fedavg", **HERE, **own, **more}


@pytest.fixture(scope="module")
def run(hospitals) -> Path:
    folder = hospitals / "run"
    PreparedRun(settings(hospitals)).execute(folder, False)
    return folder


@pytest.fixture(scope="module")
def evaluation(run, hospitals) -> dict:
    how = Evaluating(alone=True, pooled=True, without=("south",), sites=str(hospitals / "others"), by="sex")
    return evaluate([run], how)[1]


def probabilities(model: torch.nn.Module, frame: pd.DataFrame, server: pd.DataFrame) -> np.ndarray:
    """By pandas: each column in the server's standard deviations from its mean."""
    scaled = (frame[FEATURES] - server[FEATURES].mean()) / server[FEATURES].std(ddof=0)
    with torch.no_grad():
        return model(torch.tensor(scaled.to_numpy(), dtype=torch.float32)).softmax(1).numpy()


def figures(probability: np.ndarray, frame: pd.DataFrame) -> dict[str, float]:
    """By scikit-learn."""
    from sklearn.metrics import accuracy_score, roc_auc_score

    ill = (frame["ill"] == "yes").to_numpy()
    right = accuracy_score(ill, probability.argmax(1) == 1)
    return {"accuracy": right, "auc": roc_auc_score(ill, probability[:, 1])}


def test_figures_equal_pandas_and_scikit_learn(evaluation, run, hospitals):
    from sklearn.metrics import confusion_matrix

    server = pd.read_csv(hospitals / "server.csv")
    frames = {name: pd.read_csv(hospitals / "sites" / name / "test.csv") for name in NAMES}
    frames["east"] = pd.read_csv(hospitals / "others" / "east.csv")  # all its samples, as it took no part
    models = {("shared model", None): load_model(run), ("pooled data", None): load_model(run / BASELINES / "pooled", 0)}
    models |= {("training alone", name): load_model(run / BASELINES / "alone", i) for i, name in enumerate(NAMES)}
    models["without south", None] = load_model(run / BASELINES / "without-1")
    assert {(c["models"], c["of"]) for c in evaluation["cells"]} == models.keys()
    assert len(evaluation["cells"]) == len(models) * len(frames)
    for cell in evaluation["cells"]:
        frame = frames[cell["site"]]
        found = probabilities(models[cell["models"], cell["of"]], frame, server)
        shown = {metric: figure["value"] for metric, figure in cell["scores"].items()}
        assert shown == pytest.approx(figures(found, frame), abs=1e-6)
        ill = (frame["ill"] == "yes").to_numpy().astype(int)
        assert cell["confusion"] == confusion_matrix(ill, found.argmax(1), labels=[0, 1]).tolist()
    assert [(s["name"], s["samples"], s["trained"]) for s in evaluation["sites"]] == [
        *((name, len(frames[name]), True) for name in NAMES), ("east", 80, False),
    ]  # fmt: skip


def test_subgroups_equal_pooled_pandas(evaluation, run, hospitals):
    server, model = pd.read_csv(hospitals / "server.csv"), load_model(run)
    pooled = pd.concat([pd.read_csv(hospitals / "sites" / name / "test.csv") for name in NAMES])
    shown = {g["group"]: g for g in evaluation["groups"] if g["models"] == "shared model" and g["site"] is None}
    assert list(shown) == ["f", "m"]
    for sex, group in shown.items():
        frame = pooled[pooled["sex"] == sex]
        assert group["samples"] == len(frame)
        expected = figures(probabilities(model, frame, server), frame)["accuracy"]
        assert group["score"]["value"] == pytest.approx(expected, abs=1e-6)
        assert group["score"]["low"] <= group["score"]["value"] <= group["score"]["high"]


def test_gains_are_differences_on_the_same_samples(evaluation):
    own = [cell for cell in evaluation["cells"] if cell["of"] in (None, cell["site"])]
    at = {(cell["models"], cell["site"]): cell["scores"]["accuracy"]["value"] for cell in own}
    gains = {(g["models"], g["over"], g["site"]): g["gain"] for g in evaluation["gains"]}
    for name in NAMES:
        gap = gains["shared model", "training alone", name]
        assert gap["value"] == pytest.approx(at["shared model", name] - at["training alone", name])
        assert gap["low"] <= gap["value"] <= gap["high"]
    mean = np.mean([gains["shared model", "training alone", name]["value"] for name in NAMES])
    assert gains["shared model", "training alone", None]["value"] == pytest.approx(mean)
    assert ("shared model", "training alone", "east") not in gains  # it has no model of its own
    contribution = gains["shared model", "without south", "east"]["value"]
    assert contribution == pytest.approx(at["shared model", "east"] - at["without south", "east"])


def test_without_a_site_is_the_run_of_the_others(evaluation, run, hospitals, tmp_path):
    (tmp_path / "sites").mkdir()
    for name in ("north", "west"):
        shutil.copytree(hospitals / "sites" / name, tmp_path / "sites" / name)
    PreparedRun(settings(hospitals, client_data=str(tmp_path / "sites"))).execute(tmp_path / "two", False)
    assert same(*(place / "models/global.safetensors" for place in (tmp_path / "two", run / BASELINES / "without-1")))


def same(one: Path, other: Path) -> bool:
    """Whether two files have the same weights."""
    weights = load_file(one), load_file(other)
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_pooled_is_one_site_with_all_samples(evaluation, run, hospitals, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "sites" / "all").mkdir(parents=True, exist_ok=True)
        frames = [pd.read_csv(hospitals / "sites" / name / f"{split}.csv") for name in NAMES]
        pd.concat(frames).to_csv(tmp_path / "sites" / "all" / f"{split}.csv", index=False)
    own = json.loads((run / "result.json").read_text())["parameters"]
    parameters = {key: own[key] for key in ("epochs", "lr", "batch", "momentum")}
    of_one = {"client_data": str(tmp_path / "sites"), "clients": 1, "method": "separate", "parameters": parameters}
    PreparedRun(settings(hospitals, **of_one)).execute(tmp_path / "one", False)
    assert same(*(place / "models/client-0.safetensors" for place in (tmp_path / "one", run / BASELINES / "pooled")))


def test_the_report_names_the_sites(evaluation, run):
    counts = json.loads((run / "partition.json").read_text())
    assert counts["names"] == NAMES
    last = json.loads((run / "rounds.jsonl").read_text().splitlines()[-1])
    by_site = last["by_client"]["accuracy"]["personalised"]
    assert list(by_site) == ["0", "1", "2"]
    assert np.mean(list(by_site.values())) == pytest.approx(last["scores"]["accuracy"]["personalised"])
    for page in ("evaluation.html", "report.html"):
        text = (run / page).read_text()
        assert "By site" in text
        assert all(f'<th scope="row">{name}</th>' in text for name in NAMES)
    assert '<th scope="row">east *</th>' in (run / "evaluation.html").read_text()


def test_a_models_file_is_evaluated_at_other_sites(run, hospitals, tmp_path):
    file = run / "models" / "global.safetensors"
    folder, found = evaluate([file], Evaluating(sites=str(hospitals / "others"), by="age"), tmp_path / "out")
    frame, server = (pd.read_csv(hospitals / place) for place in ("others/east.csv", "server.csv"))
    [cell] = found["cells"]
    expected = figures(probabilities(load_model(run), frame, server), frame)
    assert {k: v["value"] for k, v in cell["scores"].items()} == pytest.approx(expected, abs=1e-6)
    groups = [g for g in found["groups"] if g["site"] is None]
    assert sum(g["samples"] for g in groups) == 80
    assert [g["samples"] for g in groups] == pytest.approx([20] * 4, abs=6)
    assert (folder / "evaluation.html").is_file()


def test_a_resumed_run_forgets_its_evaluation(hospitals, tmp_path):
    PreparedRun(settings(hospitals, rounds=1)).execute(tmp_path / "run", False)
    evaluate([tmp_path / "run"], Evaluating(alone=True))
    assert (tmp_path / "run" / BASELINES).is_dir()
    forget_result(tmp_path / "run")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"evaluation.json", "evaluation.html", BASELINES, "report.html"}


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (Evaluating(without=("nowhere",)), "there is no such site; there are north, south, west"),
        (Evaluating(by="hair"), "has no column 'hair'"),
        (Evaluating(sites="missing"), "there is no folder 'missing'"),
        (Evaluating(metrics=("beauty",)), "there is no metric 'beauty'"),
    ],
)
def test_what_cannot_be_is_one_line(run, how, error):
    with pytest.raises(UserError, match=error):
        evaluate([run], how)


def test_an_exported_file_is_the_same_model(run, hospitals, tmp_path):
    files = export_model(run, formats=["safetensors"], out=tmp_path / "export")
    [file] = [path for path in files if path.suffix == ".safetensors"]
    how = Evaluating(sites=str(hospitals / "others"))
    one, other = (evaluate([path], how, out=tmp_path)[1] for path in (file, run / "models" / "global.safetensors"))
    assert one["cells"] == other["cells"]
    assert one["cells"]
    assert str(hospitals) not in file.read_bytes()[:5000].decode(errors="replace")  # it may be shared


def test_a_calibration_curve_is_scikit_learns(evaluation, run, hospitals):
    from sklearn.calibration import calibration_curve

    rng = np.random.default_rng(0)
    probability = rng.uniform(size=500)
    ill = rng.uniform(size=500) < probability**2
    found = tested.Predictions(
        torch.tensor(np.stack([1 - probability, probability], 1)), torch.from_numpy(ill.astype(np.int64))
    )
    observed, predicted = calibration_curve(ill, probability, n_bins=10)
    curve = found.calibration(positive=1)
    assert [each[:2] for each in curve] == [pytest.approx(pair) for pair in zip(predicted, observed, strict=True)]
    merged = found.calibration(positive=1, least=120)
    assert min(count for _, _, count in merged) >= 120
    assert sum(count for _, _, count in merged) == 500
    assert sum(p * n for p, _, n in merged) == pytest.approx(probability.sum())
    cell = next(cell for cell in evaluation["cells"] if cell["models"] == "shared model" and cell["site"] == "north")
    assert sum(count for _, _, count in cell["calibration"]) == 75
    assert "Calibration at each site" in (run / "evaluation.html").read_text()


def test_a_file_needs_sites_and_trains_nothing(run):
    file = run / "models" / "global.safetensors"
    with pytest.raises(UserError, match="--sites"):
        evaluate([file])
    with pytest.raises(UserError, match="give its folder"):
        evaluate([file], Evaluating(alone=True, sites="others"))


def test_a_run_whose_data_are_elsewhere_says_so(run, tmp_path):
    text = "".join(line for line in (run / "config.toml").read_text().splitlines(True) if "client_data" not in line)
    for name in ("partition.json", "rounds.jsonl", "result.json"):
        (tmp_path / name).write_text((run / name).read_text())
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UserError, match="has its data on the sites' machines"):
        evaluate([tmp_path])


def test_the_command_prints_a_table_and_a_verdict(run, capsys, monkeypatch):
    code, out, _ = ended(capsys, monkeypatch, run.parent, "evaluate", str(run), "--alone", "--metrics", "accuracy")
    assert code == 0
    for name in (*NAMES, "mean of the sites", "training alone", "federating helps"):
        assert name in out.replace("Federating helps", "federating helps")
    page, terms = out.split()[-3], out.split()[-2]
    assert (page.endswith("evaluation.html"), terms) == (True, "terms:")


def test_a_comparison_says_whether_federating_helps(hospitals, capsys, monkeypatch):
    arguments = ("--partition", "local", "--client-data", "sites", "--dataset", "server.csv", "--target", "ill")
    more = ("--leave-out", "sex", "--rounds", "1", "--out", "compared")
    code, out, _ = ended(capsys, monkeypatch, hospitals, "compare", "fedavg", "separate", *arguments, *more)
    assert code == 0
    assert "fedavg's shared model is" in out
    assert "than training alone on average over 3 sites' test sets" in out
    [folder] = (hospitals / "compared").iterdir()
    assert len(read_runs([folder])) == 2
    found = json.loads((folder / "evaluation.json").read_text())
    assert [each["kind"] for each in found["models"]] == ["shared", "alone"]
    assert "fedavg&#39;s shared model is" in (folder / "report.html").read_text()


def test_pictures_of_three_hospitals(places):
    """Their figures equal scikit-learn's on the files as PIL reads them."""
    from sklearn.metrics import accuracy_score, confusion_matrix

    for seed, (name, classes) in enumerate(SITES.items()):
        images(places / "sites" / name, "test", dict.fromkeys(classes, 6), 40 + seed)
    how = {"method": "fedavg", "partition": "local", "dataset": "cells", "client_data": str(places / "sites")}
    PreparedRun({**how, "rounds": 1, "parameters": {"batch": 10}}).execute(places / "run", False)
    _, found = evaluate([places / "run"])
    model = load_model(places / "run")
    assert [site["name"] for site in found["sites"]] == list(SITES)
    for cell in found["cells"]:
        files = sorted((places / "sites" / cell["site"] / "test").glob("*/*.png"))
        x = torch.stack([torch.from_numpy(np.array(Image.open(file)))[None] / 255 for file in files])
        with torch.no_grad():
            guessed = model(x).argmax(1).numpy()
        truth = [int(file.parent.name == "malignant") for file in files]
        assert cell["scores"]["accuracy"]["value"] == pytest.approx(accuracy_score(truth, guessed))
        assert cell["confusion"] == confusion_matrix(truth, guessed, labels=[0, 1]).tolist()
