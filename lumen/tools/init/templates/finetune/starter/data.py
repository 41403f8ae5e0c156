"""Prompts and their answers."""

import json
from pathlib import Path

import lumen
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer

IGNORED = -100  # label of a token that does not count in the loss of transformers


class Pairs(lumen.DataModule):
    """Pairs of a prompt and an answer; a tenth is for validation.

    A batch is a dictionary of int64 of shape `(batch, time)`: `input_ids`, `attention_mask` and `labels`. Only the
    tokens of the answers have labels.

    Args:
        path: A file with a pair in each line, such as `{"prompt": "14", "answer": "XIV"}`.
        base: A name or a directory for `from_pretrained`, of the model and its tokenizer.
        max_length: Largest number of tokens of a pair. Longer pairs are truncated.
        batch_size: Number of pairs in a batch.
        prompt: Prompt that `lumen predict` answers.
        split: Seed of the random split into training and validation.
    """

    def __init__(
        self,
        path: str,
        base: str,
        max_length: int = 512,
        batch_size: int = 32,
        prompt: str = "14",
        split: int = 0,
    ):
        super().__init__()
        self.path, self.base, self.max_length = path, base, max_length
        self.batch_size, self.prompt, self.split = batch_size, prompt, split
        self.tokenizer = AutoTokenizer.from_pretrained(base)  # An export of the model saves the tokenizer too.

    def setup(self, stage: str) -> None:
        """Read and split the pairs."""
        lines = Path(self.path).read_text(encoding="utf-8").splitlines()
        pairs = [json.loads(line) for line in lines]
        self.train, self.val = random_split(pairs, [0.9, 0.1], torch.Generator().manual_seed(self.split))

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens before an answer. For a chat model, use the tokenizer's `apply_chat_template`."""
        return self.tokenizer(f"{prompt}\n", add_special_tokens=False).input_ids

    def encode_answer(self, answer: str) -> list[int]:
        """Return the tokens of an answer and its end."""
        return [*self.tokenizer(answer, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]

    def collate(self, pairs: list[dict[str, str]]) -> dict[str, Tensor]:
        """Return a batch of pairs, padded to the longest pair."""
        ids, labels = [], []
        for pair in pairs:
            prompt, answer = self.encode_prompt(pair["prompt"]), self.encode_answer(pair["answer"])
            ids.append(torch.tensor([*prompt, *answer][: self.max_length]))
            labels.append(torch.tensor([*[IGNORED] * len(prompt), *answer][: self.max_length]))
        return {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        }

    def train_dataloader(self) -> DataLoader:
        """Return the training pairs, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        """Return the validation pairs."""
        return DataLoader(self.val, self.batch_size, collate_fn=self.collate)

    def predict_dataloader(self) -> DataLoader:
        """Return the tokens of the prompt."""
        return DataLoader([torch.tensor(self.encode_prompt(self.prompt))])
