"""Trained models as files that run without this package: ONNX, PyTorch's exported programs, safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.state import copied
from fewbytes.models.files import read_model
from fewbytes.models.kgf import with_plain_kernels
from fewbytes.models.normalise import Normalisation

Format = Literal["onnx", "torch", "safetensors"]
FILES: dict[Format, str] = {"onnx": "model.onnx", "torch": "model.pt2", "safetensors": "model.safetensors"}
"""What each format's file is called. A .pt2 is what PyTorch has in place of TorchScript, which it gives up; as it is
written here there is no pickle in it."""
ONE_FILE = 2_000_000_000  # bytes of a model that one ONNX file holds


class _Outputs(nn.Module):
    """The model as it is exported: samples to a tensor, whatever else it gives and whatever hooks it has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to outputs (n, …)."""
        outputs = self.model(x)
        made: Tensor = getattr(outputs, "logits", outputs)
        return made


def export_model(
    run: Path | str,
    client: int | None = None,
    formats: Sequence[Format] = tuple(FILES),
    out: Path | str | None = None,
    build: Callable[..., nn.Module] | None = None,
) -> list[Path]:
    """Write the global model of a finished run, or a client's own, into the folder `out`; returns the files' paths.

    By default the folder is RUN/export, or RUN/export/client-I. Beside the model in each of the `formats` stand
    model.json, which says what it takes and gives, and README.md, how to run it; another export's files there are
    replaced. `build`: as for `load_model`. Raises UserError if there is no such model, or it cannot be exported.
    """
    run = Path(run)
    model, about = read_model(run, client, build)
    if about.get("learns") == "boxes":
        raise UserError(f"{run} trained a detector, which is not exported: load it with fewbytes.load_model")
    if "sample_shape" not in about:
        raise UserError(f"{run} does not say what samples its models take: the server had none, or fewbytes was older")
    if "onnx" in formats:
        _check_onnx()
    model = _Outputs(with_plain_kernels(model)).eval()
    folder = Path(out) if out is not None else run / "export" / ("" if client is None else f"client-{client}")
    said = _described(run, client, about, formats)
    folder.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        _write_model(model, _samples(about), formats, written)
        (written / "model.json").write_text(json.dumps(said, indent=2) + "\n")
        (written / "README.md").write_text(_readme(said))
        names = sorted(path.name for path in written.iterdir())
        for name in names:
            os.replace(written / name, folder / name)
        for stale in {*FILES.values(), "model.onnx.data"} - set(names):
            (folder / stale).unlink(missing_ok=True)
    finally:
        shutil.rmtree(written, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # if there is nothing in it
    return [folder / name for name in names]


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError(
            "ONNX needs packages that are not installed: pip install 'fewbytes[onnx]'; --torch and --safetensors do not"
        ) from None


def _samples(about: dict[str, Any]) -> Tensor:
    """Two samples of zeros as the model takes them: what one sample gives could hold for one alone."""
    whole = about.get("samples") == "int64"
    return torch.zeros(2, *about["sample_shape"], dtype=torch.int64 if whole else torch.float32)


def _write_model(model: nn.Module, x: Tensor, formats: Sequence[Format], folder: Path) -> None:
    """The model in each format; x: samples (2, …)."""
    if "safetensors" in formats:
        state = {name.removeprefix("model."): copied(value) for name, value in model.state_dict().items()}
        (folder / FILES["safetensors"]).write_bytes(save(state))
    if not {"torch", "onnx"} & set(formats):
        return
    if not torch.cuda.is_available():
        # Autograd starts threads for the devices it knows when it is first used, and processes with them cannot be
        # forked for a later run. Exporting makes a device known that is none: so it is used before.
        torch.zeros((), requires_grad=True).backward()
    step = "PyTorch"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what will be different in later versions of torch
            program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
            program.example_inputs = None  # would be pickled
            if "torch" in formats:
                torch.export.save(program, folder / FILES["torch"])
            if "onnx" in formats:
                step = "ONNX"
                made = torch.onnx.export(
                    program, input_names=["x"], output_names=["outputs"], dynamo=True, verbose=False
                )
                size = sum(value.nbytes for value in model.state_dict().values())
                made.save(folder / FILES["onnx"], external_data=size > ONE_FILE)  # type: ignore[union-attr]
    except OSError:
        raise
    except Exception as error:  # users' own models may do what cannot be exported
        others = "--safetensors writes its weights" if step == "PyTorch" else "leave it out, by --torch --safetensors"
        why = one_line(error.__cause__ if isinstance(error.__cause__, Exception) else error, 200)
        raise UserError(f"the model has something that cannot be exported for {step} ({why}): {others}") from None


def _described(run: Path, client: int | None, about: dict[str, Any], formats: Sequence[Format]) -> dict[str, Any]:
    """What model.json says."""
    shape, stored = about["sample_shape"], about.get("samples", "float32")
    how = None if "normalise" not in about else Normalisation.read(about["normalise"], shape[0])
    result = run / "result.json"
    found = json.loads(result.read_text()) if result.is_file() else {}  # a node of a deployment has none
    return {
        "model": "global" if client is None else f"client {client}",
        "method": about.get("method") or found.get("method"),
        "architecture": about.get("model"),
        "learns": about.get("learns", "classes"),
        "classes": about.get("class_names", []),
        "input": {
            "shape": ["n", *shape],
            "dtype": "int64" if stored == "int64" else "float32",
            "pixels_divided_by": 255 if stored == "uint8" else None,
            "image_size": about.get("image_size"),
        },
        "normalise": None if how is None else {"mean": how.mean, "std": how.std, "inside": "model.onnx and model.pt2"},
        "scores": _scores(found),
        "files": [FILES[each] for each in FILES if each in formats],
        "torch": torch.__version__.partition("+")[0],
    }


def _scores(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By metric and kind, the last values of a run that result.json tells of."""
    score = found.get("score", {})
    kinds = {score.get("metric"): score.get("all", {}), **found.get("further", {})}
    return {metric: {kind: value["final"] for kind, value in each.items()} for metric, each in kinds.items() if each}


def _readme(said: dict[str, Any]) -> str:
    """How to run what was exported, for people."""
    taken, shape = said["input"], said["input"]["shape"]
    parts = [f"# {said['model']} model of {said['method']}".replace("None", "a run")]
    words = f"It takes samples x, {taken['dtype']} ({', '.join(map(str, shape))})"
    if taken["pixels_divided_by"]:
        words += f", images with values 0 to 1: {'RGB' if shape[1] == 3 else 'grey'} pixels divided by 255"
        if taken["image_size"]:
            words += f", the shorter side scaled to {taken['image_size']} pixels and the middle of the longer one taken"
    given = {
        "classes": "logits, one for each of `classes` in model.json",
        "labels": "logits, one for each of the labels, `classes` in model.json: the sigmoid is a probability",
        "masks": "logits (n, classes, height, width)",
        "tokens": "logits (n, length, tokens)",
    }.get(said["learns"], "its outputs")
    parts.append(f"{words}. It gives {given}.")
    if said["normalise"]:
        parts.append("It normalises x itself: give x as it is.")
    if "model.pt2" in said["files"]:
        lines = _snippet(said, "torch", 'torch.export.load("model.pt2").module()', "model(torch.from_numpy(x))")
        parts.append(f"With PyTorch {said['torch']} or newer:\n\n{lines}")
    if "model.onnx" in said["files"]:
        ran = 'model.run(None, {"x": x})[0]'
        lines = _snippet(said, "onnxruntime", 'onnxruntime.InferenceSession("model.onnx")', ran)
        parts.append(f"With onnxruntime:\n\n{lines}")
    if "model.safetensors" in said["files"]:
        of = f" ({said['architecture']})" if said["architecture"] else ""
        parts.append(
            f"model.safetensors holds the weights by name, for a module of your own{of}:\n\n"
            '```python\nmodule.load_state_dict(safetensors.torch.load_file("model.safetensors"))\n```'
        )
        if said["normalise"]:
            parts.append("That module gets (x - mean) / std, for every channel, of `normalise` in model.json.")
    return "\n\n".join(parts) + "\n"


def _snippet(said: dict[str, Any], library: str, load: str, ran: str) -> str:
    """Five lines of Python that run the model on an image, or four on samples of zeros."""
    _, *shape = said["input"]["shape"]
    labelled = said["learns"] == "classes" and said["classes"]
    imports = ["json"] if labelled else []
    if said["input"]["pixels_divided_by"]:
        grey = shape[0] == 1
        size, mode = (shape[2], shape[1]), "L" if grey else "RGB"
        axes = "[None, None]" if grey else ".transpose(2, 0, 1)[None]"
        x = [
            f'image = PIL.ImageOps.fit(PIL.Image.open("image.png").convert("{mode}"), {size}, '
            "PIL.Image.Resampling.BILINEAR)",
            f'x = numpy.array(image, "float32"){axes} / 255',
        ]
        imports += ["numpy", library, "PIL.Image", "PIL.ImageOps"]
    else:
        x = [f'x = numpy.zeros({(1, *shape)}, "{said["input"]["dtype"]}")  # in place of samples of yours']
        imports += ["numpy", library]
    shown = f'json.load(open("model.json"))["classes"][int({ran}[0].argmax())]' if labelled else ran
    lines = [f"import {', '.join(imports)}", f"model = {load}", *x, f"print({shown})"]
    return "\n".join(["```python", *lines, "```"])
