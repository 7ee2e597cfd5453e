"""The samples of several splits as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fewbytes.base.errors import UserError
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import Items, Split, Targets


def joined(splits: Sequence[Split]) -> Split:
    """The samples of several splits, in order. Views of the same arrays share them; other arrays are copied.

    Raises UserError for samples of several tensors, and for torch data sets, which are read when used.

    >>> import torch
    >>> from fewbytes.data.joined import joined
    >>> from fewbytes.data.split import Split
    >>> a, b = Split.of((torch.zeros(2, 3), torch.tensor([0, 1]))), Split.of((torch.ones(1, 3), torch.tensor([1])))
    >>> joined([a, b]).labels, len(joined([a.take([1]), a]))
    (tensor([0, 1, 1]), 3)
    """
    first = splits[0]
    if all(each.x is first.x and each.y is first.y for each in splits):
        rows = [np.arange(len(each)) if each.rows is None else each.rows for each in splits]
        return Split(first.x, first.y, np.concatenate(rows), first.transform, first.learnt)
    parts = []
    for each in splits:
        if isinstance(each.x, NamedTensors | Items):
            raise UserError("samples of several tensors, or read item by item, cannot be pooled: give tensors or files")
        parts.append(np.asarray(each.x if each.rows is None else each.x[each.rows]))
    learnt = None
    if first.learnt is not None:
        learnt = Targets(first.learnt.kind, torch.cat([each.targets for each in splits]))
    x = torch.from_numpy(np.concatenate(parts))
    return Split(x, torch.cat([each.labels for each in splits]), None, first.transform, learnt)
