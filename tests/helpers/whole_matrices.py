"""Optimizers that need unsharded matrices, like a user's, and a task for them."""

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import lumen
from lumen.optim import MultiOptimizer, WholeMatrices
from tests.helpers.tasks import FEATURES, Regression


class Shampoo(Optimizer):
    """Shampoo (Gupta et al. 2018) on plain matrices: two preconditioners, with inverse roots at every second step."""

    def __init__(self, params, lr=0.05, momentum=0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad
                if not state:
                    state["step"] = 0
                    state["sums"] = [torch.eye(size, dtype=grad.dtype) * 1e-2 for size in grad.shape]
                    state["roots"] = {"left": torch.eye(len(grad)).to(grad), "right": torch.eye(grad.shape[1]).to(grad)}
                    state["moment"] = torch.zeros_like(grad)
                    state["count"] = torch.zeros(())
                state["step"] += 1
                state["count"] += 1
                state["sums"][0] += grad @ grad.T
                state["sums"][1] += grad.T @ grad
                if state["step"] % 2:
                    state["roots"] = {
                        "left": compute_inverse_root(state["sums"][0]),
                        "right": compute_inverse_root(state["sums"][1]),
                    }
                state["moment"].mul_(group["momentum"]).add_(state["roots"]["left"] @ grad @ state["roots"]["right"])
                p.sub_(state["moment"], alpha=group["lr"])


def compute_inverse_root(matrix):
    """Return the inverse fourth root."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


KINDS = {
    "Muon": lambda held: Muon(held, lr=0.02),
    "Shampoo": Shampoo,
    "AdamW": lambda held: AdamW(held, lr=0.01, amsgrad=True),
}


class Matrices(Regression):
    """Task with matrices of several shapes; one has fewer rows than processes and is for `WholeMatrices` only."""

    def __init__(self, kind="Muon", wraps=True):
        super().__init__(dtype=torch.float64)
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 1)
        self.net = nn.Sequential(*layers).double()
        self.kind, self.wraps = kind, wraps

    def configure_optimizers(self):
        matrices = [each for each in self.parameters() if each.ndim == 2 and (self.wraps or len(each) > 1)]
        rest = [each for each in self.parameters() if all(each is not matrix for matrix in matrices)]
        inner = KINDS[self.kind](matrices)
        both = MultiOptimizer([WholeMatrices(inner) if self.wraps else inner, AdamW(rest, lr=0.01)])
        return {"optimizer": both, "lr_scheduler": {"scheduler": lumen.optim.linear(both, 12), "interval": "step"}}
