"""Hugging Face's transformers, silenced and imported only on use: the library, and tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.named import check_fetched, elsewhere, places

HUB_SECONDS = 5.0  # to check whether the hub answers at all


def transformers() -> Any:
    """The library, without progress bars and advice. Raises UserError if it is not installed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork of workers
    try:
        with warnings.catch_warnings(action="ignore"):
            import transformers
    except ImportError:
        raise UserError("text and hf: models need transformers: pip install 'fewbytes[adapters]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def located(name: str) -> Path:
    """The folder `name` under FEWBYTES_DATA, else at that path; else the download of `name` from the Hugging Face hub:
    settings, tokenizer and safetensors. Raises UserError if there is none."""
    for folder in places(name):
        if folder.is_dir():
            return folder
    if elsewhere():  # else an earlier download may be named
        check_fetched(name)
    try:
        import huggingface_hub as hub

        fetch = partial(hub.snapshot_download, name, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"])
        try:
            return Path(fetch(local_files_only=True))
        except hub.errors.LocalEntryNotFoundError:
            check_fetched(name)
            hub.HfApi().model_info(name, timeout=HUB_SECONDS)  # without a network the download may retry for minutes
            return Path(fetch())
    except UserError:
        raise
    except Exception as error:  # many kinds: no network, offline mode, no such name, disk full
        raise UserError(
            f"there is no folder {name!r}, and fetching it from the hub failed ({one_line(error, 160)}): name a "
            "folder with the model and its tokenizer"
        ) from None


def read_tokenizer(place: str) -> Any:
    """The tokenizer in a folder, or with that name on the hub (`located`). Raises UserError if there is none."""
    folder = located(place)
    try:
        return transformers().AutoTokenizer.from_pretrained(folder)
    except UserError:
        raise
    except Exception as error:  # files that are not a tokenizer's fail in many ways
        raise UserError(f"{folder} has no tokenizer ({one_line(error, 160)}): name another with --tokenizer") from None


def tokenizer_digest(tokenizer: Any) -> str:
    """32 characters that are equal for tokenizers that split all texts equally."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = repr(sorted(tokenizer.get_vocab().items()))
    else:  # state of its last call, not its own: the number of tokens
        rules = json.dumps(json.loads(backend.to_str()) | {"truncation": None, "padding": None})
    return hashlib.sha256(rules.encode()).hexdigest()[:32]


def padding_token(tokenizer: Any) -> int:
    """The id that pads short texts: the tokenizer's padding token, else its end-of-text token, else 0."""
    own = tokenizer.pad_token_id
    return int(own if own is not None else tokenizer.eos_token_id or 0)
