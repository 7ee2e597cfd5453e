"""`--partition local`: each client has a data set of its own; its node tells the server no more than it agrees to."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from commands import fewbytes
from flower_grid import MemoryGrid
from places import SITES, TEST, TRAIN, images, options
from safetensors.torch import load_file

import fewbytes as fb
from fewbytes.experiments import app
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower import apps as flower_apps
from fewbytes.flower.link import Exchange
from fewbytes.flower.node_file import NodeFile
from fewbytes.report import read_runs, write_report
from fewbytes.report.left_out import captions


class Told(fb.Watcher):
    """Hears of sites that cannot take part and of those that come later; calls `mended` after each round."""

    def __init__(self, mended=lambda: None):
        self.mended, self.lines, self.came = mended, [], []

    def refused(self, client, why):
        self.lines.append((client, why))

    def joined(self, client):
        self.came.append(client)

    def scored(self, row):
        self.mended()


def deployed(
    places: Path, out: Path, monkeypatch, node: dict | None = None, told: bool = True, watcher=None, all_of=1.0, **given
) -> Path:
    """A run whose nodes are hosts with a FEWBYTES_DATA of their own; `node`: their configuration, by host's name.

    `told`: whether the run config names the classes, as that of `fewbytes deploy` does. `all_of`: the part of the
    clients that must take part.
    """
    settings = {"method": "fedavg", "dataset": "cells", "partition": "local", "clients": 3, "rounds": 1} | given
    settings |= {"model": "mlp", "parameters": {"batch": 10}}
    found, resume = find(make_experiment(settings), here=()), out.exists()
    experiment = found.experiment
    run_config = experiment.run_config()
    run_config |= {f"parameters.{key}": value for key, value in run_config.pop("parameters").items()}
    if not told:
        run_config.pop("class_names")

    class Hosts(MemoryGrid):
        """Every message starts a process on its host, as Flower's do."""

        def answer(self, message):
            host = list(SITES)[message.metadata.dst_node_id - 1000]
            self.config = {"folder": str(places / host / "runs"), **(node or {}).get(host, {})}
            self.run_config = run_config
            with monkeypatch.context() as there:
                there.setenv("FEWBYTES_DATA", str(places / host))
                there.setattr(app, "_served", {})
                there.setattr(flower_apps, "_nodes", {})
                return super().answer(message)

    names = [f"site-{i}" for i in range(3)]
    policy = fb.Policy(min_replies=all_of, round_timeout=20, connect_timeout=5)
    run = replace(found.run(out, resume, watcher or fb.Watcher()), policy=policy)
    grid, exchange = Hosts(app.client, 3, named=True), Exchange(poll=0.001)
    flower_apps.serve_run(grid, run, names, exchange)
    return out


def of(out: Path, name: str):
    return json.loads((out / name).read_text())


def model(out: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(out / "models" / "global.safetensors").items()}


def test_every_image_of_each_clients_own_is_used(places, monkeypatch):
    """On one machine, and with nodes that each have a folder of that name: the same model comes of both."""
    done = fewbytes("run", "fedavg", *options(places), "--rounds", "1", "--out", places / "runs")
    assert done.returncode == 0, done.stderr
    (here,) = (places / "runs").iterdir()
    counts = {"classes": ["benign", "malignant"], "train": TRAIN, "test": TEST}
    assert of(here, "partition.json") == counts | {"names": list(SITES)}
    node = {name: {"tell": "labels"} for name in SITES}
    there = deployed(places, places / "deployed", monkeypatch, node)
    assert of(there, "partition.json") == counts
    assert of(there, "result.json")["majority_class_accuracy"] == of(here, "result.json")["majority_class_accuracy"]
    assert of(there, "result.json")["uplink_bytes"] == of(here, "result.json")["uplink_bytes"]
    assert model(there) == model(here)


def test_a_node_tells_no_more_than_it_agrees_to(places, monkeypatch):
    node = {"north": {"tell": "nothing"}, "south": {"tell": "labels"}}
    out = deployed(places, places / "deployed", monkeypatch, node)
    assert of(out, "partition.json")["train"] == [28, None, [12, 20]]
    assert of(out, "partition.json")["test"] == [7, None, [3, 5]]
    assert of(out, "result.json")["majority_class_accuracy"] == {}  # what the server does not know it does not guess
    page = write_report(read_runs([out]), out / "report.html").read_text()
    for row in ("0</th><td>28</td><td>7</td>", "1</th><td>—</td><td>—</td>", "2</th><td>32</td><td>8</td>"):
        assert row in page
    assert "Label distribution" in page
    nobody = deployed(places, places / "nobody", monkeypatch)
    page = write_report(read_runs([nobody]), nobody / "report.html").read_text()
    assert "Label distribution" not in page
    assert "1</th><td>36</td><td>9</td>" in page
    with pytest.raises(fb.UserError, match=r"client 1 \(site-1\) .*tell .* not 'all'"):
        deployed(places, places / "other", monkeypatch, {"north": {"tell": "all"}})


def test_a_class_that_only_one_site_has_is_refused_with_both_lists(places, monkeypatch, capfd):
    images(places / "sites" / "south", "train", {"lesion": 5}, 4)
    says = r"its data have classes that the run lacks, 1 of 3; its log names them; the run benign, malignant: use"
    with pytest.raises(fb.UserError, match=rf"client 2 \(site-2\) .*{says}"):
        deployed(places, places / "deployed", monkeypatch)
    lists = "classes that the run lacks: lesion; it has benign, lesion, malignant, the run benign, malignant: use"
    assert lists in capfd.readouterr().err
    assert (places / "deployed" / "rounds.jsonl").read_text() == ""  # nobody has trained
    done = fewbytes("run", "fedavg", *options(places), "--out", places / "runs")
    assert done.returncode == 2
    assert "the run benign, malignant" in " ".join(done.stderr.split())


def test_the_other_sites_go_on_where_the_policy_allows_and_who_is_mended_joins(places, monkeypatch):
    images(places / "sites" / "south", "train", {"lesion": 5}, 4)
    wrong = places / "sites" / "south" / "train" / "lesion"
    watcher = Told(lambda: wrong.rename(places / "elsewhere") if wrong.exists() else None)
    out = deployed(places, places / "deployed", monkeypatch, watcher=watcher, all_of=0.5, rounds=2)
    ((client, why),) = watcher.lines
    assert (client, watcher.came) == (2, [2])
    assert re.search("^site-2: .*1 of 3; its log names them; the run benign, malignant: ", why)
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [(row["round"], row["phase"], row["cohort"]) for row in rows] == [
        (1, "round", 2), (2, "join", 0), (2, "round", 3),
    ]  # fmt: skip
    assert [(left["client"], left["handler"], left["why"]) for left in rows[0]["left_out"]] == [(2, "data", why)]
    assert of(out, "result.json")["absent"] == {"2": 1}
    assert of(out, "partition.json")["train"] == [28, 36, 32]
    assert "its log names them" in write_report(read_runs([out]), out / "report.html").read_text()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda site: (site / "train" / "benign" / "3.png").write_bytes(b"no image"),
            r"image .*\(PNG",
        ),
        (lambda site: (site / "train" / "benign").rename(site / "train" / "bening"), "1 of 2; .*log"),
        (
            lambda site: site.rename(site.parent / "moved"),
            "no such data set .*node.toml",
        ),
    ],
)
def test_a_site_whose_folder_does_not_suit_is_named_and_the_others_go_on(places, monkeypatch, spoil, says):
    spoil(places / "sites" / "south")
    watcher = Told()
    out = deployed(places, places / "deployed", monkeypatch, watcher=watcher, all_of=0.5, rounds=3)
    ((client, why),) = watcher.lines
    assert client == 2
    assert re.match(rf"site-2: .*{says}", why)
    assert of(out, "partition.json")["train"] == [28, 36, None]
    assert (of(out, "result.json")["absent"], of(out, "result.json")["left_out"]) == ({"2": 3}, 3)
    (run,) = read_runs([out])
    (line,) = captions([run])
    assert re.match(rf"left out: client 2 missed 3 of 3 rounds \(site-2: .*{says}", line)
    assert "Client 2 missed 3 of 3 rounds" in write_report([run], out / "report.html").read_text()
    with pytest.raises(fb.UserError, match=rf"^client 2 \(site-2\) .*{says}"):
        deployed(places, places / "none", monkeypatch)


def tables(places: Path, table: dict[str, list], **at: dict[str, list]) -> None:
    """Tables called cells in place of the images, at some sites others; None stands for a column that is not there."""
    for name in ("server", *SITES):
        (places / name / "cells").rename(places / f"images of {name}")
        (places / name / "cells").mkdir()
        mine = {key: values for key, values in at.get(name, table).items() if values is not None}
        pandas.DataFrame(mine).to_csv(places / name / "cells" / "train.csv", index=False)
        pandas.DataFrame(table).to_csv(places / name / "cells" / "test.csv", index=False)


TABLE = {"age": [30, 50, 70, 50], "sex": ["f", "m", "f", "m"], "target": ["ill", "well", "ill", "well"]}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"age": [30, None, 70, 50]},
            "a table's column 'age' has missing values in some rows: fill it in, or have the server run",
        ),
        ({"sex": None}, "a table has no column 'sex': use the column names of the server's table$"),
        (
            {"sex": ["f", "x", "f", "m"]},
            "a table's column 'sex' has a value that is not a category .* or add a row with it to the server's",
        ),
        (
            {"target": ["ill", "well", "dead", "well"]},
            "classes that the run lacks, 1 of 3; its log names them",
        ),
    ],
)
def test_a_site_whose_table_does_not_suit_is_named_and_the_others_go_on(places, monkeypatch, columns, says):
    tables(places, TABLE, south=TABLE | columns)
    watcher = Told()
    node = {name: {"tell": "labels"} for name in SITES}
    out = deployed(places, places / "deployed", monkeypatch, node, watcher=watcher, all_of=0.5)
    ((client, why),) = watcher.lines
    assert client == 2
    assert re.match(rf"site-2: .*{says}", why)
    assert "\n" not in why
    assert of(out, "partition.json")["train"] == [[2, 2], [2, 2], None]


def test_of_numbers_to_learn_a_node_tells_how_many_are_in_each_tenth_of_the_servers(places, monkeypatch):
    costs = {"age": [i // 2 for i in range(40)], "target": [i + 0.5 for i in range(40)]}
    tables(places, costs, north={key: values[:10] for key, values in costs.items()})
    out = deployed(places, places / "deployed", monkeypatch, {"north": {"tell": "labels"}})
    partition = of(out, "partition.json")
    assert partition["classes"][:2] == ["below 4.4", "4.4 to 8.3"]
    assert partition["train"] == [40, [4, 4, 2, 0, 0, 0, 0, 0, 0, 0], 40]


def test_a_node_may_say_itself_where_its_data_are(places, monkeypatch):
    (places / "east" / "cells").unlink()
    node = {"east": {"client-data": str(places / "sites" / "east")}}
    out = deployed(places, places / "deployed", monkeypatch, node)
    assert of(out, "partition.json")["train"] == [28, 36, 32]


def test_a_node_that_does_not_say_where_its_data_are_does_not_train_on_the_servers_table(places, monkeypatch):
    """Although that lies there, too, as where both are on one machine."""
    tables(places, TABLE)
    server = str(places / "server" / "cells" / "test.csv")
    node = {name: {"allow": server, "client-data": str(places / name / "cells" / "train.csv")} for name in SITES}
    del node["south"]["client-data"]
    watcher = Told()
    out = deployed(places, places / "deployed", monkeypatch, node, watcher=watcher, all_of=0.5, dataset=server)
    ((client, why),) = watcher.lines
    assert client == 2
    assert re.match(r"site-2: test.csv is the server's test data, .* in its node.toml, .* client-data = ", why)
    assert of(out, "partition.json")["train"] == [4, 4, None]
    node["south"]["client-data"] = "/data/soth.csv"
    with pytest.raises(fb.UserError, match=r"no such data set .*node.toml"):
        deployed(places, places / "none", monkeypatch, node, dataset=server)


def test_of_a_client_s_values_the_server_is_told_none(places, monkeypatch, capfd):
    """Its own node's log has them, but for whole rows."""
    tables(places, TABLE, south=TABLE | {"age": ["30", "fifty", "70", "50"]})
    watcher = Told()
    deployed(places, places / "deployed", monkeypatch, watcher=watcher, all_of=0.5)
    ((_, why),) = watcher.lines
    assert why.startswith("site-2: a table's column 'age' has a value that is not a number: correct it")
    assert "row 2 of the data: 'fifty' is not a number" in capfd.readouterr().err
    (places / "south" / "cells" / "train.csv").write_text("age,sex,target\n50,25,f,ill\n")
    with pytest.raises(fb.UserError, match="more or fewer values"):
        deployed(places, places / "none", monkeypatch)
    assert "50,25" not in capfd.readouterr().err


def test_a_config_may_name_classes_that_the_servers_test_set_lacks(places):
    images(places / "sites" / "south", "train", {"lesion": 5}, 4)
    settings = {"method": "fedavg", "dataset": "cells", "partition": "local", "client_data": str(places / "sites")}
    data = find(make_experiment(settings | {"class_names": ["malignant", "lesion", "benign"]})).task.data
    assert data.label_counts()["train"] == [[12, 0, 16], [36, 0, 0], [20, 4, 12]]
    assert data.test.labels.tolist() == [2] * 5 + [0] * 5


def test_nodes_that_are_told_no_classes_must_have_the_servers(places, monkeypatch):
    """Of as many classes, sorted folders would give the same number to different ones."""
    images(places / "sites" / "north", "train", {"normal": 5}, 4)
    told = r'client 1 .*: classes: \["malignant", "normal"\] there, \["benign", "malignant"\] here$'
    with pytest.raises(fb.UserError, match=told):
        deployed(places, places / "deployed", monkeypatch, told=False)


def test_samples_of_another_shape_are_refused(places, monkeypatch):
    images(places / "large" / "cells", "train", {"benign": 5, "malignant": 5}, 4, side=9)
    (places / "east" / "cells").unlink()
    (places / "large" / "cells").rename(places / "east" / "cells")
    with pytest.raises(fb.UserError, match=r"client 0 .*\(1, 9, 9\) there, \(1, 8, 8\) here"):
        deployed(places, places / "deployed", monkeypatch)


def test_a_node_whose_samples_changed_is_not_gone_on_with(places, monkeypatch):
    out = deployed(places, places / "deployed", monkeypatch)
    images(places / "sites" / "east", "test", {"benign": 2}, 5)  # so that none is split off any more
    with pytest.raises(fb.UserError, match=r"client 0 .* 35 .* 28 "):
        deployed(places, out, monkeypatch)
    (places / "sites" / "east" / "test").rename(places / "elsewhere")
    deployed(places, out, monkeypatch)


def test_nodes_whose_data_are_not_the_servers_are_told_of_it_where_data_are_dealt_out(places, monkeypatch):
    images(places / "server" / "cells", "train", {"benign": 60, "malignant": 60}, 7)
    words = r"--partition local leaves each node its own\): 28 training and 7 test .* there, 120 training and 10 test"
    with pytest.raises(fb.UserError, match=f"client 0 .*{words}"):
        deployed(places, places / "deployed", monkeypatch, partition="iid")
    for name in SITES:
        (places / name / "cells").unlink()
        (places / name / "cells").symlink_to(places / "server" / "cells")
    out = deployed(places, places / "alike", monkeypatch, partition="iid")
    assert of(out, "result.json")["left_out"] == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"client_data": None}, "partition local needs --client-data"),
        ({"client_data": "nowhere"}, "there is no folder 'nowhere'"),
        ({"clients": 4}, "holds data of 3 clients, not 4"),
        ({"dataset": "none"}, "--dataset is the server's test data"),
        ({"dataset": "digits"}, "it has benign, malignant, the run 0, 1, 2"),
        ({"alpha": 0.1}, "alpha sets how a dataset is split"),
        ({"shards_per_client": 3}, "shards_per_client sets how a dataset is split"),
        ({"test": "held-classes"}, "test sets how a dataset is split"),
        ({"samples": "5/5"}, "samples sets how a dataset is split"),
        ({"newcomers": 1, "rounds": 4}, "newcomers sets how a dataset is split"),
        ({"public": 10}, "holds out no samples"),
        ({"partition": "iid"}, "--client-data is for clients with their own data: add --partition local"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(places, given, words):
    settings = {"method": "fedavg", "dataset": "cells", "partition": "local", "client_data": str(places / "sites")}
    with pytest.raises(fb.UserError) as error:
        find(make_experiment({key: value for key, value in (settings | given).items() if value is not None}))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prepared_host_tells_sizes_unless_it_says_otherwise(places):
    hosts = ["--hosts", "north,south", "--address", "server.example:9092", "--print", "--out", places / "runs"]
    done = fewbytes("deploy", "fedavg", "--dataset", "cells", "--partition", "local", *hosts)
    assert done.returncode == 0, done.stderr
    (folder,) = (places / "runs").glob("[!.]*")
    told = {"partition-id": 1, "folder": "runs", "tell": "sizes", "allow": "cells"}
    assert NodeFile.read(folder / "deployment" / "nodes" / "south" / "node.toml").config == told
