"""The language model that all nodes have, its tokenizer, and the adapters that travel."""

from flwr.app import UserConfig
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)


def load(config: UserConfig) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The model with new adapters, equal on all nodes, and its tokenizer."""
    set_seed(0)
    name = str(config["model.name"])
    if name:
        base, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    else:
        base, tokenizer = small()
    lora = LoraConfig(
        r=int(config["lora.rank"]), lora_alpha=int(config["lora.alpha"]), target_modules="all-linear",
        fan_in_fan_out=base.config.model_type == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(base, lora), tokenizer


def small() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerBase]:
    """A GPT-2 of 0.4 million random weights, whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=128, n_layer=2, n_head=4, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config), PreTrainedTokenizerFast(tokenizer_object=bytewise)
