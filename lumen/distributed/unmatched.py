"""Finds ranks that wait in different collectives: each for one that the other has not begun, so neither ever ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

from lumen.internals.process_groups import group_members, recorded_on_host


class Begun(NamedTuple):
    """The collectives of a process whose main thread waits in one.

    Attributes:
        newest: Number of the newest collective that the process has begun, by the name of the process group.
        unfinished: Name of the process group, number, and ranks of each collective that its main thread has begun and
            that is not done.
    """

    newest: dict[str, int]
    unfinished: list[list[Any]]


def collectives_begun(thread: int) -> Begun:
    """Read torch's flight recorder of this process; nothing is found where this torch has none, or records less.

    Args:
        thread: Identifier of the main thread.
    """
    newest, unfinished, members = dict[str, int](), list[list[Any]](), group_members()
    for entry in json.loads(recorded_on_host() or b"{}").get("entries", []):
        group, number = str((entry.get("process_group") or [""])[0]), int(entry.get("collective_seq_id", 0))
        if not entry.get("is_p2p"):
            newest[group] = max(number, newest.get(group, 0))
            if entry.get("retired") is False and entry.get("thread_id") == str(thread):
                unfinished.append([group, number, members.get(group, [])])
    return Begun(newest, unfinished)


def find_unmatched(processes: Mapping[int, Begun]) -> tuple[int, int] | None:
    """Return two ranks that wait for one another in different collectives; None if it is not certain of any two.

    Args:
        processes: What each process has begun whose main thread waits in a collective, by rank.
    """
    for rank, other in combinations(sorted(processes), 2):
        if _is_missed_in_all(processes, rank, other) and _is_missed_in_all(processes, other, rank):
            return rank, other
    return None


def _is_missed_in_all(processes: Mapping[int, Begun], rank: int, other: int) -> bool:
    """Return True if another rank is to take part in each collective that a rank waits for, and has begun none."""
    unfinished, newest = processes[rank].unfinished, processes[other].newest
    return bool(unfinished) and all(
        other in members and newest.get(group, 0) < number for group, number, members in unfinished
    )
