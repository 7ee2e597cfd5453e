"""Surveys: figures equal those of the pooled data, none is of few samples, and sites that tell nothing reveal a sum."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
import surveyed
import torch
from hypothesis import given
from hypothesis import strategies as st
from surveyed import SITES, tables, write_pictures, write_tables

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.state import state_of
from fewbytes.core.promise import Privacy
from fewbytes.data.surveyed import Column, SiteTerms
from fewbytes.experiments.groups import DataSettings
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.survey import survey_here
from fewbytes.experiments.survey_schema import with_survey
from fewbytes.experiments.surveying import described_like, survey_task, terms_of_node
from fewbytes.experiments.tasks import find
from fewbytes.methods.survey.figures import ColumnFigures, cells, describe, pooled, shown
from fewbytes.methods.survey.survey import Reported, Survey, check_reported
from fewbytes.report.survey_file import SurveyFile
from fewbytes.report.survey_findings import Finding, findings
from fewbytes.report.survey_page import notes_of
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import Layout, unpack

SURVEY = {"method": "survey", "partition": "local"}


def surveyed_at(folder: Path, clients: Path, tell: str = "figures", **settings: object) -> SurveyFile:
    """The result of a survey of these clients' folders, in one process."""
    asked = {**SURVEY, "client_data": str(clients), **settings}
    return SurveyFile.read(survey_here(asked, folder, tell.split(",")) / "survey.json")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory) -> tuple[dict[str, pd.DataFrame], SurveyFile]:
    """The three hospitals' tables, and their survey."""
    place, frames = tmp_path_factory.mktemp("hospitals"), tables()
    return frames, surveyed_at(place / "runs", write_tables(place / "clients", frames), target=["ill"])


# ------------------------------------------------------------------------------------------------- the pooled figures


def test_figures_equal_those_of_pandas_at_each_site_and_pooled(hospitals):
    frames, whole = hospitals
    everything = pd.concat(frames.values())
    reported = {site.name: site.columns for site in whole.sites} | {"pooled": whole.pooled}
    assert {site.name: site.samples for site in whole.sites} == {site: len(frame) for site, frame in frames.items()}
    for name, frame in {**frames, "pooled": everything}.items():
        for column in ("age", "glucose"):
            found, true = reported[name][column], frame[column]
            assert found.missing == true.isna().sum()
            assert found.mean == pytest.approx(true.mean(), rel=1e-12)
            assert found.deviation == pytest.approx(true.std(ddof=0), rel=1e-12)
            assert sum(found.counts) == true.notna().sum()
        for column in ("smoker", "ill"):
            assert reported[name][column].categories == frame[column].value_counts().to_dict()
            assert reported[name][column].other == 0


def test_histograms_are_numpys_and_quantiles_are_off_by_at_most_one_cell(hospitals):
    frames, whole = hospitals
    for site in whole.sites:
        values = frames[site.name]["glucose"].dropna().to_numpy()
        found = site.columns["glucose"]
        below = [(values <= edge).sum() for edge in found.edges]
        assert np.diff([0, *below, len(values)]).tolist() == found.counts
    for name, values in {"age": pd.concat(f["age"] for f in frames.values())}.items():
        found, ordered = whole.pooled[name], np.sort(values)
        allowed = found.rank_error + sum(s.columns[name].rank_error for s in whole.sites) / 3
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            read = found.quantile(share)
            low, high = (np.searchsorted(ordered, read, side=side) / len(ordered) for side in ("left", "right"))
            assert low - allowed <= share <= high + allowed


def test_an_identifier_has_no_figures(hospitals):
    _, whole = hospitals
    for site in whole.sites:
        found = site.columns["patient_id"]
        assert (found.kind, found.mean, found.counts, found.categories) == ("identifiers", None, [], {})


def test_what_differs_is_found_and_nothing_else(hospitals):
    _, whole = hospitals
    found = {(each.kind, each.column, *each.sites) for each in whole.findings}
    assert found == {
        ("units", "glucose", "south"),
        ("classes", "ill", "west"),
        ("categories", "smoker", "west"),
        ("categories", "smoker", *SITES),  # three categories, each in two spellings
        ("drift", "age", "west"),
        ("drift", "ill", "west"),
    }
    (units,) = (each.text for each in whole.findings if each.kind == "units")
    assert "about 17.8 times" in units
    assert "glucose in mg/dL and mmol/L" in units


def test_a_column_that_is_empty_at_a_site_is_said_with_its_name(tmp_path):
    frames = tables()
    frames["south"]["age"] = np.nan
    whole = surveyed_at(tmp_path / "runs", write_tables(tmp_path / "clients", frames), target=["ill"])
    (found,) = (each.text for each in whole.findings if each.column == "age" and each.sites == ["south"])
    assert found.startswith("'age' at south has no value: ")


def test_bytes_are_those_of_the_ledger(hospitals):
    _, whole = hospitals
    assert whole.uplink_bytes == sum(site.uplink_bytes for site in whole.sites) > 0
    assert whole.uplink_bytes < 3 * 1500  # a kilobyte a site


def test_pictures_have_their_files_size_depth_and_brightness(tmp_path):
    pixels = write_pictures(tmp_path / "clients")
    whole = surveyed_at(tmp_path / "runs", tmp_path / "clients", parameters={"duplicates": True, "min_count": 2})
    for site in whole.sites:
        of, most = site.columns, 65535 if site.name == "south" else 255
        means = [each.mean() / most for each in pixels[site.name]]
        assert of["image brightness"].mean == pytest.approx(np.mean(means), rel=1e-6)
        assert (of["image height"].mean, of["image width"].mean) == pixels[site.name][0].shape
        assert of["class"].categories == {"benign": 20, "malignant": 20}
    depths = [list(site.columns["image depth"].categories) for site in whole.sites]
    assert depths == [["8 bits or fewer"], ["more than 8 bits"], ["8 bits or fewer"]]
    assert {each.sites: each.samples for each in whole.common} == {
        ("north", "south"): 0,
        ("north", "west"): 2,
        ("south", "west"): 0,
    }


def test_texts_have_lengths(tmp_path):
    for site, words in {"north": 3, "south": 30}.items():
        (tmp_path / "clients" / site).mkdir(parents=True)
        for i in range(12):
            (tmp_path / "clients" / site / f"{i}.txt").write_text("word " * (words + i))
    whole = surveyed_at(tmp_path / "runs", tmp_path / "clients")
    assert [site.columns["text (words)"].mean for site in whole.sites] == [3 + 5.5, 30 + 5.5]


def test_a_split_data_set_is_surveyed_as_a_run_splits_it(tmp_path):
    settings = {"method": "survey", "dataset": "digits", "clients": 4, "partition": "iid"}
    whole = SurveyFile.read(survey_here(settings, tmp_path, ["figures"]) / "survey.json")
    run = find(make_experiment({**settings, "method": "fedavg", "parameters": {}})).task.data
    assert [site.samples for site in whole.sites] == [len(each.train) + len(each.test) for each in run.clients]
    assert sum(whole.pooled["class"].categories.values()) == 1797


# --------------------------------------------------------------------------------------------------- nothing of a few


@given(st.lists(st.floats(-1e6, 1e6) | st.integers(-3, 3).map(float), min_size=1, max_size=300), st.integers(1, 20))
def test_no_cell_has_fewer_values_than_the_minimum(values, least):
    edges, counts = cells(np.array(values), least)
    assert len(counts) == len(edges) + 1 <= 64
    assert sum(counts) == len(values)
    assert min(counts) >= min(least, len(values))
    assert edges == sorted(set(edges))
    assert [sum(v <= e for v in values) for e in edges] == np.cumsum(counts)[:-1].tolist()


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 40), max_size=8), st.integers(1, 20))
def test_no_category_of_few_samples_is_told_or_follows_from_the_sum(named, least):
    kept, other = shown(named, least)
    reported = sum(kept.values()) + (other or 0)
    assert all(count >= least for count in kept.values())
    assert other is None or other == 0 or other >= least
    assert reported in (sum(named.values()), 0)  # 0: fewer than the minimum in all


def test_few_missing_values_count_as_known():
    values = np.array([1.0] * 50 + [2.0] * 50 + [math.nan] * 3)
    found = describe(Column("numbers", values), 10)
    assert (found.missing, found.rows, sum(found.counts), found.mean) == (None, 103, 103, 1.5)
    found = describe(Column("categories", values - 1, ("a", "b")), 10)
    assert (found.missing, sum(found.categories.values())) == (None, 103)


def test_a_site_with_fewer_samples_than_the_minimum_tells_nothing(tmp_path):
    frames = tables()
    frames["west"] = frames["west"][:9]
    whole = surveyed_at(tmp_path / "runs", write_tables(tmp_path / "clients", frames))
    west = whole.sites[2]
    assert (west.samples, west.columns) == (None, {})


def test_a_sites_own_minimum_cannot_be_lowered_by_the_server():
    assert terms_of_node({"tell": "figures"}, False).min_count == 10
    assert terms_of_node({"tell": "figures", "min-count": 25}, False).min_count == 25
    with pytest.raises(UserError, match="min-count is a whole number of at least 1"):
        terms_of_node({"min-count": 0}, False)
    with pytest.raises(UserError, match="tell is one of figures, labels, sizes, nothing"):
        terms_of_node({"tell": "all"}, False)


# ------------------------------------------------------------------------------------------ what a site does not tell


SECRETS = {"glucose": 424242.4242, "smoker": "Zmarkedsecret", "ward": "Ymarkedward", "ill": "Xmarkedclass"}


def silent(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Five sites: north and south, and three that have marked secret values, and another number of rows each."""
    found = {site: frames[site] for site in ("north", "south")}
    for i, name in enumerate(("xa", "xb", "xc")):
        frame = frames["north"].iloc[: 201 + 7 * i].copy()
        frame.loc[:19, "glucose"] = SECRETS["glucose"]
        frame.loc[20:39, "smoker"] = SECRETS["smoker"]
        frame.loc[40:59, "ill"] = SECRETS["ill"]
        frame["ward"] = SECRETS["ward"]
        found[name] = frame
    return found


def run_silent(place: Path, frames: dict[str, pd.DataFrame], least: int = 10) -> Path:
    """A survey in which the three sites tell nothing, which keeps every message; its folder."""
    settings = {**SURVEY, "client_data": str(write_tables(place / "clients", frames)), "target": ["ill"]}
    settings |= {"keep_frames": True, "coding": False, "parameters": {"min_count": least}}
    terms = [SiteTerms("figures" if len(site) > 2 else "nothing") for site in frames]
    job = PreparedRun(settings, survey_task(make_experiment(settings), None, terms.__getitem__))
    job.execute(place / "run", False)
    return place / "run"


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[dict[str, pd.DataFrame], Path]:
    frames = silent(tables())
    return frames, run_silent(tmp_path_factory.mktemp("silent"), frames)


def numbers_in(value: object) -> list[float]:
    """All numbers in a message."""
    if isinstance(value, torch.Tensor):
        return value.double().flatten().tolist()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [float(value)]
    if isinstance(value, dict):
        return [n for each in value.items() for part in each for n in numbers_in(part)]
    if isinstance(value, list | tuple):
        return [n for each in value for n in numbers_in(each)]
    return [n for each in vars(value).values() for n in numbers_in(each)] if hasattr(value, "__dict__") else []


def texts_in(value: object) -> str:
    """All texts in a message."""
    return repr(value) if not hasattr(value, "__dict__") else " ".join(map(texts_in, vars(value).values()))


def test_sites_that_tell_nothing_reveal_only_their_sum(kept):
    """The law: no message of such a site has one of its marked values, its number of rows, or any figure of it."""
    frames, folder = kept
    handlers = {each.name: each for each in Survey().handlers()}
    hidden, layout = {2: "xa", 3: "xb", 4: "xc"}, Layout.of(state_of(torch.nn.Linear(1, 1)))
    looked = 0
    for path in sorted((folder / "frames").glob("*-up.frame")):
        _, name, client, *_ = path.name.split("-")
        if int(client) not in hidden:
            continue
        message = unpack(handlers[name].reply, path.read_bytes(), layout=layout)
        texts, numbers = texts_in(message), numbers_in(message)
        frame = frames[hidden[int(client)]]
        figures = [len(frame), frame["age"].sum(), frame["age"].mean(), SECRETS["glucose"], frame["age"].std(ddof=0)]
        assert not any(secret in texts for secret in SECRETS.values() if isinstance(secret, str))
        assert not any(math.isclose(n, figure, rel_tol=1e-6) for n in numbers for figure in figures)
        assert "age" not in texts
        raw = path.read_bytes()
        assert not any(struct.pack(form, SECRETS["glucose"]) in raw for form in ("<d", "<f", ">d"))
        looked += 1
    assert looked >= 3 * 5  # what they introduce, and the exchanges of the sum
    for name in ("survey.json", "survey.html"):
        text = (folder / name).read_text("utf-8")
        assert not any(str(secret) in text for secret in SECRETS.values())


def test_what_such_a_site_introduces_does_not_depend_on_its_data(kept, tmp_path):
    frames, folder = kept
    other = {site: frame if len(site) > 2 else frame.iloc[:150].assign(age=1) for site, frame in frames.items()}
    again = run_silent(tmp_path, other)
    for client in (2, 3, 4):
        (a,), (b,) = (list((f / "frames").glob(f"*introduce-{client}-*up.frame")) for f in (folder, again))
        assert a.read_bytes() == b.read_bytes()
    lengths = [sorted(p.stat().st_size for p in (f / "frames").glob("*-[234]-*up.frame")) for f in (folder, again)]
    assert lengths[0] == lengths[1]


def test_the_hidden_sum_is_exact(kept):
    frames, folder = kept
    whole = SurveyFile.read(folder / "survey.json")
    (group,) = whole.hidden
    three = pd.concat(frames[site] for site in ("xa", "xb", "xc"))
    assert (group.sites, group.samples) == (["xa", "xb", "xc"], len(three))
    age = group.columns["age"]
    assert age.mean == pytest.approx(three["age"].mean(), rel=1e-6)
    assert age.deviation == pytest.approx(three["age"].std(ddof=0), rel=1e-5)
    assert sum(age.counts) == len(three)
    assert group.columns["glucose"].missing == three["glucose"].isna().sum()
    smoker = three["smoker"].value_counts().to_dict()
    marked = smoker.pop(SECRETS["smoker"])
    assert (group.columns["smoker"].categories, group.columns["smoker"].other) == (smoker, marked)
    everything = pd.concat(frames.values())
    assert whole.pooled["age"].mean == pytest.approx(everything["age"].mean(), rel=1e-6)
    assert not whole.left_out


@pytest.mark.parametrize("tell", ["figures,nothing,nothing", "figures,sizes,nothing", "labels,sizes,nothing"])
def test_fewer_than_three_sites_that_tell_equally_little_are_in_no_sum(tmp_path, tell):
    clients = write_tables(tmp_path / "clients", tables())
    whole = surveyed_at(tmp_path / "runs", clients, tell, target=["ill"])
    assert not whole.hidden
    assert whole.left_out == [
        name for name, reported in zip(SITES, tell.split(","), strict=True) if reported != "figures"
    ]
    reported = {site.name: (site.samples is not None, list(site.columns)) for site in whole.sites}
    expected = {"nothing": (False, []), "sizes": (True, []), "labels": (True, ["ill"])}
    for name, what in zip(SITES, tell.split(","), strict=True):
        assert what == "figures" or reported[name] == expected[what]


def test_sites_that_all_tell_nothing_are_summed_up_by_a_table_like_theirs(tmp_path):
    frames = tables()
    clients = write_tables(tmp_path / "clients", frames)
    made = pd.DataFrame(
        {"age": [20 + 7 * i % 60 for i in range(70)], "glucose": np.linspace(3.0, 9.0, 70), "ill": ["no", "mild"] * 35}
    )
    made.to_csv(tmp_path / "made.csv", index=False)
    like = described_like(DataSettings(target=["ill"]), str(tmp_path / "made.csv"))
    whole = surveyed_at(tmp_path / "runs", clients, "nothing", parameters={"like": like})
    (group,) = whole.hidden
    everything = pd.concat(frames.values())
    assert (group.sites, group.samples, list(group.columns)) == ([*SITES], len(everything), list(made))
    assert group.columns["age"].mean == pytest.approx(everything["age"].mean(), rel=1e-6)
    assert group.columns["glucose"].missing == everything["glucose"].isna().sum()
    assert whole.pooled["ill"].categories == everything["ill"].value_counts()[["mild", "no"]].to_dict()
    assert not surveyed_at(tmp_path / "others", clients, "nothing").hidden
    with pytest.raises(UserError, match="cannot be read"):
        assert Survey(like="[]").alike


def test_what_is_in_no_figure_is_said(tmp_path):
    frames = tables()
    frames["west"] = frames["west"][:1]
    clients = write_tables(tmp_path / "clients", frames)
    whole = surveyed_at(tmp_path / "runs", clients, target=["ill"])
    assert whole.small == ["west"]
    assert any("west have too few samples" in text for text in notes_of(whole))
    with pytest.raises(UserError, match="no site has a column 'agee'"):
        surveyed_at(tmp_path / "runs", clients, leave_out=["agee"])
    assert "age" not in surveyed_at(tmp_path / "runs", clients, leave_out=["age"]).pooled


def test_a_site_joins_only_sums_of_sites_that_tell_as_little(tmp_path):
    """A server that asks for the sum of one silent site and others, whose figures it knows, is refused."""
    from fewbytes.core.site import Site
    from fewbytes.methods.survey.sums import Plan, Totals

    settings = {**SURVEY, "client_data": str(write_tables(tmp_path / "clients", tables()))}
    terms = [SiteTerms("figures"), SiteTerms("sizes"), SiteTerms("nothing")]
    task = survey_task(make_experiment(settings), None, terms.__getitem__)
    plan = Plan("nothing", [], torch.zeros(0, dtype=torch.float64))
    for client in (0, 1):
        with pytest.raises(MethodError, match="takes part only in sums of such sites"):
            Totals().add(None, plan, Site(task, client, 1, "add"))
    assert Totals().add(None, plan, Site(task, 2, 1, "add")).sums.dense()["counts 0"].tolist() == [250.0]


def test_a_site_that_requires_secure_aggregation_tells_nothing_alone():
    assert terms_of_node({"tell": "figures"}, hidden=True).tell == "nothing"


def test_a_description_that_does_not_add_up_is_refused():
    sound = {"age": ColumnFigures("numbers", 20, 0, 1.0, 1.0, [0.5], [10, 10])}
    check_reported(0, Reported.of("figures", 20, [], sound))
    for wrong in (
        ColumnFigures("numbers", 20, 0, 1.0, 1.0, [0.5], [10, 10, 10]),
        ColumnFigures("numbers", 20, 30, 1.0, 1.0, [0.5], [10, 10]),
        ColumnFigures("numbers", 20, 0, 1.0, None, [0.5], [10, 10]),
        ColumnFigures("numbers", 20, 0, 1.0, 1.0, [0.5], [-10, 30]),
        ColumnFigures("numbers", -20, 0, 1.0, 1.0, [0.5], [10, 10]),
    ):
        with pytest.raises(MethodError, match="does not add up"):
            check_reported(0, Reported.of("figures", 20, [], {"age": wrong}))


# ------------------------------------------------------------------------------------------------- a run by a survey


def test_a_run_by_the_survey_is_standardised_as_scikit_learn_would(hospitals, tmp_path):
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frames, whole = hospitals
    path = tmp_path / "survey.json"
    path.write_bytes(msgspec.json.encode(whole))
    notes: list[str] = []
    found = with_survey({"dataset": "digits", "missing": "mean"}, path, notes.append)
    schema, everything = found["schema"], pd.concat(frames.values())
    scaler = StandardScaler().fit(everything[["age", "glucose"]])
    assert [schema["numbers"][name][0] for name in ("age", "glucose")] == pytest.approx(scaler.mean_, rel=1e-12)
    assert [schema["numbers"][name][1] for name in ("age", "glucose")] == pytest.approx(scaler.scale_, rel=1e-12)
    encoder = OneHotEncoder().fit(everything[["smoker"]])
    assert list(schema["categories"]["smoker"]) == encoder.categories_[0].tolist()
    assert found["class_names"] == sorted(set(everything["ill"]))
    assert any("units of 'glucose'" in note for note in notes)
    assert any("'patient_id'" in note for note in notes)
    with pytest.raises(UserError, match="describes no column 'agee'"):
        with_survey({"target": ["agee"]}, path, notes.append)


def test_a_run_by_the_survey_learns_without_a_servers_table(tmp_path):
    rng, frames = np.random.default_rng(1), {}
    for site in SITES:
        age = rng.normal(60, 10, 300)
        frames[site] = pd.DataFrame(
            {"age": age, "group": rng.choice(["a", "b", site], 300), "ill": np.where(age > 60, "yes", "no")}
        )
    clients = write_tables(tmp_path / "clients", frames)
    folder = survey_here({**SURVEY, "client_data": str(clients), "target": ["ill"]}, tmp_path, ["figures"])
    settings = {"method": "fedavg", "partition": "local", "client_data": str(clients), "rounds": 5}
    settings |= {"parameters": {"epochs": 5, "lr": 0.1, "batch": 20}}
    settings = with_survey(settings, folder / "survey.json", print)
    result = PreparedRun(settings).execute(tmp_path / "run", False)
    assert result["score"]["final"] > 0.9
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["classes"] == ["no", "yes"]


def test_findings_and_figures_are_read_again_from_the_file(hospitals, tmp_path):
    _, whole = hospitals
    assert all(isinstance(each, Finding) for each in whole.findings)
    (tmp_path / "survey.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a survey\.json"):
        SurveyFile.read(tmp_path / "survey.json")


def test_pooled_figures_of_one_site_are_its_own():
    own = describe(Column("numbers", np.arange(100.0)), 5)
    assert pooled([own]) == own


def test_the_checkpoint_of_a_survey_is_read(kept):
    _, folder = kept
    assert read_checkpoint(folder).round == 1
    assert surveyed.ROWS["north"] == 400


# ------------------------------------------------------------------------------------------------------ under privacy


PRIVATE = {"dp": "of=samples,epsilon=4,delta=1e-5,clip=1"}


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> tuple[dict[str, pd.DataFrame], SurveyFile]:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    place = tmp_path_factory.mktemp("private")
    rng = np.random.default_rng(2)
    frames = {}
    for site in SITES:
        sex = np.where(np.arange(4000) < 3, "rare", rng.choice(["f", "m"], 4000))
        frames[site] = pd.DataFrame({"age": rng.normal(60, 12, 4000).round(), "sex": sex})
    return frames, surveyed_at(place / "runs", write_tables(place / "clients", frames), target=["sex"], **PRIVATE)


def test_private_figures_are_near_the_true_ones_and_never_equal(private):
    frames, whole = private
    for site in whole.sites:
        frame, age = frames[site.name], site.columns["age"]
        assert site.samples == pytest.approx(4000, abs=60)
        assert age.mean == pytest.approx(frame["age"].mean(), rel=0.05)
        assert age.mean != frame["age"].mean()
        assert set(site.columns["sex"].categories) == {"f", "m"}  # three are far below what is named
    assert whole.dp == str(Privacy.read(PRIVATE["dp"]))


def test_noise_is_no_finding(tmp_path):
    """Sites with samples of one population, so few that noise alone makes their figures differ."""
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    rng, frames = np.random.default_rng(3), {}
    for site in SITES:
        sex = rng.choice(["f", "m"], 400)
        frames[site] = pd.DataFrame(
            {"age": rng.normal(60, 12, 400).round(), "mass": rng.normal(70, 9, 400), "sex": sex}
        )
    clients = write_tables(tmp_path / "clients", frames)
    asked = {"target": ["sex"], "dp": "of=samples,epsilon=0.5,delta=1e-5,clip=1"}
    whole = surveyed_at(tmp_path / "runs", clients, **asked)
    assert whole.drift["age"]  # they do differ
    assert not [each.text for each in whole.findings if each.kind in ("drift", "units", "missing")]
    frames["west"]["age"] += 200
    whole = surveyed_at(tmp_path / "others", write_tables(tmp_path / "apart", frames), **asked)
    assert ("age", ["west"]) in [(each.column, each.sites) for each in whole.findings]


def test_the_noise_is_of_the_stated_size(tmp_path):
    """Of a column in fixed cells: its deviation is the multiplier of one release times the root of columns plus one."""
    from fewbytes.core.site import Shared, Site
    from fewbytes.engines.store import ClientStore

    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    settings = {**SURVEY, "client_data": str(write_tables(tmp_path / "clients", tables())), "target": ["ill"]}
    task = survey_task(make_experiment(settings), None, lambda client: SiteTerms())
    task = Survey().promising(task, PRIVATE["dp"], 1)
    site = Site(task, 0, 1, "introduce", Shared(ClientStore(tmp_path / "states")))
    noisy, deviation = site.noisy(torch.zeros(20_000), 3.0)
    assert deviation == pytest.approx(3.0 * task.problem.privacy.multiplier(400))
    assert float(noisy.std()) == pytest.approx(deviation, rel=0.05)
    with pytest.raises(MethodError, match="and this would be more"):
        site.noisy(torch.ones(20_000), 3.0)


def test_digests_and_hidden_sums_are_refused_under_privacy(tmp_path):
    settings = {**SURVEY, "client_data": str(write_tables(tmp_path / "clients", tables())), **PRIVATE}
    with pytest.raises(UserError, match="leave out --duplicates, or --dp"):
        survey_here({**settings, "parameters": {"duplicates": True}}, tmp_path, ["figures"])
    whole = SurveyFile.read(survey_here(settings, tmp_path, ["nothing"]) / "survey.json")
    assert not whole.hidden


@given(
    st.lists(st.integers(-300, 300).map(lambda n: n / 10) | st.floats(-50, 50), min_size=1, max_size=300),
    st.integers(1, 12),
)
def test_no_edge_of_a_cell_is_a_value(values, least):
    edges, counts = cells(np.array(values), least)
    assert not set(edges) & set(values)
    assert sum(counts) == len(values)
    assert all(count >= min(least, len(values)) for count in counts)


def of_categories(counts: dict[str, int], least: int) -> ColumnFigures:
    named, other = shown(counts, least)
    return ColumnFigures("categories", sum(counts.values()), 0, categories=named, other=other)


def test_categories_that_are_folded_are_no_drift():
    alike = {"benign": 90, "malignant": 60}
    of = {"north": {"d": of_categories(alike, 55)}, "south": {"d": of_categories({"benign": 96, "malignant": 54}, 55)}}
    assert [each.kind for each in findings(of, [], 55)] == ["categories"]  # south may have fewer than 55
    of["south"] = {"d": of_categories({"benign": 20, "malignant": 130}, 10)}
    assert "drift" in [each.kind for each in findings(of, [], 10)]


def test_with_noise_a_mean_of_few_cells_is_no_drift():
    def noisy(mean: float, edges: list[float]) -> ColumnFigures:
        counts = [100] * (len(edges) + 1)
        return ColumnFigures("numbers", sum(counts), mean=mean, deviation=1.0, edges=edges, counts=counts, noise=5.0)

    for edges in ([0.0], [0.0, 2.0]):
        assert not findings({"north": {"x": noisy(0.0, edges)}, "south": {"x": noisy(2.0, edges)}}, [], 1)
    fine = np.linspace(-4, 4, 60).tolist()
    far = [edge + 8 for edge in fine]
    found = findings({"north": {"x": noisy(0.0, fine)}, "south": {"x": noisy(8.0, far)}}, [], 1)
    assert {each.kind for each in found} == {"drift"}
