"""Kinds of files of tables and texts, each beside pandas: packed, other separators and encodings, sheets, any case."""

from __future__ import annotations

import codecs
import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import zstandard

import fewbytes as fb
from fewbytes.base import unfolded
from fewbytes.data import Dataset, Schema, client_folders
from fewbytes.data.datasets import load_dataset  # its errors name options, as on the command line
from fewbytes.data.table_files import read_columns
from fewbytes.data.text import documents_in, holds_text, read_text_table

ROWS = 40
FRAME = pandas.DataFrame(
    {
        "größe": [i % 9 + 0.5 for i in range(ROWS)],
        "kind": [f"ä{i % 3}" for i in range(ROWS)],
        "seen": pandas.to_datetime([f"1970-01-{i % 20 + 1:02}" for i in range(ROWS)]),
        "smokes": [i % 4 == 0 for i in range(ROWS)],
        "y": [i % 2 for i in range(ROWS)],
    }
)
Y = Schema(target=("y",))
COMMAS = FRAME.to_csv(index=False)


def write(path: Path) -> Path:
    """FRAME as a file of the kind that the name says."""
    content = COMMAS.encode()
    match path.name.partition(".")[2].lower():
        case "csv":
            path.write_bytes(content)
        case "tsv":
            path.write_text(FRAME.to_csv(index=False, sep="\t"))
        case "csv.gz":
            path.write_bytes(gzip.compress(content))
        case "csv.zst":
            path.write_bytes(zstandard.compress(content))
        case "csv.zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("table.csv", content)
                archive.writestr("__MACOSX/._table.csv", b"x")
        case "parquet":
            FRAME.to_parquet(path)
        case "feather":
            FRAME.to_feather(path)
        case "jsonl" | "ndjson":
            FRAME.assign(seen=FRAME["seen"].dt.strftime("%Y-%m-%d")).to_json(path, orient="records", lines=True)
        case "xlsx":
            pytest.importorskip("python_calamine")
            pytest.importorskip("openpyxl")
            with pandas.ExcelWriter(path) as book:
                FRAME.to_excel(book, sheet_name="first", index=False)
                FRAME.assign(y=1 - FRAME["y"]).to_excel(book, sheet_name="north", index=False)
    return path


def samples(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    return data.train.load()


def check_is_frame(data: Dataset) -> None:
    """The samples are FRAME's, by pandas's means."""
    assert data.schema is not None
    assert data.schema.features == ("größe", "seen", "smokes", "kind=ä0", "kind=ä1", "kind=ä2")
    rows = data.train.rows
    part = FRAME.iloc[rows]
    days = (part["seen"] - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    columns = [part["größe"], days, part["smokes"].astype(float)]
    numbers = [(each - each.mean()) / each.std(ddof=0) for each in columns]
    marks = [(part["kind"] == f"ä{i}").astype(float) for i in range(3)]
    x, y = samples(data)
    assert x.numpy() == pytest.approx(np.stack([*numbers, *marks], axis=1), abs=1e-5)
    assert y.tolist() == part["y"].tolist()


@pytest.mark.parametrize(
    "name",
    [
        "a.csv", "a.CSV", "a.tsv", "a.TSV", "a.csv.gz", "a.csv.zip", "a.csv.zst", "a.CSV.GZ", "a.parquet", "a.Parquet",
        "a.feather", "a.jsonl", "a.ndjson", "a.xlsx",
    ],
)  # fmt: skip
def test_every_kind_gives_the_same_samples(name, tmp_path):
    path = write(tmp_path / name)
    check_is_frame(load_dataset(str(path), schema=Y))
    assert client_folders(str(tmp_path)) == [path]
    path.rename(tmp_path / f"train{path.name[1:]}")
    check_is_frame(load_dataset(str(tmp_path), schema=Y))


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "windows-1252"]
)
def test_separators_and_encodings_are_found_and_said_or_given(separator, encoding, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(FRAME.to_csv(index=False, sep=separator).encode(encoding))
    data = load_dataset(str(path), schema=Y)
    check_is_frame(data)
    assert ("text in" in data.notes[0]) == (not encoding.startswith("utf-8"))
    assert ("columns separated by" in data.notes[0]) == (separator != ",")
    check_is_frame(load_dataset(str(path), schema=Schema(target=("y",), encoding=encoding, separator=separator)))


def test_commas_in_a_tsv_and_excels_line_of_the_separator_are_read(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(COMMAS)
    check_is_frame(load_dataset(str(path), schema=Y))
    check_is_frame(load_dataset(str(path), schema=Schema(target=("y",), separator=",")))
    assert "columns separated by" not in load_dataset(str(path), schema=Y).notes[0]
    for separator, encoding in ((";", "utf-8"), ("\t", "utf-8-sig"), ("|", "utf-16"), (";", "utf-32")):
        path = tmp_path / "b.csv"
        path.write_bytes(f"sep={separator}\r\n{FRAME.to_csv(index=False, sep=separator)}".encode(encoding))
        check_is_frame(load_dataset(str(path), schema=Y))


def test_remarks_above_the_names_are_one_line_that_says_so(tmp_path):
    (tmp_path / "a.csv").write_text("# exported by Ada\n" + COMMAS)
    with pytest.raises(fb.UserError, match="line of names") as error:
        load_dataset(str(tmp_path / "a.csv"), schema=Y)
    assert "Ada" not in error.value.public


def test_an_encoding_that_is_none_or_not_the_files_is_one_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(COMMAS.encode("windows-1252"))
    with pytest.raises(fb.UserError, match="'utf-9'"):
        load_dataset(str(path), schema=Schema(target=("y",), encoding="utf-9"))
    with pytest.raises(fb.UserError, match=r"utf-8.*--encoding"):
        load_dataset(str(path), schema=Schema(target=("y",), encoding="utf-8"))


def test_a_sheet_is_named(tmp_path):
    path = write(tmp_path / "a.xlsx")
    first = load_dataset(str(path), schema=Y)
    assert "sheet 'first' of 2" in first.notes[0]
    north = load_dataset(str(path), schema=Schema(target=("y",), sheet="north"))
    assert sum(north.train.labels.tolist()) == len(north.train) - sum(first.train.labels.tolist())
    with pytest.raises(fb.UserError, match=r"'noth' \(did you mean 'north'\?\).*first, north"):
        load_dataset(str(path), schema=Schema(target=("y",), sheet="noth"))


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zip", "a.csv.zst", "a.xlsx", "a.feather", "a.parquet", "a.jsonl"])
def test_what_is_no_such_file_is_one_line_without_its_name_for_a_server(name, tmp_path):
    path = tmp_path / f"Ada_Lovelace_{name}"
    path.write_bytes(b"Grace Hopper, born 1906\n" * 3)
    with pytest.raises(fb.UserError) as error:
        read_columns(path, Y)
    assert "\n" not in str(error.value)
    assert error.value.public is not None
    assert not any(word in error.value.public for word in ("Ada", "Grace", "1906"))


def test_a_packed_file_that_unpacks_to_too_much_is_refused_before_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(unfolded, "MOST_BYTES", 1 << 20)
    content = b"x,y\n" + b"0,0\n" * (1 << 23)
    for name, packed in (("a.csv.gz", gzip.compress(content)), ("a.csv.zst", zstandard.compress(content))):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(fb.UserError, match="in memory"):
            read_columns(tmp_path / name, Y)
    for name in ("a.csv.zip", "a.xlsx"):
        if name == "a.xlsx":
            pytest.importorskip("python_calamine")
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("table.csv", content)
        with pytest.raises(fb.UserError, match="in memory"):
            read_columns(tmp_path / name, Y)


def test_a_file_of_another_kind_is_not_called_not_found(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(fb.UserError, match=r"a.pdf .*'.pdf'"):
        load_dataset(str(tmp_path / "a.pdf"))


def test_line_breaks_in_quotes_are_read_beyond_a_block(tmp_path):
    words = [f'line {i}\nand "more"\n' + "x" * 900 for i in range(12_000)]
    frame = pandas.DataFrame({"text": words, "y": [0, 1] * 6000, "x": range(12_000)})
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert (tmp_path / "a.csv").stat().st_size > 1e7
    read = read_columns(tmp_path / "a.csv", Y)
    assert read.column("text").to_pylist() == words
    texts, *_ = read_text_table(tmp_path / "a.csv", "text", "y")
    assert texts == [(str(i % 2), word) for i, word in enumerate(words)]
    long = pandas.DataFrame({"text": ["a\n" * 10_000_000, "b"], "y": [0, 1]})
    long.to_csv(tmp_path / "b.csv", index=False)
    assert len(read_text_table(tmp_path / "b.csv", "text", "y")[0][0][1]) == 20_000_000


def test_no_refusal_shows_a_server_a_rows_text(tmp_path):
    secret = "Ada Lovelace, HIV positive"
    (tmp_path / "a.csv").write_text(f'text,y\n"{secret}",1\n{secret},1,2\n')
    with pytest.raises(fb.UserError) as error:
        read_text_table(tmp_path / "a.csv", "text", "y")
    (tmp_path / "b.csv").write_text(f'text,y\n"{secret}",\n')
    with pytest.raises(fb.UserError) as empty:
        read_text_table(tmp_path / "b.csv", "text", "y")
    for told in (error.value.public, empty.value.public):
        assert told is not None
        assert not any(word in told for word in ("Ada", "HIV", "a.csv", "b.csv", str(tmp_path)))
    assert "Ada" not in str(error.value)


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["", "NA", "  "])
def test_rows_without_a_class_are_refused_with_their_number_or_left_out(empty, tmp_path):
    (tmp_path / "a.csv").write_text(f"text,y\nred,a\nblue,{empty}\ngreen,b\nwhite,{empty}\n")
    with pytest.raises(fb.UserError, match=r"a.csv .*2 rows .* y.*--missing drop"):
        read_text_table(tmp_path / "a.csv", "text", "y")
    texts, _, notes, _ = read_text_table(tmp_path / "a.csv", "text", "y", Schema(missing="drop"))
    assert texts == [("a", "red"), ("b", "green")]
    assert "4 rows; 2 without text or label left out" in notes[0]


def test_a_mark_of_the_encoding_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"rot")
    (tmp_path / "b.txt").write_bytes("grün".encode("utf-16"))
    assert documents_in(tmp_path) == [("a", "rot"), ("b", "grün")]
    (tmp_path / "b.txt").write_bytes("grün".encode("latin-1"))
    assert documents_in(tmp_path / "b.txt", Schema(encoding="latin-1")) == [("b", "grün")]
    for name, content in (("a.csv", b"text,y\nred,a\n"), ("a.jsonl", json.dumps({"text": "red", "y": "a"}).encode())):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content)
        assert read_text_table(tmp_path / name, "text", "y")[0] == [("a", "red")]


def test_texts_are_read_in_any_case_of_their_names(tmp_path):
    (tmp_path / "A.TXT").write_text("red")
    (tmp_path / "b.Txt").write_text("blue")
    (tmp_path / "._b.txt").write_bytes(b"\xff\xfe\x00")
    assert holds_text(str(tmp_path))
    assert holds_text(str(tmp_path / "A.TXT"))
    assert documents_in(tmp_path) == [("A", "red"), ("b", "blue")]
    for stray in ("__MACOSX/x.txt", "__MACOSX/ada/x.txt", "ada/.cache/x.txt", "ada/~$x.txt"):
        (tmp_path / stray).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / stray).write_bytes(b"\0\5")
    assert documents_in(tmp_path) == [("A", "red"), ("b", "blue")]
    (tmp_path / "mac" / "__MACOSX").mkdir(parents=True)
    (tmp_path / "mac" / "__MACOSX" / "x.txt").write_text("x")
    assert not holds_text(str(tmp_path / "mac"))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "TRAIN.CSV").write_text("text,y\nred,a\n")
    (tmp_path / "tables" / "Test.CSV").write_text("text,y\nblue,b\n")
    assert read_text_table(tmp_path / "tables", "text", "y")[:2] == ([("a", "red")], [("b", "blue")])


def test_what_became_of_a_table_is_said_in_a_line(tmp_path):
    frame = FRAME.assign(size=[None, *FRAME["größe"][1:]]).drop(columns="größe")
    frame.to_csv(tmp_path / "a.csv")
    (note,) = load_dataset(str(tmp_path / "a.csv"), schema=Schema(target=("y",), missing="mean")).notes
    for part in ("40 rows", "4 columns used (3 of numbers, 1 of categories)", "left out ''", "1 values missing"):
        assert part in note
    assert "\n" not in note
