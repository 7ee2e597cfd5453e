"""Hugging Face's transformers, quiet and only where used: the library, and tokenizers."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError


def transformers() -> Any:
    """The library, without its progress bars and advice. Raises UserError if it is not installed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork of workers
    try:
        with warnings.catch_warnings(action="ignore"):
            import transformers
    except ImportError:
        raise UserError("text and hf: models need transformers: pip install 'fewbytes[adapters]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def read_tokenizer(place: str) -> Any:
    """The tokenizer in a folder, or of that name on the Hugging Face hub. Raises UserError if there is none."""
    folder = Path(place).expanduser()
    try:
        return transformers().AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else place)
    except UserError:
        raise
    except Exception as error:  # it fails in many ways: no such name, no network, files that are no tokenizer's
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"the tokenizer {place} cannot be read ({why}): name a folder that holds one") from None


def tokenizer_digest(tokenizer: Any) -> str:
    """32 characters that are equal for tokenizers that cut all text alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(rules.encode()).hexdigest()[:32]


def padding_token(tokenizer: Any) -> int:
    """The id of what short texts are filled up with: the tokenizer's own, else what ends a text, else 0."""
    own = tokenizer.pad_token_id
    return int(own if own is not None else tokenizer.eos_token_id or 0)
