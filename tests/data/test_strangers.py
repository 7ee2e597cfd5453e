"""Data folders from strangers: links that lead elsewhere, pipes, tables and images far larger than they look."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fewbytes as fb
from fewbytes.base.parquet import read_parquet
from fewbytes.data import client_folders, load_dataset
from fewbytes.data.images import read_image
from fewbytes.data.text import documents_in, read_text_table

TABLE = "x,label\n" + "1,a\n2,b\n" * 20


def picture(path: Path, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (side, side), len(path.parts)).save(path)


def classes(folder: Path) -> None:
    for name in ("cat", "dog", "fox"):
        for i in range(10):
            picture(folder / name / f"{i}.png")


def domains(folder: Path) -> None:
    for name in ("art", "photo"):
        classes(folder / name)


def masks(folder: Path) -> None:
    for i in range(6):
        picture(folder / "train" / "images" / f"{i}.png")
        picture(folder / "train" / "masks" / f"{i}.png")
    (folder / "classes.txt").write_text("\n".join(map(str, range(40))))


def boxes(folder: Path) -> None:
    file = {
        "images": [{"id": 1, "file_name": "1.png", "width": 64, "height": 64}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [4, 4, 20, 20]}],
        "categories": [{"id": 1, "name": "cell"}],
    }
    (folder / "annotations").mkdir(parents=True)
    for split in ("train", "test"):
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(file))
        picture(folder / split / "1.png", 64)


def tables(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text(TABLE)
    pq.write_table(pa.table({"x": [1, 2] * 20, "label": ["a", "b"] * 20}), folder / "test.parquet")


def sites(folder: Path) -> None:
    for name in ("a", "b"):
        tables(folder / name)


def texts(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.txt").write_text("a text")


def parquet(folder: Path) -> None:
    folder.mkdir(parents=True)
    picture(folder.parent / "one.png")
    images = pa.array([(folder.parent / "one.png").read_bytes()] * 20)
    pq.write_table(pa.table({"image": images, "label": [0, 1] * 10}), folder / "train-0.parquet")


def loaded(folder: Path) -> object:
    return load_dataset(str(folder))


def texts_of_tables(folder: Path) -> object:
    return read_text_table(folder, "label", None)


CASES = {  # what makes a folder, what reads it, what in it is put elsewhere and linked to
    "a class": (classes, loaded, "fox"),
    "an image": (classes, loaded, "fox/3.png"),
    "a domain": (domains, loaded, "art"),
    "a domain's class": (domains, loaded, "art/fox"),
    "a mask": (masks, loaded, "train/masks/3.png"),
    "all masks": (masks, loaded, "train/masks"),
    "the classes": (masks, loaded, "classes.txt"),
    "images with boxes": (boxes, loaded, "train"),
    "boxes": (boxes, loaded, "annotations/instances_train.json"),
    "a table": (tables, loaded, "train.csv"),
    "a second table": (tables, loaded, "test.parquet"),
    "a client": (sites, client_folders, "b"),
    "a text": (texts, documents_in, "b/1.txt"),
    "texts in a table": (tables, texts_of_tables, "train.csv"),
    "Parquet": (parquet, loaded, "train-0.parquet"),
}


@pytest.fixture(autouse=True)
def _no_data_elsewhere(monkeypatch):
    monkeypatch.delenv("FEWBYTES_DATA", raising=False)


@pytest.mark.parametrize("case", CASES)
def test_a_link_out_of_a_data_folder_is_refused_and_one_within_it_or_within_the_users_data_is_read(
    case, tmp_path, monkeypatch
):
    make, read, moved = CASES[case]
    if isinstance(read, type(client_folders)) and read is client_folders:
        read = lambda folder: client_folders(str(folder))  # noqa: E731
    folder, away = tmp_path / "mine" / "data", tmp_path / "away"
    make(folder)
    read(folder)  # control: as it was
    away.mkdir()
    shutil.move(folder / moved, away / "it")
    (folder / moved).symlink_to(away / "it")
    with pytest.raises(fb.UserError, match=f"leads out .*{away}") as refused:
        read(folder)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path))
    read(folder)  # control: both are below FEWBYTES_DATA
    monkeypatch.delenv("FEWBYTES_DATA")
    shutil.move(away / "it", folder / ".kept")
    (folder / moved).unlink()
    (folder / moved).symlink_to(os.path.relpath(folder / ".kept", (folder / moved).parent))
    (tmp_path / "link").symlink_to(folder)
    read(folder)  # control: a link within the folder
    read(tmp_path / "link")  # and the folder a link itself


def test_a_pipe_among_images_is_named_and_not_waited_for_and_a_dangling_link_is_passed_over(tmp_path):
    classes(tmp_path / "data")
    loaded(tmp_path / "data")
    os.mkfifo(tmp_path / "data" / "dog" / "a.png")
    with pytest.raises(fb.UserError, match=r"dog/a.png .*pipe"):
        loaded(tmp_path / "data")
    (tmp_path / "data" / "dog" / "a.png").unlink()
    (tmp_path / "data" / "dog" / "a.png").symlink_to("b.png")
    assert "1 links to missing files" in loaded(tmp_path / "data").notes[0]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """300 million rows in a few MB."""
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    part = pa.table({"label": pa.array(np.zeros(10_000_000, np.int8))})
    with pq.ParquetWriter(path, part.schema) as file:
        for _ in range(30):
            file.write_table(part, row_group_size=10_000_000)
    assert path.stat().st_size < 4_000_000
    return path


def test_a_parquet_file_that_unfolds_to_far_more_rows_than_it_looks_is_refused_before_it_is_read(rows):
    before = pa.total_allocated_bytes()
    for read in (read_parquet, load_dataset_of, lambda path: read_text_table(path, "label", None)):
        with pytest.raises(fb.UserError, match=r"train\.parquet .*2\.4 GB .*300,000,000"):
            read(rows)
    assert pa.total_allocated_bytes() - before < 1 << 20


def load_dataset_of(path: Path) -> object:
    return load_dataset(str(path))


def test_images_of_a_parquet_file_of_too_many_rows_are_not_read(tmp_path):
    parquet(tmp_path / "data")
    loaded(tmp_path / "data")  # control: of few
    few = pq.read_table(tmp_path / "data" / "train-0.parquet")
    rows = 7_000_000
    part = pa.table([pa.nulls(rows, pa.binary()), pa.array(np.zeros(rows, np.int64))], few.schema)
    with pq.ParquetWriter(tmp_path / "data" / "train-0.parquet", few.schema) as file:
        file.write_table(few)
        for _ in range(10):
            file.write_table(part, row_group_size=rows)
    with pytest.raises(fb.UserError, match=r"train-0\.parquet .*GB in memory"):
        loaded(tmp_path / "data")


@pytest.mark.parametrize("declared", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_text_that_is_stored_once_and_repeated_is_counted_as_often(tmp_path, declared):
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100, np.int32)), pa.array(["x" * 500_000]))
    part = pa.table({"words": long if declared == long.type else long.cast(declared), "y": range(100)})
    with pq.ParquetWriter(tmp_path / "a.parquet", part.schema) as file:
        for _ in range(22):
            file.write_table(part)
    assert (tmp_path / "a.parquet").stat().st_size < 2_000_000
    with pytest.raises(fb.UserError, match=r"a\.parquet .* 1\.1 GB .*'words'"):
        read_parquet(tmp_path / "a.parquet")


def test_an_honest_table_is_read_as_it_was_written(tmp_path):
    g = np.random.default_rng(0)
    table = pa.table({
        "words": [f"{i % 13}" for i in range(10_000)], "once": [f"{i}" for i in range(10_000)],
        "none": pa.array([None, "a"] * 5000), "kept": pa.array(["a", "b"] * 5000).dictionary_encode(),
        "long": pa.array(["a", "bc"] * 5000, pa.large_string()), "x": g.standard_normal(10_000), "same": [1] * 10_000,
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    read = read_parquet(tmp_path / "a.parquet")
    assert read.schema == pq.read_table(tmp_path / "a.parquet").schema
    assert read.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("side", [8193, 12_000, 20_000])
def test_an_image_of_huge_dimensions_is_named_and_not_decoded(side, tmp_path):
    classes(tmp_path / "data")
    Image.new("1", (side, side)).save(tmp_path / "data" / "dog" / "0.png")
    assert (tmp_path / "data" / "dog" / "0.png").stat().st_size < 100_000
    with pytest.raises(fb.UserError, match=r"dog/0\.png .*67,108,864 pixels"):
        load_dataset(str(tmp_path / "data"), image_size=8)


def test_an_image_as_large_as_may_be_is_decoded(tmp_path):
    Image.new("1", (8192, 8192)).save(tmp_path / "0.png")
    assert read_image(tmp_path / "0.png", tmp_path, 0).shape == (8192, 8192, 1)
