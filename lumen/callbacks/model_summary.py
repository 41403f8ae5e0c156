"""ModelSummary (placeholder while it is written)."""

from lumen.callbacks.base import Callback


class ModelSummary(Callback):
    """x."""
