"""What `fewbytes export` writes runs without this package: in a plain PyTorch, in onnxruntime, as its README says."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from commands import fewbytes
from language import LENGTH, WORDS, write_language_model, write_texts, write_tokenizer
from PIL import Image

import fewbytes as fb
from fewbytes.base.language import read_tokenizer
from fewbytes.data import table
from fewbytes.data.images import squared
from fewbytes.data.named import NamedTensors
from fewbytes.data.text import token_ids
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.running.settings import Watcher

of_text = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
WITHOUT = "import sys; sys.modules['fewbytes'] = None\n"  # so that importing it fails


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, fb.Task]:
    """A run on coloured image files that differ in size, of two classes."""
    folder = tmp_path_factory.mktemp("export")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for number, name in enumerate(("cells", "dust")):
            (folder / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (20 + i % 3, 18, 3), dtype=np.uint8) + 100 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / "data" / split / name / f"{i}.png")
    experiment = make_experiment(
        {
            "method": "fedavg", "dataset": str(folder / "data"), "image_size": 16, "clients": 2, "partition": "iid",
            "model": "resnet8:width=4,stem=3x3", "normalise": "imagenet", "rounds": 2,
            "parameters": {"batch": 6, "lr": 0.05, "epochs": 4},
        }
    )  # fmt: skip
    found = find(experiment)
    run_with(found.run(folder / "run", False, Watcher()))
    done = fewbytes("export", folder / "run", env={"FEWBYTES_CACHE": str(folder / "cache")})
    assert done.returncode == 0, done.stderr
    assert "model.onnx, model.pt2, model.safetensors" in done.stdout
    return folder / "run", found.task


def python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "predict",
    [
        "import torch; y = torch.export.load('model.pt2').module()(torch.from_numpy(x)).detach().numpy()",
        "import onnxruntime as o; (y,) = o.InferenceSession('model.onnx').run(None, {'x': x})",
    ],
    ids=["torch", "onnxruntime"],
)
def test_predictions_of_test_samples_are_equal_elsewhere(run, predict, tmp_path):
    folder, task = run
    x = task.data.test.load()[0]
    np.save(tmp_path / "x.npy", x.numpy())
    code = f"import numpy; x = numpy.load(r'{tmp_path}/x.npy'); {predict}; numpy.save(r'{tmp_path}/y.npy', y)"
    python(code, folder / "export")
    with torch.no_grad():
        want = fb.load_model(folder)(x).numpy()
    found = np.load(tmp_path / "y.npy")
    assert (found.argmax(1) == want.argmax(1)).all()
    assert found == pytest.approx(want, rel=1e-3, abs=1e-4)


def test_the_readmes_lines_name_an_images_class(run, tmp_path):
    folder, task = run
    snippets = re.findall(r"```python\n(import .*?)```", (folder / "export" / "README.md").read_text(), re.S)
    assert [len(snippet.splitlines()) for snippet in snippets] == [8, 8]
    for name in task.data.classes:
        picture = Image.open(next((folder.parent / "data" / "test" / name).iterdir())).convert("RGB")
        exif = Image.Exif()
        exif[0x0112] = 6  # turned on its side, as a telephone leaves it
        picture.transpose(Image.Transpose.ROTATE_90).save(folder / "export" / "image.png", exif=exif)
        x = torch.from_numpy(np.array(squared(np.asarray(picture), 16)))
        with torch.no_grad():
            want = fb.load_model(folder)(x.permute(2, 0, 1)[None] / 255).softmax(1)[0]
        for snippet in snippets:
            found = ast.literal_eval(python(snippet, folder / "export"))
            assert found == pytest.approx(dict(zip(task.data.classes, want.tolist(), strict=True)), abs=1e-4)


def test_the_command_says_what_is_wrong_in_one_line(run, tmp_path):
    for arguments, words in (
        ((tmp_path / "none",), "there is no run folder"),
        ((run[0], "--client", "5"), "leave out --client"),
    ):
        done = fewbytes("export", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.strip().count("\n") == 0
    done = fewbytes("export", run[0], "--torch", "--out", tmp_path / "out", "--json")
    assert set(json.loads(done.stdout)) == {"README.md", "model.json", "model.pt2"}


# From a row or a text to an answer ------------------------------------------------------------------------------------


def trained(folder: Path, **settings: Any) -> tuple[Path, fb.Task]:
    """The folder of a run of two clients, and its task."""
    experiment = make_experiment({"method": "fedavg", "clients": 2, "partition": "iid", "rounds": 2} | settings)
    found = find(experiment)
    run_with(found.run(folder / "run", False, Watcher()))
    return folder / "run", found.task


def exported(run: Path) -> dict[str, Any]:
    """What model.json says of the run's model, once it is exported."""
    fb.export_model(run, formats=["torch", "onnx"])
    return json.loads((run / "export" / "model.json").read_text())


def printed(run: Path, asked: list[Any]) -> list[tuple[list[str], list[Any]]]:
    """For PyTorch and for onnxruntime: what the README's lines print, and what they answer to what is asked then."""
    snippets = re.findall(r"```python\n(import .*?)```", (run / "export" / "README.md").read_text("utf-8"), re.S)
    assert len(snippets) == 2
    code = f"import json\nprint(json.dumps([answer(each) for each in json.loads({json.dumps(asked)!r})]))"
    lines = [python(f"{snippet}\n{code}", run / "export").splitlines() for snippet in snippets]
    return [(each[:-1], json.loads(each[-1])) for each in lines]


def outputs(run: Path, x: torch.Tensor | NamedTensors) -> torch.Tensor:
    """What the run's own model gives."""
    with torch.no_grad():
        made = fb.load_model(run)(**x.tensors) if isinstance(x, NamedTensors) else fb.load_model(run)(x)
    return getattr(made, "logits", made)


def written(rows: pandas.DataFrame, run: Path) -> list[dict[str, str]]:
    """Rows as a CSV file has them, beside the run's exported model, too."""
    text = rows.to_csv(index=False)
    (run / "export" / "rows.csv").write_text(text)
    return list(csv.DictReader(io.StringIO(text)))


def patients(count: int = 80) -> pandas.DataFrame:
    drawn = np.random.default_rng(0)
    kinds = {"stage": drawn.choice(["early", "late", "none seen"], count), "smoker": drawn.random(count) < 0.5}
    return pandas.DataFrame({"age": drawn.normal(60, 9, count).round(2), **kinds})


def test_a_row_gives_a_number_in_the_targets_own_unit(tmp_path):
    frame = patients()
    frame["cost"] = 1000 + 20 * frame.age + 300 * frame.smoker
    (tmp_path / "patients").mkdir()
    frame[:60].to_csv(tmp_path / "patients" / "train.csv", index=False)
    frame[60:].to_csv(tmp_path / "patients" / "test.csv", index=False)
    run, task = trained(
        tmp_path, dataset=str(tmp_path / "patients"), target=["cost"], parameters={"lr": 0.1, "batch": 8}
    )
    said = exported(run)["table"]
    mean, std = frame.cost[:60].mean(), frame.cost[:60].std(ddof=0)
    assert said["target"] == [{"name": "cost", "mean": pytest.approx(mean), "std": pytest.approx(std)}]
    assert [column["name"] for column in said["columns"]] == ["age", "smoker", "stage"]
    x = table(frame, schema=task.data.schema, test=frame[:8]).test.load()[0]
    want = outputs(run, x).ravel().numpy() * std + mean
    assert np.ptp(want) > 50
    rows = frame[:8].drop(columns="cost")
    for asked in (written(rows, run), rows.to_dict("records")):
        for _, found in printed(run, asked):
            assert [list(each) for each in found] == [["cost"]] * 8
            assert [each["cost"] for each in found] == pytest.approx(want, rel=1e-5)


def test_a_row_with_a_missing_value_gives_a_class(tmp_path):
    frame = patients()
    frame["outcome"] = np.where(frame.stage == "late", "ill", "well")
    frame.loc[::7, "stage"] = None
    frame.loc[3::7, "age"] = None
    frame.to_parquet(tmp_path / "patients.parquet")
    run, task = trained(
        tmp_path, dataset=str(tmp_path / "patients.parquet"), target=["outcome"], missing="mean",
        parameters={"lr": 0.1, "batch": 8, "epochs": 5},
    )  # fmt: skip
    said = exported(run)["table"]
    assert said["columns"][-1] == {"name": "stage", "categories": ["early", "late", "none seen"]}
    assert said["missing"]["rule"] == "mean"
    x = table(frame, schema=task.data.schema, test=frame[:20]).test.load()[0]
    shares = outputs(run, x).double().softmax(1).tolist()
    want = [dict(zip(task.data.classes, each, strict=True)) for each in shares]
    assert {max(each, key=lambda name: each[name]) for each in want} == {"ill", "well"}
    asked = written(frame[:20].drop(columns="outcome"), run)
    for lines, found in printed(run, [*asked, {"age": None, "stage": None, "smoker": True}]):
        assert [ast.literal_eval(line) for line in lines] == found[:20]
        for mine, theirs in zip(found[:20], want, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
    strange = {"age": 50, "stage": "x", "smoker": True}
    written(pandas.DataFrame([strange]), run)
    with pytest.raises(AssertionError, match=r"ValueError: stage .*'x'"):
        printed(run, [])


def test_the_best_model_answers_for_a_new_patient_in_plain_pytorch(tmp_path):
    """Early stopping on validation data, the best model exported, and one patient's probability, equal elsewhere."""
    frame = patients(300)
    frame["outcome"] = np.where(
        frame.age + 20 * frame.smoker + np.random.default_rng(1).normal(0, 9, 300) > 70, "ill", "well"
    )
    frame.to_csv(tmp_path / "patients.csv", index=False)
    run, task = trained(
        tmp_path, dataset=str(tmp_path / "patients.csv"), target=["outcome"], metrics=["auc"], positive="ill",
        validation=0.2, stop_when="patience=3", rounds=40, model="mlp", parameters={"lr": 0.3, "batch": 8},
    )  # fmt: skip
    result = json.loads((run / "result.json").read_text())
    best = result["best_model"]
    assert result["ended_by"] == "stop_when"
    assert (best["metric"], best["chosen_on"]) == ("auc", "validation")
    assert best["round"] == result["rounds"] - 3
    done = fewbytes("export", run)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "export" / "model.json").read_text())["round"] == best["round"]
    patient = {"age": 68.5, "stage": "late", "smoker": False}
    x = table(pandas.DataFrame([patient] * 2).assign(outcome="ill"), schema=task.data.schema, test=frame[:1]).train
    model, last = fb.load_model(run), fb.load_model(run, round=result["rounds"])
    with torch.no_grad():
        want, other = (each(x.load()[0][:1]).double().softmax(1)[0].tolist() for each in (model, last))
    assert want != pytest.approx(other, abs=1e-4)
    written(pandas.DataFrame([patient]), run)
    for lines, found in printed(run, [patient]):
        assert found[0] == pytest.approx(dict(zip(task.data.classes, want, strict=True)), abs=1e-5)
        assert ast.literal_eval(lines[0]) == found[0]


def test_rows_of_several_labels_and_none_missing(tmp_path):
    frame = patients(60)
    frame["cough"], frame["fever"] = (frame.age > 60).astype(int), frame.smoker.astype(int)
    frame.to_csv(tmp_path / "patients.csv", index=False)
    run, task = trained(tmp_path, dataset=str(tmp_path / "patients.csv"), target=["cough", "fever"])
    assert exported(run)["table"]["target"] == [{"name": "cough"}, {"name": "fever"}]
    x = table(frame, schema=task.data.schema, test=frame[:5]).test.load()[0]
    for _, found in printed(run, written(frame[:5], run)):
        assert [list(each) for each in found] == [["cough", "fever"]] * 5
        assert [list(each.values()) for each in found] == pytest.approx(outputs(run, x).sigmoid().numpy(), rel=1e-4)
    written(frame[:1].assign(age=None), run)
    with pytest.raises(AssertionError, match="ValueError: age "):
        printed(run, [])


@of_text
@pytest.mark.parametrize("method", ["fedavg", "ensemble"])
def test_a_text_gives_a_class(method, tmp_path):
    language = write_language_model(tmp_path / "language", "bert")
    drawn = np.random.default_rng(0)
    said = [" ".join(drawn.choice(WORDS[9 * (i % 2) : 9 * (i % 2) + 9], 3 + i % 20)) for i in range(60)]
    texts = pandas.DataFrame({"said": said, "mood": ["calm", "wild"] * 30})
    texts.to_csv(tmp_path / "said.csv", index=False)
    run, task = trained(
        tmp_path, method=method, dataset=str(tmp_path / "said.csv"), text="said", target=["mood"],
        model=f"hf:{language}", length=LENGTH, rounds=4, parameters={"lr": 0.3, "batch": 8, "epochs": 4},
    )  # fmt: skip
    about = exported(run)
    assert about["text"]["length"] == LENGTH
    assert list(about["input"]["tensors"]) == ["input_ids", "attention_mask"]
    asked = [*said[:8], "a text of yours"]
    logits = outputs(run, token_ids(asked, read_tokenizer(str(language)), LENGTH))
    want = [dict(zip(task.data.classes, each, strict=True)) for each in logits.double().softmax(1).tolist()]
    assert {max(each, key=lambda name: each[name]) for each in want} == {"calm", "wild"}
    shutil.rmtree(language)  # the export has all it needs
    for lines, found in printed(run, asked):
        for mine, theirs in zip(found, want, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        assert [ast.literal_eval(line) for line in lines] == found[-1:]


@of_text
@pytest.mark.parametrize("lora", [None, "rank=2"])
def test_a_text_goes_on_as_the_runs_model_would(lora, tmp_path):
    language = write_language_model(tmp_path / "language", "llama")
    run, _ = trained(
        tmp_path, dataset=str(write_texts(tmp_path / "texts", 2)), model=f"hf:{language}", length=LENGTH,
        parameters={"lr": 0.5, "batch": 4}, **({} if lora is None else {"lora": lora}),
    )  # fmt: skip
    exported(run)
    tokenizer, asked = read_tokenizer(str(language)), ["the cat", " ".join(WORDS * 2)]
    want = []
    for text in asked:
        tokens = tokenizer(text)["input_ids"]
        for _ in range(10):
            tokens.append(int(outputs(run, torch.tensor([tokens[-LENGTH:]]))[0, -1].argmax()))
        want.append(tokenizer.decode(tokens))
    shutil.rmtree(language)
    for _, found in printed(run, asked):
        assert found == want


@of_text
def test_another_tokenizer_in_the_runs_place_is_refused(tmp_path):
    language = write_language_model(tmp_path / "language", "llama")
    run, _ = trained(
        tmp_path, dataset=str(write_texts(tmp_path / "texts", 2)), model=f"hf:{language}", length=LENGTH, rounds=1
    )
    write_tokenizer(language, "red cars ran and ran and ran in the red town")
    with pytest.raises(fb.UserError, match="was trained with"):
        exported(run)
    assert not (run / "export").exists()
