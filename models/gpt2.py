"""GPT-2 of the package transformers: trained to write surnames, then fine-tuned to write those of one country.

What it shares with `models.bert` is there: bytes, the schedule, gradual unfreezing. New here are per-token weights and
tied weights: the head is the token embedding, which is saved once and exported as ``from_pretrained`` wants it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import lumen
from lumen.optim import layer_decay_groups
from models.bert import PAD, START, Batch, falling, save_config, with_start

END = PAD  # what comes after the last letter of a name
IGNORED = -100


class NameWriter(lumen.TaskModule):
    """GPT-2 writes names letter by letter.

    A batch is that of `datamodules.surnames.Surnames`.

    Args:
        config: Arguments of `transformers.GPT2Config`; with ``trainer.init_from``, those of the model begun with.
        learning_rate: AdamW's, of the last norm, the highest one.
        layer_decay: Learning rate of a layer, as a fraction of that of the layer above, in (0, 1].
        weight_decay: AdamW's; biases, norms and embeddings, so the head too, do not decay.
        warmup_steps: Steps until the learning rates are at their highest.
        temperature: Of ``predict``, above 0: lower is safer, higher is wilder.
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
        """Write the config.json that ``from_pretrained`` wants beside exported weights."""
        save_config(self, self.gpt)

    def forward(self, letters: Tensor) -> Tensor:
        """Logits of each next letter, of shape ``(batch, 1 + longest, vocab_size)``; padding is not looked at."""
        ids = with_start(letters)
        return self.gpt(ids, attention_mask=ids != PAD).logits

    def training_step(self, batch: Batch) -> tuple[Tensor, int]:
        """Cross-entropy in nats per letter, and how many there are: a long name counts for more than a short one."""
        loss, count = self.loss(batch)
        self.log("train_loss", loss, weight=count)
        return loss, count

    def validation_step(self, batch: Batch) -> None:
        """Log the same for names that it has never seen."""
        loss, count = self.loss(batch)
        self.log("val_loss", loss, weight=count, prog_bar=True)

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """A mean over letters and ends, and their number, which is known without asking the device."""
        letters, lengths, _ = batch
        targets = F.pad(letters, (0, 1), value=END).masked_fill(with_start(letters) == PAD, IGNORED)
        count = sum(lengths) + len(lengths)
        logits = self(letters).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / count, count

    def predict_step(self, batch: tuple[Tensor, list[int]]) -> list[str]:
        """Each name written on until its end."""
        prompts = [ids[: length + 1] for ids, length in zip(with_start(batch[0]), batch[1], strict=True)]
        options = {"do_sample": True, "temperature": self.hparams.temperature, "top_k": 0, "max_length": 32}
        written = [self.gpt.generate(ids[None], attention_mask=ids[None] != PAD, **options)[0] for ids in prompts]
        return [bytes(row[row > START].tolist()).decode(errors="replace") for row in written]

    def configure_optimizers(self) -> dict:
        """AdamW with a learning rate for each layer; all of them warm up, then fall to 0 with the run."""
        h = self.hparams
        groups = layer_decay_groups(
            self, h.learning_rate, h.layer_decay, "gpt.transformer.h", weight_decay=h.weight_decay, by="module type"
        )
        optimizer = torch.optim.AdamW(groups)
        return {"optimizer": optimizer, "lr_scheduler": falling(self, optimizer)}
