"""LoRA (Hu et al., 2021) with the package peft: a frozen GPT-2, and small trained matrices."""

import warnings

from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from models.packed_gpt2 import Answers


class LoraAnswers(Answers):
    """Frozen GPT-2 of `Answers` with a LoRA adapter.

    Args:
        config: Arguments of `transformers.GPT2Config`, as in the model of ``trainer.init_from``.
        rank: Rank of the adapter's matrices.
        learning_rate: Highest learning rate of AdamW.
        warmup_steps: Number of steps until the highest learning rate.
    """

    def __init__(self, config: dict, rank: int = 8, learning_rate: float = 5e-3, warmup_steps: int = 20):
        super().__init__(config, learning_rate, warmup_steps)
        self.save_hyperparameters()
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers.
            self.gpt = get_peft_model(self.gpt, lora)

    def on_train_epoch_end(self) -> None:
        """Write only the adapter, for ``PeftModel.from_pretrained``."""
        trained = {name: weight for name, weight in self.gpt.state_dict().items() if "lora_" in name}
        full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in trained.items()}
        if self.trainer.is_global_zero and self.trainer.run_directory:
            self.gpt.save_pretrained(self.trainer.run_directory / "adapter", state_dict=full)
