"""Trained models as safetensors files, and back by one call."""

from __future__ import annotations

import json
from collections.abc import Callable
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
"""By the kind of a recipe: what makes the model of (recipe, state, maker of a client's model)."""


Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class Recipe(TypedDict, total=False):
    """How a model is put together; what else stands there is for its kind."""

    kind: Required[str]
    clients: list[Size]


class Values(TypedDict):
    """One tensor of samples of several."""

    shape: list[Size]
    dtype: Annotated[str, msgspec.Meta(pattern=r"^(bool|bfloat16|u?int\d+|float\d+)$")]


class Columns(TypedDict, total=False):
    """What a table's columns mean."""

    numbers: Required[dict[str, tuple[float, float]]]
    categories: Required[dict[str, list[str]]]
    target: Required[list[str]]
    missing: Required[str]
    missing_marks: list[str]
    dates: list[str]


class About(TypedDict, total=False):
    """What a model's file says, where it is used; its bounds are for files of strangers."""

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
    recipe: Recipe
    tensors: dict[str, Values]


TIMES = 4  # the values of a file that its model may have
_NO_OWN_MODELS = "its clients keep none of their own, leave out --client"


def save_model(model: nn.Module, path: Path, about: dict[str, Any]) -> None:
    """Write the model's parameters and buffers; `about` may say how to build it: `model`, `sample_shape`, `classes`.

    A model put together from clients' models says how in its `recipe`, which is written too. Of a model whose frozen
    part lies elsewhere, in transformers' folders, only what is trained is written, and a digest of that part.
    """
    make_folder(path.parent, mode=0o700)  # whose it is where it is there already, whoever names it knows
    recipe = {"recipe": model.recipe} if hasattr(model, "recipe") else {}
    elsewhere = str(about.get("model", "")).startswith(PREFIX) and frozen_entries(model) and not recipe
    written = trained_entries(model) if elsewhere else all_entries(model)  # frozen parts, too
    frozen = {"frozen": frozen_digest(model)} if elsewhere else {}
    state = {name: copied(value) for name, value in written.items()}
    words = json.dumps(about | recipe | frozen)
    with replacing(path) as file:
        file.write(save(state, metadata={"fewbytes": _digest(words, state) + words}))  # of several the order is drawn


def _digest(about: str, state: State) -> str:
    """64 characters that differ where anything in a model's file does: what it says, a name, type, shape or value."""
    hasher = blake3(about.encode())
    for name, value in sorted(state.items()):
        hasher.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def model_of(about: dict[str, Any]) -> Callable[[int], nn.Module]:
    """What makes the models of a run that says this about itself, those of transformers with what was drawn in it."""
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


def load_model(run: Path | str, client: int | None = None, build: Callable[..., nn.Module] | None = None) -> nn.Module:
    """A model a run saved: the global one, or a client's own, which may be its member of an ensemble; in eval mode.

    `build` makes the module for runs on your own one, as for `Task`; no code that the file names is imported, unless
    `with only_allowed("package.module"):` (`fewbytes.base.named`) is around the call. Raises UserError if the run saved
    no such model, the file is damaged, or the module does not fit it.

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
    return read_model(run, client, build)[0]


def read_model(
    run: Path | str, client: int | None = None, build: Callable[..., nn.Module] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """As `load_model`, with what the file says about the model."""
    path = _place(Path(run), client)
    check_own(Path(run))
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
        raise UserError(f"the model {path} is damaged: it is not what was written; take a copy of it, or run anew")
    if build is None and "model" not in about:
        raise UserError(f"{path} is of a module of your own: in Python, pass build=, the function that makes it")
    if client is not None and path.stem == "global":
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
            raise MethodError(f"what is not trained of {about['model']} differs from what it was trained with")
        lacking = (trained_entries(model) if "frozen" in about else all_entries(model)).keys() - state.keys()
        if lacking:
            raise MethodError(f"it lacks {', '.join(sorted(lacking)[:3])}")
    except MethodError as error:
        raise UserError(f"{path} does not fit the module: {error}") from None
    except UserError:
        raise
    except Exception as error:  # what the file says of the model may be anything, and ask for any memory
        if build is not None and not isinstance(error, (KeyError, IndexError, TypeError, AttributeError)):
            raise  # of one's own code
        raise UserError(f"the model {path} cannot be put together: {error_text(error)}") from None
    if isinstance(model, LogitMean) and client is not None:
        member = model.members[about["recipe"]["clients"].index(client)]
        return member.eval(), {key: value for key, value in about.items() if key != "recipe"}
    return model.eval(), about


def _check_size(make: Callable[[int], nn.Module], state: State) -> None:
    """Raises MethodError for a model of far more values than the file has, before any memory is taken for them."""
    try:
        with torch.device("meta"):
            values = sum(value.numel() for value in all_entries(make(0)).values())
    except Exception:  # what cannot be made without memory, such as kernels that are drawn
        return
    stored = sum(value.numel() for value in state.values())
    if values > TIMES * stored:
        raise MethodError(f"its model has {values:,} values, and the file {stored:,}")


def _place(run: Path, client: int | None) -> Path:
    """Where a run keeps its global model, or a client's own: the global one's place, if there is no other model.

    Raises UserError if it has no such model.
    """
    path = run / "models" / ("global.safetensors" if client is None else f"client-{client}.safetensors")
    if path.exists():
        return path
    if not run.is_dir():
        raise UserError(f"there is no run folder {run}")
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.toml")
    have = sorted(p.name for p in path.parent.glob("*.safetensors"))
    if not have:
        raise UserError(f"{run} has no model {path.name}; it has none: it has not ended, or was not to save models")
    if client is not None and have == ["global.safetensors"]:
        return path.with_name(have[0])
    listed = ", ".join(have[:3]) + (", …" if len(have) > 3 else "")
    own = [name.removeprefix("client-").removesuffix(".safetensors") for name in have if name.startswith("client-")]
    hint = f": name a client, such as --client {own[0]}" if client is None and own else ""
    raise UserError(f"{run} has no model {path.name}; it has {listed}{hint}")
