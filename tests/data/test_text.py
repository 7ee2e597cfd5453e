"""Text: folders and tables cut into tokens, dealt out by author; tokenizers and backbones that sites must share."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch
from commands import fewbytes
from flower_grid import MemoryGrid
from language import LENGTH, TEXT, write_language_model, write_texts, write_tokenizer
from modules import needs

import fewbytes as fb
from fewbytes.base.language import read_tokenizer, tokenizer_digest
from fewbytes.data import federate, load_text
from fewbytes.data.schema import Schema
from fewbytes.data.settings import Partition
from fewbytes.experiments import app
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower import apps as flower_apps
from fewbytes.flower.link import Exchange

needs("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return read_tokenizer(str(folder))


def test_documents_are_cut_and_the_next_tokens_are_learnt(tokenizer, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text(TEXT)
    (tmp_path / "a" / "2.txt").write_text("the moon")
    (tmp_path / "b.txt").write_text("red cars")
    data = load_text(str(tmp_path), tokenizer, 6)
    assert data.groups == ("a", "b")
    assert data.learns == "tokens"
    whole = tokenizer(TEXT)["input_ids"] + [0] + tokenizer("the moon")["input_ids"] + [0]
    x, y = data.train.load()
    seen = torch.cat([data.train.load()[0], data.test.load()[0]])[data.train.labels.new_tensor(range(len(data.train)))]
    assert torch.equal(seen, x)
    of_a = data.train.labels == 0
    known = x[of_a].flatten().tolist()
    assert known == whole[: len(known)]
    assert y[of_a].flatten().tolist() == whole[1 : len(known) + 1]
    assert len(data.test) == 1  # the last sample of a; b has one sample, which is trained on
    last, aimed = data.test.load()
    left = len(whole) - 1 - len(known)
    assert last[0, :left].tolist() == whole[len(known) : -1]
    assert aimed[0].tolist() == whole[len(known) + 1 :] + [-100] * (6 - left)


def test_clients_hold_what_their_authors_wrote(tokenizer, tmp_path):
    data = load_text(str(write_texts(tmp_path / "texts")), tokenizer, LENGTH)
    dealt = federate(data, Partition("pathological", clients=4, classes_per_client=1))
    counts = torch.tensor(dealt.label_counts()["train"])
    assert dealt.label_counts()["classes"] == [f"author-{i}" for i in range(4)]
    assert ((counts > 0).sum(1) == 1).all()
    tests = [client.test for client in dealt.clients]
    assert all(test.labels.unique().tolist() == client.train.labels.unique().tolist()
               for test, client in zip(tests, dealt.clients, strict=True))  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_column_of_text_and_one_of_classes(kind, tokenizer, tmp_path):
    table = pd.DataFrame({"said": ["the cat", "red cars in town", TEXT] * 10, "mood": ["calm", "wild", "calm"] * 10})
    path = tmp_path / f"said.{kind}"
    {"csv": lambda: table.to_csv(path, index=False), "parquet": lambda: table.to_parquet(path),
     "jsonl": lambda: table.to_json(path, orient="records", lines=True)}[kind]()  # fmt: skip
    data = load_text(str(path), tokenizer, 8, "said", "mood")
    assert data.classes == ("calm", "wild")
    assert len(data.train) + len(data.test) == 30
    x = data.train.gathered()
    ids = tokenizer(["the cat"])["input_ids"][0]
    short = next(i for i in range(len(x)) if x.tensors["attention_mask"][i].sum() == len(ids))
    assert x.tensors["input_ids"][short].tolist() == ids + [0] * (8 - len(ids))
    assert x.tensors["attention_mask"].sum(1).max() == 8  # the long ones are cut off
    assert load_text(str(path), tokenizer, 8, "said").learns == "tokens"
    with pytest.raises(fb.UserError, match=r"no column 'says'.*said, mood"):
        load_text(str(path), tokenizer, 8, "says")
    with pytest.raises(fb.UserError, match=r"'mod' \(did you mean 'mood'\?\).*--target"):
        load_text(str(path), tokenizer, 8, "said", "mod")
    with pytest.raises(fb.UserError, match="'said' is both"):
        load_text(str(path), tokenizer, 8, "said", "said")


def test_a_column_names_the_clients_of_texts(tokenizer, tmp_path):
    """Also one that is neither text nor class, if a class is learnt; and the groups, if the next token is."""
    rows = {"said": [f"the cat {i}" for i in range(40)], "mood": ["calm", "wild"] * 20,
            "by": ["ann", "bob", "bob", "eve"] * 10}  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "said.csv", index=False)
    whole = load_text(str(tmp_path / "said.csv"), tokenizer, 8, "said", "mood")
    data = federate(whole, Partition("column:by"))
    assert data.names == ("ann", "bob", "eve")
    for name, client in zip(data.names, data.clients, strict=True):
        assert {rows["by"][row] for row in client.train.rows} == {name}
        assert {rows["by"][row] for row in client.test.rows} == {name}
    with pytest.raises(fb.UserError, match="no column 'bi'"):
        federate(whole, Partition("column:bi"))
    next_tokens = load_text(str(tmp_path / "said.csv"), tokenizer, 4, "said", by="by")
    data = federate(next_tokens, Partition("column:by"))
    assert data.names == ("ann", "bob", "eve")
    assert [client.train.labels.unique().tolist() for client in data.clients] == [[0], [1], [2]]
    for plain in (load_text(str(tmp_path / "said.csv"), tokenizer, 4, "said"), whole):
        with pytest.raises(fb.UserError, match="is a table, without folders: use column:NAME"):
            federate(plain, Partition("folders"))
    with pytest.raises(fb.UserError, match=r"no column 'bi'.*--partition column:NAME"):
        load_text(str(tmp_path / "said.csv"), tokenizer, 4, "said", by="bi")


def test_columns_of_texts_in_two_files_are_those_of_the_rows_that_are_kept(tokenizer, tmp_path):
    (tmp_path / "said").mkdir()
    for name, by in (("train", "aab"), ("test", "bbc")):
        table = pd.DataFrame({"said": ["the cat", None, "red cars"], "mood": ["calm", "wild", "wild"], "by": list(by)})
        table.to_parquet(tmp_path / "said" / f"{name}.parquet")
    whole = load_text(str(tmp_path / "said"), tokenizer, 8, "said", "mood", how=Schema(missing="drop"))
    assert [each.tolist() for each in whole.values("by")] == [["a", "b"], ["b", "c"]]


def test_what_cannot_be_read_is_told(tokenizer, tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(fb.UserError, match=r"latin.txt .*UTF-8 \(byte 3\)"):
        load_text(str(tmp_path), tokenizer, 8)
    (tmp_path / "latin.txt").write_text("")
    with pytest.raises(fb.UserError, match="two tokens"):
        load_text(str(tmp_path), tokenizer, 8)
    pd.DataFrame({"said": ["the cat", None]}).to_parquet(tmp_path / "said.parquet")
    with pytest.raises(fb.UserError, match="1 rows without a said"):
        load_text(str(tmp_path / "said.parquet"), tokenizer, 8, "said")


def test_tokenizers_that_cut_alike_have_one_digest(tokenizer, tmp_path):
    write_tokenizer(tmp_path / "same")
    write_tokenizer(tmp_path / "other", "red cars ran and ran and ran in the red town")
    same, other = (tokenizer_digest(read_tokenizer(str(tmp_path / name))) for name in ("same", "other"))
    assert same == tokenizer_digest(tokenizer) != other


HOSTS = ("server", "east", "north")


@pytest.fixture
def hosts(tmp_path):
    """A folder for each host, with texts of its own and copies of one model."""
    language = write_language_model(tmp_path / "language")
    texts = write_texts(tmp_path / "texts", authors=3)
    for number, host in enumerate(HOSTS):
        shutil.copytree(language, tmp_path / host / "backbone")
        shutil.copytree(texts / f"author-{number}", tmp_path / host / "notes")
    return tmp_path


def deployed(hosts, monkeypatch, **policy):
    """A run on two nodes that hold texts and a backbone of their own."""
    monkeypatch.setenv("FEWBYTES_DATA", str(hosts / "server"))
    settings = {"method": "fedavg", "dataset": "notes", "partition": "local", "clients": 2, "rounds": 2}
    settings |= {"model": "hf:backbone", "lora": "rank=2", "length": LENGTH, "parameters": {"batch": 16}}
    found = find(make_experiment(settings), here=())
    run_config = found.experiment.run_config()
    run_config |= {f"parameters.{key}": value for key, value in run_config.pop("parameters").items()}

    class Hosts(MemoryGrid):
        """Every message starts a process on its host, as Flower's do."""

        def answer(self, message):
            host = HOSTS[message.metadata.dst_node_id - 999]
            self.config, self.run_config = {"folder": str(hosts / host / "runs")}, run_config
            with monkeypatch.context() as there:
                there.setenv("FEWBYTES_DATA", str(hosts / host))
                there.setattr(app, "_served", {})
                there.setattr(flower_apps, "_nodes", {})
                return super().answer(message)

    grid = Hosts(app.client, 2, named=True)
    rules = fb.Policy(round_timeout=60, connect_timeout=30, **policy)
    run = replace(found.run(hosts / "run", False, fb.Watcher()), policy=rules)
    return flower_apps.serve_run(grid, run, ["site-0", "site-1"], Exchange(poll=0.001))


def test_sites_with_texts_of_their_own(hosts, monkeypatch):
    result = deployed(hosts, monkeypatch)
    assert json.loads((hosts / "run" / "result.json").read_text())["left_out"] == 0
    assert result.rounds[-1]["scores"]["perplexity"]["global"] > 1
    assert "class_names" not in (hosts / "run" / "config.toml").read_text()


def test_a_site_with_another_tokenizer_is_named(hosts, monkeypatch):
    write_tokenizer(hosts / "north" / "backbone", "red cars ran and ran and ran in the red town")
    words = r"client 1 \(site-1\) .*tokenizer \(give every node the server's folder\): \w+ there, \w+ here$"
    with pytest.raises(fb.UserError, match=words) as error:
        deployed(hosts, monkeypatch, min_replies=1.0)
    assert "\n" not in str(error.value)


def test_a_site_with_another_backbone_is_named(hosts, monkeypatch):
    write_language_model(hosts / "north" / "backbone", seed=1)
    words = r"client 1 \(site-1\) .*not trained.*: give every node the server's weights\): \w+ there, \w+ here$"
    with pytest.raises(fb.UserError, match=words) as error:
        deployed(hosts, monkeypatch, min_replies=1.0)
    assert "\n" not in str(error.value)


def test_image_folders_with_some_text_beside_stay_image_folders(places):
    place = places / "sites" / "east"
    (place / "readme.txt").write_text("cells")
    settings = {"method": "fedavg", "dataset": str(place), "clients": 2, "partition": "iid"}
    assert find(make_experiment(settings)).task.data.learns == "classes"


def test_one_command_learns_text(hosts):
    done = fewbytes(
        "run", "fedavg", "--dataset", str(hosts / "texts"), "--model", f"hf:{hosts / 'language'}", "--lora", "rank=2",
        "--length", str(LENGTH), "--clients", "2", "--rounds", "2", "--set", "lr=1", "--json",
        "--set", "batch=8", "--out", str(hosts / "runs"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    score = json.loads(done.stdout)["score"]
    assert (score["metric"], score["kind"]) == ("perplexity", "global")
    (run,) = (hosts / "runs").glob("[!.]*")
    first, last = [json.loads(line)["scores"]["perplexity"] for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert last["global"] < first["global"]
    (table,) = hosts.glob("**/report.html")
    assert "perplexity" in table.read_text()
