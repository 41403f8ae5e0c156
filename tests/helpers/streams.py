"""Streams that tests of several packages read."""

import torch
from torch.utils.data import IterableDataset


class Buffered(IterableDataset):
    """Stream with a shuffle buffer whose state is the buffer itself, not a copy, and which resumes from its state."""

    def __init__(self, samples=22, held=6):
        self.samples, self.held, self.read, self.buffer = samples, held, 0, []

    def __iter__(self):
        while self.read < self.samples or self.buffer:
            while self.read < self.samples and len(self.buffer) < self.held:
                self.buffer.append(self.read)
                self.read += 1
            yield self.buffer.pop(int(torch.randint(len(self.buffer), ())))
        self.read = 0

    def state_dict(self):
        return {"read": self.read, "buffer": self.buffer}

    def load_state_dict(self, state):
        self.read, self.buffer = state["read"], state["buffer"]
