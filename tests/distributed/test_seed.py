"""`seed_everything` sets the seed of all runs of its process, like the option of the command line."""

import torch.distributed as dist

import lumen
from tests.helpers.seed import make_trainer, train_and_read_order


def fit_with_a_seed_on_rank_0(path):
    if dist.get_rank() == 0:
        lumen.seed_everything(9)
    try:
        return train_and_read_order(make_trainer(path, devices=2))[0]
    finally:
        lumen.random._chosen_seed = None  # these processes run other tests too


def test_several_processes_take_that_of_rank_0(group, tmp_path):
    assert group(2).run(fit_with_a_seed_on_rank_0, tmp_path) == [9, 9]
