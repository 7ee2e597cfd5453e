"""Initial weights from a file instead of random ones."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.named import places
from fewbytes.base.state import State, copied, load_state
from fewbytes.base.unfolded import check_unfolded
from fewbytes.models.features import PooledFeatures
from fewbytes.models.protocol import Weights

LISTED = 3  # maximum number of names in a message


@dataclass(frozen=True)
class Pretrained:
    """The entries of a weights file. `digest` is equal for equal entries, in any file format."""

    name: str
    entries: State = field(repr=False)
    digest: str

    def into(self, model: nn.Module) -> None:
        """Copy the fitting entries into the model."""
        load_state(model, self.fitting(model))

    def fitting(self, model: nn.Module) -> State:
        """The entries that the model has with the same shape, by the model's names.

        A model with pooled features (`PooledFeatures`) also accepts the entries of its inner model.
        """
        own = model.state_dict()
        pooled = isinstance(model, PooledFeatures) and not any(name.startswith("body.") for name in self.entries)
        named = {f"body.{name}" if pooled else name: value for name, value in self.entries.items()}
        return {name: value for name, value in named.items() if name in own and own[name].shape == value.shape}

    def left(self, model: nn.Module) -> Iterator[str]:
        """A message that names the model's entries missing in the file, if there are any."""
        taken = self.fitting(model)
        drawn = [name for name in model.state_dict() if name not in taken]
        if drawn:
            yield (
                f"weights {self.name}: a {type(model).__name__} takes {len(taken)} of the {len(self.entries)} entries; "
                f"none fits {_listed(drawn)}, so these start at random"
            )


def read_pretrained(name: str) -> Pretrained:
    """Read the weights in a safetensors file or a torch file with a state dict, possibly under `state_dict` or `model`:
    a path, or a name under the folder FEWBYTES_DATA. No code in it is run. Raises UserError."""
    path = next((place for place in reversed(places(name)) if place.is_file()), None)
    if path is None:
        raise UserError(f"there is no weights file {name}, here or under FEWBYTES_DATA")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            _check_archive(path)
            found = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"the weights {path} cannot be read: {error.strerror}") from None
    except SafetensorError as error:
        raise UserError(f"the weights {path} are not a safetensors file: {error}") from None
    except Exception as error:  # untrusted bytes: torch's reader fails in many ways
        raise UserError(
            f"the weights {path} are neither a .safetensors file nor a state dict that torch reads with "
            f"weights_only=True ({type(error).__name__})"
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    tensors = _tensors(found) if isinstance(found, Mapping) else {}
    check_unfolded(path, sum(value.nbytes for value in tensors.values()))  # a stride of 0 can expand enormously
    entries = {name: copied(value) for name, value in tensors.items()}
    if not entries:
        raise UserError(f"the weights {path} hold no tensors by name: provide a model's state dict")
    return Pretrained(name, entries, blake3(save(dict(sorted(entries.items())))).hexdigest()[:32])


def check_fits(pretrained: Weights, models: Sequence[nn.Module]) -> None:
    """Raises UserError if no entry of the weights fits any of the models."""
    if not any(pretrained.fitting(model) for model in models):
        raise UserError(
            f"no entry of the weights {pretrained.name} fits the model: they have {_listed(list(pretrained.entries))}, "
            f"a {type(models[0]).__name__} has {_listed(list(models[0].state_dict()))}"
        )


def _tensors(found: Mapping[Any, Any]) -> State:
    values = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    return {name: value for name, value in values.items() if value.layout == torch.strided}


def _check_archive(path: Path) -> None:
    """Raises UserError for a torch zip file that expands too much; torch reads compressed ones, too."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_unfolded(path, sum(member.file_size for member in archive.infolist()))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(names[:LISTED])}{more}"
