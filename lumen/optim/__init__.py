"""Tools for any torch optimizer: parameter groups, schedules, Lookahead, combined optimizers, unsharded matrices."""

from lumen.optim.fused import adamw
from lumen.optim.groups import check_groups, decay_groups, layer_decay_groups
from lumen.optim.multi import MultiOptimizer
from lumen.optim.schedules import Schedule, Warmup, constant, cosine, inverse_sqrt, linear, wsd
from lumen.optim.wrappers import Lookahead, WholeMatrices, list_on_parts, muons_on_parts, needs_closure

__all__ = [
    "Lookahead",
    "MultiOptimizer",
    "Schedule",
    "Warmup",
    "WholeMatrices",
    "adamw",
    "check_groups",
    "constant",
    "cosine",
    "decay_groups",
    "inverse_sqrt",
    "layer_decay_groups",
    "linear",
    "list_on_parts",
    "muons_on_parts",
    "needs_closure",
    "wsd",
]
