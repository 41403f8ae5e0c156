"""Strategies: the devices that hold a task, and the communication between its processes."""

from lumen.strategies.factory import make_strategy as make_strategy
from lumen.strategies.single import SingleDevice as SingleDevice
from lumen.strategies.strategy import (
    Strategy as Strategy,
    by_data_rank as by_data_rank,
    check_data_ranks as check_data_ranks,
    gather_values as gather_values,
    sync_buffers as sync_buffers,
)
