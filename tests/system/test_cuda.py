"""CUDA: behaviour that needs a device; `test_cuda_order.py` tests the order of calls without one."""

import gc
import os
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.data.seeded_dataset import BatchRequest, SeededDataset
from lumen.errors import ConfigError, NonFiniteLoss
from tests.helpers import ROOT
from tests.helpers.jobs import find_free_port
from tests.helpers.tables import read_rows
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, weights

pytestmark = pytest.mark.cuda


class Classifier(lumen.TaskModule):
    def __init__(self, *, logs=False, weighs=False):
        super().__init__()
        self.logs, self.weighs = logs, weighs
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        self.losses = []

    def training_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.detach())
        if self.logs:
            self.log("loss", loss, on_epoch=True)
            self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return (loss, float(len(inputs))) if self.weighs else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Unsynced(Classifier):
    """Task that forbids the host to wait for the device from step 5 to step 105."""

    def on_before_zero_grad(self, optimizer):
        if self.global_step in (5, 105):
            torch.cuda.set_sync_debug_mode("error" if self.global_step == 5 else "default")

    def on_exception(self, exception):
        torch.cuda.set_sync_debug_mode("default")


class InTurns(Unsynced):
    """Task with two optimizers in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch):
        if self.global_step in (5, 105):
            torch.cuda.set_sync_debug_mode("error" if self.global_step == 5 else "default")
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[number].parameters(), 1e-2) for number in (0, 2)]


def batches(*, pin_memory):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(7200, 16, generator=generator), torch.randint(4, (7200,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=32, pin_memory=pin_memory)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ({}, {}),
        ({"logs": True}, {}),
        ({"logs": True}, {"log_every_n_steps": 1, "logger": "csv"}),
        ({"weighs": True}, {}),
        ({}, {"gradient_clip_val": 0.1}),
        ({}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        ({}, {"accumulate_grad_batches": 2}),
        ({"logs": True, "weighs": True}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ({}, {"callbacks": lambda: [lumen.EMA(0.9), lumen.ThroughputMonitor(), lumen.LearningRateMonitor()]}),
        ({"logs": True}, {"enable_progress_bar": True}),
    ],
    ids=["plain", "logs", "logs to a file", "weighs", "norm", "value", "accumulates", "all", "average", "bar"],
)
def test_no_step_waits_for_what_it_has_queued(tmp_path, precision, task, options):
    options = {"max_steps": 110, "precision": precision, "log_every_n_steps": 1000} | options
    trainer = quiet_trainer(tmp_path, accelerator="cuda", **options | {"callbacks": options.get("callbacks", list)()})
    trainer.fit(Unsynced(**task), batches(pin_memory=True))  # no epoch ends, where the host may wait
    assert trainer.global_step == 110


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_manual_optimization_never_synchronizes(tmp_path, precision):
    trainer = bare_trainer(tmp_path, accelerator="cuda", precision=precision, max_steps=110)
    trainer.fit(task := InTurns(), batches(pin_memory=True))
    assert trainer.global_step == 110
    assert len(task.losses) == 220


def test_batches_copied_on_side_stream_are_equal(tmp_path):
    losses = []
    for device, pin_memory in (("cpu", False), ("cuda", False), ("cuda", True)):
        torch.manual_seed(0)
        task = Classifier()
        quiet_trainer(tmp_path, accelerator=device, max_steps=4).fit(task, batches(pin_memory=pin_memory))
        losses.append(torch.stack(task.losses).cpu())
    torch.testing.assert_close(losses[1], losses[0])
    assert torch.equal(losses[1], losses[2])


# ---------------------------------------------------------------------- compiled, replayed as graphs


class TwoModules(Classifier):
    """Task with two compiled modules in sequence."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def forward_loss(self, batch):
        return torch.nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def training_step(self, batch):
        return self.forward_loss(batch)

    def validation_step(self, batch):
        self.log("val", self.forward_loss(batch))

    def predict_step(self, batch):
        return self.head(self.net(batch[0]))


GRAPHS = {"mode": "reduce-overhead"}


@pytest.mark.time_limit(300)
@pytest.mark.filterwarnings("ignore")  # a warning of the compiler
def test_cuda_graphs_equal_eager_modules(tmp_path):
    found = []
    for setting in (None, GRAPHS):
        torch.manual_seed(0)
        task = TwoModules()
        options = {"accelerator": "cuda", "compile": setting, "matmul_precision": "highest"}
        trainer = bare_trainer(tmp_path, max_steps=24, val_check_interval=8, limit_val_batches=20, **options)
        trainer.fit(task, batches(pin_memory=True), batches(pin_memory=True))
        value = trainer.callback_metrics["val"]
        predictions = trainer.predict(task, batches(pin_memory=True))
        assert {each.device.type for each in predictions} == {"cpu"}
        found.append((weights(task).cpu(), value, torch.cat(predictions)))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(compiled), torch.as_tensor(plain), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # a warning of the compiler
def test_graphs_and_several_micro_batches_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="gradients of a micro-batch"):
        bare_trainer(tmp_path, accelerator="cuda", compile=GRAPHS, accumulate_grad_batches=2, max_steps=1).fit(
            TwoModules(), batches(pin_memory=True)
        )


# ---------------------------------------------------------------------- losses, resume, fp16, memory


class Breaks(Classifier):
    """Task whose loss is NaN from one step on."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss * float("nan") if self.global_step + 1 >= 7 else loss


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nan_loss_names_its_step_and_saves_nothing(tmp_path, asynchronous):
    saves = lumen.ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, asynchronous=asynchronous)
    trainer = quiet_trainer(tmp_path, accelerator="cuda", max_steps=50, callbacks=[saves])
    with pytest.raises(NonFiniteLoss, match="the loss of step 7 "):
        trainer.fit(Breaks(), batches(pin_memory=True))
    steps = sorted(path.name for path in (tmp_path / "runs/run/checkpoints").glob("step-*"))
    assert steps[-1] == "step-00000006"


class Drops(Classifier):
    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.Dropout(0.3))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumed_run_is_exact(tmp_path, precision, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ends = []
    for folder, parts in (("whole", [20]), ("parts", [7, 20])):
        for steps in parts:
            torch.manual_seed(0)
            task = Drops()
            trainer = quiet_trainer(
                tmp_path / folder, accelerator="cuda", precision=precision, max_steps=steps, resume="auto",
                deterministic=True,
            )  # fmt: skip
            trainer.fit(task, batches(pin_memory=True))
        ends.append(weights(task).cpu())
    assert torch.equal(*ends)


class Overflows(Classifier):
    """Task whose gradients overflow in the third step."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss * 1e38 if self.trainer.run.progress.micro_batches == 3 else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2, fused=True)


def test_fused_optimizer_skips_overflow_without_counting_a_step(tmp_path):
    trainer = bare_trainer(tmp_path, accelerator="cuda", precision="fp16", max_epochs=1, limit_train_batches=10)
    trainer.fit(task := Overflows(), batches(pin_memory=True))
    assert trainer.global_step == 9
    assert torch.isfinite(weights(task)).all()


class Slow(Classifier):
    """Task whose host is done with a step long before the device."""

    def training_step(self, batch):
        torch.cuda._sleep(20_000_000)
        return super().training_step((batch[0][:32, :16], batch[1][:32]))


def test_prefetched_batches_do_not_accumulate(tmp_path):
    size = 1 << 22
    data = TensorDataset(torch.zeros(64, size), torch.zeros(64, dtype=torch.int64))
    trainer = bare_trainer(tmp_path, accelerator="cuda", max_steps=60)
    trainer.fit(Slow(), DataLoader(data, 1, pin_memory=True))
    assert torch.cuda.max_memory_allocated() < 6 * 4 * size


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_allocator_stats_are_recorded_without_synchronizing(tmp_path):
    trainer = quiet_trainer(
        tmp_path, accelerator="cuda", max_steps=120, log_every_n_steps=30, callbacks=[lumen.DeviceStatsMonitor()]
    )
    trainer.fit(Unsynced(), batches(pin_memory=True))
    found = [row for row in read_rows(trainer.run_directory / "system.csv") if row["cuda_allocated_mb"]]
    assert [row["step"] for row in found] == ["30", "60", "90", "120"]
    for row in found:
        assert 0 < float(row["cuda_allocated_mb"]) <= float(row["cuda_allocated_peak_mb"])
        assert float(row["cuda_allocated_mb"]) <= float(row["cuda_reserved_mb"])


@pytest.mark.cuda(devices=2)
def test_a_loss_on_another_device_is_checked_there(tmp_path):
    class Elsewhere(Breaks):
        def training_step(self, batch):
            return super().training_step(batch).to("cuda:1")

    with pytest.raises(NonFiniteLoss, match="the loss of step 7 "):
        bare_trainer(tmp_path, accelerator="cuda", max_steps=50).fit(Elsewhere(), batches(pin_memory=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("fused", [False, True])
def test_run_equals_manual_loop_exactly(tmp_path, precision, fused, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    data, ends = batches(pin_memory=True), []
    for by_hand in (True, False):
        torch.manual_seed(0)
        task = Classifier()
        task = task.double() if precision == "fp64" else task
        task.configure_optimizers = lambda task=task: torch.optim.AdamW(task.parameters(), 1e-2, fused=fused)
        if by_hand:
            torch.use_deterministic_algorithms(True)
            task.cuda()
            optimizer, scaler = task.configure_optimizers(), torch.amp.GradScaler(enabled=precision == "fp16")
            for batch in data:
                inputs, targets = (part.cuda(non_blocking=True) for part in batch)
                with torch.autocast("cuda", dtype, enabled=dtype is not None):
                    loss = task.training_step((inputs.to(next(task.parameters()).dtype), targets))
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(task.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            torch.use_deterministic_algorithms(False)
        else:
            options = {"precision": precision, "gradient_clip_val": 0.5, "deterministic": True, "max_epochs": 1}
            bare_trainer(tmp_path, accelerator="cuda", **options).fit(task, data)
        ends.append((weights(task).cpu(), torch.stack(task.losses).cpu()))
    assert torch.equal(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][0], ends[1][0])


# ---------------------------------------------------------------------- full memory, other devices, workers


class Wide(lumen.TaskModule):
    """Task that takes 256 KB for each sample, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 1 << 15), torch.nn.Tanh(), torch.nn.Linear(1 << 15, 1)
        ).double()
        self.sizes = []

    def training_step(self, batch):
        self.sizes.append(len(batch[0]))
        return self.net(batch[0].double()).square().mean()

    def predict_step(self, batch):
        return self.net(batch[0].double())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


@pytest.fixture
def little_memory():
    """Limit the memory to 600 samples of `Wide`."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((600 * 2 * (1 << 18) + torch.cuda.memory_reserved()) / whole)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_batch_halved_on_oom_gives_the_same_update(tmp_path, little_memory):
    inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0))
    data, ends = TensorDataset(inputs), []
    for size, options in ((256, {"accumulate_grad_batches": 8}), (2048, {"halve_on_oom": True})):
        task = Wide()
        trainer = bare_trainer(tmp_path, accelerator="cuda", precision="fp64", max_epochs=2, **options)
        trainer.fit(task, DataLoader(data, size))
        ends.append(weights(task).cpu())
        predicted = trainer.predict(task, DataLoader(data, size))
    assert task.sizes[:2] == [2048, 1024]
    assert {*task.sizes[3:]} <= {256, 512}
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)
    assert torch.cat(predicted).shape == (2048, 1)


def test_largest_batch_size_that_fits_is_found(tmp_path, little_memory):
    class Sized(Wide):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(4096, 16)), self.batch_size)

    trainer = bare_trainer(tmp_path, accelerator="cuda", precision="fp64", max_steps=1)
    assert 128 <= lumen.Tuner(trainer).scale_batch_size(Sized()) <= 600


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_a_run_goes_on_on_another_device(tmp_path, first):
    second = "cuda" if first == "cpu" else "cpu"
    ends = []
    for name, parts in (("whole", [(first, 20)]), ("parts", [(first, 7), (second, 20)])):
        for device, steps in parts:
            torch.manual_seed(0)
            task = Classifier(logs=True).double()
            options = {"precision": "fp64", "max_steps": steps, "resume": "auto"}
            quiet_trainer(tmp_path / name, accelerator=device, **options).fit(task, batches(pin_memory=False))
        ends.append(weights(task).cpu())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


class Collects(torch.utils.data.Dataset):
    """Data set that collects garbage in the reading process, which aborts on CUDA events of another process."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        gc.collect()
        return torch.randn(16), torch.tensor(index % 4)


def test_forked_workers_do_not_free_cuda_objects(tmp_path):
    gc.disable()
    try:
        for _ in range(3):
            task = Classifier(logs=True)
            task.itself = [task]  # in a cycle with the run
            trainer = quiet_trainer(tmp_path, accelerator="cuda", max_epochs=2)
            trainer.fit(task, DataLoader(Collects(), 8, num_workers=2, pin_memory=True))
            assert trainer.global_step == 16
            del task, trainer
    finally:
        gc.enable()


class Draws(torch.utils.data.Dataset):
    """Draws its samples on the device."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randn(16, device="cuda")


def test_draws_on_device_depend_on_sample_alone():
    torch.cuda.init()
    collate, requests = torch.utils.data.default_collate, [(0, [0, 1, 2, 3]), (2, [2, 3])]
    whole, part = (
        SeededDataset(Draws(), collate, 0, single=False)[BatchRequest(0, start, indices, False)]
        for start, indices in requests
    )
    assert torch.equal(whole[2:], part)
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize("draws", [False, True])
def test_draw_on_device_is_detected(draws):
    torch.cuda.init()
    data = Draws() if draws else [torch.full((16,), index, device="cuda") for index in range(8)]
    seeded = SeededDataset(data, torch.utils.data.default_collate, 0, single=False)
    for start in (0, 4):
        seeded[BatchRequest(0, start, range(start, start + 4), False)]
    assert seeded.has_drawn.value is draws


# ---------------------------------------------------------------------- several processes

PREDICT = """
import sys, torch, torch.distributed as dist, lumen
from torch.utils.data import DataLoader, TensorDataset

class Late(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(1024))

    def predict_step(self, batch):
        inputs = batch[0]
        for _ in range(40):  # keeps the device behind the host
            inputs = inputs @ self.weight
        return inputs

dist.init_process_group("gloo")  # NCCL refuses two processes on one device
inputs = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
trainer = lumen.Trainer(
    accelerator="cuda", strategy="ddp", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, matmul_precision="highest",
)
predictions = trainer.predict(Late(), DataLoader(TensorDataset(inputs), 2, pin_memory=True))
assert {each.device.type for each in predictions} == {"cpu"}
assert torch.equal(torch.cat(predictions), inputs)
print("the same")
"""
TRAIN = """
import sys, torch, torch.distributed as dist, lumen
from tests.helpers.tasks import Regression, loader, weights

def trained(strategy):
    task = Regression(dtype=torch.float64)
    trainer = lumen.Trainer(
        accelerator="cuda", strategy=strategy, precision="fp64", max_epochs=3, global_batch_size=8, seed=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(task, loader(50, 4, dtype=torch.float64), val_dataloaders=loader(23, 4, dtype=torch.float64))
    return weights(task).cpu(), trainer.callback_metrics["val_loss"]

dist.init_process_group("gloo")
one, other = trained("ddp"), torch.load(sys.argv[1], weights_only=True)
torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=1e-14)
assert abs(one[1] - other[1]) < 1e-12
print("the same")
"""
FAIL = """
import lumen, os, torch
from lumen.errors import TrainingError
from tests.system.test_cuda import Classifier, batches

class Fails(Classifier):
    def training_step(self, batch):
        if self.global_step == 3 and os.environ["RANK"] == "1":
            raise TrainingError("a mistake on one rank")
        return super().training_step(batch)

lumen.Trainer(accelerator="cuda", strategy="ddp", max_steps=50, enable_progress_bar=False).fit(
    Fails(), batches(pin_memory=True))
"""


SYNCHRONIZED = """
import torch, lumen
from torch.utils.data import DataLoader, TensorDataset

class Normed(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def training_step(self, batch):
        assert isinstance(self.norm, torch.nn.SyncBatchNorm)
        return self.norm(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) + torch.arange(8.0)[:, None]
task = Normed()
trainer = lumen.Trainer(
    accelerator="cuda", strategy="ddp", sync_batchnorm=True, max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(task, DataLoader(TensorDataset(inputs), 4))
torch.testing.assert_close(task.norm.running_mean.cpu(), 0.1 * inputs.mean(0))
torch.testing.assert_close(task.norm.running_var.cpu(), 0.9 + 0.1 * inputs.var(0))
print("of all samples")
"""

CRAMPED = """
import os, torch, lumen
from torch.utils.data import DataLoader, TensorDataset
from tests.helpers.sharded import unshard
from tests.system.test_cuda import Wide

def trained(size, **options):
    task = Wide()
    trainer = lumen.Trainer(
        accelerator="cuda", strategy=lumen.FSDP(wrap="Linear"), precision="fp64", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )
    trainer.fit(task, DataLoader(TensorDataset(inputs), size))
    return torch.cat([unshard(each).flatten() for each in task.parameters()]), task.sizes

inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
expected, _ = trained(256, accumulate_grad_batches=8)
if os.environ["RANK"] == "1":
    torch.cuda.empty_cache()
    share = 600 * 2 * (1 << 18) + torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(share / torch.cuda.get_device_properties(0).total_memory)
found, sizes = trained(2048, halve_on_oom=True)
assert sizes.count(2048) == 1 and max(sizes[-4:]) <= 512, sizes
torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
print("the same")
"""


def run_two_processes(code, folder, limit_s, *arguments, own_device):
    """Run code in two processes; return their exit codes, outputs, and the seconds that both took."""
    port = find_free_port()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    began_s, started = time.monotonic(), []
    for rank in (0, 1):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank if own_device else 0)}
        place |= {"LOCAL_WORLD_SIZE": "2"} if own_device else {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
        place |= {"GROUP_RANK": "0" if own_device else str(rank)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                cwd=folder,
                env={**os.environ, **world, **place},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [process.communicate(timeout=limit_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], outputs, time.monotonic() - began_s


def test_predictions_of_two_ranks_match_their_samples(tmp_path):
    codes, outputs, _ = run_two_processes(PREDICT, tmp_path, 80, own_device=False)
    assert codes == [0, 0], outputs
    assert all("the same" in output for output in outputs)


def test_two_processes_train_what_one_does(tmp_path):
    task = Regression(dtype=torch.float64)
    trainer = bare_trainer(tmp_path, accelerator="cuda", precision="fp64", max_epochs=3, global_batch_size=8)
    data = [loader(samples, 4, dtype=torch.float64) for samples in (50, 23)]
    trainer.fit(task, data[0], val_dataloaders=data[1])
    torch.save((weights(task).cpu(), float(trainer.callback_metrics["val_loss"])), tmp_path / "alone.pt")
    codes, outputs, _ = run_two_processes(TRAIN, tmp_path, 80, str(tmp_path / "alone.pt"), own_device=False)
    assert codes == [0, 0], outputs
    assert all("the same" in output for output in outputs)


@pytest.mark.cuda(devices=2)
def test_error_on_one_rank_ends_both_quickly(tmp_path):
    codes, outputs, took_s = run_two_processes(FAIL, tmp_path, 100, own_device=True)
    assert codes == [1, 1], outputs
    assert "a mistake on one rank" in outputs[1]
    assert took_s < 60


@pytest.mark.cuda(devices=2)
def test_sync_batchnorm_uses_samples_of_both_ranks(tmp_path):
    codes, outputs, _ = run_two_processes(SYNCHRONIZED, tmp_path, 100, own_device=True)
    assert codes == [0, 0], outputs
    assert all("of all samples" in output for output in outputs)


@pytest.mark.cuda(devices=2)
def test_fsdp_continues_if_one_rank_lacks_memory(tmp_path):
    codes, outputs, _ = run_two_processes(CRAMPED, tmp_path, 100, own_device=True)
    assert codes == [0, 0], outputs
    assert all("the same" in output for output in outputs)
