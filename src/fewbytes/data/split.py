"""A client's data: labelled samples as views into shared arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fewbytes.base.errors import UserError, named
from fewbytes.base.streams import untouched
from fewbytes.data.named import NamedTensors, one_tensor

Transform = Callable[[Tensor, Tensor], Tensor]
"""(x, labels (n,)) to x, changed at random: float32 of the same shape, drawn from torch's global CPU generator."""


Kind = Literal["classes", "labels", "numbers", "masks", "tokens", "boxes", "own"]
"""The kind of targets. classes: labels, one of several. labels: any of several, float32 (n, labels). numbers: float32
(n,) or (n, how many). masks: a class for every pixel, (n, height, width). tokens: each token's successor, int64
(n, length). boxes: objects in images, float32 (n, most, 5): class, centre x, centre y, width and height in pixels of
the stored image, padded with rows of zeros. own: targets of your own loss."""


IGNORED_PIXEL, IGNORED_TOKEN = 255, -100
"""Targets to ignore: of pixels, and of tokens."""


@dataclass(frozen=True)
class Targets:
    """Targets other than one of several classes: `values` (n, …), see `Kind`.

    `truth`: the boxes for scoring detections, in COCO's format, in pixels of the original images, with row numbers as
    image ids and class numbers as category ids.
    """

    kind: Kind
    values: Tensor
    truth: dict[str, Any] | None = None


class Items:
    """The samples of a torch map-style data set, read item by item each time they are used.

    So its transforms run each time, and only samples in use are in memory. Worker processes are forked: as with torch's
    DataLoader, the data set must open its files when it reads. `targets`: all items' targets, for which each item is
    read once. Raises UserError unless items are (x, target), with x a tensor or array of one shape, and target an
    integer label, a number, or a tensor or array of one shape; and for a data set that holds an open file.
    """

    def __init__(self, data: TorchDataset[Any]) -> None:
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise UserError(f"cannot use {type(data).__name__} as data; give a pair (x, y) or a map-style data set")
        if not len(data):
            raise UserError(f"{type(data).__name__} is empty")
        if open_files := [name for name, value in getattr(data, "__dict__", {}).items() if hasattr(value, "fileno")]:
            raise UserError(
                f"{type(data).__name__} holds an open file ({open_files[0]}), which processes that read at once would "
                "share: open it in __getitem__"
            )
        self._data = data
        with untouched():
            first = self._read(0)[0]
            self.shape, self.dtype = (len(data), *first.shape), first.dtype
            self.targets = torch.stack([self._read(i)[1] for i in range(len(data))])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: NDArray[np.int64]) -> Tensor:
        nothing = torch.zeros((0, *self.shape[1:]), dtype=self.dtype)
        return torch.stack([self._read(int(i))[0] for i in rows]) if len(rows) else nothing

    def _read(self, i: int) -> tuple[Tensor, Tensor]:
        name, item = type(self._data).__name__, self._data[i]
        if not (isinstance(item, (tuple, list)) and len(item) == 2 and _is_target(item[1])):
            raise UserError(f"item {i} of {name} has no integer label and no other target; items must be (x, label)")
        if not isinstance(item[0], (Tensor, np.ndarray)):
            raise UserError(
                f"item {i} of {name} is a {type(item[0]).__name__}; "
                "give tensors or arrays, for example with torchvision's PILToTensor transform"
            )
        x, target = torch.as_tensor(item[0]), torch.as_tensor(item[1])
        if not i:
            self._like = target
        if i and x.shape != self.shape[1:]:
            raise UserError(f"item {i} has shape {tuple(x.shape)}, item 0 {self.shape[1:]}; resize them to one shape")
        if target.shape != self._like.shape:
            like = tuple(self._like.shape)
            raise UserError(f"the target of item {i} has shape {tuple(target.shape)}, that of item 0 {like}")
        return x, target


class Split:
    """Labelled samples: rows of arrays that many splits may share; creating a split copies no sample.

    `x`: tensor or NumPy array (a read-only memory map will do), uint8 images (n, C, H, W) in 0..255, float32 features
    (n, ...), uint8 ones (n, features) or other integers, such as token ids (n, length); several tensors of any types by
    name (`NamedTensors`); or `Items`, read when used. `y`: int64 tensor (n,), class indices. `rows`: int64 (m,), the
    samples of this view in order; None for all. `transform`: applied in training to each batch of these samples, at
    each access; not by `load`. `learnt`: the targets of all rows, if they are not the labels; `y` then only serves to
    split the samples. Raises UserError if `x` and `y` differ in length. For data of other types see `of`.

    >>> import torch
    >>> from fewbytes.data import Split
    >>> split = Split.of((torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])))
    >>> len(split), split.shape, split.learns, split.take([1, 4]).labels
    (6, (3,), 'classes', tensor([1, 1]))
    """

    def __init__(
        self,
        x: Tensor | NDArray[Any] | NamedTensors | Items,
        y: Tensor,
        rows: NDArray[np.int64] | None = None,
        transform: Transform | None = None,
        learnt: Targets | None = None,
    ) -> None:
        if len(x) != len(y) or (learnt is not None and len(learnt.values) != len(x)):
            labels = len(y if learnt is None else learnt.values)
            raise UserError(f"{len(x)} samples but {labels} labels; give one label per sample")
        self.x = x
        self.y = y
        self.rows = rows
        self.transform = transform
        self.learnt = learnt

    @classmethod
    def of(cls, data: Split | tuple[Any, Any] | TorchDataset[Any]) -> Split:
        """A split from a Split, a pair (x, y) of arrays or tensors, or a torch map-style data set.

        A data set is read when used (`Items`). Integers stay integers; all others become float32. So do bytes: uint8
        samples of two axes or more are pictures, which `load` divides by 255; those of one axis are features, whose
        values stay. x may be several tensors by name, which keep their types, except that NumPy's float64 becomes
        float32. Raises UserError for anything else.
        """
        if isinstance(data, Split):
            return data
        if isinstance(data, Tensor | np.ndarray):
            raise UserError(
                f"data are a pair (x, y) of samples and labels, not {named(data)} of shape {tuple(data.shape)}"
            )
        if not isinstance(data, tuple):
            items = Items(data)
            return cls(items, *_learnt(items.shape, items.targets))
        if len(data) != 2:
            raise UserError(f"data are a pair (x, y) of samples and labels, not a tuple of {len(data)}")
        x = _samples(data[0])
        return cls(x, *_learnt(tuple(x.shape), data[1]))

    def __len__(self) -> int:
        return len(self.y) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> Tensor:
        """Class indices of this view, int64 (m,)."""
        return self.y if self.rows is None else self.y[torch.from_numpy(self.rows)]

    @property
    def targets(self) -> Tensor:
        """The targets of this view's samples."""
        y = self.y if self.learnt is None else self.learnt.values
        return y if self.rows is None else y[torch.from_numpy(self.rows)]

    @property
    def learns(self) -> Kind:
        """The kind of these targets."""
        return "classes" if self.learnt is None else self.learnt.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, for example (3, 32, 32); with several tensors, the first one's."""
        return tuple(self.x.shape[1:])

    def blank(self) -> Tensor | NamedTensors:
        """A sample of zeros (1, …) in the format of `load`; no sample is read."""
        if isinstance(self.x, NamedTensors):
            blanks = {name: value.new_zeros(1, *value.shape[1:]) for name, value in self.x.tensors.items()}
            return NamedTensors({name: _as_it_is(value, "cpu") for name, value in blanks.items()})
        return _blank(self.x)

    def take(self, indices: Sequence[int] | NDArray[np.int64] | Tensor) -> Split:
        """The samples at `indices` of this view, in that order, without copying."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows = chosen if self.rows is None else self.rows[chosen]
        return Split(self.x, self.y, rows, self.transform, self.learnt)

    def load(self, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
        """Newly gathered samples (m, ...), float32, or int64 if they are integers, and their `targets`, on `device`.

        uint8 samples of two axes or more are images, which are divided by 255; nothing else is normalised. Several
        tensors keep their types, except images, uint8 (n, 1, 3 or 4, height, width). Raises UserError for samples of
        several tensors.
        """
        return one_tensor(self.gathered(device)), self.aimed(device)

    def gathered(self, device: str | torch.device = "cpu") -> Tensor | NamedTensors:
        """The samples of `load`, or those of several tensors."""
        if isinstance(self.x, NamedTensors):
            return NamedTensors({k: _as_it_is(_chosen(v, self.rows), device) for k, v in self.x.tensors.items()})
        if isinstance(self.x, Items):
            return _used(self.x[np.arange(len(self)) if self.rows is None else self.rows], device)
        return _gathered(self.x, self.rows, device)

    def lazy(self, device: str | torch.device = "cpu") -> tuple[LazySamples, Tensor]:
        """As `load`, but samples are gathered each time they are indexed: for transforms of the data set itself, and
        for data larger than memory."""
        return LazySamples(self, torch.device(device)), self.aimed(device)

    def aimed(self, device: str | torch.device) -> Tensor:
        """A copy of the `targets` on the device."""
        targets = self.targets.to(device, copy=True)
        return targets.long() if targets.dtype == torch.uint8 else targets


@dataclass(frozen=True)
class ClientData:
    """One client's own training and test samples, and those held out from training to choose models by, if any."""

    train: Split
    test: Split
    validation: Split | None = None


@dataclass(frozen=True)
class LazySamples:
    """The samples of a split, gathered each time they are indexed, images channels-last."""

    split: Split
    device: torch.device

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, rows: slice | Tensor) -> Tensor | NamedTensors:
        chosen = np.arange(len(self.split))[rows if isinstance(rows, slice) else rows.cpu().numpy()]
        x = self.split.take(chosen).gathered(self.device)
        return x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.dim() == 4 else x


def ungrouped(split: Split) -> Split:
    """The same samples, in one group if labels only serve to split them."""
    if split.learnt is None:
        return split
    return Split(split.x, torch.zeros_like(split.y), split.rows, split.transform, split.learnt)


def check_finite(split: Split, whose: str, targets: bool = True) -> None:
    """Raises UserError for numbers that are not finite in samples in memory, or in their `targets`."""
    parts = split.x.tensors if isinstance(split.x, NamedTensors) else {"": split.x}
    arrays = {f"{whose}{f' ({k})' if k else ''}": x for k, x in parts.items() if not isinstance(x, Items)}
    arrays |= {f"the targets of {whose}": split.learnt.values} if targets and split.learnt is not None else {}
    for name, values in arrays.items():
        if "float" not in str(values.dtype) or _on_disk(values):
            continue
        used = values if split.rows is None else values[split.rows]
        if not len(used) or (math.isfinite(float(used.min())) and math.isfinite(float(used.max()))):  # both are NaN
            continue
        wrong = ~np.isfinite(np.asarray(used)).reshape(len(used), -1).all(axis=1)
        raise UserError(
            f"{name}: {int(wrong.sum())} of {len(used)} hold numbers that are not finite (NaN or infinite), the "
            f"first is sample {int(wrong.argmax())}: correct them, or leave those samples out"
        )


def _on_disk(x: Any) -> bool:
    """Whether an array is a memory map, or part of one."""
    while x is not None and not isinstance(x, np.memmap):
        x = getattr(x, "base", None)
    return x is not None


def classes_in(splits: Sequence[Split]) -> int:
    """The number of classes by the highest label of all samples; 0 without samples."""
    return max((int(split.labels.max()) for split in splits if len(split)), default=-1) + 1


def widest(splits: Sequence[Split]) -> int:
    """The number of a sample's numeric targets or labels, or of classes or tokens by the highest one."""
    values = [split.targets for split in splits if len(split)]
    if not values:
        return 0
    if values[0].is_floating_point():
        return max(v.shape[1] if v.dim() > 1 else 1 for v in values)
    valid = [v[(v >= 0) & (v != IGNORED_PIXEL)] for v in values]
    return max((int(v.max()) for v in valid if len(v)), default=-1) + 1


def transform_name(transform: Transform) -> str:
    """A transform's name, the same in every process."""
    return str(getattr(transform, "__qualname__", type(transform).__qualname__))


def _is_target(target: Any) -> bool:
    if isinstance(target, (Tensor, np.ndarray)):
        return target.ndim > 0 or _is_target(target.item())
    return isinstance(target, (int, float, np.number)) and not isinstance(target, bool)


def _blank(x: Tensor | NDArray[Any] | Items) -> Tensor:
    kind = str(x.dtype).removeprefix("torch.")
    integers = "int" in kind and kind != "uint8"
    return torch.zeros(1, *x.shape[1:], dtype=torch.int64 if integers else torch.float32)


def _gathered(x: Tensor | NDArray[Any], rows: NDArray[np.int64] | None, device: str | torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return _used(_chosen(x, rows), device)
    gathered = np.array(x) if rows is None else np.asarray(x[rows])
    if gathered.dtype.kind in "iu" and gathered.dtype != np.uint8:
        gathered = gathered.astype(np.int64, copy=False)  # torch supports few unsigned types
    return _used(torch.from_numpy(gathered), device)


def _chosen(x: Tensor, rows: NDArray[np.int64] | None) -> Tensor:
    return x.clone() if rows is None else x[torch.from_numpy(rows)]


def _as_it_is(x: Tensor, device: str | torch.device) -> Tensor:
    """One of several tensors for a model: of its own type, except that images become 0..1."""
    image = x.dtype == torch.uint8 and x.dim() == 4 and x.shape[1] in (1, 3, 4)
    return _used(x, device) if image else x.to(device)


def _used(x: Tensor, device: str | torch.device) -> Tensor:
    x = x.to(device)  # copied as bytes, before they become floats
    if x.dtype == torch.uint8:
        return x.float().div_(255) if x.dim() > 2 else x.float()
    return x.float() if x.is_floating_point() or x.dtype == torch.bool else x.long()


def _samples(x: Any) -> Tensor | NDArray[Any] | NamedTensors:
    if isinstance(x, Mapping):
        return NamedTensors({str(name): _entry(value) for name, value in x.items()})
    samples = _array(x, 2)
    if isinstance(samples, Tensor):
        integers = not samples.is_floating_point() and samples.dtype != torch.bool
        return samples if integers else samples.float()
    return samples if samples.dtype.kind in "iu" else samples.astype(np.float32, copy=False)


def _entry(x: Any) -> Tensor:
    """One of several tensors: in its own type, except NumPy's float64, and types that PyTorch lacks become int64."""
    samples = _array(x, 1)
    if isinstance(samples, Tensor):
        return samples
    kind = {"<f8": np.float32, "<u2": np.int64, "<u4": np.int64, "<u8": np.int64}.get(samples.dtype.str, samples.dtype)
    return torch.from_numpy(samples.astype(kind))


def _array(x: Any, least: int) -> Tensor | NDArray[Any]:
    """Numeric samples. Raises UserError for others, and for fewer than `least` dimensions."""
    samples: Tensor | NDArray[Any] = x if isinstance(x, Tensor) else np.asarray(x)
    if isinstance(samples, Tensor) and samples.is_complex():
        raise UserError("samples are real numbers, not complex ones: give real and imaginary parts as two channels")
    if isinstance(samples, np.ndarray) and samples.dtype.kind not in "biuf":
        raise UserError(f"samples are numbers, not {samples.dtype}; give arrays of uint8 or float32")
    if samples.ndim < least:
        shape, more = tuple(samples.shape), "two" if least > 1 else "one"
        raise UserError(f"samples have shape {shape}; the first dimension counts them, so give {more} or more")
    return samples


def _learnt(shape: tuple[int, ...], y: Any) -> tuple[Tensor, None, None, Targets | None]:
    """A Split's arguments after its samples (n, …): the labels if classes are learnt, else the targets, and labels that
    are all 0."""
    y = y.numpy(force=True) if isinstance(y, Tensor) else np.asarray(y)
    kind = learnt_of(shape, y)
    if kind == "classes":
        if y.size and y.min() < 0:
            raise UserError(f"label {y.min()} is negative; labels count the classes from 0")
        return torch.from_numpy(y.astype(np.int64)), None, None, None
    known = {"f": np.float32, "b": np.float32, "u": y.dtype if y.dtype == np.uint8 else np.int64, "i": np.int64}
    values = torch.from_numpy(y.astype(known[y.dtype.kind]))
    return torch.zeros(len(y), dtype=torch.int64), None, None, Targets(kind, values)


def learnt_of(shape: tuple[int, ...], y: NDArray[Any]) -> Kind:
    """The kind of targets y (n, …) of samples of that shape (n, …). Raises UserError if they are not numbers."""
    if y.dtype.kind not in "biuf" or not y.ndim:
        raise UserError(f"labels are one integer per sample, or other numbers, not {y.dtype} of shape {y.shape}")
    if y.dtype.kind == "b":
        return "labels" if y.ndim == 2 else "own"
    if y.dtype.kind == "f":
        return "numbers" if y.ndim <= 2 else "own"
    if y.ndim == 1:
        return "classes"
    if y.ndim == 2 and y.shape[1:] == shape[1:]:
        return "tokens"
    return "masks" if y.ndim == 3 and y.shape[1:] == shape[2:] else "own"
