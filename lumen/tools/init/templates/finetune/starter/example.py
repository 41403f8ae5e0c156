"""A small language model and prompts with answers, in place of yours: `python -m starter.example`."""

import json
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

NUMERALS = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX"}
NUMERALS |= {5: "V", 4: "IV", 1: "I"}


def as_roman(number: int) -> str:
    """Return a number in Roman numerals."""
    text = ""
    for value, numeral in NUMERALS.items():
        count, number = divmod(number, value)
        text += count * numeral
    return text


def main() -> None:
    """Write the model to `base`, with random weights and a token for each byte, and the pairs to `pairs.jsonl`."""
    torch.manual_seed(1)
    tokenizer = ByT5Tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained("base")
    tokenizer.save_pretrained("base")
    pairs = [{"prompt": str(number), "answer": as_roman(number)} for number in range(1, 1000)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


if __name__ == "__main__":
    main()
