"""Finds ranks that wait in different collectives: each for one that the other has not begun, so neither ever ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

from lumen.internals.process_groups import recorded_on_host


class Begun(NamedTuple):
    """The collectives of a process whose main thread waits in one.

    Attributes:
        newest: Number of the newest collective that the process has begun, by process group.
        unfinished: Process group and number of each collective that its main thread has begun and that is not done.
    """

    newest: dict[str, int]
    unfinished: list[list[Any]]


def collectives_begun(thread: int) -> Begun:
    """Read torch's flight recorder of this process; nothing is found where this torch has none, or records less.

    Args:
        thread: Identifier of the main thread.
    """
    newest, unfinished = dict[str, int](), list[list[Any]]()
    for entry in json.loads(recorded_on_host() or b"{}").get("entries", []):
        group, number = str(entry.get("pg_id")), int(entry.get("collective_seq_id", 0))
        if not entry.get("is_p2p"):
            newest[group] = max(number, newest.get(group, 0))
            if entry.get("retired") is False and entry.get("thread_id") == str(thread):
                unfinished.append([group, number])
    return Begun(newest, unfinished)


def find_unmatched(processes: Mapping[int, Begun]) -> tuple[int, int] | None:
    """Return two ranks that wait for one another in different collectives; None if it is not certain of any two.

    Args:
        processes: What each process has begun whose main thread waits in a collective, by rank.
    """
    for (rank, one), (other, two) in combinations(sorted(processes.items()), 2):
        if _has_begun_none(two, one.unfinished) and _has_begun_none(one, two.unfinished):
            return rank, other
    return None


def _has_begun_none(process: Begun, collectives: list[list[Any]]) -> bool:
    return bool(collectives) and all(process.newest.get(group, 0) < number for group, number in collectives)
