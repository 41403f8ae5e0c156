"""Import torchvision with a CPU build of torch, whose libraries do not fit torchvision's compiled file.

All of torchvision's Python code works without that file, but it looks up one operator on import, `nms`, which detection
calls and this module defines. If the compiled file works, this module changes nothing.
"""

import importlib.util

import pytest
import torch
from torch import library as operators


def nms(boxes, scores, iou_threshold):
    """Return the indices of boxes that no better box overlaps by more than the threshold, the best first."""
    (x1, y1, x2, y2), kept = boxes.unbind(1), []
    areas, left = (x2 - x1) * (y2 - y1), scores.argsort(descending=True, stable=True)
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        wide = (torch.minimum(x2[best], x2[left]) - torch.maximum(x1[best], x1[left])).clamp(min=0)
        high = (torch.minimum(y2[best], y2[left]) - torch.maximum(y1[best], y1[left])).clamp(min=0)
        common = wide * high
        left = left[common / (areas[best] + areas[left] - common) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)


def _compiled_file_works():
    place = importlib.util.find_spec("torchvision")
    try:
        torch.ops.load_library(f"{place.submodule_search_locations[0]}/_C.so")
    except OSError:
        return False
    return True


if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision, which `make ecosystem` installs", allow_module_level=True)
if not _compiled_file_works():
    _library = operators.Library("torchvision", "DEF")
    _library.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    _library.impl("nms", nms, "CPU")
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None
