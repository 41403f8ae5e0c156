"""ProgressBar (placeholder while it is written)."""

from lumen.callbacks.base import Callback


class ProgressBar(Callback):
    """x."""
