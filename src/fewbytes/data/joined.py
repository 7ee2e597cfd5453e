"""The samples of several splits as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fewbytes.data.named import NamedTensors
from fewbytes.data.split import Items, Split, Targets


def joined(splits: Sequence[Split]) -> Split:
    """The samples of several splits (at least one), in order. Views of the same arrays share them; others are copied,
    and items of a data set are read.

    >>> import torch
    >>> from fewbytes.data.joined import joined
    >>> from fewbytes.data.split import Split
    >>> a, b = Split.of((torch.zeros(2, 3), torch.tensor([0, 1]))), Split.of((torch.ones(1, 3), torch.tensor([1])))
    >>> joined([a, b]).labels, len(joined([a.take([1]), a]))
    (tensor([0, 1, 1]), 3)
    """
    first = splits[0]
    rows = [np.arange(len(each)) if each.rows is None else each.rows for each in splits]
    if all(each.x is first.x and each.y is first.y for each in splits):
        return Split(first.x, first.y, np.concatenate(rows), first.transform, first.learnt)
    labels, learnt = torch.cat([each.labels for each in splits]), None
    if first.learnt is not None:
        learnt = Targets(first.learnt.kind, torch.cat([each.targets for each in splits]))
    if isinstance(first.x, NamedTensors | Items):
        gathered = [each.gathered() for each in splits]
    else:
        arrays: list[Any] = [each.x for each in splits]
        gathered = [torch.as_tensor(np.asarray(x[mine])) for x, mine in zip(arrays, rows, strict=True)]
    if isinstance(gathered[0], NamedTensors):
        names = gathered[0].tensors
        every = {name: torch.cat([each.tensors[name] for each in gathered]) for name in names}  # type: ignore[union-attr]
        return Split(NamedTensors(every), labels, None, first.transform, learnt)
    return Split(torch.cat(gathered), labels, None, first.transform, learnt)  # type: ignore[arg-type]
