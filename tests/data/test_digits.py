"""The digits that come with the package are those of scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from fewbytes.data import load_dataset


def test_all_are_there_as_scikit_learn_has_them() -> None:
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), load_dataset("digits")
    splits = [split.load() for split in (ours.train, ours.test)]
    rows = torch.cat([torch.cat([x.flatten(1) * 16, y[:, None]], 1) for x, y in splits]).numpy()
    wanted = np.concatenate([theirs.data, theirs.target[:, None]], 1)
    assert sorted(map(tuple, rows.astype(int))) == sorted(map(tuple, wanted.astype(int)))
