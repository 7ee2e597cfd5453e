"""Each client's own texts: the docstrings of one installed package. In your project: read this node's own files."""

import ast
import importlib.util
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

PACKAGES = ("numpy", "torch", "transformers", "flwr")


def docstrings(package: str, most: int) -> str:
    """The first `most` characters of a package's docstrings, file by file; none of its code is run."""
    found, size = [], 0
    for path in sorted(Path(importlib.util.find_spec(package).submodule_search_locations[0]).rglob("*.py")):
        if size >= most:
            break
        for node in ast.walk(ast.parse(path.read_text("utf-8", "ignore"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found.append(text)
                size += len(text)
    return "\n\n".join(found)[:most]


def samples(client: int, tokenizer: PreTrainedTokenizerBase, length: int, most: int) -> tuple[list, list]:
    """A client's samples for training, and the last tenth of them for evaluation: `length` tokens each."""
    ids = tokenizer(docstrings(PACKAGES[client % len(PACKAGES)], most), verbose=False)["input_ids"]
    rows = torch.tensor(ids[: len(ids) // length * length]).reshape(-1, length)
    data = [{"input_ids": row, "labels": row} for row in rows]
    held_out = max(1, len(data) // 10)
    return data[:-held_out], data[-held_out:]
