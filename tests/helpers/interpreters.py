"""Modules of the working directory with names of other packages."""

from pathlib import Path

#: Modules of Python, of torch and of its dependencies; the launcher, the elastic agent and multiprocessing import them.
SHADOWS = ("platform", "pickle", "socket", "multiprocessing", "torch", "numpy", "typing_extensions", "lumen")


def shadow_modules(*names):
    """Write modules into the working directory that end any process which imports them."""
    for name in names:
        Path(f"{name}.py").write_text(f"import os; os.write(2, b'Traceback: imported {name}'); os._exit(7)")
