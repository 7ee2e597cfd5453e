"""Models of Hugging Face's transformers: `hf:<folder or name>`, with a head for the task."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.language import located, padding_token, read_tokenizer, tokenizer_digest, transformers

PREFIX = "hf:"
HEADS = {
    "CausalLM": ("CAUSAL_LM", "predict next tokens: use a causal language model"),
    "SequenceClassification": ("SEQUENCE_CLASSIFICATION", "classify texts: use a language model"),
    "ImageClassification": (
        "IMAGE_CLASSIFICATION",
        "take images, but these samples are images: provide text (.txt files, or a table with --text COLUMN), or use "
        "an image model",
    ),
}
"""By kind of head: transformers' name for models that can have it; what other models cannot do, with a remedy."""


def hugging_face_model(place: str, shape: tuple[int, ...], classes: int, learns: str = "classes") -> nn.Module:
    """Load the model in a folder, or of that name on the hub (`located`), float32: a causal language model for next
    tokens, else a classifier of texts or, if samples are images, of images.

    A folder with config.json but no weights gives random weights. Weights are read only from safetensors, and no code
    shipped with a model is run. `shape` of a sample: (tokens,) or (channels, height, width). Raises UserError for a
    model that cannot be read, or does not take such samples.
    """
    library, name, pictures = transformers(), PREFIX + place, len(shape) == 3
    if learns not in ("tokens", "classes"):
        raise UserError(f"{name} learns next tokens or classes, not {learns}: use a model of your own")
    source = located(place)
    kind = "CausalLM" if learns == "tokens" else "ImageClassification" if pictures else "SequenceClassification"
    maker = getattr(library, f"AutoModelFor{kind}")
    try:
        config = library.AutoConfig.from_pretrained(source, **({} if learns == "tokens" else {"num_labels": classes}))
        models, otherwise = HEADS[kind]
        if type(config) not in getattr(library, f"MODEL_FOR_{models}_MAPPING"):
            raise UserError(f"{name}, a {config.model_type}, does not {otherwise}")
        _check(config, name, shape)
        if kind == "SequenceClassification" and config.pad_token_id is None:
            config.pad_token_id = padding_token(library.AutoTokenizer.from_pretrained(source))
        config.use_cache = False
        if not any(source.glob("*.safetensors")):
            model = maker.from_config(config, dtype=torch.float32)
        else:
            model = maker.from_pretrained(
                source, config=config, dtype=torch.float32, use_safetensors=True, ignore_mismatched_sizes=True
            )
    except UserError:
        raise
    except Exception as error:  # transformers fails in many ways: no model, another kind, damaged files
        raise UserError(
            f"the model {name} cannot be used to learn {learns} ({one_line(error, 200)}): name another model"
        ) from None
    trained: nn.Module = model
    return trained


def head_of_transformer(model: nn.Module) -> list[nn.Module] | None:
    """The modules of a transformer besides its base model; None for other models."""
    base = getattr(model, "base_model_prefix", "")
    if not (base and hasattr(model, "config") and hasattr(model, base)):
        return None
    return [module for name, module in model.named_children() if name != base]


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises UserError if the tokenizer has tokens beyond those of the model `name`."""
    known, highest = _tokens(name), max(tokenizer.get_vocab().values())
    if known is not None and highest >= known:
        raise UserError(
            f"{name} knows {known} tokens, the tokenizer {highest + 1}: use the model's own tokenizer (--tokenizer)"
        )


def other_tokenizer(name: str, place: str) -> str:
    """A message if the tokenizer in `place` is not that of the model `name`; empty if it is."""
    tokenizer, known = read_tokenizer(place), _tokens(name)
    try:
        own = read_tokenizer(name.removeprefix(PREFIX))
    except UserError:  # the model has none
        return "" if known in (None, len(tokenizer)) else f"{name} knows {known} tokens, and {place} {len(tokenizer)}"
    if tokenizer_digest(own) == tokenizer_digest(tokenizer):
        return ""
    return f"{place} ({len(tokenizer)} tokens) splits text differently from the tokenizer of {name} ({len(own)})"


def _tokens(name: str) -> int | None:
    """The vocabulary size of the model `name`; None if its config has none, or cannot be read."""
    place = located(name.removeprefix(PREFIX))
    try:
        found: int | None = getattr(transformers().AutoConfig.from_pretrained(place), "vocab_size", None)
    except Exception:  # reported when the model is built
        return None
    return found


def _check(config: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raises UserError for samples longer than the model's maximum."""
    longest = getattr(config, "max_position_embeddings", None)
    if len(shape) == 1 and longest is not None and shape[0] > longest:
        raise UserError(f"{name} takes at most {longest} tokens at once, not {shape[0]}: --length {longest}")
