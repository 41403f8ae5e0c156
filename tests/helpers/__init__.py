"""What tests share; no tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Examples whose library stands beside the environment of the tests: see tests/vision.
OF_TORCHVISION = {"timm_digits", "detector"}
