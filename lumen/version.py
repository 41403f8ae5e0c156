"""The version of Lumen."""

__version__ = "0.1.0"
