"""What tests share; no tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
