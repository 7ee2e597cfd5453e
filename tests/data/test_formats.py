"""Files of hospitals and laboratories: DICOM, NIfTI, arrays, and images with tables of labels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data import load_dataset
from fewbytes.data.formats.arrays import read_arrays
from fewbytes.data.formats.label_lists import read_label_lists
from fewbytes.data.images import read_image
from fewbytes.data.schema import Schema


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBYTES_CACHE", str(tmp_path / "cache"))


def read(path: Path) -> np.ndarray:
    return read_image(path, path.parent, 0)


# DICOM ----------------------------------------------------------------------------------------------------------------


def write_dicom(path: Path, pixels: np.ndarray, bits: int = 12, **more) -> None:
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed")
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    file = pydicom.Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID = generate_uid()
    file.PatientName = "MEIER^HANS"
    file.Rows, file.Columns = pixels.shape[-2:] if pixels.shape[-1] != 3 else pixels.shape[-3:-1]
    file.SamplesPerPixel = 3 if pixels.shape[-1] == 3 else 1
    if file.SamplesPerPixel == 3:
        file.PlanarConfiguration = 0
    file.PhotometricInterpretation = "RGB" if file.SamplesPerPixel == 3 else "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit = 8 * pixels.dtype.itemsize, bits, bits - 1
    file.PixelRepresentation = int(pixels.dtype.kind == "i")
    if pixels.ndim == 3 and file.SamplesPerPixel == 1:
        file.NumberOfFrames = len(pixels)
    file.PixelData = pixels.tobytes()
    for name, value in more.items():
        setattr(file, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)


STORED = (np.arange(64).reshape(8, 8) * 60).astype(np.uint16)


def test_stored_values_are_parts_of_what_their_bits_hold(tmp_path):
    write_dicom(tmp_path / "a.dcm", STORED)
    assert np.allclose(read(tmp_path / "a.dcm")[..., 0], STORED / 4095)


def test_hounsfield_units_are_as_slope_and_intercept_say(tmp_path):
    write_dicom(tmp_path / "a.dcm", STORED, RescaleSlope=2, RescaleIntercept=-1024)
    assert np.array_equal(read(tmp_path / "a.dcm")[..., 0], STORED * 2.0 - 1024)


def test_a_window_is_what_a_viewer_shows(tmp_path):
    write_dicom(tmp_path / "a.dcm", STORED, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=40, WindowWidth=400)
    units = STORED - 1024.0
    wanted = np.clip((units - (40 - 0.5)) / (400 - 1) + 0.5, 0, 1)  # DICOM PS3.3, C.11.2.1.2.1
    assert np.allclose(read(tmp_path / "a.dcm")[..., 0], wanted, atol=1e-6)


def test_where_the_lowest_value_is_white_the_picture_is_turned_about(tmp_path):
    write_dicom(tmp_path / "a.dcm", STORED, PhotometricInterpretation="MONOCHROME1")
    assert np.allclose(read(tmp_path / "a.dcm")[..., 0], 1 - STORED / 4095)


def test_signed_values_and_colours(tmp_path):
    write_dicom(tmp_path / "a.dcm", (STORED.astype(np.int16) - 1900), bits=12)
    assert np.allclose(read(tmp_path / "a.dcm")[..., 0], (STORED.astype(float) - 1900) / 2047)
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    write_dicom(tmp_path / "b.dcm", colours, bits=8)
    assert np.allclose(read(tmp_path / "b.dcm"), colours / 255)


def test_class_folders_of_dicom_are_read_and_a_series_is_a_volume_in_the_bodys_order(tmp_path):
    rng = np.random.default_rng(0)
    volumes = {}
    for kind in ("ct", "mr"):
        for patient in range(3):
            volume = rng.integers(0, 4096, (4, 6, 5)).astype(np.uint16)
            volumes[kind, patient] = volume
            for i in rng.permutation(4):
                write_dicom(
                    tmp_path / "x" / kind / f"p{kind}{patient}" / f"{9 - i}.dcm", volume[i],
                    SeriesInstanceUID=f"1.2.{patient + 1}", ImagePositionPatient=[0, 0, 3.0 * int(i)],
                    ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
                )  # fmt: skip
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("ct", "mr")
    assert data.train.shape == (1, 4, 6, 5)
    x = np.concatenate([data.train.load()[0].numpy(), data.test.load()[0].numpy()])
    assert len(x) == 6
    assert "6 folders of slices are volumes" in data.notes[0]
    for volume in volumes.values():
        assert any(np.allclose(each[0], volume / 4095) for each in x)


def dicoms(folder: Path, *each: dict, pixels: np.ndarray = STORED) -> Path:
    """A folder of two classes, a file for each of these headers."""
    for i, more in enumerate(each):
        write_dicom(folder / "ab"[i % 2] / f"MEIER{i}.dcm", pixels, **more)
    return folder


IDENTITY, CT = {"RescaleSlope": 1, "RescaleIntercept": 0}, {"RescaleSlope": 1, "RescaleIntercept": -1024}
WINDOW = {"WindowCenter": 40, "WindowWidth": 400}


@pytest.mark.parametrize(
    ("heads", "wanted", "words"),
    [
        ([{}, {}], STORED / 4095, "DICOM: stored values, as parts"),
        ([IDENTITY, {}], STORED / 4095, "stored values"),  # scanners differ in whether they write it
        ([IDENTITY, IDENTITY], STORED / 4095, "stored values"),
        ([IDENTITY | {"Modality": "CT"}] * 2, STORED, "slope and intercept"),
        ([{"Modality": "CT"}] * 2, STORED, "slope and intercept"),
        ([{"WindowCenter": None, "WindowWidth": None}, {}], STORED / 4095, "stored values"),
        ([{"RescaleSlope": None, "RescaleIntercept": None}, {}], STORED / 4095, "stored values"),
        ([WINDOW | CT, {"WindowCenter": [40, 600], "WindowWidth": [400, 1500]} | CT],
         np.clip((STORED - 1024.0 - 39.5) / 399 + 0.5, 0, 1), "cut to the window"),
    ],
)  # fmt: skip
def test_a_data_set_of_dicom_has_one_scale_whatever_single_headers_say(heads, wanted, words, tmp_path):
    data = load_dataset(str(dicoms(tmp_path / "x", *heads)))
    x = np.concatenate([data.train.load()[0].numpy(), data.test.load()[0].numpy()])
    assert len(x) == 2
    assert np.allclose(x[:, 0], wanted, atol=1e-5)
    assert words in data.notes[0]
    assert load_dataset(str(tmp_path / "x")).notes == data.notes  # of the cache


def test_files_that_are_rescaled_beside_others_are_all_in_units(tmp_path):
    data = load_dataset(str(dicoms(tmp_path / "x", CT, {})))
    x = np.concatenate([data.train.load()[0].numpy(), data.test.load()[0].numpy()])[:, 0]
    assert sorted(x[:, 0, 0].tolist()) == [-1024, 0]
    assert np.array_equal(np.sort(x, axis=0)[1], STORED)


def test_windows_in_some_files_only_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"1 of 2 .*window") as error:
        load_dataset(str(dicoms(tmp_path / "x", WINDOW | CT, CT)))
    assert "MEIER" not in error.value.public


@pytest.mark.parametrize("kind", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_windows_are_those_of_pydicom(kind, tmp_path):
    pytest.importorskip("pydicom", reason="pydicom is not installed")
    from pydicom import dcmread
    from pydicom.pixels import apply_modality_lut, apply_windowing

    write_dicom(tmp_path / "a.dcm", STORED, VOILUTFunction=kind, **WINDOW, **CT)
    file = dcmread(tmp_path / "a.dcm")
    shown = apply_windowing(
        apply_modality_lut(file.pixel_array, file), file
    )  # from the lowest to the highest of 12 bits
    assert np.allclose(read(tmp_path / "a.dcm")[..., 0], (shown + 1024) / 4095, atol=1e-6)


@pytest.mark.parametrize("highest", [2000, 4095])
def test_pictures_are_turned_about_by_what_their_bits_hold_not_by_what_is_in_them(highest, tmp_path):
    pixels = np.full((4, 4), 1000, np.uint16)
    pixels[0, 0] = highest
    turned = {"PhotometricInterpretation": "MONOCHROME1", "Modality": "CT"}
    data = load_dataset(str(dicoms(tmp_path / "x", turned | CT, turned | CT, pixels=pixels)))
    x = data.train.load()[0].numpy()
    assert (x[0, 0, 1, 1], x[0, 0, 0, 0]) == (4095 - 1000 - 1024, 4095 - highest - 1024)
    assert "2 in which the lowest value is white" in data.notes[0]
    signed = {"PhotometricInterpretation": "MONOCHROME1"}
    write_dicom(tmp_path / "s.dcm", np.array([[-2048, 0, 2047, 7]], np.int16), **signed)
    assert np.allclose(read(tmp_path / "s.dcm")[..., 0], [[1, -1 / 2047, -2048 / 2047, -8 / 2047]])


def test_a_table_of_labels_may_name_dicom(tmp_path):
    folder = dicoms(tmp_path / "x", CT, {}, CT, {})
    rows = "".join(f"MEIER{i},{'benign' if i < 2 else 'malignant'}\n" for i in range(4))
    (folder / "train.csv").write_text("image,dx\n" + rows)
    data = load_dataset(str(folder), schema=Schema(target=("dx",)))
    assert data.classes == ("benign", "malignant")
    assert {float(x) for split in (data.train, data.test) for x in split.load()[0][:, 0, 0, 0]} == {-1024, 0}


def test_dicom_called_ima_is_read(tmp_path):
    folder = dicoms(tmp_path / "x", {}, {})
    for path in list(folder.rglob("*.dcm")):
        path.rename(path.with_suffix(".IMA"))
    assert np.allclose(load_dataset(str(folder)).train.load()[0].numpy()[0, 0], STORED / 4095)


@pytest.mark.parametrize("content", [b"", b"no DICOM", bytes(128) + b"DICM" + b"\xff" * 50])
def test_dicom_that_cannot_be_read_is_refused_and_its_name_not_told(content, tmp_path):
    pytest.importorskip("pydicom", reason="pydicom is not installed")
    (tmp_path / "MEIER.dcm").write_bytes(content)
    with pytest.raises(UserError, match=r"MEIER\.dcm .*cannot be read") as error:
        read(tmp_path / "MEIER.dcm")
    assert "MEIER" not in error.value.public


# NIfTI ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_volumes_are_in_the_bodys_axes_with_slope_and_intercept(suffix, tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed")
    stored = np.random.default_rng(0).integers(0, 100, (4, 5, 6)).astype(np.int16)
    image = nibabel.Nifti1Image(stored, np.diag([-1, -1, 1, 1]))  # from right to left, from front to back
    image.header.set_slope_inter(0.5, -3)
    nibabel.save(image, tmp_path / f"a{suffix}")
    wanted = nibabel.load(tmp_path / f"a{suffix}").get_fdata()[::-1, ::-1]
    assert np.allclose(read(tmp_path / f"a{suffix}")[..., 0], wanted)


def test_class_folders_of_volumes(tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed")
    for c, kind in enumerate(("healthy", "ill")):
        (tmp_path / "x" / kind).mkdir(parents=True)
        for i in range(5):
            nibabel.save(
                nibabel.Nifti1Image(np.full((4, 4, 4), c + i / 10), np.eye(4)), tmp_path / "x" / kind / f"{i}.nii.gz"
            )
    data = load_dataset(str(tmp_path / "x"))
    assert (data.train.shape, data.classes) == ((1, 4, 4, 4), ("healthy", "ill"))
    assert np.array_equal(data.train.load()[0].numpy()[:, 0, 0, 0, 0] >= 1, data.train.labels.numpy() == 1)
    assert data.notes[0].startswith("pixels are floats from 0 to 1.4; NIfTI: ")


def test_volumes_that_differ_in_size_are_to_be_brought_to_one(tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed")
    (tmp_path / "a").mkdir()
    for i in (4, 5):
        nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, i)), np.eye(4)), tmp_path / "a" / f"{i}.nii")
    with pytest.raises(UserError, match="one size") as error:
        load_dataset(str(tmp_path))
    assert error.value.public.endswith("to one size")


# Arrays ---------------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (20, 8, 8), dtype=np.uint8), np.arange(20) % 4


def test_medmnists_layout(tmp_path):
    arrays = {}
    for split, count in (("train", 12), ("val", 4), ("test", 4)):
        arrays |= {f"{split}_images": X[:count], f"{split}_labels": Y[:count, None].astype(np.uint8)}
    np.savez_compressed(tmp_path / "bloodmnist.npz", **arrays)
    data = load_dataset(str(tmp_path / "bloodmnist.npz"))
    assert (len(data.train), len(data.test), data.train.shape, data.classes) == (12, 4, (1, 8, 8), tuple("0123"))
    assert np.array_equal(data.train.load()[0][:, 0].numpy(), X[:12] / np.float32(255))
    assert data.train.labels.tolist() == Y[:12].tolist()
    (note,) = data.notes
    assert note.endswith("val_images, val_labels")


def test_colours_last_labels_of_which_any_may_hold_and_volumes(tmp_path):
    colours = RNG.integers(0, 256, (10, 8, 8, 3), dtype=np.uint8)
    marks = RNG.integers(0, 2, (10, 5))
    np.savez(tmp_path / "a.npz", x_train=colours, y_train=marks, x_test=colours, y_test=marks)
    data = read_arrays("a", tmp_path / "a.npz")
    assert data.train.shape == (3, 8, 8)
    assert np.array_equal(np.asarray(data.train.x), colours.transpose(0, 3, 1, 2))
    assert data.train.learns == "labels"
    assert np.array_equal(data.train.targets.numpy(), marks)
    np.savez(tmp_path / "b.npz", images=RNG.integers(0, 256, (10, 6, 6, 6), dtype=np.uint8), labels=np.arange(10) % 2)
    assert read_arrays("b", tmp_path / "b.npz").train.shape == (1, 6, 6, 6)


def test_signals_in_hdf5_and_in_npy(tmp_path):
    signals = RNG.normal(size=(20, 2, 50))
    for stem, array in {"x_train": signals, "y_train": Y}.items():
        (tmp_path / "folder").mkdir(exist_ok=True)
        np.save(tmp_path / "folder" / f"{stem}.npy", array)
    data = load_dataset(str(tmp_path / "folder"))
    assert data.train.shape == (2, 50)
    assert data.train.load()[0].dtype.is_floating_point
    assert len(data.train) + len(data.test) == 20
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["signals"], file["labels"] = signals, Y
    again = load_dataset(str(tmp_path / "a.h5"))
    assert np.array_equal(np.asarray(again.train.load()[0]), np.asarray(data.train.load()[0]))


def test_numbers_to_learn_are_numbers(tmp_path):
    np.savez(tmp_path / "a.npz", x=RNG.normal(size=(20, 3)), y=RNG.normal(size=20))
    data = read_arrays("a", tmp_path / "a.npz")
    assert (data.train.learns, data.train.shape) == ("numbers", (3,))


@pytest.mark.parametrize("shape", [(20, 6, 6), (20, 6, 6, 3), (20, 5, 6, 7)])
@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int16, np.int64])
def test_pictures_of_more_than_8_bits_are_scaled_as_those_in_files_and_other_numbers_stay(shape, kind, tmp_path):
    x = RNG.integers(0, 30000, shape).astype(kind)
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    data = read_arrays("a", tmp_path / "a.npz")
    whole = np.concatenate([split.load()[0].numpy() for split in (data.train, data.test)])
    pictures = np.dtype(kind).kind == "u"
    wanted = x / np.iinfo(kind).max if pictures else x
    wanted = np.moveaxis(wanted, 3, 1) if shape[-1] == 3 else wanted
    wanted = wanted[:, None] if (len(shape) == 4 and shape[-1] != 3) or (pictures and len(shape) == 3) else wanted
    assert whole.dtype == np.float32
    assert whole.shape == wanted.shape
    order = [np.lexsort(each.reshape(20, -1).T) for each in (whole, wanted)]
    assert np.allclose(whole[order[0]], wanted[order[1]], rtol=1e-6)


def test_labels_that_are_floats_of_whole_numbers_are_classes(tmp_path):
    x = RNG.normal(size=(20, 3))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=Y.astype(float), x_test=x[:3], y_test=Y[:3, None].astype(float))
    data = read_arrays("a", tmp_path / "a.npz")
    assert (data.train.learns, data.classes) == ("classes", tuple("0123"))
    assert data.train.labels.tolist() == Y.tolist()
    np.savez(tmp_path / "b.npz", x_train=x, y_train=Y + 0.5, x_test=x[:3], y_test=Y[:3].astype(float))
    assert read_arrays("b", tmp_path / "b.npz").test.learns == "numbers"


@pytest.mark.parametrize("where", ["x", "y"])
def test_arrays_that_are_not_finite_are_refused(where, tmp_path):
    arrays = {"x": RNG.normal(size=(20, 3)), "y": RNG.normal(size=20)}
    arrays[where][7] = np.nan
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=f"{where} .*not finite"):
        read_arrays("a", tmp_path / "a.npz")


def test_names_in_capitals_splits_called_dev_and_what_is_passed_over(tmp_path):
    np.savez(tmp_path / "a.npz", trainX=X, trainY=Y, dev_x=X[:5], dev_y=Y[:5], weights=Y)
    data = read_arrays("a", tmp_path / "a.npz")
    assert (len(data.train), len(data.test)) == (20, 5)
    assert data.notes[0].endswith(": weights")


def test_groups_of_hdf5_are_splits_and_what_they_hold_is_named(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for split, count in (("train", 20), ("test", 5)):
            file[f"{split}/images"], file[f"{split}/labels"] = X[:count], Y[:count]
    data = load_dataset(str(tmp_path / "a.h5"))
    assert (len(data.train), len(data.test), data.train.shape) == (20, 5, (1, 8, 8))
    assert np.array_equal(np.asarray(data.train.x)[:, 0], X)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["scan/patients"] = X
        file["scan/x"] = h5py.ExternalLink(str(tmp_path / "a.h5"), "/train/images")
    with pytest.raises(UserError, match="scan/patients: call samples"):
        load_dataset(str(tmp_path / "b.h5"))


def test_arrays_that_would_be_unpickled_or_lie_elsewhere_are_not_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}, {}], dtype=object), y=np.arange(2))
    with pytest.raises(UserError, match="cannot be read"):
        read_arrays("a", tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", patients=X, outcome=Y)
    with pytest.raises(UserError, match="call samples images"):
        read_arrays("b", tmp_path / "b.npz")
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = X
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["x"], file["y"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/x"), Y
    with pytest.raises(UserError, match="call samples"):
        read_arrays("c", tmp_path / "c.h5")


# Pictures in Parquet ----------------------------------------------------------------------------------------------


def parquet(folder: Path, **splits: list) -> Path:
    """Pictures of 0, 1, … with these labels."""
    folder.mkdir(parents=True)
    for split, labels in splits.items():
        pictures = []
        for i in range(len(labels)):
            buffer = io.BytesIO()
            Image.fromarray(np.full((4, 4), i, np.uint8)).save(buffer, "PNG")
            pictures.append(buffer.getvalue())
        pyarrow.parquet.write_table(pyarrow.table({"image": pictures, "label": labels}), folder / f"{split}-0.parquet")
    return folder


@pytest.mark.parametrize("written", [[0, 1, 9], [0.0, 1.0, 9.0], ["0", "1", "9"], ["00", "1.0", " 9"]])
def test_labels_in_parquet_are_alike_however_they_are_written(written, tmp_path):
    data = load_dataset(str(parquet(tmp_path / "x", train=written * 4, test=["9", "1", "0"])))
    assert data.classes == tuple(map(str, range(10)))
    assert data.train.labels.tolist() == [0, 1, 9] * 4
    assert data.test.labels.tolist() == [9, 1, 0]
    assert (data.train.load()[0][:, 0, 0, 0] * 255).round().tolist() == list(range(12))


@pytest.mark.parametrize("written", [[True, False], ["True", "False"], ["true", " false"]])
def test_truth_in_parquet_is_two_classes_and_spaces_make_none(written, tmp_path):
    data = load_dataset(str(parquet(tmp_path / "x", train=written * 4, test=["FALSE", "true"])))
    assert (data.classes, data.train.labels.tolist()) == (("false", "true"), [1, 0] * 4)
    assert data.test.labels.tolist() == [0, 1]


@pytest.mark.parametrize(("empty", "words"), [("", "2 .*without a label"), (" ", "2 .*without a label")])
def test_an_empty_label_in_parquet_is_no_class(empty, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load_dataset(str(parquet(tmp_path / "x", train=["a", "b", empty] * 2)))


# Images and tables of labels ------------------------------------------------------------------------------------------


def images(folder: Path, names: list[str]) -> None:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(folder / name)


def test_isics_layout_one_column_a_class_and_names_without_suffix(tmp_path):
    names = [f"ISIC_{i:04}" for i in range(10)]
    images(tmp_path / "x", [f"ISIC2019/{name}.png" for name in names])
    rows = [f"{name},{float(i % 3 == 0)},{float(i % 3 == 1)},{float(i % 3 == 2)}" for i, name in enumerate(names)]
    (tmp_path / "x" / "truth.csv").write_text("image,MEL,NV,BCC\n" + "\n".join(rows) + "\n")
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("MEL", "NV", "BCC")
    for split in (data.train, data.test):
        assert (np.asarray(split.load()[0])[:, 0, 0, 0] * 255).round().astype(int).tolist() != []
        values = (split.load()[0][:, 0, 0, 0] * 255).round().int()
        assert (values % 3).tolist() == split.labels.tolist()


def chexpert(folder: Path) -> None:
    names = [f"train/patient{i:05}/study1/view1_frontal.png" for i in range(6)]
    valid = [f"valid/patient{i:05}/study1/view1_frontal.png" for i in range(6, 8)]
    images(folder, names + valid)
    table = ["Path,Sex,Age,Edema,Cardiomegaly"]
    values = ["1.0,", ",1.0", "-1.0,0.0", "1.0,1.0", "0.0,", ",-1.0"]
    rows = [f"CheXpert-v1.0-small/{name},Male,60,{value}" for name, value in zip(names, values, strict=True)]
    (folder / "train.csv").write_text("\n".join(table + rows) + "\n")
    rows = [f"CheXpert-v1.0-small/{name},Male,60,1.0,0.0" for name in valid]
    (folder / "valid.csv").write_text("\n".join(table + rows) + "\n")


@pytest.mark.parametrize(
    ("uncertain", "wanted"),
    [
        ("zero", [[1, 0], [0, 1], [0, 0], [1, 1], [0, 0], [0, 0]]),
        ("one", [[1, 0], [0, 1], [1, 0], [1, 1], [0, 0], [0, 1]]),
        ("drop", [[1, 0], [0, 1], [1, 1], [0, 0]]),
    ],
)
def test_chexperts_layout_and_its_uncertain_labels(uncertain, wanted, tmp_path):
    chexpert(tmp_path / "x")
    with pytest.raises(UserError, match=r"2 rows .*uncertain"):
        read_label_lists("x", tmp_path / "x", None)
    data = read_label_lists("x", tmp_path / "x", None, uncertain=uncertain)
    assert (data.classes, data.train.learns) == (("Edema", "Cardiomegaly"), "labels")
    assert data.train.targets.tolist() == wanted
    assert (len(data.test), data.test.targets.tolist()) == (2, [[1, 0], [1, 0]])


def test_a_column_of_texts_is_of_classes_and_a_missing_image_is_named_but_not_told(tmp_path):
    images(tmp_path / "x", [f"{i}.png" for i in range(10)])
    rows = [f"{i}.png,{'benign' if i % 2 else 'malignant'}" for i in range(10)]
    (tmp_path / "x" / "labels.csv").write_text("file,diagnosis\n" + "\n".join(rows) + "\n")
    data = load_dataset(str(tmp_path / "x"))
    assert data.classes == ("benign", "malignant")
    (tmp_path / "x" / "labels.csv").write_text("file,diagnosis\n" + "\n".join([*rows, "MEIER.png,benign"]) + "\n")
    with pytest.raises(UserError, match=r"row 11: .*MEIER\.png") as error:
        load_dataset(str(tmp_path / "x"))
    assert "MEIER" not in error.value.public


def test_two_images_of_one_name_are_not_taken_for_each_other(tmp_path):
    images(tmp_path / "x", ["a/1.png", "b/1.png", "a/2.png"])
    (tmp_path / "x" / "labels.csv").write_text("file,y\n1.png,p\n2.png,q\n")
    with pytest.raises(UserError, match="no unique image"):
        read_label_lists("x", tmp_path / "x", None)
    table = pyarrow.csv.read_csv(tmp_path / "x" / "labels.csv")
    assert table.num_rows == 2
