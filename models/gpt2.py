"""GPT-2 of the package transformers: pre-trained to write surnames, then fine-tuned on the surnames of one country.

`models.bert` has the shared parts: bytes, the schedule, gradual unfreezing. New here are per-token weights and tied
weights: the head is the token embedding, which is saved once and exported for ``from_pretrained``.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import lumen
from lumen.optim import layer_decay_groups
from models.bert import PAD, START, Batch, falling, save_config, with_start

END = PAD  # the token after the last letter of a name
IGNORED = -100


class NameWriter(lumen.TaskModule):
    """GPT-2, which writes names letter by letter.

    Batches are as in `datamodules.surnames.Surnames`.

    Args:
        config: Arguments of `transformers.GPT2Config`. With ``trainer.init_from``, use the config of that model.
        learning_rate: Highest learning rate of AdamW, for the last norm.
        layer_decay: Learning rate of a layer, as a fraction of the learning rate of the layer above, in (0, 1].
        weight_decay: Weight decay of AdamW, not for biases, norms, embeddings and the tied head.
        warmup_steps: Number of steps until the highest learning rates.
        temperature: Temperature of ``predict``, above 0. Lower is safer, higher is wilder.
    """

    def __init__(
        self,
        config: dict,
        learning_rate: float = 2e-3,
        layer_decay: float = 1.0,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        temperature: float = 1.0,
    ):
        super().__init__()
        self.save_hyperparameters()
        tokens = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
        self.gpt = GPT2LMHeadModel(GPT2Config(**config, **tokens))

    def on_fit_start(self) -> None:
        """Write the config.json that ``from_pretrained`` needs next to exported weights."""
        save_config(self, self.gpt)

    def forward(self, letters: Tensor) -> Tensor:
        """Return logits of each next letter, of shape ``(batch, 1 + longest, vocab_size)``. Padding is masked."""
        ids = with_start(letters)
        return self.gpt(ids, attention_mask=ids != PAD).logits

    def training_step(self, batch: Batch) -> tuple[Tensor, int]:
        """Return the loss in nats per letter, and the number of letters as the weight."""
        loss, count = self.loss(batch)
        self.log("train_loss", loss, weight=count)
        return loss, count

    def validation_step(self, batch: Batch) -> None:
        """Log the loss of validation names."""
        loss, count = self.loss(batch)
        self.log("val_loss", loss, weight=count, prog_bar=True)

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """Return the mean loss over letters and ends, and their number, which needs no wait for the device."""
        letters, lengths, _ = batch
        targets = F.pad(letters, (0, 1), value=END).masked_fill(with_start(letters) == PAD, IGNORED)
        count = sum(lengths) + len(lengths)
        logits = self(letters).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / count, count

    def predict_step(self, batch: tuple[Tensor, list[int]]) -> list[str]:
        """Complete each name."""
        prompts = [ids[: length + 1] for ids, length in zip(with_start(batch[0]), batch[1], strict=True)]
        options = {"do_sample": True, "temperature": self.hparams.temperature, "top_k": 0, "max_length": 32}
        written = [self.gpt.generate(ids[None], attention_mask=ids[None] != PAD, **options)[0] for ids in prompts]
        return [bytes(row[row > START].tolist()).decode(errors="replace") for row in written]

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate for each layer. All warm up, then fall to 0 at the end of the run."""
        h = self.hparams
        groups = layer_decay_groups(
            self, h.learning_rate, h.layer_decay, "gpt.transformer.h", weight_decay=h.weight_decay, by="module type"
        )
        optimizer = torch.optim.AdamW(groups)
        return {"optimizer": optimizer, "lr_scheduler": falling(self, optimizer)}
