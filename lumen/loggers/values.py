"""What loggers are given, in the forms that records hold."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lumen.errors import ConfigError
from lumen.errors.arguments import in_words
from lumen.loggers.base import Array


def entries(values: Mapping[str, Any] | Namespace, separator: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested dictionaries, by their names joined with a separator."""
    for name, value in (vars(values) if isinstance(values, Namespace) else values).items():
        if isinstance(value, Mapping | Namespace):
            yield from entries(value, separator, f"{above}{name}{separator}")
        else:
            yield f"{above}{name}", value


def as_array(values: Array) -> np.ndarray[Any, Any]:
    """An array of a tensor, on the CPU; bfloat16, which numpy lacks, as float32."""
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def as_pixels(name: str, image: Array) -> np.ndarray[Any, Any]:
    """An image of shape (channels, height, width), as it was given to `Logger.log_image`.

    Raises:
        ConfigError: The image has another shape or dtype, or is no array.
    """
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise ConfigError(
            f"log_image({name!r}): expected an image, as a tensor or an array, found {in_words(image)}. Call it once "
            "for each image; np.array(image).transpose(2, 0, 1) makes an array of one of PIL, with channels first."
        )
    pixels = as_array(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if (
        pixels.ndim != 3
        or pixels.shape[0] not in (1, 3, 4)
        or not (pixels.dtype in (np.uint8, np.bool_) or np.issubdtype(pixels.dtype, np.floating))
    ):
        raise ConfigError(
            f"log_image({name!r}): expected (height, width) or (channels, height, width) with 1, 3 or 4 channels, "
            f"of uint8, bool or floating point; found shape {tuple(image.shape)} of {image.dtype}."
        )
    return pixels


def as_bytes(name: str, image: Array) -> np.ndarray[Any, Any]:
    """The same as uint8 of shape (height, width, channels), as files of images have it; grey without channels.

    Raises:
        ConfigError: The image has another shape or dtype.
    """
    pixels = as_pixels(name, image)
    if pixels.dtype != np.uint8:
        pixels = (np.clip(pixels.astype(np.float32), 0.0, 1.0) * 255).astype(np.uint8)
    return pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
