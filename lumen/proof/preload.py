"""What every process of a variant needs, imported by the one that they are forked from."""

from __future__ import annotations

import lumen.proof.worker
import lumen.strategies.ddp
import lumen.strategies.fsdp  # noqa: F401
from lumen.internals.compiler import import_compiler

import_compiler()
