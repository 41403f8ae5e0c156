"""Teacher: moves towards its student like in the loop by hand, once for each update, and never otherwise."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.checkpoint.format.reader import Checkpoint
from lumen.errors import ConfigError
from tests.helpers.byol import ByHand, Byol, decay_by_cosine, make_student, train_by_hand
from tests.helpers.tasks import bare_trainer, loader, quiet_trainer

STEPS = 9


def is_same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], each) for name, each in expected.items())


def fit(folder, task, **options):
    trainer = bare_trainer(folder, **{"max_steps": STEPS} | options)
    trainer.fit(task, loader(48, shuffle=False, dtype=torch.float64))
    return task.student.state_dict(), task.teacher.module.state_dict()


def constant(step):
    return 0.9


@pytest.mark.parametrize(
    ("options", "decay", "by_hand"),
    [
        ({"decay": 0.9}, constant, {}),
        ({"decay": 0.8, "final_decay": 1.0}, lambda step: decay_by_cosine(0.8, 1.0, step, STEPS), {}),
        ({"decay": 0.8, "final_decay": 1.0, "steps": 5}, lambda step: decay_by_cosine(0.8, 1.0, min(step, 5), 5), {}),
        ({"decay": lambda step: min(1 - 1 / (step + 1), 0.9)}, lambda step: min(1 - 1 / (step + 1), 0.9), {}),
        ({"decay": 0.9, "norm": True}, constant, {}),
        ({"decay": 0.9, "norm": True, "eval_mode": True}, constant, {"eval_mode": True, "buffers": True}),
        ({"decay": 0.9, "norm": True, "use_buffers": True}, constant, {"buffers": True}),
    ],
    ids=["constant", "cosine", "cosine of its own length", "function", "norm", "eval mode", "buffers"],
)
def test_teacher_equals_the_manual_loop(tmp_path, options, decay, by_hand):
    online, target = fit(tmp_path, task := Byol(**options))
    expected = train_by_hand(decay, STEPS, norm=options.get("norm", False), **by_hand)
    assert is_same(online, expected[0])
    assert is_same(target, expected[1])
    assert task.teacher.training != options.get("eval_mode", False)


@pytest.mark.parametrize(("kind", "options"), [(Byol, {"accumulate_grad_batches": 2}), (ByHand, {})])
def test_only_updates_move_it_also_by_hand(tmp_path, kind, options):
    online, target = fit(tmp_path, kind(decay=0.9), max_steps=5, **options)
    expected = train_by_hand(constant, 5, accumulate=2)
    assert is_same(online, expected[0])
    assert is_same(target, expected[1])


def test_skipped_updates_do_not_move_the_teacher(tmp_path):
    precision = lumen.precision.Float16(init_scale=2.0**40)
    task, seen = Byol(dtype=torch.float32, decay=0.5), []

    class Watching(lumen.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            seen.append((trainer.global_step, task.teacher.module[0].weight.clone()))

    first = task.teacher.module[0].weight.clone()
    trainer = bare_trainer(tmp_path, precision=precision, callbacks=[Watching()], max_epochs=1, max_steps=1)
    trainer.fit(task, loader(400))
    assert precision.skipped_updates > 1
    assert len(seen) == precision.skipped_updates + 1
    assert all(torch.equal(weight, first) for step, weight in seen if step == 0)
    assert torch.equal(seen[-1][1], torch.lerp(first, task.student[0].weight, 0.5))


@pytest.mark.parametrize("task", [Byol, ByHand])
def test_resumed_run_is_exact_and_saves_student_once(tmp_path, task):
    def run(folder, max_steps):
        trained = task(decay=0.7, final_decay=1.0, steps=STEPS, norm=True)
        trainer = quiet_trainer(folder, max_steps=max_steps, resume="auto")
        trainer.fit(trained, loader(48, dtype=torch.float64))
        return trainer, trained

    _, whole = run(tmp_path / "whole", STEPS)
    for steps in (2, 7, STEPS):
        trainer, parts = run(tmp_path / "parts", steps)
    assert is_same(parts.state_dict(), whole.state_dict())
    newest = find_checkpoints(trainer.run_directory / "checkpoints")[-1]
    checkpoint = Checkpoint.open(newest)
    names = [name for name in checkpoint.list_tensor_names("model") if "2.0.linear.weight" in name]
    assert names == ["student.2.0.linear.weight", "teacher.module.2.0.linear.weight"]
    assert not any(name.startswith("teacher") for name in checkpoint.list_tensor_names("optimizer"))
    assert not checkpoint.aliases
    assert is_same(task.load_from_checkpoint(newest).state_dict(), whole.state_dict())


def test_layers_of_configure_model_begin_alike(tmp_path):
    class Late(Byol):
        def __init__(self):
            lumen.TaskModule.__init__(self)

        def configure_model(self):
            self.student = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
            self.predictor, self.teacher = nn.Linear(3, 3), lumen.Teacher(self.student, decay=1.0)

        def on_fit_start(self):
            self.first = {name: each.clone() for name, each in self.student.state_dict().items()}

    task = Late()
    bare_trainer(tmp_path, max_steps=2).fit(task, loader(48))
    assert is_same(task.teacher.module.state_dict(), task.first)
    assert not torch.equal(task.student[0].weight, task.first["0.weight"])


@pytest.mark.filterwarnings(  # torch's own code warns when it compiles
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.torch.jit:DeprecationWarning"
)
def test_it_moves_without_a_recompilation(tmp_path):
    counter = CompileCounter()
    compiled = Byol(decay=0.9)
    fit(tmp_path, compiled, compile={"backend": counter}, max_steps=2)
    made = counter.frame_count
    assert made
    compiled, counter.frame_count = Byol(decay=0.9), 0
    online, target = fit(tmp_path, compiled, compile={"backend": counter})
    assert counter.frame_count == made
    assert is_same(target, fit(tmp_path, Byol(decay=0.9))[1])
    assert not is_same(online, target)


def test_nothing_else_trains_it(tmp_path):
    task = Byol(decay=1.0)
    task.unfreeze()
    assert [name for name, each in task.named_parameters() if not each.requires_grad] == [
        f"teacher.module.{name}" for name, _ in task.student.named_parameters()
    ]
    first = {name: each.clone() for name, each in task.teacher.module.state_dict().items()}
    _, target = fit(tmp_path, task)
    assert is_same(target, first)


def test_it_may_start_again_from_the_student():
    task = Byol()
    nn.init.ones_(task.student[0].weight)
    task.teacher.restart()
    assert is_same(task.teacher.module.state_dict(), task.student.state_dict())
    nn.init.zeros_(task.student[0].weight)
    task.teacher.follow(0)
    torch.testing.assert_close(task.teacher.module[0].weight, torch.full((8, 6), 0.996, dtype=torch.float64))


def test_teacher_averages_only_running_statistics_of_buffers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("queue", torch.ones(2))
    teacher = lumen.Teacher(model, decay=0.5, eval_mode=True)
    model.queue.fill_(3.0)
    model[1].running_mean.fill_(2.0)
    teacher.follow(0)
    assert teacher.module.queue.tolist() == [3.0, 3.0]
    assert teacher.module[1].running_mean.tolist() == [1.0, 1.0]


def test_what_it_cannot_be_is_refused(tmp_path):
    for options, said in (
        ({"decay": 1.5}, "at least 0 and at most 1, found 1.5"),
        ({"decay": 0.9, "final_decay": -1.0}, "at least 0 and at most 1, found -1"),
        ({"decay": abs, "final_decay": 1.0}, "final_decay has no effect if decay is a function"),
        ({"steps": 3}, "steps=3 needs final_decay"),
        ({"steps": 0, "final_decay": 1.0}, "steps: must be at least 1, found 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            lumen.Teacher(make_student(), **options)
    with pytest.raises(ConfigError, match=r"expected a module of the task, .* found Byol"):
        lumen.Teacher(Byol())
    made = make_student()
    made.kept = made[0](torch.ones(1, 6, dtype=torch.float64))
    with pytest.raises(ConfigError, match="Sequential cannot be copied: Only Tensors created explicitly"):
        lumen.Teacher(made)
    task = Byol()
    task.student = make_student()
    with pytest.raises(ConfigError, match="the student, a Sequential, is not a module of Byol"):
        fit(tmp_path, task)
    with pytest.raises(ConfigError, match="Set max_steps, or steps of the teacher"):
        fit(tmp_path, Byol(final_decay=1.0), max_steps=-1, max_time="00:00:01:00")
    with pytest.raises(ConfigError, match=r'torch.bfloat16, which .* Train with precision="bf16"'):
        fit(tmp_path, Byol(), precision="bf16-true")
    with pytest.raises(ConfigError, match="at most 1, found 3"):
        fit(tmp_path, Byol(decay=lambda step: 3.0))
