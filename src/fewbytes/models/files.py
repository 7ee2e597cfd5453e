"""Trained models as safetensors files, and loading them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from fewbytes.base.calls import takes_argument
from fewbytes.base.errors import MethodError, UserError, error_text, one_line
from fewbytes.base.files import check_own, make_folder, replacing
from fewbytes.base.named import only_allowed
from fewbytes.base.state import (
    State,
    all_entries,
    copied,
    frozen_digest,
    frozen_entries,
    load_state,
    mark_trained,
    trained_entries,
)
from fewbytes.base.streams import seeded
from fewbytes.models.adapters import Adapters
from fewbytes.models.build import ModelBuilder
from fewbytes.models.chain import resized_network
from fewbytes.models.ensemble import LogitMean, logit_mean
from fewbytes.models.etf import etf_network
from fewbytes.models.fused import network_of
from fewbytes.models.hugging_face import PREFIX
from fewbytes.models.kgf import Kernels
from fewbytes.models.kgf import network_of as kernels_of
from fewbytes.models.lora import Lora
from fewbytes.models.normalisation import Normalisation
from fewbytes.models.prototypes import prototype_network

PUT_TOGETHER: dict[str, Callable[..., nn.Module]] = {
    "fused": network_of,
    "kgf": kernels_of,
    "ensemble": logit_mean,
    "etf": etf_network,
    "prototypes": prototype_network,
    "resized": resized_network,
}
"""By the kind of a recipe: the function that builds the model from (recipe, state, builder of a client's model)."""


Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class Recipe(TypedDict, total=False):
    """How a model is composed; further keys depend on the kind."""

    kind: Required[str]
    clients: list[Size]


class Values(TypedDict):
    """Shape and type of one tensor of a sample."""

    shape: list[Size]
    dtype: Annotated[str, msgspec.Meta(pattern=r"^(bool|bfloat16|u?int\d+|float\d+)$")]


class Columns(TypedDict, total=False):
    """The meaning of a table's columns."""

    numbers: Required[dict[str, tuple[float, float]]]
    categories: Required[dict[str, list[str]]]
    target: Required[list[str]]
    missing: Required[str]
    missing_marks: list[str]
    dates: list[str]


class About(TypedDict, total=False):
    """The metadata of a model's file, as far as it is used; the bounds protect against untrusted files."""

    model: str
    sample_shape: Annotated[list[Size], msgspec.Meta(min_length=1, max_length=8)]
    classes: Size
    class_names: list[str]
    learns: str
    method: str
    seed: int
    samples: str
    normalise: str
    image_size: Size | None
    lora: Annotated[str, msgspec.Meta(max_length=100)]
    schema: Columns
    tokenizer: str | None
    tokenizer_digest: str
    round: Size
    recipe: Recipe
    tensors: dict[str, Values]


class NeedsModule(UserError):
    """A model's file does not state how to build its module."""


TIMES = 4  # maximum ratio of a model's number of values to its file's
_NO_OWN_MODELS = "its clients keep none of their own, leave out --client"


def save_model(model: nn.Module, path: Path, about: dict[str, Any]) -> None:
    """Write the model's parameters and buffers; `about` may state how to build it: `model`, `sample_shape`, `classes`.

    The `recipe` of a model composed of clients' models is written, too. If the frozen part is stored elsewhere, in
    transformers' folders, only the trained part is written, with a digest of the frozen one.
    """
    make_folder(path.parent, mode=0o700)  # an existing folder keeps its mode: the caller chose it
    recipe = {"recipe": model.recipe} if hasattr(model, "recipe") else {}
    elsewhere = str(about.get("model", "")).startswith(PREFIX) and frozen_entries(model) and not recipe
    written = trained_entries(model) if elsewhere else all_entries(model)  # frozen parts, too
    frozen = {"frozen": frozen_digest(model)} if elsewhere else {}
    state = {name: copied(value) for name, value in written.items()}
    with replacing(path) as file:
        file.write(save(state, metadata=metadata_of(about | recipe | frozen, state)))


def metadata_of(about: dict[str, Any], state: State) -> dict[str, str]:
    """The metadata of a model's file, by which `read_model` reads it."""
    words = json.dumps(about)
    return {"fewbytes": _digest(words, state) + words}  # one key: order is random


def _digest(about: str, state: State) -> str:
    """64 characters that depend on everything in a model's file: metadata, names, types, shapes and values."""
    hasher = blake3(about.encode())
    for name, value in sorted(state.items()):
        hasher.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def model_of(about: dict[str, Any]) -> Callable[[int], nn.Module]:
    """A builder of the run's models from their metadata; transformers' models get the run's random initialisation."""
    kernels, learns = Kernels(about["kgf"], about["seed"]) if "kgf" in about else None, about.get("learns", "classes")
    shape, how = tuple(about["sample_shape"]), about.get("normalise")
    normalisation = None if how is None else Normalisation.read(how).on(shape[0])
    build = ModelBuilder(about["model"], shape, about["classes"], kernels, normalisation, learns)
    lora = Lora.read(about["lora"]) if "lora" in about else None

    def make(client: int) -> nn.Module:
        with seeded(about.get("seed", 0), "first model", build.architecture(client)):
            model = build(client)
            return model if lora is None else Adapters(lora).added(model, head=learns != "tokens")

    return make


def load_model(
    run: Path | str,
    client: int | None = None,
    build: Callable[..., nn.Module] | None = None,
    round: int | None = None,
) -> nn.Module:
    """Load a model of a run in eval mode: the global one, or a client's own, possibly its member of an ensemble.

    `round`: the round after which it is; None: the best, if the run kept it (`validation`, or `stop_when` with
    patience), else the last. The last, the best, and with `keep_checkpoints` above 2 those of its last rounds are kept.
    `build` builds the module if the run used your own, as in `Task`. No code named in the file is imported, unless the
    call is inside `with only_allowed("package.module"):` (`fewbytes.base.named`). Raises UserError if the run saved no
    such model, the file is damaged, or the module does not fit it.

    >>> import tempfile
    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))], test=(x, y))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fb.run(fb.FedAvg(), task, rounds=1, out=f"{folder}/run")
    ...     model = fb.load_model(f"{folder}/run", build=lambda: torch.nn.Linear(4, 4))
    >>> torch.equal(model(x), result.global_model(x))
    True
    """
    return read_model(run, client, build, round)[0]


def read_model(
    run: Path | str,
    client: int | None = None,
    build: Callable[..., nn.Module] | None = None,
    round: int | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """As `load_model`, together with the file's metadata; `run` may be a model's file."""
    if os.path.lexists(Path(run) / "config.toml"):  # other folders are refused below
        check_own(Path(run))
    path = _place(Path(run), client, round)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        digest, brace, rest = metadata.get("fewbytes", "{}").partition("{")  # files of older versions have no digest
        words = brace + rest
        about = json.loads(words)
        msgspec.convert(about, About)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"the model {path} cannot be read: {one_line(error)}") from None
    if metadata.keys() - {"fewbytes"} or (digest and digest != _digest(words, state)):
        raise UserError(f"the model {path} is damaged: restore it from a copy, or repeat the run")
    if build is None and "model" not in about:
        raise NeedsModule(f"{path} needs a module of your own: in Python, pass build=, the function that builds it")
    if client is not None and path.stem != f"client-{client}":
        recipe = about.get("recipe", {})
        members = recipe["clients"] if recipe.get("kind") == "ensemble" else []
        if client not in members:
            hint = f"its members are of clients {', '.join(map(str, members))}" if members else _NO_OWN_MODELS
            raise UserError(f"{run} has no model client-{client}.safetensors; it has {path.name}: {hint}")
    try:
        with only_allowed():
            maker: Callable[..., nn.Module] = build or model_of(about)
            make: Callable[[int], nn.Module] = maker if takes_argument(maker) else lambda _: maker()
            if "recipe" in about:
                model = PUT_TOGETHER[about["recipe"]["kind"]](about["recipe"], state, make)
            else:
                if build is None and "frozen" not in about:
                    _check_size(make, state)
                model = make(0 if client is None else client)
                load_state(model, state)
        mark_trained(model)
        if "frozen" in about and about["frozen"] != frozen_digest(model):
            raise MethodError(f"the frozen part of {about['model']} differs from the one used in training")
        lacking = (trained_entries(model) if "frozen" in about else all_entries(model)).keys() - state.keys()
        if lacking:
            raise MethodError(f"it lacks {', '.join(sorted(lacking)[:3])}")
    except MethodError as error:
        raise UserError(f"{path} does not fit the module: {error}") from None
    except UserError:
        raise
    except Exception as error:  # the metadata may be anything, and ask for any amount of memory
        if build is not None and not isinstance(error, (KeyError, IndexError, TypeError, AttributeError)):
            raise  # the caller's own code failed
        raise UserError(f"the model {path} cannot be built: {error_text(error)}") from None
    if isinstance(model, LogitMean) and client is not None:
        member = model.members[about["recipe"]["clients"].index(client)]
        return member.eval(), {key: value for key, value in about.items() if key != "recipe"}
    return model.eval(), about


def _check_size(make: Callable[[int], nn.Module], state: State) -> None:
    """Raises MethodError for a model with far more values than its file, before its memory is allocated."""
    try:
        with torch.device("meta"):
            values = sum(value.numel() for value in all_entries(make(0)).values())
    except Exception:  # models that need memory to be built, such as those with random kernels
        return
    stored = sum(value.numel() for value in state.values())
    if values > TIMES * stored:
        raise MethodError(f"its model has {values:,} values, and the file {stored:,}")


def _place(run: Path, client: int | None, t: int | None) -> Path:
    """The file of a run's global model or a client's own, after round t or the best or last; the global one's if the
    run has no other model. A model's file is itself.

    Raises UserError if there is no such model.
    """
    if run.is_file() and client is None:
        return run
    folder, best, last = run / "models", *_rounds(run)
    path = folder / ("global.safetensors" if client is None else f"client-{client}.safetensors")
    names = {_number(each): each.stem for each in folder.glob("round-*")} | ({} if best is None else {best: "best"})
    wanted = best if t is None else t
    if wanted in names and not (wanted == last and path.exists()):
        name = names[wanted]
        one = folder / f"{name}.safetensors" if client is None else folder / name / path.name
        if one.exists():
            return one
        if client is not None and (folder / f"{name}.safetensors").exists() and not (folder / name).exists():
            return folder / f"{name}.safetensors"
    elif t is not None and t != last:
        there = ", ".join(str(each) for each in sorted({*names, *([] if last is None else [last])}))
        raise UserError(
            f"{run} keeps no model of round {t}; it has those of rounds {there or 'none'} (keep_checkpoints sets how "
            "many recent rounds are kept)"
        )
    if path.exists():
        return path
    if not run.is_dir():
        raise UserError(f"there is no run folder {run}")
    if not (run / "config.toml").is_file():
        runs = sorted(run.glob("*/config.toml"))
        within = f"; it holds runs: name one of them, such as {runs[-1].parent}" if runs else ""
        raise UserError(f"{run} is not a run folder: it has no config.toml{within}")
    have = sorted(p.name for p in path.parent.glob("*.safetensors") if p.stem not in names.values())
    if not have:
        raise UserError(f"{run} has no model {path.name}: the run has not ended, or did not save models")
    if client is not None and have == ["global.safetensors"]:
        return path.with_name(have[0])
    listed = ", ".join(have[:3]) + (", …" if len(have) > 3 else "")
    own = [name.removeprefix("client-").removesuffix(".safetensors") for name in have if name.startswith("client-")]
    hint = f": name a client, such as --client {own[0]}" if client is None and own else ""
    raise UserError(f"{run} has no model {path.name}; it has {listed}{hint}")


def _number(path: Path) -> int:
    """The round of a file of models, 0 for another file."""
    found = re.fullmatch(r"round-([0-9]{1,9})", path.stem)
    return int(found[1]) if found else 0


def _rounds(run: Path) -> tuple[int | None, int | None]:
    """A run's best round, if its model is kept, and its last, by its result.json; None if unknown."""
    if not (run / "config.toml").is_file():
        return None, None
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        result = json.loads((run / "result.json").read_text())
        best, last = result.get("best_model", {}).get("round"), result.get("rounds")
        return best if isinstance(best, int) else None, last if isinstance(last, int) else None
    return None, None
