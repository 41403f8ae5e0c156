"""State of this process that a run could change."""

import atexit
import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn


def list_open_files():
    """Return the open descriptors of this process, by number, without the one of the listing."""
    numbers = {int(each) for each in os.listdir("/proc/self/fd")}
    found = {}
    for number in numbers:
        with suppress(OSError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def read_process_state():
    """Return everything that a run could leave behind in its process."""
    loggers = [logging.root, *(each for each in logging.root.manager.loggerDict.values() if hasattr(each, "handlers"))]
    caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), re.M)
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "signals that are caught": int(caught[1], 16),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "path": [*sys.path],
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks of errors": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "what is done at exit": atexit._ncallbacks(),
        "warnings": [*warnings.filters],
        "loggers": {
            each.name: (each.level, [*each.handlers], [[*handler.filters] for handler in each.handlers], each.propagate)
            for each in loggers
        },
        "threads": {thread.name for thread in threading.enumerate()},
        "processes": {*multiprocessing.active_children()},
        "files": list_open_files(),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0, len(gc.callbacks)),
        "process groups": torch.distributed.is_initialized(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads of torch": torch.get_num_threads(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "hooks of modules": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
            len(nn.modules.module._global_backward_hooks),
        ),
    }


def find_changes(before):
    """Return what has changed since `before`, a result of `read_process_state`, as pairs of the old and new state.

    Threads that feed the queues of data workers end a moment after the workers: wait for them, at most a minute.
    """
    gc.collect()
    deadline_s = time.monotonic() + 60
    while True:
        after = read_process_state()
        before["processes"] = {child for child in before["processes"] if child.is_alive()}  # of an earlier test
        changes = {what: (before[what], after[what]) for what in before if before[what] != after[what]}
        if not changes or time.monotonic() > deadline_s:
            return changes
        time.sleep(0.01)
