"""A small causal language model, trained here from scratch, and texts for clients to adapt it to.

The model's text is Python's own reference manual as the standard library ships it (`pydoc_data.topics`, 465 kB of
English prose). The clients' texts are the docstrings of packages that are installed anyway, a package a client.
Writes `backbone/` (a folder as transformers reads it, with its tokenizer) and `texts/<package>/docstrings.txt`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

PACKAGES = ("numpy", "scipy", "sklearn", "torch", "flwr", "transformers")
END = "<end>"


def docstrings(package: str, most: int) -> str:
    """The first `most` characters of a package's docstrings, file by file; nothing of it is run."""
    spec = importlib.util.find_spec(package)
    found, size = [], 0
    for path in sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.py")):
        if "test" not in str(path) and size < most:
            for node in ast.walk(ast.parse(path.read_text("utf-8", "ignore"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                    found.append(text)
                    size += len(text)
    return "\n\n".join(found)[:most]


def train(text: str, tokenizer: PreTrainedTokenizerFast, config: GPT2Config, steps: int) -> GPT2LMHeadModel:
    """By AdamW on random windows, 16 at a time; the learning rate falls to 0."""
    torch.manual_seed(0)
    model, length = GPT2LMHeadModel(config), config.n_positions
    ids = torch.tensor(tokenizer(text)["input_ids"])
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(ids) - length, (16, 1))
        windows = ids[starts + torch.arange(length)]
        loss = model(windows, labels=windows).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1}: perplexity {loss.exp():.1f} ({time.monotonic() - began:.0f} s)", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens at once")
    parser.add_argument("--tokens", type=int, default=2048, help="of the tokenizer")
    parser.add_argument("--characters", type=int, default=48_000, help="of each client")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="whose docstrings clients have")
    parser.add_argument("--part", type=float, default=1.0, help="of the manual's topics")
    given = parser.parse_args()
    known = list(topics.values())
    known = known[: max(1, round(given.part * len(known)))]
    text = "\n\n".join(known)

    cut = Tokenizer(models.BPE())  # bytes, so that there is no text it cannot cut
    cut.pre_tokenizer, cut.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    cut.train_from_iterator(
        known,
        trainers.BpeTrainer(
            vocab_size=given.tokens, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=cut, eos_token=END)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=given.length, n_embd=given.width, n_layer=given.layers, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = train(text, tokenizer, config, given.steps)
    model.save_pretrained(given.out / "backbone")
    tokenizer.save_pretrained(given.out / "backbone")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} characters of text")

    for package in given.packages.split(","):
        place = given.out / "texts" / package
        place.mkdir(parents=True, exist_ok=True)
        (place / "docstrings.txt").write_text(docstrings(package, given.characters), "utf-8")


if __name__ == "__main__":
    main()
