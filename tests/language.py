"""A tiny language model and its tokenizer as transformers' folder, and texts by a few authors."""

from __future__ import annotations

import random
from pathlib import Path

import torch

TEXT = "the cat sat on a mat and looked at the moon while dogs ran after red cars in town"
WORDS = TEXT.split()
LENGTH = 16
TOKENS = 300


def write_texts(folder: Path, authors: int = 4, words: int = 400) -> Path:
    """A folder for each author, who has words of his own."""
    drawn = random.Random(0)
    for author in range(authors):
        (folder / f"author-{author}").mkdir(parents=True)
        for name in ("early", "late"):
            text = " ".join(drawn.choice(WORDS[4 * author : 4 * author + 6]) for _ in range(words // 2))
            (folder / f"author-{author}" / f"{name}.txt").write_text(text)
    return folder


def write_tokenizer(folder: Path, corpus: str = TEXT) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    cut = Tokenizer(models.BPE())
    cut.pre_tokenizer, cut.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    cut.train_from_iterator(
        [corpus],
        trainers.BpeTrainer(
            vocab_size=TOKENS, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=cut, eos_token="<end>").save_pretrained(folder)


def write_language_model(folder: Path, kind: str = "gpt2", seed: int = 0) -> Path:
    """`kind`: gpt2 (embeddings are tied), llama, or bert (no classifier: its pooler is drawn, too)."""
    import transformers

    from fewbytes.base.language import transformers as quiet

    quiet()
    torch.manual_seed(seed)
    small = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **small)
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(max_position_embeddings=32, **sizes, **small))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.BertForMaskedLM(transformers.BertConfig(max_position_embeddings=32, **sizes, **small))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
