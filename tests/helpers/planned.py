"""Tasks with a plan for tensor parallelism, and their data, for `lumen check` and `lumen verify`."""

import torch
from torch import nn

import lumen
from tests.helpers.mesh import PLAN, Model, make_loader


class Tokens(lumen.DataModule):
    """Blocks of tokens."""

    def train_dataloader(self):
        return make_loader(shuffle=True)

    def val_dataloader(self):
        return make_loader(shuffle=False)


class Planned(Model):
    """Language model, in float32.

    Args:
        heads: The number of heads that the code of attention contains, without a norm of heads; -1: the code does not
            contain a number.
        depth: The number of blocks.
        typo: True for a plan with a wrong name.
        muon: True for an optimizer that needs whole matrices.
    """

    def __init__(self, heads: int = -1, depth: int = 2, typo: bool = False, muon: bool = False):
        changes = {"blocks.*.mix.norm": None} if heads > 0 else {"blocks.*.mix.qkw": "colwise"} if typo else {}
        super().__init__(PLAN | changes, heads=heads)
        self.blocks.extend(type(self.blocks[0])(heads=heads) for _ in range(depth - 2))
        for block in self.blocks if heads > 0 else ():
            block.mix.norm = nn.Identity()
        self.muon = muon
        self.float()

    def configure_optimizers(self):
        matrices = [each for each in self.parameters() if each.dim() == 2]
        return torch.optim.Muon(matrices) if self.muon else super().configure_optimizers()
