"""Models of Hugging Face's transformers: `hf:<folder or name>`, with the head that suits what is learnt."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.language import located, padding_token, read_tokenizer, tokenizer_digest, transformers

PREFIX = "hf:"
HEADS = {
    "CausalLM": ("CAUSAL_LM", "tell next tokens: take a causal language model"),
    "SequenceClassification": ("SEQUENCE_CLASSIFICATION", "classify texts: take a language model"),
    "ImageClassification": (
        "IMAGE_CLASSIFICATION",
        "take images, as these samples are: give it text (.txt files, or a table with --text COLUMN), or take a model "
        "of images",
    ),
}
"""By kind of head, what transformers calls the models that can have it, and what others do not do, with a remedy."""


def hugging_face_model(place: str, shape: tuple[int, ...], classes: int, learns: str = "classes") -> nn.Module:
    """The model in a folder, or of that name on the hub (`located`), float32: a causal language model where next tokens
    are learnt, else a classifier of texts, or of images where samples are such.

    A folder with a config.json and no weights gives a model that is drawn. Weights are read from safetensors only, and
    no code that comes with a model is run. `shape`: of a sample, (tokens,) or (channels, height, width). Raises
    UserError for a model that cannot be read, or does not take such samples.
    """
    library, name, pictures = transformers(), PREFIX + place, len(shape) == 3
    if learns not in ("tokens", "classes"):
        raise UserError(f"{name} learns next tokens or classes, not {learns}: make your own model")
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
    except Exception as error:  # it fails in many ways: no model at all, of another kind, damaged
        raise UserError(
            f"the model {name} cannot be used to learn {learns} ({one_line(error, 200)}): name a folder that holds "
            "such a model"
        ) from None
    trained: nn.Module = model
    return trained


def head_of_transformer(model: nn.Module) -> list[nn.Module] | None:
    """What a model of transformers has besides its base model; None of another model."""
    base = getattr(model, "base_model_prefix", "")
    if not (base and hasattr(model, "config") and hasattr(model, base)):
        return None
    return [module for name, module in model.named_children() if name != base]


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises UserError for a tokenizer whose tokens are beyond those of the model called so."""
    known, highest = _tokens(name), max(tokenizer.get_vocab().values())
    if known is not None and highest >= known:
        raise UserError(
            f"{name} knows {known} tokens, the tokenizer {highest + 1}: take the one it was trained with (--tokenizer)"
        )


def other_tokenizer(name: str, place: str) -> str:
    """For people: that the tokenizer in `place` is not that of the model called so; nothing if it is."""
    tokenizer, known = read_tokenizer(place), _tokens(name)
    try:
        own = read_tokenizer(name.removeprefix(PREFIX))
    except UserError:  # the model has none
        return "" if known in (None, len(tokenizer)) else f"{name} knows {known} tokens, and {place} {len(tokenizer)}"
    if tokenizer_digest(own) == tokenizer_digest(tokenizer):
        return ""
    return f"{place} ({len(tokenizer)} tokens) does not cut text as the tokenizer of {name} ({len(own)}) does"


def _tokens(name: str) -> int | None:
    """How many tokens the model called so knows, if it says; None, too, for one that cannot be read."""
    place = located(name.removeprefix(PREFIX))
    try:
        found: int | None = getattr(transformers().AutoConfig.from_pretrained(place), "vocab_size", None)
    except Exception:  # it is told when the model is made
        return None
    return found


def _check(config: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raises UserError for longer samples than the model takes."""
    longest = getattr(config, "max_position_embeddings", None)
    if len(shape) == 1 and longest is not None and shape[0] > longest:
        raise UserError(f"{name} takes at most {longest} tokens at once, not {shape[0]}: --length {longest}")
