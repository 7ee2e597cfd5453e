"""`fewbytes survey`: findings a line each, the result as JSON, a page, and errors in one line."""

from __future__ import annotations

import json

import pytest
from commands import fewbytes
from surveyed import tables, write_tables


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """A folder with three hospitals' tables."""
    return write_tables(tmp_path_factory.mktemp("hospitals") / "clients", tables())


def test_findings_are_printed_and_the_page_has_them(clients, tmp_path):
    done = fewbytes("survey", "--client-data", clients, "--target", "ill", "--duplicates", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "950 samples, 3 sites" in done.stdout
    assert "glucose in mg/dL and mmol/L" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    page = (folder / "survey.html").read_text()
    for text in ("Units that may differ", "north", "Near-duplicates between sites", "units differ", "Drift"):
        assert text in page
    assert "{{" not in page
    assert not (folder / "report.html").exists()
    ran = fewbytes(
        "run", "fedavg", "--partition", "local", "--client-data", clients, "--schema", folder / "survey.json",
        "--missing", "mean", "--rounds", "1", "--out", tmp_path / "by", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "the units of 'glucose' seem to differ" in ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if "the units of 'glucose'" in line]
    assert "north" in line  # the site is named
    assert json.loads(ran.stdout)["sample_shape"] == [2 + 6]  # age, glucose, and smoker in two spellings


def test_the_result_is_printed_as_json(clients, tmp_path):
    done = fewbytes("survey", "--client-data", clients, "--tell", "figures,sizes,nothing", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [site["samples"] for site in found["sites"]] == [400, 300, None]
    assert found["left_out"] == ["south", "west"]


def test_a_survey_without_figures_says_so_and_gives_no_schema(clients, tmp_path):
    done = fewbytes("survey", "--client-data", clients, "--target", "ill", "--min-count", "100000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No site has 100000 samples" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    about = ("--partition", "local", "--client-data", clients, "--schema", folder / "survey.json")
    done = fewbytes("run", "fedavg", *about, cwd=tmp_path)
    assert done.returncode == 2
    assert "with a smaller --min-count" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--tell", "all"], "--tell is one of figures, labels, sizes, nothing"),
        (["--tell", "figures,nothing"], "--tell names 2 sites, and there are 3"),
        (["--hosts", "a,b,c", "--tell", "sizes"], "real sites set it in their node.toml"),
        (["--address", "server.example:9092"], "add --hosts or --federation"),
        (["--dp", "epsilon=0,delta=1e-5"], "epsilon and clip above 0"),
    ],
)
def test_wrong_options_are_refused_in_one_line(clients, tmp_path, options, error):
    done = fewbytes("survey", "--client-data", clients, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert error in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--target", "--columns"])
def test_a_column_that_no_site_has_is_refused(clients, tmp_path, option):
    done = fewbytes("survey", "--client-data", clients, option, "glucosse", cwd=tmp_path)
    assert done.returncode == 2
    assert "no site has a column 'glucosse'" in done.stderr
    assert not list(tmp_path.glob("runs/*"))
