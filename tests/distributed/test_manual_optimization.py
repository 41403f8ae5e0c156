"""Manual optimization on several processes: training equals one process, with the gradients of the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import lumen
from lumen.errors import TrainingError
from tests.helpers.manual_optimization import Gan, SharpByHand, critic_loss, make_pair_loader, make_pairs
from tests.helpers.sharded import unshard
from tests.helpers.tasks import bare_trainer, loader, quiet_trainer


def read_values(task):
    return torch.cat([unshard(each).flatten() for each in task.parameters()]).tolist()


def train(folder, strategy, task=None, data=None, **options):
    """Return the parameters, the batch numbers, the steps, and the means of the last epoch."""
    task = Gan(every=2) if task is None else task
    options = {"max_epochs": 3, "strategy": strategy, "global_batch_size": 16} | options
    trainer = bare_trainer(folder, **options)
    trainer.fit(task, make_pair_loader(shuffle=True) if data is None else data)
    means = dict(trainer.newest_values)
    return read_values(task), task.indices, trainer.global_step, means


@pytest.mark.parametrize(
    ("strategy", "world"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), pytest.param("fsdp", 3, marks=pytest.mark.slow)]
)
def test_several_processes_train_what_one_does(group, tmp_path, strategy, world):
    alone, indices, steps, means = train(tmp_path / "alone", "auto")
    assert indices == [0, 1, 2, 3] * 3
    for each in group(world).run(train, tmp_path, strategy):
        torch.testing.assert_close(each[0], alone, rtol=0, atol=1e-13)
        assert each[1:3] == (indices, steps)
        for name in ("critic", "generator"):
            assert each[3][name] == pytest.approx(means[name], abs=1e-13)


class Accumulating(Gan):
    """Task with the critic alone, which accumulates the gradients of two batches."""

    def training_step(self, batch, batch_idx):
        self.indices.append(batch_idx)
        theirs = self.optimizers()[1]
        self.manual_backward(critic_loss(self.generator, self.critic, *batch) / 2)
        self.manual_backward(0.1 * self.critic[0].weight.square().sum())
        if batch_idx % 2:
            theirs.step()
            theirs.zero_grad()


class Joint(Gan):
    """Task with one backward for both networks, through a graph that was built before one of them was frozen."""

    def training_step(self, batch, batch_idx):
        self.indices.append(batch_idx)
        loss = softplus(self.critic(self.generator(batch[1]) - batch[0])).mean()
        ours, theirs = self.optimizers()
        for each in (ours, theirs):
            each.zero_grad()
        with self.toggled_optimizer(theirs):
            self.manual_backward(loss)
        theirs.step()
        self.manual_backward(softplus(self.critic(self.generator(batch[1]))).mean())
        ours.step()
        theirs.step()


def train_by(folder, strategy, task):
    return train(folder, strategy, task())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("task", [Accumulating, Joint])
def test_gradients_of_several_backwards_are_summed_once(group, tmp_path, strategy, task):
    """One sum also covers one backward for several optimizers."""
    alone = train_by(tmp_path / "alone", "auto", task)
    for each in group(2).run(train_by, tmp_path, strategy, task):
        torch.testing.assert_close(each[0], alone[0], rtol=0, atol=1e-13)
        assert each[1:3] == alone[1:3]


class Weighed(Gan):
    def batch_weight(self, batch):
        return float(batch[0].exp().sum())


def train_weighed(folder, strategy):
    class Scaled(Weighed):
        def training_step(self, batch, batch_idx):
            theirs = self.optimizers()[1]
            theirs.zero_grad()
            units = self.batch_weight(batch)
            self.manual_backward((self.critic(batch[0]).square() * batch[0].exp().sum(1, keepdim=True)).sum() / units)
            theirs.step()

    return train(folder, strategy, Scaled())


def test_batch_parts_are_weighted_by_task_weights(group, tmp_path):
    alone = train_weighed(tmp_path / "alone", "auto")
    for each in group(2).run(train_weighed, tmp_path, "ddp"):
        torch.testing.assert_close(each[0], alone[0], rtol=0, atol=1e-13)


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*(each.split(4) for each in make_pairs(44)), strict=True)


def read_batches(folder, kind):
    if kind == "stream":
        data = DataLoader(Stream(), batch_size=None)
    else:
        batches = BatchSampler(SequentialSampler(range(44)), 4, drop_last=False)
        data = DataLoader(TensorDataset(*make_pairs(44)), batch_sampler=batches)
    return train(folder, "ddp", Gan(), data, max_epochs=1, global_batch_size=None)


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_unsplittable_batches_alternate_between_ranks(group, tmp_path, kind):
    alone = train(tmp_path / "alone", "auto", Gan(), make_pair_loader(44, 8), max_epochs=1, global_batch_size=None)
    for each in group(2).run(read_batches, tmp_path, kind):
        torch.testing.assert_close(each[0], alone[0], rtol=0, atol=1e-13)
        assert each[1] == [0, 1, 2, 3, 4, 5]


def resume_training(folder, strategy, max_steps):
    task = Gan(every=2)
    options = {"global_batch_size": 16, "max_steps": max_steps, "resume": "auto", "log_every_n_steps": 1}
    trainer = quiet_trainer(folder, strategy=strategy, **options)
    trainer.fit(task, make_pair_loader(shuffle=True), make_pair_loader())
    return read_values(task), (trainer.default_root_dir / "run" / "metrics.csv").read_text()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resumed_run_is_exact_under_any_strategy(group, tmp_path, strategy):
    whole = group(2).run(resume_training, tmp_path / "whole", strategy, 11)
    group(2).run(resume_training, tmp_path / "parts", strategy, 5)
    assert group(2).run(resume_training, tmp_path / "parts", strategy, 11) == whole
    group(2).run(resume_training, tmp_path / "moved", strategy, 5)
    alone = resume_training(tmp_path / "moved", "auto", 11)
    torch.testing.assert_close(alone[0], whole[0][0], rtol=0, atol=1e-13)


class Half(Gan):
    """Task whose generator's gradients overflow on one process in the third batch."""

    def move_generator(self, optimizer, noise):
        optimizer.zero_grad()
        factor = 1e38 if self.current_epoch == 0 and self.global_step == 2 and self.global_rank == 1 else 1.0
        self.manual_backward(self.generator(noise).float().mean() * factor)
        optimizer.step()


def overflow(folder, strategy):
    precision = lumen.precision.Float16(init_scale=1024.0)
    options = {"precision": precision, "max_steps": 6, "max_epochs": -1}
    trained = train(folder, strategy, Half(torch.float32), make_pair_loader(dtype=torch.float32), **options)
    return *trained, precision.state_dict()["scale"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_overflow_on_one_rank_skips_update_on_all(group, tmp_path, strategy):
    results = group(2).run(overflow, tmp_path, strategy)
    assert results[0][0] == results[1][0]
    assert {each[-1] for each in results} == {512.0}
    assert all(torch.tensor(each[0]).isfinite().all() for each in results)


def train_critic(folder, strategy):
    """Train the critic alone; its plain SGD shows the size of its gradients."""
    task = Gan(torch.float32, every=100)
    before = read_values(task)
    after = train(folder, strategy, task, make_pair_loader(dtype=torch.float32), precision="16-mixed", max_epochs=1)[0]
    return [one - other for one, other in zip(after, before, strict=True)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fp16_gradients_equal_those_of_single_process(group, tmp_path, strategy):
    alone = train_critic(tmp_path / "alone", "auto")
    assert max(map(abs, alone)) > 0.05
    for each in group(2).run(train_critic, tmp_path, strategy):
        torch.testing.assert_close(each, alone, rtol=0, atol=2e-3)


class Counting(Gan):
    """Task with a buffer that counts samples and a logged value; a part outside of the batch must change neither."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.seen += len(batch[0])


def train_counting(folder, strategy):
    task = Counting()
    return *train(folder, strategy, task, make_pair_loader(33), max_epochs=1), float(task.seen)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_idle_rank_takes_part_and_changes_nothing(group, tmp_path, strategy):
    alone = train_counting(tmp_path / "alone", "auto")
    assert alone[2] == 3
    strategy = getattr(lumen, strategy.upper())(broadcast_buffers=False)
    for each, seen in zip(group(2).run(train_counting, tmp_path, strategy), (17.0, 16.0), strict=True):
        torch.testing.assert_close(each[0], alone[0], rtol=0, atol=1e-13)
        assert each[1:3] == alone[1:3]
        assert each[3] == pytest.approx(alone[3], abs=1e-13)
        assert each[4] == seen


class Leaving(Gan):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 and self.global_rank == 1 else None


class Stopping(Gan):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            self.trainer.should_stop = True


def leave(folder):
    left = train(folder, "ddp", Leaving(), max_epochs=2)
    return left[1:3], train(folder, "ddp", Stopping(), max_epochs=2)[1:3]


def test_one_rank_ends_epoch_or_run_for_all(group, tmp_path):
    for left, stopped in group(2).run(leave, tmp_path):
        assert left == ([0, 1] * 2, 4)
        assert stopped == ([0, 1], 2)


class Plain(Gan):
    def training_step(self, batch, batch_idx):
        critic_loss(self.generator, self.critic, *batch).backward()
        self.optimizers()[1].step()


def plain_backward(folder, strategy):
    with pytest.raises(TrainingError, match="manual_backward was not called"):
        train(folder, strategy, Plain())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_plain_backward_is_refused_on_several_ranks(group, tmp_path, strategy):
    group(2).run(plain_backward, tmp_path, strategy)


def own_parameter(folder):
    class Owning(Gan):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(1))

    with pytest.raises(lumen.errors.ConfigError, match="temperature is a parameter of the task itself"):
        train(folder, "fsdp", Owning())


def test_parameters_of_task_itself_are_refused_under_fsdp(group, tmp_path):
    group(2).run(own_parameter, tmp_path)


class Searching(Gan):
    """Task with the critic alone and an optimizer that evaluates the loss."""

    def training_step(self, batch, batch_idx):
        self.indices.append(batch_idx)
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = critic_loss(self.generator, self.critic, *batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.critic.parameters(), max_iter=3, line_search_fn="strong_wolfe")


def test_manual_line_search_sees_the_global_batch_loss(group, tmp_path):
    alone = train_by(tmp_path / "alone", "auto", Searching)
    for each in group(2).run(train_by, tmp_path, "ddp", Searching):
        torch.testing.assert_close(each[0], alone[0], rtol=0, atol=1e-9)
        assert each[1:3] == alone[1:3]


def train_sharp(folder, strategy):
    task = SharpByHand(torch.float64)
    trainer = bare_trainer(folder, max_steps=6, strategy=strategy, global_batch_size=8)
    trainer.fit(task, loader(48, dtype=torch.float64))
    return read_values(task)


def test_an_optimizer_with_two_steps_trains_the_same(group, tmp_path):
    alone = train_sharp(tmp_path / "alone", "auto")
    for each in group(2).run(train_sharp, tmp_path, "ddp"):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-13)
