"""Adapters on models of transformers and others: only they travel, and a saved model is them and a digest."""

from __future__ import annotations

import json

import pytest
import torch
from cases import TinyNet, tiny_data
from commands import fewbytes
from language import LENGTH, TOKENS, write_language_model, write_texts, write_tokenizer
from modules import needs
from runs import fingerprint
from safetensors import safe_open
from torch import nn

import fewbytes as fb
from fewbytes.base.language import read_tokenizer
from fewbytes.base.state import frozen_digest, mark_trained, state_of, trained_entries
from fewbytes.core.objectives import NextToken
from fewbytes.engines.handlers import UP_BITS
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.models.adapters import Adapters
from fewbytes.models.build import build_model
from fewbytes.models.lora import Lora
from fewbytes.running.checkpoint import fingerprint as of_configuration

needs("peft", "transformers")

METHOD = {"epochs": 1, "lr": 0.1, "batch": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    write_texts(folder / "texts")
    for kind in ("gpt2", "llama", "bert"):
        write_language_model(folder / kind, kind)
    write_tokenizer(folder / "other", "red cars ran and ran and ran in the red town")
    larger = read_tokenizer(str(folder / "gpt2"))
    larger.add_tokens(["moonlight"])
    larger.save_pretrained(folder / "larger")
    (folder / "said.csv").write_text("said,mood\nthe cat,calm\nred cars,wild\n" * 5)
    return folder


def numbers():
    x, y = torch.rand(20, LENGTH), torch.arange(20) % 2
    return (x, y), (x, y)


def settings(place, **more):
    given = {"method": "fedavg", "dataset": str(place / "texts"), "model": f"hf:{place / 'gpt2'}", "lora": "rank=4"}
    return given | {"length": LENGTH, "clients": 3, "rounds": 2, "parameters": METHOD} | more


def task_of(place, **more):
    return find(make_experiment(settings(place, **more))).task


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_alone_travel(place, kind):
    task = task_of(place, model=f"hf:{place / kind}")
    assert all("lora_" in name for name in task.problem.first_state())
    values = sum(value.numel() for value in task.problem.first_state().values())
    methods = (fb.FedAvg, fb.FedBN, fb.FedProx, fb.FedAdam, fb.Ditto) if kind == "gpt2" else (fb.FedAvg,)
    for method in methods:
        result = fb.run(method(**METHOD), task, rounds=2, workers=1)
        columns = result.ledger.columns()
        for way in ("uplink", "downlink"):
            a_client_and_round = result.ledger.totals()[f"{way}_nominal_bytes"] / len(columns["round"])
            assert a_client_and_round == pytest.approx(4 * values, rel=0.02)
        assert isinstance(task.problem.objective, NextToken)
        assert result.rounds[-1]["scores"]["perplexity"]["personalised"] < TOKENS


def test_adapters_may_be_rounded(place):
    result = fb.run(fb.FedAvg(**METHOD), task_of(place), rounds=2, workers=1, uplink_bits=2)
    exact = fb.run(fb.FedAvg(**METHOD), task_of(place), rounds=2, workers=1)
    assert all(row["measured"][UP_BITS] < 4 for row in result.rounds)  # tables are large beside so few values
    assert 4 * result.summary["uplink_bytes"] < exact.summary["uplink_bytes"]
    assert result.rounds[-1]["scores"]["perplexity"]["personalised"] < TOKENS


def test_adapters_begin_as_if_there_were_none_and_are_drawn_by_the_seed(place):
    x = torch.arange(LENGTH)[None]
    plain = build_model(f"hf:{place / 'gpt2'}", (LENGTH,), TOKENS, "tokens").eval()
    problems = [task_of(place, seed=seed).problem for seed in (0, 0, 1)]
    for problem in problems:
        torch.testing.assert_close(problem.model(0).eval()(x), plain(x).logits)
    states = [problem.first_state() for problem in problems]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not all(torch.equal(value, states[2][name]) for name, value in states[0].items())
    assert len({problem.frozen(0) for problem in problems}) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_a_real_peft_model_is_taken_as_it_is(place):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def make():
        base = AutoModelForCausalLM.from_pretrained(place / "gpt2")
        return get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    x = torch.randint(TOKENS, (20, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    pair = x[:, :-1], x[:, 1:]
    task = fb.Task.of(make, [(pair, pair), (pair, pair)], pair)
    result = fb.run(fb.FedAvg(epochs=2, lr=0.5, batch=5), task, rounds=2, workers=1)
    before, after = task.problem.first_model().state_dict(), result.global_model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(task.problem.first_state())
    perplexity = [row["scores"]["perplexity"]["global"] for row in result.rounds]
    assert perplexity[1] < perplexity[0]


def test_what_was_saved_is_loaded_again_and_a_run_goes_on(place, tmp_path):
    asked = ["--dataset", place / "texts", "--model", f"hf:{place / 'gpt2'}", "--lora", "rank=4", "--length", LENGTH]
    asked += ["--clients", "3", "--set", "batch=16", "--set", "lr=0.5", "--workers", "1", "--out", tmp_path / "runs"]
    assert fewbytes("run", "fedavg", *map(str, asked), "--rounds", "2").returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    with safe_open(run / "models" / "global.safetensors", "pt") as file:
        about = json.loads(file.metadata()["fewbytes"][64:])  # after a digest
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert all("lora_" in name for name in saved)
    assert (about["lora"], about["learns"]) == ("rank=4", "tokens")
    model = fb.load_model(run)
    assert all(torch.equal(value, saved[name]) for name, value in trained_entries(model).items())
    assert about["frozen"] == frozen_digest(model)


class Stopping(fb.Watcher):
    def scored(self, row):
        if row["round"] == 1:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_goes_on(place, tmp_path):
    task, method = task_of(place), fb.FedPURIN(**METHOD)
    fb.run(method, task, rounds=2, workers=1, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fb.run(method, task, rounds=2, workers=1, out=tmp_path / "stopped", watcher=Stopping())
    fb.run(method, task_of(place), rounds=2, workers=1, out=tmp_path / "stopped", resume=True)
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "whole")


def test_a_saved_model_on_another_backbone_is_refused(place, tmp_path):
    asked = settings(place, model=f"hf:{write_language_model(tmp_path / 'backbone')}")
    experiment = make_experiment(asked)
    found = find(experiment)
    task = found.task
    fb.run(experiment.build_method(), task, rounds=1, workers=1, out=tmp_path / "run", about=found.about())
    assert fb.load_model(tmp_path / "run") is not None
    was = of_configuration(experiment.build_method(), task, "")
    write_language_model(tmp_path / "backbone", seed=1)
    with pytest.raises(fb.UserError, match=r"hf:.* differs"):
        fb.load_model(tmp_path / "run")
    assert of_configuration(experiment.build_method(), find(make_experiment(asked)).task, "") != was


def test_texts_are_classified_by_named_tensors(place, tmp_path):
    rows = ["".join(f"{{\"said\": \"{text}\", \"mood\": \"{mood}\"}}\n" for _ in range(20)) for text, mood in
            (("the cat sat on a mat", "calm"), ("dogs ran after red cars in town", "wild"))]  # fmt: skip
    (tmp_path / "said.jsonl").write_text("".join(rows))
    for kind in ("bert", "gpt2"):
        of = {"dataset": str(tmp_path / "said.jsonl"), "text": "said", "target": ["mood"], "partition": "iid"}
        task = task_of(place, **of, model=f"hf:{place / kind}", clients=2)
        assert set(task.problem.blank().tensors) == {"input_ids", "attention_mask"}
        trained = {name for name in task.problem.first_state() if "lora_" not in name}
        assert trained == ({"classifier.weight", "classifier.bias"} if kind == "bert" else {"score.weight"})
        method = fb.FedAvg(epochs=5, lr=0.01, batch=8, optimiser="adam")
        result = fb.run(method, task, rounds=3, workers=1, out=tmp_path / kind)
        assert result.rounds[-1]["scores"]["accuracy"]["global"] == 1.0


def test_a_drawn_part_of_a_saved_model_is_drawn_again(place, tmp_path):
    """A BERT without a pooler gets one by the seed, and it is not trained."""
    (tmp_path / "said.csv").write_text("said,mood\n" + "the cat sat,calm\nred cars,wild\n" * 10)
    of = {"dataset": str(tmp_path / "said.csv"), "text": "said", "target": ["mood"], "partition": "iid", "seed": 3}
    experiment = make_experiment(settings(place, **of, model=f"hf:{place / 'bert'}", clients=2))
    found = find(experiment)
    task = found.task
    fb.run(fb.FedAvg(**METHOD), task, rounds=1, workers=1, out=tmp_path / "run", about=found.about())
    assert frozen_digest(fb.load_model(tmp_path / "run")) == task.problem.frozen(0)


def test_samples_of_several_tensors_from_python():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, numbers, more):
            return self.left(numbers) + self.right(more)

    g = torch.Generator().manual_seed(0)
    x = {"numbers": torch.randn(60, 3, generator=g), "more": torch.randn(60, 2, generator=g)}
    y = (x["numbers"][:, 0] + x["more"][:, 1] > 0).long()

    def part(start, stop):
        return {name: value[start:stop].numpy() for name, value in x.items()}, y[start:stop]

    task = fb.Task.of(Two, [(part(0, 20), part(20, 25)), (part(25, 45), part(45, 50))], part(50, 60))
    result = fb.run(fb.FedAvg(epochs=10, lr=0.5, batch=10), task, rounds=3, workers=1)
    assert result.rounds[-1]["scores"]["accuracy"]["global"] >= 0.9
    with pytest.raises(fb.UserError, match=r"\(numbers, more\)"):
        fb.run(fb.GeneFL(clusters=1, **METHOD), task, rounds=1, workers=1)
    with pytest.raises(fb.UserError, match="numbers 5, more 4"):
        fb.Task.of(Two, [(({"numbers": x["numbers"][:5], "more": x["more"][:4]}, y[:5]), part(0, 5))])


def test_tied_weights_travel_once(place):
    model = build_model(f"hf:{place / 'gpt2'}", (LENGTH,), TOKENS, "tokens")
    mark_trained(model)
    names = [name for name in state_of(model) if name.endswith(("wte.weight", "lm_head.weight"))]
    assert names == ["transformer.wte.weight"]
    assert frozen_digest(model) == ""


def test_adapters_on_convolutions_and_a_head_that_is_trained():
    model = Adapters(Lora.read("rank=2,alpha=4")).added(TinyNet(), head=True)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        "conv.lora_A.default.weight": (2, 1, 3, 3),
        "conv.lora_B.default.weight": (4, 2, 1, 1),
        "fc.weight": (3, 64),
        "fc.bias": (3,),
    }
    result = fb.run(
        fb.FedAvg(**METHOD), fb.Task.on(tiny_data(), TinyNet, lora=Adapters(Lora(2, 2))), rounds=1, workers=1
    )
    assert set(state_of(result.global_model)) == trained.keys()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora": "8"}, "lora .*'8': .*rank=8"),
        ({"lora": "rank=0"}, "rank and alpha"),
        ({"lora": "rank=4,targets=q_proj"}, "GPT2LMHeadModel .*q_proj"),
        ({"lora": "rank=4", "kgf": 4}, "one of them"),
        ({"length": 64}, "32 tokens .*not 64: --length 32"),
        (
            {"model": "hf:nowhere", "tokenizer": "gpt2"},
            "no folder 'nowhere', .*hub failed",
        ),
        ({"model": "hf:texts", "tokenizer": "gpt2"}, "hf:texts cannot be used"),
        ({"model": "hf:texts"}, "no tokenizer"),
        ({"dataset": "digits"}, "gpt2, .*images, .*--text COLUMN"),
        ({"dataset": "said.csv"}, r"said.csv .* hf:.*--text COLUMN"),
        ({"dataset": "test_adapters:numbers", "partition": "iid"}, "tokens or images, .* numbers"),
        ({"tokenizer": "larger"}, "300 tokens, .*tokenizer 301"),
        (
            {"dataset": "said.csv", "text": "said", "target": "mood", "tokenizer": "larger", "partition": "iid"},
            "300 tokens",
        ),
        ({"model": "mlp", "lora": None}, "--tokenizer, or an hf: model"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(place, given, words, monkeypatch):
    monkeypatch.setenv("FEWBYTES_DATA", str(place))
    with pytest.raises(fb.UserError, match=words) as error:
        find(make_experiment({key: value for key, value in settings(place, **given).items() if value is not None}))
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_not_the_models_is_noted(place):
    def notes(name):
        return PreparedRun(settings(place, tokenizer=str(place / name))).notes

    assert notes("bert") == []  # another folder, the same tokenizer
    (note,) = notes("other")
    assert "splits text differently from the tokenizer of hf:" in note
