"""LoRA (Hu et al., 2021) by the package peft: a GPT-2 that stays as it is, and small matrices that are trained."""

import warnings

from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from models.packed_gpt2 import Answers


class LoraAnswers(Answers):
    """The GPT-2 of `Answers`, frozen, with an adapter.

    Args:
        config: Arguments of `transformers.GPT2Config`, those of the model begun with by ``trainer.init_from``.
        rank: Of the matrices of the adapter.
        learning_rate: AdamW's, the highest one.
        warmup_steps: Steps until then.
    """

    def __init__(self, config: dict, rank: int = 8, learning_rate: float = 5e-3, warmup_steps: int = 20):
        super().__init__(config, learning_rate, warmup_steps)
        self.save_hyperparameters()
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that it is giving up
            self.gpt = get_peft_model(self.gpt, lora)

    def on_train_epoch_end(self) -> None:
        """Write the adapter by itself, as ``PeftModel.from_pretrained`` reads it."""
        trained = {name: weight for name, weight in self.gpt.state_dict().items() if "lora_" in name}
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in trained.items()}
        if self.trainer.is_global_zero and self.trainer.run_directory:
            self.gpt.save_pretrained(self.trainer.run_directory / "adapter", state_dict=whole)
