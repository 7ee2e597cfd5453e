"""A second set of golden vectors: the first one's layout with other seeds, shapes and configurations.

    cd tests && python -m second_golden FOLDER

The expected values are computed here, from the papers' equations as the first set's READMEs tell them, with NumPy and
torch alone: nothing of the package. Of every file one function draws the inputs and another makes the expected values
of any inputs; `test_second_golden.py` holds the latter to the first set before it trusts the second.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from second_golden import fedkgf, fedktl, fedpurin, fusefl, genefl  # noqa: F401 (each adds its files)
from second_golden.common import ARCHIVES, TABLES


def write(folder: Path, seed: int = 7) -> None:
    """The whole set; `seed` varies the arrays."""
    for name, (inputs, answers) in ARCHIVES.items():
        v = inputs(np.random.default_rng([seed, *name.encode()]))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{name}.npz", **{k: a for k, a in (v | answers(v)).items() if a is not None})
    for name, (configurations, answers) in TABLES.items():
        (folder / f"{name}.json").write_text(json.dumps(answers(configurations), indent=1))
