"""Order, device and number of CUDA calls, shown without a device.

`test_cuda.py` tests the effect on a device.
"""

import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import lumen
from lumen.checkpoint.save.snapshot import Snapshot, allocate_pinned_like
from lumen.data.nested import CopyStream, _get_copy_stream, move_batch
from lumen.data.rank_checks import share_batch
from lumen.data.windows import LoadedBatch
from lumen.distributed.process_groups import CUDA_BACKENDS
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError, NonFiniteLoss, ProcessStuck
from lumen.precision import make_precision
from lumen.run.anomalies import NonFiniteCheck
from lumen.run.open_loaders import _make_rank_slice
from lumen.strategies import SingleDevice, gather_from_data_ranks
from lumen.strategies.factory import choose_device, make_strategy
from lumen.task.compile import Compilation
from tests.helpers.cuda_order import Synced
from tests.helpers.tasks import Regression, bare_trainer, loader

CUDA = torch.device("cuda")
PACKED = pack_sequence([torch.ones(3)])


# ---------------------------------------------------------------------- batches


@pytest.fixture
def requested_moves(monkeypatch):
    """Record requests to move tensors: (device, whether the host continues at once)."""
    asked, to = [], torch.Tensor.to

    def noted(tensor, *given, non_blocking=False, **options):
        device, *rest = given or [options.pop("device")]
        asked.append((torch.device(device).type, non_blocking))
        return to(tensor, "cpu", *rest, **options)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    return asked


@pytest.mark.parametrize(("device", "beside"), [("cpu", False), ("mps", False), ("cuda", True)])
def test_copies_are_synchronous_except_to_cuda(requested_moves, device, beside):
    move_batch({"a": torch.ones(2), "b": [PACKED]}, torch.device(device))
    assert set(requested_moves) == {(device, beside)}
    assert len(requested_moves) >= 2


class Device:
    """Fake device whose streams and events record their calls, in order."""

    def __init__(self, monkeypatch):
        self.log, self.events = [], 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "copies"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(self, f"current of {device}"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("kept for current"))

    @contextmanager
    def on(self, stream):
        self.log.append(f"on {stream.name}")
        yield


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_event(self, event):
        self.device.log.append(f"wait for {event.number}")


class Event:
    def __init__(self, device):
        device.events += 1
        self.device, self.number, self.arrived = device, device.events, False

    def record(self, stream=None):
        self.device.log.append(f"event {self.number}" + (f" on {stream.name}" if stream else ""))

    def synchronize(self):
        self.arrived = True
        self.device.log.append(f"host waits for {self.number}")

    def query(self):
        return self.arrived


@pytest.fixture
def device(monkeypatch):
    _get_copy_stream.cache_clear()
    yield Device(monkeypatch)
    _get_copy_stream.cache_clear()


def test_the_host_is_two_copied_batches_ahead(device):
    copies = CopyStream(torch.device("meta"), None)  # its first event marks the end of the copies
    for number in range(1, 5):
        device.log.clear()
        assert copies.move_batch((torch.ones(1 << 14),))[0].is_meta
        begun = 2 + (number - 1) % 2
        waits = [f"host waits for {begun}"] if number > 2 else []
        on_copies = ["on copies", "kept for current", "event 1", "wait for 1"]
        assert device.log == [*waits, f"event {begun} on current of meta", *on_copies]


def test_small_batches_change_no_stream(device):
    copies = CopyStream(torch.device("meta"), None)
    assert copies.move_batch((torch.ones((1 << 14) - 1), "text"))[0].is_meta
    assert device.log == []


def test_runs_of_a_process_copy_on_one_stream(device):
    one, other = CopyStream(torch.device("meta"), None), CopyStream(torch.device("meta"), None)
    assert one._stream is other._stream


# ---------------------------------------------------------------------- losses


class OnDevice(torch.Tensor):
    """Tensor that claims to be on a second device."""

    is_cuda = True
    device = torch.device("cuda:1")


@pytest.fixture
def pinned_tensors(monkeypatch):
    """Record the pinned tensors that are made."""
    made, empty = [], torch.empty

    def pinned(*shape, pin_memory, **options):
        assert pin_memory
        made.append(empty(*shape, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", pinned)
    return made


def on_device(value):
    return torch.tensor(value).as_subclass(OnDevice)


def test_non_finite_check_names_the_step_of_loss(device, pinned_tensors):
    """The event is recorded on the device of the loss, not on the current device."""
    checks = NonFiniteCheck()
    for step, value in enumerate([0.5, float("nan"), 0.25], 1):
        checks.check(on_device(value), 1.0, lambda step=step: (step, 0, step))
    assert device.log == [f"event {number} on current of cuda:1" for number in (1, 2, 3)]
    with pytest.raises(NonFiniteLoss, match="the loss of step 2 "):
        checks.flush()


def test_checks_use_the_same_pinned_memory_again(device, pinned_tensors):
    checks = NonFiniteCheck()
    for step in range(100):
        checks.check(on_device(0.5), 1.0, lambda step=step: (step, 0, step))
        for scalar, *_ in checks._under_way:
            scalar.event.arrived = step % 10 == 9  # the device is ten steps behind
    assert device.events == len(pinned_tensors) <= 11


# ---------------------------------------------------------------------- devices


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(4, 3, 3), (1, 3, 0), (1, 0, 0)])
def test_process_with_one_visible_device_uses_it(monkeypatch, visible, local_rank, index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert choose_device("cuda", Processes(3, 4, local_rank, 4)) == torch.device("cuda", index)


def test_more_processes_than_devices_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="process 3 of 4 on this node has no device: only 2 devices are visible"):
        choose_device("cuda", Processes(3, 4, 3, 4))


@pytest.mark.parametrize("devices", [[0, 2], "0,2"])
def test_device_indices_suggest_cuda_visible_devices(devices):
    with pytest.raises(ConfigError, match="Choose devices with CUDA_VISIBLE_DEVICES"):
        make_strategy("auto", "cpu", devices)


def test_a_single_device_is_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cuda", "cpu"):
        SingleDevice(name).connect()
    assert chosen == [torch.device("cuda:1")]


def test_the_device_is_current_before_a_group_opens(monkeypatch):
    calls = []

    def open_group(backend, device_id, **options):
        calls.append((backend, device_id))
        raise RuntimeError("no device here")

    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", open_group)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test may have left a group open
    with pytest.raises(ProcessStuck, match="no device here"):
        Processes().connect(torch.device("cuda:1"))
    assert calls == [torch.device("cuda:1"), (CUDA_BACKENDS, torch.device("cuda:1"))]


def test_precision_check_does_not_touch_the_device(monkeypatch):
    monkeypatch.setattr(torch, "autocast", None)
    monkeypatch.setattr(torch.amp, "GradScaler", None)
    for name in ("bf16", "16-mixed", 64):
        make_precision(name).check(CUDA, CUDA)


def test_fp16_with_gradients_on_the_host_is_refused():
    make_precision("bf16").check(CUDA, torch.device("cpu"))
    make_precision("fp16").check(torch.device("cpu"), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"fp16 does not support FSDP\(cpu_offload=True\)\. .* Use precision: bf16"):
        make_precision("fp16").check(CUDA, torch.device("cpu"))


def test_peak_memory_is_reset_for_each_run(monkeypatch, tmp_path):
    def reset(device):
        raise LookupError(device)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    bare_trainer(tmp_path, max_steps=1).fit(Regression(), loader())
    with pytest.raises(LookupError, match="cuda"):
        bare_trainer(tmp_path, max_steps=1, strategy=SingleDevice("cuda")).fit(Regression(), loader())


# ---------------------------------------------------------------------- graphs


@pytest.mark.parametrize(
    ("setting", "replays"),
    [
        (False, False),
        (True, False),
        ({"mode": "default"}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"options": {"triton.cudagraphs": False}}, False),
    ],
)
def test_cuda_graphs_depend_on_the_compile_mode(setting, replays):
    assert Compilation(setting).replays_graphs(CUDA) is replays
    assert not Compilation(setting).replays_graphs(torch.device("cpu"))


class Sharding(lumen.Strategy):
    shards = True

    def setup(self, task):
        task.to("cpu")

    def call(self, step, *args):
        raise AssertionError

    def gradient_sync(self, *, last):
        raise AssertionError


@pytest.fixture
def step_marks(monkeypatch):
    """Count the marks of a new step, in a run that replays graphs."""
    marks = []
    monkeypatch.setattr(Compilation, "replays_graphs", lambda compilation, device: True)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    return marks


def test_cuda_graph_step_is_marked_for_every_batch(step_marks, tmp_path):
    trainer = bare_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=2)
    trainer.fit(Regression(), loader(), loader())
    assert len(step_marks) == 7 + 7 + 2
    trainer.predict(Regression(), loader())
    assert len(step_marks) == 7 + 7 + 2 + 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "overwrites the gradients of the previous micro-batch"),
        ({"accumulate_grad_batches": {9: 2}}, "overwrites the gradients of the previous micro-batch"),
        ({"global_batch_size": 16}, "overwrites the gradients of the previous micro-batch"),
        ({"strategy": Sharding()}, "this strategy gathers parameters at new addresses"),
    ],
    ids=["accumulate", "by epoch", "global_batch_size", "shards"],
)
def test_options_incompatible_with_cuda_graphs_are_rejected(step_marks, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, max_epochs=1, **options).fit(Regression(), loader())
    assert not step_marks


# ---------------------------------------------------------------------- several processes


class Recorded:
    """Processes that only record their arguments."""

    world_size, rank = 2, 0

    def for_user(self):
        return self

    def all_gather(self, value):
        return [value, value]

    def broadcast(self, value, source):
        return value


def test_pickled_collectives_move_tensors_to_the_host(requested_moves):
    strategy = SingleDevice()
    strategy.processes = Recorded()
    given = {"x": torch.ones(2), "y": [1, None]}
    for device, moves in (("cpu", 0), ("cuda", 1)):
        strategy.device = torch.device(device)
        for call in (strategy.all_gather, strategy.broadcast, partial(gather_from_data_ranks, strategy)):
            requested_moves.clear()
            call(given)
            assert requested_moves == [("cpu", False)] * moves


def test_lent_batch_is_moved_to_the_host(request, tmp_path):
    trainer = bare_trainer(tmp_path, max_steps=1)
    trainer.fit(Regression(), loader())
    run = trainer.run
    run.strategy.processes = run.processes = Recorded()
    run.strategy.device = torch.device("cuda")
    asked = request.getfixturevalue("requested_moves")
    share_batch(_make_rank_slice(run, 1, needs_dummies=True), 0, LoadedBatch(torch.ones(2), 2))
    assert asked == [("cpu", False)]


def test_synchronized_norms_allow_skipping_in_one_process(tmp_path):
    plain, synced = Synced(), Synced()
    plain.norm = nn.BatchNorm1d(1)
    synced.net.load_state_dict(plain.net.state_dict())
    for task in (plain, synced):
        bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=4).fit(task, loader())
    assert plain.global_step >= 1
    assert all(map(torch.equal, plain.net.parameters(), synced.net.parameters()))


# ---------------------------------------------------------------------- checkpoints


@pytest.fixture
def pinned_blocks(monkeypatch):
    """Record the bytes of each requested block of pinned memory, and how often unused blocks were released."""
    asked, empty = [], torch.empty

    def noted(*shape, pin_memory=False, **options):
        if pin_memory:
            asked.append(shape[0])
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", noted)
    return asked


def test_pinned_memory_is_allocated_in_shared_blocks(pinned_blocks):
    shapes = [(3, 1000), (), (0,), (700, 1000), (5,), (256, 1024), (100, 1000), (7, 3), (900, 1000)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]
    tensors = {
        ("model", f"{dtype} {shape}"): torch.ones(shape, dtype=dtype) * (number % 2)
        for number, (dtype, shape) in enumerate((dtype, shape) for dtype in dtypes for shape in shapes)
    }
    buffers = allocate_pinned_like(tensors)
    assert all((buffers[key].shape, buffers[key].dtype) == (each.shape, each.dtype) for key, each in tensors.items())
    for key, tensor in tensors.items():
        buffers[key].copy_(tensor)
    assert all(torch.equal(buffers[key], tensor) for key, tensor in tensors.items())  # the blocks do not overlap
    assert all(buffer.data_ptr() % 64 == 0 for buffer in buffers.values())
    needed = sum(tensor.nbytes for tensor in tensors.values())
    alone = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in tensors.values() if tensor.nbytes)
    assert all(size.bit_count() == 1 for size in pinned_blocks)  # torch would round up the size
    assert len(pinned_blocks) < len(tensors) / 2
    assert needed < sum(pinned_blocks) < needed + (alone - needed) / 4
    assert allocate_pinned_like({}) == {}


def test_snapshot_memory_is_reused_and_freed_at_end(pinned_blocks, monkeypatch):
    given_back = []
    monkeypatch.setattr("lumen.checkpoint.save.snapshot.empty_host_cache", lambda: given_back.append(list(alive)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: None))
    monkeypatch.setattr("lumen.checkpoint.save.snapshot.is_contiguous_on_host", lambda tensor: False)
    alive = weakref.WeakSet()
    snapshot, tensors = Snapshot(), {"a": torch.ones(600), "b": torch.ones(30, 10)}
    snapshot.reserve_memory({"model": tensors})
    for step in range(2):
        tensors["a"].fill_(step)
        copies = snapshot.start_copy({"model": tensors})["model"]
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
    assert len(pinned_blocks) == 1
    copies = snapshot.start_copy({"model": tensors | {"a": torch.ones(2000)}})["model"]
    assert len(pinned_blocks) == 2
    alive |= set(copies.values())
    del copies
    snapshot.close()
    assert given_back == [[]]
