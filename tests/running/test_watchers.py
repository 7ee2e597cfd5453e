"""Who watches a run: functions, watchers, several; and the stores of other tools, read back with their own readers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from cases import LOCAL, scheduled_task, tiny_task
from commands import fewbytes
from runs import tensorboard_scalars

import fewbytes as fb
from fewbytes.running.recorders import watcher_of
from fewbytes.running.watcher import EVENT_NAMES

METHOD = fb.FedPURIN(**LOCAL)
RUN = {"rounds": 4, "workers": 1}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the tools


def needs(package: str):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


class Heard(fb.Watcher):
    """Remembers what it hears, and interrupts the run when a round is done."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.heard, self.notes = stop, [], []

    def started(self, folder, rounds, done):
        self.heard.append(("started", rounds, done, (folder / "config.toml").is_file()))

    def moved(self, uplink_bytes, downlink_bytes):
        self.heard.append(("moved",))

    def scored(self, row):
        self.heard.append(("scored", row["round"]))
        if row["round"] == self.stop:
            raise KeyboardInterrupt

    def note(self, text):
        self.notes.append(text)

    def ended(self, result):
        self.heard.append(("ended", result["status"]))


class TensorBoard:
    def watch(self, folder: Path) -> str:
        return f"tensorboard:{folder / 'board'}"

    def read(self, folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
        return tensorboard_scalars(folder / "board" / name)


class MLflow:
    def watch(self, folder: Path) -> str:
        return f"mlflow:{folder / 'flow.db'}"

    def run(self, folder: Path, name: str):
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'flow.db'}")
        runs = self.client.search_runs([self.client.get_experiment_by_name("fewbytes").experiment_id])
        [run] = [run for run in runs if run.info.run_name == name]
        return run

    def read(self, folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
        run = self.run(folder, name)
        history = {key: self.client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        return {key: [(each.step, each.value) for each in values] for key, values in history.items()}


class Trackio:
    def watch(self, folder: Path) -> str:
        return "trackio:tests"

    def read(self, folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
        from trackio.sqlite_storage import SQLiteStorage

        assert SQLiteStorage.get_runs("tests").count(name) == 1
        found: dict[str, list[tuple[int, float]]] = {}
        for log in SQLiteStorage.get_logs("tests", name):
            for key, value in log.items():
                if key not in ("timestamp", "step"):
                    found.setdefault(key, []).append((log["step"], value))
        return found


STORES = [
    pytest.param(TensorBoard(), marks=needs("tensorboard"), id="tensorboard"),
    pytest.param(MLflow(), marks=needs("mlflow"), id="mlflow"),
    pytest.param(Trackio(), marks=needs("trackio"), id="trackio"),
]


@pytest.fixture(scope="module", autouse=True)
def stores(tmp_path_factory):
    """Where all stores lie. Trackio reads where its projects do when it is first imported."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        yield folder


def expected(result: fb.Result) -> dict[str, list[tuple[int, float]]]:
    """Some of what any store should hold of a run, from its rows."""
    curves: dict[str, list[tuple[int, float]]] = {}
    up = down = 0.0
    for row in result.rounds:
        up, down = up + row["uplink_bytes"] / 1e6, down + row["downlink_bytes"] / 1e6
        if row["phase"] == "join":
            continue
        numbers = {f"{metric}/{kind}": v for metric, of in row["scores"].items() for kind, v in of.items()}
        numbers |= {"uplink_MB/total": up, "downlink_MB/total": down, "uplink_MB/round": row["uplink_bytes"] / 1e6}
        numbers |= {f"loss/{name}": value for name, value in row["loss"].items()}
        for name, value in numbers.items():
            curves.setdefault(name, []).append((row["round"], value))
    return curves


def check(found: dict[str, list[tuple[int, float]]], result: fb.Result) -> None:
    for name, curve in expected(result).items():
        assert [t for t, _ in found[name]] == [t for t, _ in curve], name
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in curve], rel=1e-5), name
    score = result.summary["score"]
    assert {"final": score["final"], "best_round": score["best_round"]} == pytest.approx(
        {name: found[f"result/{name}"][-1][1] for name in ("final", "best_round")}
    )
    assert len(found["result/final"]) == 1


def test_a_function_is_called_with_each_row_and_watchers_come_in_lists():
    rows, watcher = [], Heard()
    result = fb.run(METHOD, tiny_task(), watcher=[rows.append, watcher], **RUN)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows == result.rounds
    begun, ended = [("started", 4, 0, True), ("moved",), ("moved",)], [("ended", "done")]
    assert watcher.heard == begun + [each for t in range(1, 6) for each in (("moved",), ("scored", t))] + ended
    assert fb.run(METHOD, tiny_task(), watcher=rows.append, **RUN).rounds[-1]["round"] == rows[-1]["round"] == 5


def test_a_watcher_is_told_how_a_run_ends(tmp_path):
    class Fails(fb.FedAvg):
        def round(self, state, net, t):
            raise RuntimeError("no such thing")

    for method, stop, error, status in (
        (METHOD, 2, KeyboardInterrupt, "interrupted"),
        (Fails(**LOCAL), 0, RuntimeError, "failed"),
    ):
        watcher = Heard(stop)
        with pytest.raises(error):
            fb.run(method, tiny_task(), watcher=watcher, **RUN)
        assert watcher.heard[-1] == ("ended", status)


def test_what_a_function_raises_ends_the_run_which_can_be_resumed(tmp_path):
    def complain(row):
        raise ZeroDivisionError(row["round"])

    with pytest.raises(ZeroDivisionError):
        fb.run(METHOD, tiny_task(), out=tmp_path / "run", watcher=complain, **RUN)
    assert fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, **RUN).summary["rounds"] == 4


@pytest.mark.parametrize("store", STORES)
def test_a_store_has_every_round_once_also_of_a_run_that_was_interrupted(store, stores, tmp_path):
    def watcher(stop: int = 0):
        return [watcher_of(store.watch(stores), "interrupted"), Heard(stop)]

    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=stop > 1, watcher=watcher(stop), **RUN)
    for _ in range(2):  # the second time there is nothing left to do
        result = fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, watcher=watcher(), **RUN)
        check(store.read(stores, "interrupted"), result)


@pytest.mark.parametrize("store", STORES)
def test_rounds_that_nobody_watched_are_made_up_for(store, stores, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, scheduled_task(), out=tmp_path / "run", watcher=Heard(3), **RUN)
    recorder = watcher_of(store.watch(stores), "late")
    result = fb.run(METHOD, scheduled_task(), out=tmp_path / "run", resume=True, watcher=recorder, **RUN)
    assert {row["phase"] for row in result.rounds} >= {"round", "join"}
    check(store.read(stores, "late"), result)


@needs("mlflow")
def test_mlflow_has_the_configuration_and_how_the_run_ended(stores, tmp_path):
    place = str(stores / "flow.db")
    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, tiny_task(), out=tmp_path / "mine", watcher=[fb.MLflow(place), Heard(2)], **RUN)
    run = MLflow().run(stores, "mine")
    assert run.info.status == "KILLED"
    assert (run.data.params["method"], run.data.params["parameters.lr"]) == ("fedpurin", "0.1")
    fb.run(METHOD, tiny_task(), out=tmp_path / "mine", resume=True, watcher=fb.MLflow(place), **RUN)
    assert MLflow().run(stores, "mine").info.status == "FINISHED"


@needs("mlflow")
@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_run_folder_whose_name_is_a_query_writes_into_no_other_run_of_mlflow(stores, tmp_path, quote):
    place, name = str(stores / "flow.db"), f"before {ord(quote)}"
    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, tiny_task(), out=tmp_path / name, watcher=[fb.MLflow(place), Heard(2)], **RUN)
    before = MLflow().read(stores, name)
    theirs = tmp_path / f"{name}{quote} AND attributes.status != {quote}FINISHED"
    shutil.copytree(tmp_path / name, theirs)
    fb.run(METHOD, tiny_task(), out=theirs, resume=True, watcher=fb.MLflow(place), **RUN)
    assert MLflow().run(stores, name).info.status == "KILLED"
    assert MLflow().read(stores, name) == before
    assert [t for t, _ in MLflow().read(stores, theirs.name)["seconds"]][:4] == [1, 2, 3, 4]  # a run of its own


@needs("tensorboard")
def test_the_default_place_is_the_run_folder_and_names_are_the_same(tmp_path):
    result = fb.run(METHOD, tiny_task(), out=tmp_path / "run", watcher=fb.TensorBoard(), **RUN)
    check(tensorboard_scalars(tmp_path / "run" / "tensorboard"), result)


def test_a_store_that_fails_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    plain = fb.run(METHOD, tiny_task(), **RUN)
    for package, make, says in (
        ("tensorboard", lambda: fb.TensorBoard(tmp_path / "file"), "TensorBoard failed and logs nothing more"),
        (
            "mlflow",
            lambda: fb.MLflow("http://127.0.0.1:9"),
            r"MLflow .http://127.0.0.1:9. failed and logs nothing more of this run",
        ),
    ):
        if importlib.util.find_spec(package) is None:
            continue
        watcher = Heard()
        result = fb.run(METHOD, tiny_task(), watcher=[make(), watcher], **RUN)
        assert [row["scores"] for row in result.rounds] == [row["scores"] for row in plain.rounds]
        assert len(watcher.notes) == 1
        assert "\n" not in watcher.notes[0]
        with pytest.warns(RuntimeWarning, match=says) as warned:  # where nobody shows notes
            fb.run(METHOD, tiny_task(), watcher=make(), **RUN)
        assert len([each for each in warned if each.category is RuntimeWarning]) == 1


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own
def test_a_store_that_fails_in_the_middle_is_made_up_for_when_the_run_is_resumed(tmp_path):
    place, shown = tmp_path / "run" / "tensorboard", Heard()

    def lose(row):
        if row["round"] == 2:  # as a disk that is gone
            for file in place.iterdir():
                file.unlink()
            place.rmdir()
            place.write_text("in the way")
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, tiny_task(), out=tmp_path / "run", watcher=[fb.TensorBoard(), lose, shown], **RUN)
    assert len(shown.notes) == 1
    place.unlink()
    result = fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, watcher=fb.TensorBoard(), **RUN)
    check(tensorboard_scalars(place), result)


@pytest.mark.parametrize(("text", "says"), [("wandb", "tensorboard, mlflow or trackio"), ("mlflow:", "colon")])
def test_what_watch_does_not_take(text, says):
    with pytest.raises(fb.UserError, match=says):
        watcher_of(text, "run")


def test_a_package_that_is_missing_is_said_in_a_line_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(fb.UserError, match=r"mlflow .*pip install 'fewbytes\[watch\]'"):
        fb.MLflow()
    for command in ("run", "compare"):
        done = fewbytes(command, "fedavg", "--watch", "mlflow", "--out", tmp_path / "runs")
        assert (done.returncode, "fewbytes[watch]" in done.stderr) == (2, True)
        assert not list((tmp_path / "runs").glob("*"))


def test_the_command_line_watches_a_run_and_every_method_of_a_comparison(tmp_path):
    terms = [
        "--clients",
        "2",
        "--part",
        "0.1",
        "--rounds",
        "2",
        "--set",
        "epochs=1",
        "--watch",
        f"tensorboard:{tmp_path}/b",
    ]
    done = fewbytes("run", "fedavg", *terms, "--stop-when", "global>=0", "--out", tmp_path / "runs", "--json")
    result = json.loads(done.stdout)
    assert (result["rounds"], result["ended_by"], result["stop_when"]) == (1, "stop_when", "global>=0.0")
    assert "fedavg ends with round 1: global>=0.0 holds" in done.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert tensorboard_scalars(tmp_path / "b" / run.name)["result/final"][0][1] == pytest.approx(
        result["score"]["final"]
    )
    done = fewbytes("compare", "fedavg", "separate", *terms, "--out", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    [both] = (tmp_path / "both").iterdir()
    for name in ("fedavg", "separate"):
        assert [t for t, _ in tensorboard_scalars(tmp_path / "b" / both.name / name)["seconds"]] == [1, 2]


def test_a_deployment_passes_on_all_that_a_watcher_hears():
    methods = {name for name, what in vars(fb.Watcher).items() if callable(what) and name[:1] != "_"}
    assert methods == {*EVENT_NAMES, "started", "ended"}  # which it tells in its own words
