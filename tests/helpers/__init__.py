"""Helpers of several tests; no tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Examples whose library is installed besides the environment of the tests: see tests/ecosystem.
OF_TORCHVISION = {"timm_digits", "detector"}
