"""Trained models as files that run without this package: ONNX, PyTorch's exported programs, safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.language import padding_token, read_tokenizer, tokenizer_digest
from fewbytes.base.named import only_allowed
from fewbytes.base.state import all_entries, copied
from fewbytes.models.export_readme import readme
from fewbytes.models.files import metadata_of, read_model
from fewbytes.models.hugging_face import PREFIX
from fewbytes.models.kgf import with_plain_kernels
from fewbytes.models.lora_xs import with_plain_adapters
from fewbytes.models.normalisation import Normalisation

Format = Literal["onnx", "torch", "safetensors"]
FILES: dict[Format, str] = {"onnx": "model.onnx", "torch": "model.pt2", "safetensors": "model.safetensors"}
"""The file name of each format. A .pt2 file, PyTorch's successor to TorchScript, contains no pickle as written here."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")  # the files of a tokenizer
ONE_FILE = 2_000_000_000  # maximum bytes of a model in one ONNX file


class _Outputs(nn.Module):
    """The exported model: samples to one tensor, whatever else the model returns and whatever hooks it has."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """`names`: the argument names of a sample's tensors, if it has several."""
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *x: Tensor) -> Tensor:
        """Samples, of one tensor (n, …) or of several, to outputs (n, …)."""
        outputs = self.model(**dict(zip(self.names, x, strict=True))) if self.names else self.model(*x)
        logits: Tensor = getattr(outputs, "logits", outputs)
        return logits


def export_model(
    run: Path | str,
    client: int | None = None,
    formats: Sequence[Format] = tuple(FILES),
    out: Path | str | None = None,
    build: Callable[..., nn.Module] | None = None,
    round: int | None = None,
) -> list[Path]:
    """Write the global model of a finished run, or one client's, into the folder `out`; returns the files' paths.

    `round`: see `load_model`; by default the best round, if the run kept it, else the last.

    The default folder is RUN/export, or RUN/export/client-I. It gets the model in each of the `formats`, model.json
    with the model's inputs and outputs (for tables also the columns' meaning), README.md with instructions, and the
    tokenizer for texts. Files of earlier exports are replaced. `build`: see `load_model`. Raises UserError if there is
    no such model, or it cannot be exported.

    >>> import tempfile
    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))], test=(x, y))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fb.run(fb.FedAvg(), task, rounds=1, out=f"{folder}/run")
    ...     files = fb.export_model(f"{folder}/run", formats=["safetensors"], build=lambda: torch.nn.Linear(4, 4))
    >>> [file.name for file in files]
    ['README.md', 'model.json', 'model.safetensors']
    """
    run = Path(run)
    model, about = read_model(run, client, build, round)
    if about.get("learns") == "boxes":
        raise UserError(f"{run} trained a detector, which cannot be exported: load it with fewbytes.load_model")
    if "sample_shape" not in about:
        raise UserError(
            f"{run} does not record the shape of its models' samples, as the server had none or fewbytes was older: "
            "load the model with fewbytes.load_model"
        )
    if "onnx" in formats:
        _check_onnx()
    tokenizer = _tokenizer(run, about)
    own = all_entries(model).keys()
    model = _Outputs(with_plain_adapters(with_plain_kernels(model)), about.get("tensors", ())).eval()
    folder = Path(out) if out is not None else run / "export" / ("" if client is None else f"client-{client}")
    description = _described(run, client, about, formats)
    folder.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        if tokenizer is not None:
            tokenizer.save_pretrained(written, save_jinja_files=False)
            beside = sorted(path.name for path in written.iterdir())
            description["text"] = _text(tokenizer, beside, about["sample_shape"][0], about["learns"])
        _write_model(model, _samples(about), formats, written)
        if "safetensors" in formats:
            _write_weights(model, about, own, written / FILES["safetensors"])
        (written / "model.json").write_text(json.dumps(description, indent=2) + "\n")
        (written / "README.md").write_text(readme(description), "utf-8")
        names = sorted(path.name for path in written.iterdir())
        for name in names:
            os.replace(written / name, folder / name)
        for stale in {*FILES.values(), "model.onnx.data", *TOKENIZER} - set(names):
            (folder / stale).unlink(missing_ok=True)
    finally:
        shutil.rmtree(written, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # if it is empty
    return [folder / name for name in names]


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError(
            "ONNX needs packages that are not installed: pip install 'fewbytes[onnx]'; torch and safetensors do not"
        ) from None


def _tokenizer(run: Path, about: dict[str, Any]) -> Any:
    """The tokenizer of the run's texts, None if there were none. Raises UserError if it is missing or differs."""
    if "tokenizer_digest" not in about:
        return None
    place = about.get("tokenizer") or about["model"].removeprefix(PREFIX)
    with only_allowed():  # the place comes from the model's file
        tokenizer = read_tokenizer(place)
    if tokenizer_digest(tokenizer) != about["tokenizer_digest"]:
        raise UserError(f"the tokenizer {place} is not the one {run} was trained with: put the original there")
    return tokenizer


def _samples(about: dict[str, Any]) -> dict[str, Tensor]:
    """Two samples of zeros by tensor name: a batch of one would be exported with a fixed batch size."""
    tensors = about.get("tensors") or {"x": {"shape": about["sample_shape"], "dtype": _dtype(about.get("samples"))}}
    return {name: torch.zeros(2, *of["shape"], dtype=getattr(torch, of["dtype"])) for name, of in tensors.items()}


def _write_weights(model: nn.Module, about: dict[str, Any], own: Collection[str], path: Path) -> None:
    """Write the weights; with the metadata by which `read_model` reads them, if they are the run's `own` entries."""
    state = {name.removeprefix("model."): copied(value) for name, value in model.state_dict().items()}
    path.write_bytes(save(state, metadata=metadata_of(about, state) if state.keys() == set(own) else None))


def _write_model(model: nn.Module, x: dict[str, Tensor], formats: Sequence[Format], folder: Path) -> None:
    """Write the model as programs; x: the tensors of samples (2, …)."""
    if not {"torch", "onnx"} & set(formats):
        return
    if not torch.cuda.is_available():
        # On first use Autograd starts a thread for each known device, and a process with threads cannot be forked for
        # a later run. Exporting registers a fake device, so Autograd is used once before.
        torch.zeros((), requires_grad=True).backward()
    step = "PyTorch"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about changes in later versions of torch
            sizes = tuple({0: torch.export.Dim("n")} for _ in x)
            program = torch.export.export(model, tuple(x.values()), dynamic_shapes=(sizes,))
            program.example_inputs = None  # would be pickled
            if "torch" in formats:
                torch.export.save(program, folder / FILES["torch"])
            if "onnx" in formats:
                step = "ONNX"
                exported = torch.onnx.export(
                    program, input_names=list(x), output_names=["outputs"], dynamo=True, verbose=False
                )
                size = sum(value.nbytes for value in model.state_dict().values())
                exported.save(folder / FILES["onnx"], external_data=size > ONE_FILE)  # type: ignore[union-attr]
    except OSError:
        raise
    except Exception as error:  # users' own models may do what cannot be exported
        others = "safetensors has its weights" if step == "PyTorch" else "use torch and safetensors instead"
        why = one_line(error.__cause__ if isinstance(error.__cause__, Exception) else error, 200)
        raise UserError(f"the model cannot be exported for {step} ({why}): {others}") from None


def _described(run: Path, client: int | None, about: dict[str, Any], formats: Sequence[Format]) -> dict[str, Any]:
    """The contents of model.json, except for texts."""
    shape, stored = about["sample_shape"], about.get("samples", "float32")
    tensors = {name: _tensor(of["shape"], of["dtype"]) for name, of in about.get("tensors", {}).items()}
    how = None if "normalise" not in about else Normalisation.read(about["normalise"]).on(shape[0])
    result, found, scores = run / "result.json", {}, {}
    if result.is_file():  # a deployment's node has none
        try:
            found = json.loads(result.read_text())
            scores = _scores(found, run, about.get("round"))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            raise UserError(f"{result} is damaged: it is not what a run writes") from None
    return {
        "model": "global" if client is None else f"client {client}",
        "round": about.get("round") or found.get("rounds"),
        "method": about.get("method") or found.get("method"),
        "architecture": about.get("model"),
        "learns": about.get("learns", "classes"),
        "classes": about.get("class_names", []),
        "input": {
            **_tensor(shape, _dtype(stored)),
            "tensors": tensors or None,
            "pixels_divided_by": 255 if stored == "uint8" and len(shape) > 1 else None,
            "image_size": about.get("image_size"),
        },
        "normalise": None if how is None else {"mean": how.mean, "std": how.std, "inside": "model.onnx and model.pt2"},
        "table": _table(about["schema"]) if "schema" in about else None,
        "text": None,
        "scores": scores,
        "files": [FILES[each] for each in FILES if each in formats],
        "torch": torch.__version__.partition("+")[0],
    }


def _tensor(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    return {"shape": ["n", *shape], "dtype": dtype}


def _dtype(stored: str | None) -> str:
    """The type of a model's input for samples stored with this type."""
    return "int64" if stored == "int64" else "float32"


def _table(schema: dict[str, Any]) -> dict[str, Any]:
    """The meaning of a table's columns, in the order of a sample's features."""

    def scaled(name: str) -> dict[str, Any]:
        mean, std = schema["numbers"][name]
        unit = {"unit": "days since 1970-01-01"} if name in schema.get("dates", ()) else {}
        return {"name": name, "mean": mean, "std": std, **unit}

    target, filled = schema["target"], schema["missing"] == "mean"
    numbers = [scaled(name) for name in schema["numbers"] if name not in target]
    categories = [{"name": name, "categories": known} for name, known in schema["categories"].items()]
    return {
        "columns": numbers + categories,
        "target": [scaled(name) if name in schema["numbers"] else {"name": name} for name in target],
        "missing": {
            "rule": schema["missing"],
            "becomes": "0, the column's mean, or zeros, no category" if filled else "refused",
            "written": sorted({"", *schema.get("missing_marks", ())}),  # as in the table's file
        },
        "unknown_category": "zeros, no category" if schema.get("unknown") == "none" else "refused",
    }


def _text(tokenizer: Any, files: list[str], length: int, learns: str) -> dict[str, Any]:
    """How texts become samples of `length` tokens, with the tokenizer in these files."""
    whole = learns == "classes"
    return {
        "tokenizer": files,
        "length": length,
        "special_tokens": whole,
        "longer": "cut off" if whole else "the last tokens",
        "padding": {"token": padding_token(tokenizer), "side": "right", "attention_mask": 0 if whole else None},
    }


def _scores(found: dict[str, Any], run: Path, t: int | None) -> dict[str, dict[str, float]]:
    """The scores of round t of rounds.jsonl by metric and kind; None: the last ones, of result.json."""
    if t is not None:
        rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        return next((row["scores"] for row in reversed(rows) if row["round"] == t and row["phase"] == "round"), {})
    score = found.get("score", {})
    kinds = {score.get("metric"): score.get("all", {}), **found.get("further", {})}
    return {metric: {kind: value["final"] for kind, value in each.items()} for metric, each in kinds.items() if each}
