"""What researchers ask of the command line: partitions to look at, papers to cite, schemas, and early errors."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import Any

import msgspec
import pytest
import typer
from commands import ended
from PIL import Image

from fewbytes.cli.app import app
from fewbytes.cli.options import option_words
from fewbytes.cli.schemas import schemas
from fewbytes.experiments.groups import GROUPS
from fewbytes.methods import METHODS, canonical
from fewbytes.report.charts import heat_map
from fewbytes.report.records import Partition

DIGITS = ("--dataset", "digits", "--clients", "4")


@pytest.fixture
def fewbytes(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder: exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words: ended(capsys, monkeypatch, tmp_path, *words)


# Partitions -----------------------------------------------------------------------------------------------------------


def test_a_partition_is_shown_without_training(fewbytes, tmp_path):
    code, out, err = fewbytes("partition", *DIGITS, "--validation", "0.1", "--figure", "p.svg")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines() if line.startswith(" client ")]
    assert [row[1] for row in rows[1:]] == ["0", "1", "2", "3"]
    assert sum(int(n) for row in rows[1:] for n in row[2:4]) == 1438
    assert "4 clients with" in err
    assert "differ from all clients' by" in err
    assert out.count("terms: ") == 1
    texts = [each.text for each in ET.parse(tmp_path / "p.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {"client 0", "client 3", "9", "0"} <= set(texts)
    assert [path.name for path in tmp_path.iterdir()] == ["p.svg"]


def test_a_partition_as_json_and_as_a_picture(fewbytes, tmp_path):
    code, out, _ = fewbytes("partition", *DIGITS, "--partition", "quantity", "--json", "--figure", "p.png")
    assert code == 0
    found = msgspec.convert(json.loads(out), Partition)
    assert sum(map(sum, found["train"])) == 1438
    assert len({sum(row) for row in found["train"]}) == 4
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.width > 600
        assert len(picture.getcolors(1 << 20)) > 20


def test_a_partition_takes_a_runs_config_and_refuses_what_a_run_refuses(fewbytes, tmp_path):
    (tmp_path / "c.toml").write_text('method = "fedprox"\nclients = 3\nrounds = 4\n[parameters]\nmu = 0.1\n')
    code, out, _ = fewbytes("partition", "-c", "c.toml", "--json")
    assert code == 0
    assert len(json.loads(out)["train"]) == 3
    for words, says in {
        ("--clients", "2000"): "2000 clients but 1438 training samples",
        ("--figure", "p.pdf"): "--figure is a .svg or .png file",
        ("--figure", "no/p.svg"): "there is no folder no",
        ("--partition", "folders"): "digits has no folders to partition by",
        ("--partition", "column:"): "unknown partition 'column:'",
        ("--shift", "blur=1"): "shift is noise=LEVEL or rotation=DEGREES",
    }.items():
        code, out, err = fewbytes("partition", *words)
        assert (code, out) == (2, "")
        assert says in err
        assert len(err.splitlines()) == 1


def test_a_column_names_clients_and_is_no_feature(fewbytes, tmp_path):
    rows = [f"{20 + i % 50},{('north', 'south', 'east')[i % 3]},{'yes' if i % 50 > 25 else 'no'}" for i in range(150)]
    (tmp_path / "t.csv").write_text("\n".join(["age,hospital,ill", *rows]) + "\n")
    about = ("--dataset", "t.csv", "--target", "ill")
    code, out, err = fewbytes("partition", *about, "--partition", "column:hospital", "--json")
    assert code == 0, err
    assert json.loads(out)["names"] == ["east", "north", "south"]
    assert "1 columns used" in err
    code, _, err = fewbytes("partition", *about, "--partition", "column:hospitl")
    assert code == 2
    assert "did you mean 'hospital'" in err
    code, _, err = fewbytes("partition", *about, "--partition", "column:hospital", "--clients", "5")
    assert (code, "3 values, so 3 clients" in err) == (2, True)


def test_a_heat_map_begins_at_zero_and_names_sites():
    counts: Partition = {"classes": ["a", "b"], "train": [[300, 270], [280, 290]], "test": [[1, 2], [3, 4]]}
    for names, ticks in ((None, None), (["north", "south"], ["north", "south"])):
        partition: Any = counts if names is None else counts | {"names": names}
        (trace,), layout = heat_map(partition, "train")
        assert (trace["zmin"], trace["zmax"]) == (0, 300)
        assert layout["yaxis"]["range"] == [1.5, -0.5]
        assert (layout["yaxis"]["dtick"], layout["yaxis"]["tickformat"]) == (1, "d")
        assert layout["yaxis"].get("ticktext") == ticks


# Methods --------------------------------------------------------------------------------------------------------------


def test_methods_are_known_in_any_spelling(fewbytes, tmp_path):
    assert canonical("FedAvg") == "fedavg"
    assert {canonical(name) for name in ("LG-FedAvg", "lg-fedavg", "LG_FEDAVG", "lgfedavg")} == {"lg_fedavg"}
    assert canonical("package.module:FedAvg") == "package.module:FedAvg"
    folded = [name.replace("_", "") for name in METHODS]
    assert len(folded) == len(set(folded))
    code, out, _ = fewbytes("methods", "Fed-Prox", "--json")
    assert (code, json.loads(out)[0]["name"]) == (0, "fedprox")
    code, _, err = fewbytes("run", "FedAvg", *DIGITS, "--rounds", "1", "--set", "weight-decay=0.01")
    assert code == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-fedavg")
    assert 'method = "fedavg"' in (run / "config.toml").read_text()
    assert "weight_decay = 0.01" in (run / "config.toml").read_text()


def test_papers_are_printed_as_bibtex(fewbytes):
    code, out, _ = fewbytes("methods", "FedAvg", "--bibtex")
    assert code == 0
    assert out.startswith("@inproceedings{mcmahan2017communication,")
    assert "Agüera y Arcas" in out
    assert "@misc{hsu2019measuring," in out
    code, out, err = fewbytes("methods", "separate", "--bibtex")
    assert (code, out) == (0, "")
    assert "separate states no paper to cite" in err
    code, _, err = fewbytes("methods", "--bibtex", "--json")
    assert (code, "leave --bibtex out" in err) == (2, True)


def test_every_method_with_a_paper_has_a_complete_entry(fewbytes):
    code, out, _ = fewbytes("methods", "--json")
    assert code == 0
    known = {each["name"]: each for each in json.loads(out)}
    without = {name for name, each in known.items() if not each["papers"]}
    assert without == {"ensemble", "fedfina", "separate"}
    for name, each in known.items():
        for paper in each["papers"]:
            assert paper["authors"], name
            assert 2010 < paper["year"] < 2100, name
            assert paper["venue"] or paper["arxiv"], name
            assert "Algorithm" not in paper["venue"], name
            assert all(author[0].isupper() and author == author.strip() for author in paper["authors"]), name
    code, out, _ = fewbytes("methods", "--bibtex")
    keys = [line for line in out.splitlines() if line.startswith("@")]
    assert len(keys) == len(set(keys)) > 38
    assert out.count("{") == out.count("}")


# JSON -----------------------------------------------------------------------------------------------------------------


def commands_with_json() -> set[str]:
    """The commands that have --json."""
    found = set[str]()

    def look(group: Any, above: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                look(command, f"{above}{name} ")
            elif any("--json" in each.opts for each in command.params):
                found.add(f"{above}{name}")

    look(typer.main.get_command(app), "")
    return found


def test_every_command_with_json_has_a_schema():
    known = {name.partition(" -")[0].partition(" SYSTEM")[0] for name in schemas()}
    assert commands_with_json() == known


@pytest.mark.parametrize("command", ["run", "federation list", "reproduce SYSTEM/TABLE"])
def test_a_schema_is_printed(fewbytes, command):
    code, out, err = fewbytes("schema", command)
    assert code == 0, err
    schema = json.loads(out)
    assert schema["title"] == f"fewbytes {command} --json"
    assert schema["$defs"]
    code, _, err = fewbytes("schema", "runn")
    assert (code, "did you mean 'run'" in err) == (2, True)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", ("run", "fedavg", *DIGITS, "--rounds", "1", "--json")),
        ("compare", ("compare", "fedavg", "separate", *DIGITS, "--rounds", "1", "--json")),
        ("plan", ("plan", "fednova", *DIGITS, "--rounds", "2", "--json")),
        ("methods", ("methods", "--json")),
        ("survey", ("survey", *DIGITS, "--json")),
        ("reproduce", ("reproduce", "--json")),
    ],
)
def test_what_is_printed_fits_its_schema(fewbytes, command, words):
    code, out, err = fewbytes(*words)
    assert code == 0, err
    found = msgspec.convert(json.loads(out), schemas()[command])
    assert found


def test_the_schema_of_a_run_names_what_every_run_prints(fewbytes, tmp_path):
    code, out, _ = fewbytes("run", "fedavg", *DIGITS, "--rounds", "1", "--json")
    assert code == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert set(json.loads(out)) <= set(schemas()["run"].__annotations__)
    for words, command in ((("status", str(run)), "status"), (("export", str(run), "--safetensors"), "export")):
        code, out, err = fewbytes(*words, "--json")
        assert code == 0, err
        msgspec.convert(json.loads(out), schemas()[command])


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "resnet7"), "unknown model 'resnet7'"),
        (("--model", "mlp:width=3"), "model mlp has no option 'width'"),
        (("--model", "mlp@x"), "features after @"),
        (("--metrics", "auk"), "there is no metric 'auk'"),
        (("--metrics", "sensitivity"), "needs the positive class"),
        (("--aggregate", "krum=20"), "--aggregate krum=20 needs 43 clients|aggregate krum=20 needs 43 clients"),
        (("--exclude", "11"), "there are clients 0 to 9"),
        (("--watch", "tensorbord"), "--watch takes tensorboard"),
        (("--weights", "no.pt"), "there is no weights file no.pt"),
        (("--partition-option", "x=1"), "does not take these options: x"),
        (("--partition-option", "min_samples=x"), "min_samples is a whole number above 0"),
        (
            ("--known-classes", "1,2"),
            "--known-classes, --newcomer-classes, --newcomers-a-round and stay need newcomers",
        ),
        (("--round-time", "5m"), "so --round-time would bias its model: use fednova, or leave --round-time out"),
        (("--round-time", "900d"), "is a length of time from 0.01s to 30d"),
        (("--set", "fractoin=1"), "did you mean 'fraction'"),
        (("--dataset", "no-such-data"), "'no-such-data' not found"),
    ],
)
def test_mistakes_are_found_before_data_are_loaded(fewbytes, monkeypatch, words, says):
    from fewbytes.experiments import loading

    if words[0] != "--dataset":
        monkeypatch.setattr(loading, "load_dataset", lambda *given: pytest.fail("the data were loaded"))
    code, out, err = fewbytes("run", "fedavg", *words)
    assert (code, out) == (2, "")
    assert any(each in err for each in says.split("|")), err
    assert len(err.splitlines()) == 1


def test_errors_name_options_as_they_are_written():
    def words(text: str) -> str:
        return option_words(text, GROUPS.values())

    assert (
        words("raise round_timeout, or give links=1Mbps,2Mbps") == "raise --round-timeout, or give --links 1Mbps,2Mbps"
    )
    assert words("set clients=5 or change its options") == "set --clients 5 or change its options"
    assert words("leave secure_aggregation out") == "leave --secure-aggregation out"
    for unchanged in (
        "use --set clusters=4, not --clusters", "there is no setting 'round_tim'; did you mean 'round_time'?",
        "/a/round_time/x is missing", "fedavg: server_lr must be above 0, not -1", "mod.round_time:f",
    ):  # fmt: skip
        assert words(unchanged) == unchanged


def test_a_positive_class_without_classes_is_refused_as_such(fewbytes, tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n" + "\n".join(f"{i % 7},{i / 3:.3f}" for i in range(100)) + "\n")
    code, _, err = fewbytes(
        "run",
        "fedavg",
        "--dataset",
        "t.csv",
        "--target",
        "y",
        "--clients",
        "2",
        "--positive",
        "yes",
        "--metrics",
        "mae",
    )
    assert code == 2
    assert "positive names one of several classes, and the targets here are numbers" in err
