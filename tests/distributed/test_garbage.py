"""Garbage collections during a run."""

from tests.helpers.garbage import Untidy, watch_collections
from tests.helpers.tasks import bare_trainer, loader


class OnRank(Untidy):
    """Task that leaves more garbage on one rank, and records each step, even on a rank without a batch."""

    def litter(self, where):
        for _ in range(1 + self.trainer.global_rank):
            super().litter(where)

    def on_before_zero_grad(self, optimizer):
        self.noted["where"] = f"step {self.global_step + 1}"


def collect_on_ranks(folder, options):
    with watch_collections() as (seen, noted):
        trainer = bare_trainer(folder, max_steps=9, strategy="ddp", val_check_interval=100, **options)
        trainer.fit(OnRank(noted), loader(20, 4))  # 5 batches: rank 1 has none for the third step
    return [found for found in seen if found[0] is not None]


def test_ranks_collect_garbage_at_the_same_steps(group, tmp_path):
    """A rank without a batch collects garbage too."""
    for seen in group(2).run(collect_on_ranks, tmp_path, {"gc_every_n_steps": 2}):
        assert seen == [(f"step {n}", 2) for n in (2, 4, 6, 8)]
    first, second = group(2).run(collect_on_ranks, tmp_path, {})
    assert first != second  # Python's own collections are not
