"""Strategies: the devices that hold a task, and the communication between its processes."""

from lumen.strategies.factory import make_strategy as make_strategy
from lumen.strategies.single import SingleDevice as SingleDevice
from lumen.strategies.strategy import (
    Strategy as Strategy,
    check_data_ranks as check_data_ranks,
    count_training_parts as count_training_parts,
    gather_from_data_ranks as gather_from_data_ranks,
    make_exact_error as make_exact_error,
    select_by_data_rank as select_by_data_rank,
    set_reduction as set_reduction,
    sync_buffers as sync_buffers,
)
