"""Data of several ranks in one process: threads that work one at a time and meet at collectives."""

import threading
from collections import defaultdict
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch

from lumen.data.adapter import Position
from lumen.data.windows import RankSlice


class Ranks:
    """Runner of a function on every rank of a world; each works until it waits for the others, or ends.

    The threads work one at a time, because they draw from the generators of one process.
    """

    def __init__(self, world, *, needs_dummies=False):
        self.world, self.needs_dummies = world, needs_dummies
        self.told = []  # gathered values, by occasion and rank

    def run(self, function):
        """Return the result of `function(rank_slice)` on each rank, or the error that it raised."""
        self.told, self._calls, self._ended = [], defaultdict(int), set()
        self._turn = threading.Condition()
        self._results = [None] * self.world
        threads = [threading.Thread(target=self._work, args=(function, rank)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in self._results:
            if isinstance(result, Hang):
                raise result
        return self._results

    def _work(self, function, rank):
        with self._turn:
            try:
                gather = partial(self._gather, rank)
                rank_slice = RankSlice(rank, self.world, self.needs_dummies, gather)
                self._results[rank] = function(rank_slice._replace(processes=self.world, gather_all=gather))
            except Exception as error:
                self._results[rank] = error
            self._ended.add(rank)
            self._turn.notify_all()

    def _gather(self, rank, value):
        occasion = self._calls[rank]
        self._calls[rank] += 1
        if len(self.told) == occasion:
            self.told.append({})
        told = self.told[occasion]
        told[rank] = value
        self._turn.notify_all()
        self._turn.wait_for(lambda: len(told) == self.world or self._ended - told.keys())
        if len(told) < self.world:
            raise Hang(f"rank {rank} waits for one that has ended: only {sorted(told)} have come")
        return [deepcopy(told[each]) for each in range(self.world)]


class Hang(Exception):
    """Error: ranks that would wait for each other for ever."""


class Seen(NamedTuple):
    """Micro-batch of a rank."""

    content: object
    index: int
    number: int
    samples: int
    weight: float
    loader: int
    first: bool
    last: bool
    is_dummy: bool


class Step(NamedTuple):
    """Window of a rank."""

    micros: list
    sizes: list
    last: bool
    state: dict


def make_plain_batch(batch):
    """Return a batch as plain data, which can be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: make_plain_batch(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [make_plain_batch(each) for each in batch]
    return batch


def read_steps(adapter, epoch=0, position=None, limit=None, steps=None):
    """Return the steps of an epoch, or the wanted number of steps, and the position after them."""
    position, given = position or Position(), []
    windows = adapter.iterate_windows(epoch, position, limit)
    while (steps is None or len(given) < steps) and (window := next(windows, None)) is not None:
        micros = [
            Seen(make_plain_batch(micro.batch), *(getattr(micro, name) for name in Seen._fields[1:]))
            for micro in window
        ]
        given.append(Step(micros, window.sizes, window.last, window.state))
        position = Position(position.samples + window.samples, position.batches + len(window.sizes), window.state)
    adapter.close()
    return given, position


def merge_ranks(ranks, *, needs_dummies=False):
    """Return the micro-batches of all ranks in the order of one process, by step.

    The function checks that the ranks agree about each step, have the same number of rounds, and work while they can.
    """
    assert len({len(steps) for steps in ranks}) == 1
    whole = []
    for step in zip(*ranks, strict=True):
        assert len({(tuple(each.sizes), each.last, len(each.micros)) for each in step}) == 1
        given = [micro for each in step for micro in each.micros if not micro.is_dummy]
        given.sort(key=lambda micro: micro.number)
        assert [micro.number for micro in given] == list(range(len(step[0].sizes)))
        assert [micro.samples for micro in given] == step[0].sizes
        assert all(micro.weight == micro.samples for micro in given)
        assert len({micro.index - micro.number for micro in given}) == 1
        for each in step:
            rounds = len(each.micros)
            assert [micro.first for micro in each.micros] == [place == 0 for place in range(rounds)]
            assert [micro.last for micro in each.micros] == [place == rounds - 1 for place in range(rounds)]
            assert [micro.is_dummy for micro in each.micros] == sorted(micro.is_dummy for micro in each.micros)
            idle = [micro for micro in each.micros if micro.is_dummy]
            assert all(micro.weight == 0 and (micro.content is not None) == needs_dummies for micro in idle)
        whole.append(given)
    return whole


def compare_key(steps):
    """Return the compared parts of micro-batches, without first and last marks."""
    return [[(micro.content, micro.index, micro.number, micro.samples, micro.loader) for micro in s] for s in steps]
