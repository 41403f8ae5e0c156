"""Pages for contributors: their statements match the code."""

import re
from collections import Counter
from functools import partial

import torch

from lumen.distributed.processes import Processes
from tests.helpers.pages import COLLECTIVE, read_rows


def count_documented(method, table):
    """Return how many collectives of each kind a row of the table states, itself or by the names of other rows."""
    found = Counter({kind: int(times) for times, kind in re.findall(r"(\d) (\w+)", table[method])})
    for other in re.findall(r"`(\w+)`", table[method]):
        found += count_documented(other, table)
    return found


def test_methods_use_the_documented_collectives(group):
    table = {name.strip("`"): text for name, _, text in read_rows("docs/contributing/collectives.md", "The methods")}
    for counted in group(2).run(count_collectives):
        assert counted == {name: count_documented(name, table) for name in counted}
        assert counted.keys() == COLLECTIVE - {"connect", "for_thread"}


def count_collectives():
    """Return the collectives that each method of Processes makes, from torch's own record."""
    processes = Processes.find()
    processes.connect(torch.device("cpu"))
    calls = {
        "broadcast": partial(processes.broadcast, 1),
        "all_gather": partial(processes.all_gather, 1),
        "gather_on_rank_zero": partial(processes.gather_on_rank_zero, 1),
        "all_reduce_sum": partial(processes.all_reduce_sum, [1.0]),
        "start_all_gather": lambda: processes.start_all_gather([1.0])(),
        "start_sum": lambda: processes.start_sum([1.0])(),
        "barrier": processes.barrier,
        "run_on_rank_zero": partial(processes.run_on_rank_zero, list),
        "run_on_all": partial(processes.run_on_all, list),
        "run_and_conclude": partial(processes.run_and_conclude, list, lambda answers: answers()),
        "run_once_per_node": partial(processes.run_once_per_node, list),
    }
    return {name: record_collectives(call) for name, call in calls.items()}


def record_collectives(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as record:
        call()
    events = [event.name.removeprefix("gloo:") for event in record.events() if event.name.startswith("gloo:")]
    return Counter(events)
