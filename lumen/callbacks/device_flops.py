"""Peak operations per second of accelerators, from their data sheets."""

from __future__ import annotations

import re

import torch

# Dense peaks in TFLOP/s (10^12 FLOP per second), without the factor 2 for structured sparsity; matrix products of 16
# bits with float32 sums, as PyTorch makes them. None: the device has no such unit, or it is no faster than float32.
# Sources, all NVIDIA's: the data sheets of V100 (2020), T4 (2019), A100 (2021), L4, L40S and H100 (2023), H200 (2024)
# and HGX B200 (2025); the architecture papers of GA102 (RTX 3090, table 2) and Ada (RTX 4090, table 2).
_PEAKS_TFLOP_PER_S: tuple[tuple[str, float, float | None, float | None, float], ...] = (
    # device, as torch.cuda.get_device_name has it   float32  TF32   bfloat16  float16
    (r"Tesla V100-SXM2-\d+GB", 15.7, None, None, 125.0),
    (r"Tesla V100-PCIE-\d+GB", 14.0, None, None, 112.0),
    (r"Tesla T4", 8.1, None, None, 65.0),
    (r"(NVIDIA )?A100-.*|NVIDIA A100 .*PCIe", 19.5, 156.0, 312.0, 312.0),
    (r"NVIDIA L4", 30.3, 60.0, 121.0, 121.0),
    (r"NVIDIA L40S", 91.6, 183.0, 362.0, 362.0),
    (r"NVIDIA H100 80GB HBM3", 67.0, 494.7, 989.4, 989.4),
    (r"NVIDIA H100 PCIe", 51.2, 378.0, 756.0, 756.0),
    (r"NVIDIA H100 NVL", 60.0, 417.5, 835.5, 835.5),
    (r"NVIDIA H200", 67.0, 494.7, 989.4, 989.4),
    (r"NVIDIA H200 NVL", 60.0, 417.5, 835.5, 835.5),
    (r"NVIDIA B200", 75.0, 1100.0, 2250.0, 2250.0),
    (r"NVIDIA GeForce RTX 3090", 35.6, None, 71.0, 71.0),
    (r"NVIDIA GeForce RTX 4090", 82.6, None, 165.2, 165.2),
)


def peak_flop_per_s(device_name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Peak floating-point operations per second of a device, for dense matrix products.

    Args:
        device_name: A name such as "NVIDIA H100 80GB HBM3", from `torch.cuda.get_device_name`.
        dtype: The dtype of the matrix products: float32, bfloat16 or float16.
        tf32: Products of float32 are computed in TF32.

    Returns:
        None if the peak is not known: of another device, of a part of one (MIG), or in another dtype.
    """
    for name, float32, of_tf32, bfloat16, float16 in _PEAKS_TFLOP_PER_S:
        if re.fullmatch(name, device_name) and "MIG" not in device_name:
            as_float32 = (of_tf32 if tf32 else None) or float32
            peak = {torch.float32: as_float32, torch.bfloat16: bfloat16, torch.float16: float16}.get(dtype)
            return None if peak is None else peak * 1e12
    return None
