"""A law: whatever is wrong with a site's data, its server learns nothing of names of files, of rows or of values."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fewbytes as fb
from fewbytes.base.named import only_allowed
from fewbytes.engines.handlers import Done, Job
from fewbytes.engines.results import unable
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower.apps import _public

MARK = "MEIER1961"
HEAD = "age,sex,outcome\n"
ROWS = [f"{20 + i * 7 % 31},{'fm'[i % 2]},{i % 2}" for i in range(40)]
SERVER = HEAD + "\n".join(ROWS) + "\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEWBYTES_DATA", raising=False)


def told(server: Path, site: Path, **settings: object) -> str:
    """What a server hears of a node that cannot use its client's data, as the node's app says it."""
    config = {"method": "fedavg", "dataset": str(server), "partition": "local", "clients": 1, "client_data": str(site)}
    try:
        with only_allowed(str(site), str(server), anywhere=False):
            find(make_experiment(config | settings), (0,))
    except Exception as error:
        job = Job(0, "train", 0, 1, False, 0)
        return _public(unable(job, error)).error
    raise AssertionError("nothing is wrong with these data")


def read_off(table: Path) -> dict[str, object]:
    """What the server says of its table: what is learnt, the classes, and what columns mean."""
    config = {"method": "fedavg", "dataset": str(table), "target": "outcome", "partition": "iid", "clients": 1}
    schema = find(make_experiment(config)).experiment.data.schema
    return {"target": "outcome", "class_names": ["0", "1"], "schema": schema}


def png(value: int = 0, size: int = 8, mode: str = "L") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (size, size), value if mode == "L" else (value,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


# Tables ---------------------------------------------------------------------------------------------------------------

TABLES: dict[str, str | bytes] = {
    "a value that is not a number": HEAD + "\n".join([*ROWS[:-1], f"{MARK},f,1"]) + "\n",
    "a category of its own": HEAD + "\n".join([*ROWS[:-1], f"30,{MARK},1"]) + "\n",
    "a class of its own": HEAD + "\n".join([*ROWS[:-1], f"30,f,{MARK}"]) + "\n",
    "a row too long": HEAD + "\n".join([*ROWS[:-1], f"30,f,1,{MARK}"]) + "\n",
    "an open quote": HEAD + "\n".join([*ROWS[:-1], f'"{MARK},f,1']) + "\n",
    "a missing value": HEAD + "\n".join([*ROWS[:-1], ",f,1"]) + f"\n# {MARK}\n",
    "no such column": HEAD.replace("age", MARK) + "\n".join(ROWS) + "\n",
    "columns of other names": f"{MARK},{MARK}2,{MARK}3\n" + "\n".join(ROWS) + "\n",
    "a column twice": "age,sex,outcome,age\n" + "\n".join(f"{row},{MARK}" for row in ROWS) + "\n",
    "another separator": (HEAD + "\n".join(ROWS) + f"\n{MARK}").replace(",", "|"),
    "Latin-1": (HEAD + "\n".join([*ROWS[:-1], f"30,\u00fc{MARK},1"])).encode("latin-1"),
    "UTF-16 cut off": (HEAD + "\n".join([*ROWS, MARK])).encode("utf-16")[:-3],
    "a limit": HEAD + "\n".join([*ROWS[:-1], "<0.5,f,1"]) + f"\n{MARK}\n",
    "-999": HEAD + "\n".join([*ROWS[:-1], "-999,f,1"]) + f"\n31,{MARK},0\n",
    "values with units": HEAD + "\n".join(f"{i} {MARK[:5]},f,{i % 2}" for i in range(40)) + f"\n1,{MARK},0\n",
    "dates": HEAD + "\n".join(f"02/03/20{10 + i},f,{i % 2}" for i in range(40)) + "\n",
    "nothing": "",
    "no row": HEAD,
    "binary": bytes(range(256)) + MARK.encode(),
}


@pytest.mark.parametrize("what", TABLES)
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".csv.zip", ".txt.csv"])
def test_of_a_table(what, suffix, tmp_path):
    content = TABLES[what]
    data = content if isinstance(content, bytes) else content.encode()
    data = data.replace(b",", b"\t") if suffix == ".tsv" else data
    site = tmp_path / f"{MARK}-1" / f"{MARK}{suffix}"
    site.parent.mkdir()
    if suffix.endswith("gz"):
        data = gzip.compress(data)
    if suffix.endswith("zip"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(f"{MARK}.csv", data)
        data = buffer.getvalue()
    site.write_bytes(data)
    (tmp_path / "server.csv").write_text(SERVER)
    words = told(tmp_path / "server.csv", site, **read_off(tmp_path / "server.csv"))
    assert MARK not in words
    assert str(tmp_path) not in words


def test_of_other_files_of_tables(tmp_path):
    (tmp_path / "server.csv").write_text(SERVER)
    schema = read_off(tmp_path / "server.csv")
    table = pa.table({"age": [MARK] * 4, "sex": ["f"] * 4, "outcome": [0, 1, 0, 1], MARK: [1, 2, 3, 4]})
    place = tmp_path / MARK
    place.mkdir()
    pq.write_table(table, place / f"{MARK}.parquet")
    pyarrow.feather.write_feather(table, place / f"{MARK}.feather")
    (place / f"{MARK}.jsonl").write_text(
        "\n".join(json.dumps({"age": MARK, "sex": "f", "outcome": 1}) for _ in range(3))
    )
    (place / f"{MARK}-2.parquet").write_bytes((place / f"{MARK}.parquet").read_bytes()[:-40])
    (place / f"{MARK}-2.jsonl").write_text('{"age": "' + MARK)
    (place / f"{MARK}.xlsx").write_bytes(b"PK" + MARK.encode())
    (place / f"{MARK}.csv.zst").write_bytes(MARK.encode())
    for path in sorted(place.iterdir()):
        words = told(tmp_path / "server.csv", path, **schema)
        assert MARK not in words, path


# Pictures and all else ------------------------------------------------------------------------------------------------


def pictures(folder: Path, classes: tuple[str, ...] = ("a", "b"), count: int = 5) -> Path:
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{MARK}_{i}.png").write_bytes(png(10 * c + i))
    return folder


def _masks(folder: Path, value: int = 1) -> None:
    for place in ("images", "masks"):
        (folder / "train" / place).mkdir(parents=True)
        for i in range(5):
            (folder / "train" / place / f"{MARK}{i}.png").write_bytes(png(value if place == "masks" else i))


def _listed(folder: Path, last: str) -> None:
    pictures(folder / MARK, ("x",))
    rows = [f"{MARK}_{i}.png,{i % 2}" for i in range(5)]
    (folder / f"{MARK}.csv").write_text("file,y\n" + "\n".join([*rows, last]) + "\n")


def _masks_unlike(folder: Path) -> None:
    _masks(folder / MARK, 1)
    _masks(folder, 255)
    (folder / MARK / "train").rename(folder / "test")


def _yolo(folder: Path, names: str) -> None:
    pictures(folder, ("images",))
    (folder / "labels").mkdir()
    (folder / "labels" / f"{MARK}_0.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (folder / "data.yaml").write_text(names)


def _remove(path: Path) -> None:
    path.unlink()


BROKEN: dict[str, Callable[[Path], object]] = {
    "no picture": lambda p: (pictures(p) / "a" / f"{MARK}_0.png").write_bytes(b"no"),
    "a cut one": lambda p: (pictures(p) / "a" / f"{MARK}_0.png").write_bytes(png()[:40]),
    "another size": lambda p: (pictures(p) / "a" / f"{MARK}_0.png").write_bytes(png(size=9)),
    "a huge one": lambda p: (pictures(p) / "a" / f"{MARK}_0.png").write_bytes(png(size=9000)),
    "another class": lambda p: pictures(p, ("a", MARK)),
    "no class": lambda p: (p.mkdir(), (p / f"{MARK}.png").write_bytes(png())),
    "several depths": lambda p: pictures(pictures(p) / "a", (MARK, f"{MARK}2")),
    "splits and others": lambda p: pictures(p, (f"{MARK}", "train", "b")),
    "a link out": lambda p: (pictures(p) / "a" / f"{MARK}_9.png").symlink_to("/etc/hostname"),
    "a link to nowhere": lambda p: (p.mkdir(), (p / f"{MARK}.csv").symlink_to(f"/{MARK}")),
    "patients in both splits": lambda p: pictures(p / "train" / "a", (MARK, "q")) and (
        pictures(p / "train" / "b", ("r",)), pictures(p / "test" / "a", (MARK,)), pictures(p / "test" / "b", ("s",))
    ),
    "patients called by numbers": lambda p: (
        pictures(p / "a", (f"{MARK}-1", f"{MARK}-2")), pictures(p / "b", (f"{MARK}-1", f"{MARK}-2"))
    ),
    "images beside masks": lambda p: pictures(p / MARK, ("images", "labels")),
    "a pipe": lambda p: os.mkfifo(pictures(p) / "a" / f"{MARK}_9.png"),
    "several pages": lambda p: Image.new("L", (8, 8)).save(
        pictures(p) / "a" / f"{MARK}_0.gif", save_all=True, append_images=[Image.new("L", (8, 8), 9)]
    ),
    "DICOM": lambda p: (pictures(p) / "a" / f"{MARK}.dcm").write_bytes(MARK.encode()),
    "NIfTI": lambda p: (pictures(p) / "a" / f"{MARK}.nii.gz").write_bytes(MARK.encode()),
    "a mask of another kind": lambda p: _masks(p, 7),
    "a mask that is missing": lambda p: (_masks(p), _remove(p / "train" / "masks" / f"{MARK}0.png")),
    "a table of labels": lambda p: _listed(p, f"{MARK}_77.png,1"),
    "labels of another class": lambda p: _listed(p, f"{MARK}_0.png,{MARK}"),
    "measured labels": lambda p: _listed(p, f"{MARK}_0.png,0.5"),
    "several tables of labels": lambda p: (
        _listed(p, f"{MARK}_0.png,1"), shutil.copy(p / f"{MARK}.csv", p / f"{MARK}2.csv")
    ),
    "a table of several labels": lambda p: (_listed(p, f"{MARK}_0.png,1"),
        (p / f"{MARK}.csv").write_text(f"file,{MARK},x\n{MARK}_0.png,p,{MARK}\n{MARK}_1.png,{MARK},q\n")),
    "a table beside folders of classes": lambda p: (pictures(p, (MARK, "b")).joinpath(f"{MARK}.csv")
        .write_text(f"file,{MARK}\n{MARK}/{MARK}_0.png,{MARK}3\nb/{MARK}_0.png,7\n")),
    "several masks": lambda p: (_masks(p), (p / "train" / "masks" / f"{MARK}0_mask.png").write_bytes(png(1))),
    "masks of other values": _masks_unlike,
    "masks with names left out": lambda p: (_masks(p), (p / "classes.txt").write_text(f"a\n\n{MARK}\n")),
    "names of classes left out": lambda p: _yolo(p, f"names:\n  0: {MARK}\n  2: {MARK}2\n"),
    "an empty label in Parquet": lambda p: (
        p.mkdir(), pq.write_table(pa.table({"image": [png()] * 2, "label": ["", MARK]}), p / "train-0.parquet")
    ),
    "broken labels in Parquet": lambda p: (
        p.mkdir(), pq.write_table(pa.table({"image": [png()] * 2, "label": [0.5, 1961.5]}), p / "train-0.parquet")
    ),
    "arrays that are not finite": lambda p: (
        p.mkdir(), np.savez(p / f"{MARK}.npz", x=np.full((3, 2), np.nan), y=np.zeros(3))
    ),
    "COCO": lambda p: (
        (p / "annotations").mkdir(parents=True),
        (p / "annotations" / "instances_train.json").write_text(f'{{"images": ["{MARK}"]}}'),
    ),
    "pictures in Parquet": lambda p: (
        p.mkdir(), pq.write_table(pa.table({"image": [MARK.encode()], "label": [0]}), p / "train-0.parquet")
    ),
    "labels in Parquet": lambda p: (
        p.mkdir(), pq.write_table(pa.table({"image": [png()], MARK: [0]}), p / "train-0.parquet")
    ),
    "arrays": lambda p: (
        p.mkdir(), np.save(p / "x.npy", np.zeros((3, 2))), np.save(p / "y.npy", np.array([MARK] * 3))
    ),
    "arrays of other names": lambda p: (
        p.mkdir(), np.save(p / "x.npy", np.zeros((3, 2))), np.save(p / "y.npy", np.zeros(4)),
        np.save(p / f"{MARK}.npy", np.zeros(4)),
    ),
    "texts": lambda p: (p.mkdir(), (p / f"{MARK}.txt").write_bytes(b"\xff\xfe\xff" + MARK.encode())),
    "nothing": lambda p: p.mkdir(),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_of_a_folder(what, tmp_path):
    server, site = pictures(tmp_path / "server"), tmp_path / MARK / f"{MARK}-site"
    site.parent.mkdir()
    with contextlib.suppress(FileExistsError):
        BROKEN[what](site)
    words = told(server, site, class_names=["a", "b"])
    assert MARK not in words
    assert str(tmp_path) not in words


def test_an_error_of_ones_own_code_tells_its_kind_alone(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(f"def data():\n    raise ValueError('row of {MARK}')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"method": "fedavg", "dataset": "digits", "partition": "local", "clients": 1}
    with pytest.raises(fb.UserError, match=MARK) as error, only_allowed("own_data"):
        find(make_experiment(config | {"client_data": "own_data:data"}), (0,))
    done = _public(unable(Job(0, "train", 0, 1, False, 0), error.value))
    assert isinstance(done, Done)
    assert MARK not in done.error
    assert "its own log says why" in done.error


def test_an_error_in_training_tells_its_kind_and_where_it_was_raised():
    """As a data set that is read while it is used, or a library, may name what it failed at."""
    namespace: dict[str, object] = {}
    exec(compile(f"def train():\n    raise KeyError('{MARK}')\n", "own.py", "exec"), namespace)
    with pytest.raises(KeyError) as error:
        namespace["train"]()
    done = unable(Job(0, "train", 0, 1, False, 0), error.value)
    assert MARK in done.error  # which the node's own log says
    assert _public(done).error == "KeyError, its own log says more (own.py, line 2)"
