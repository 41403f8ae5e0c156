"""Cases to measure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

SYSTEMS = {
    "hand": "by hand",
    "again": "by hand, again (A/A)",
    "hand-seeded": "by hand, each batch seeded",
    "hand-summed": "by hand, one sum more a step",
    "hand-fused": "by hand, fused AdamW",
    "hand-sliced": "by hand, fused AdamW, batches cut by slicing",
    "lumen": "Lumen",
    "lumen-own": "Lumen's own Python",
    "lumen-at-once": "Lumen, asynchronous=False",
    "lumen-exact": "Lumen, reduction=exact",
    "lightning": "Lightning",
    "lightning-async": "Lightning, AsyncCheckpointIO",
    "accelerate": "Accelerate",
    "ignite": "Ignite",
}
PEERS = ("lightning", "accelerate", "ignite")
ALL = ("hand", "again", "lumen", *PEERS)
WITH_SEEDS = ("hand", "again", "hand-seeded", "lumen", *PEERS)

Measure = Literal["cpu_s", "wall_s", "first_s", "peak_mb", "calls", "gap_s", "blocked_s", "lost_s"]


@final
@dataclass(frozen=True)
class Case:
    """Case to measure for several systems.

    Attributes:
        name: Name on the command line.
        about: Description in one line, for the reports.
        kind: Name of the function of a system's module; `import` and `help` are commands.
        systems: Systems that support the case.
        model: `mlp` (16-64-64-4), `deep` (300 small linear layers, 600 tensors), `gpt` (0.8 M parameters), `gpt-wide`
            (14 M), `linears` (100 M) or `gpt2` (124 M).
        tensors: True for a `TensorDataset`, False for a dataset as users write it.
        draws: True if the dataset draws an unused random number for each sample.
        stream: True for an iterable dataset.
        loaders: Number of loaders to evaluate, each with a part of the batches.
        epoch: Number of batches in an epoch.
        epochs: Number of measured epochs, after one epoch of warm-up.
        turns: Number of turns in an epoch; the systems run in turns.
        batch_size: Number of samples in a batch of one process.
        accumulate: Number of batches in an optimizer step.
        clip: Largest norm of the gradient, or None.
        optimizers: Number of optimizers that the task steps itself, each with a part of the parameters; 0 for automatic
            optimization.
        logs: Number of names under which each step logs the loss.
        full: True for a progress bar in a terminal, and TensorBoard.
        metric: Value of the evaluation: `loss`, the mean loss; `accuracy`, a torchmetrics object; or None.
        precision: `fp32`, `bf16` or `fp16`, the last with a gradient scaler.
        ema: True for an exponential moving average of the parameters, which is the model at the end.
        ranks: Number of processes of DDP.
        sharded: True for FSDP2 in place of DDP.
        workers: Number of workers of the loader.
        lr: Learning rate of the optimizer.
        fused: Systems that use `AdamW(fused=True)`: "no", "yes", or "not by hand" for all but the reference.
        device: `cpu` or `cuda`.
        compiled: True to use torch.compile.
        save_every: Number of optimizer steps between two saves.
        measure: Compared value: `cpu_s` or `wall_s` per batch; `first_s`, CPU seconds from the start of the process to
            the end of the first step; `peak_mb`; `calls` of Python and C functions per batch; `gap_s`, seconds of a
            batch in which the device is idle, by a trace; `blocked_s`, seconds that the loop waits for a save; or
            `lost_s`, the same with the slowdown of later steps.
        also: Further compared values.
        tolerance: Largest relative difference of the final loss from the loop by hand, for different kernels; 0 for
            bitwise identical loss and parameters.
        goal: Goal for Lumen's ratio, or a text for a different goal.
        rounds: Largest number of rounds.
    """

    name: str
    about: str
    kind: Literal["train", "evaluate", "import", "help", "checkpoint", "nothing"] = "train"
    systems: tuple[str, ...] = ALL
    model: str = "mlp"
    tensors: bool = False
    draws: bool = False
    stream: bool = False
    loaders: int = 1
    epoch: int = 250
    epochs: int = 8
    turns: int = 2
    batch_size: int = 32
    accumulate: int = 1
    clip: float | None = None
    optimizers: int = 0
    logs: int = 0
    full: bool = False
    metric: Literal["loss", "accuracy"] | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    ema: bool = False
    ranks: int = 1
    sharded: bool = False
    workers: int = 0
    lr: float = 1e-3
    fused: Literal["no", "yes", "not by hand"] = "no"
    device: str = "cpu"
    compiled: bool = False
    save_every: int = 0
    measure: Measure = "cpu_s"
    also: tuple[Measure, ...] = ()
    tolerance: float = 0.0
    goal: float | str | None = None
    rounds: int = 1000

    @property
    def takes_turns(self) -> bool:
        """True if the processes of all systems run in turns, False if they run one after the other."""
        return self.measure in ("cpu_s", "wall_s") and self.kind in ("train", "evaluate", "nothing")

    @property
    def batches(self) -> int:
        """Number of batches of one process. The last clock reading is at the start of the last batch."""
        return self.epoch * (self.epochs + 1)

    @property
    def definition(self) -> dict[str, Any]:
        """Everything that figures depend on, as plain data for `results.json`."""
        fields = asdict(self) | {"also": list(self.also)}
        left_out = ["about", "systems", "goal", "rounds"]
        usual = {
            "draws": False, "stream": False, "loaders": 1, "ema": False, "sharded": False, "optimizers": 0, "lr": 1e-3,
        }  # fmt: skip
        left_out += [name for name in usual if fields[name] == usual[name]]
        return {name: fields[name] for name in fields if name not in left_out}

    def small(self) -> Case:
        """Return a tiny version of the case, for tests."""
        model = "gpt-small" if self.model.startswith("gpt") else "mlp"
        saves = {"save_every": 6} if self.save_every else {}
        return replace(self, epoch=4 * self.accumulate, epochs=1, turns=1, batch_size=4, model=model, **saves)


_GPT = {"model": "gpt", "batch_size": 8, "epoch": 40, "epochs": 3, "turns": 4}
_EXACT = {"systems": ("hand", "again", "lumen", "lumen-exact"), "also": ("wall_s",)}
_EVALUATION = {"kind": "evaluate", "epoch": 1000, "epochs": 4}

_CASES = [
    Case("tiny", "MLP 16-64-64-4, 32 samples a step, AdamW", systems=WITH_SEEDS, goal=1.03),
    Case("tiny-draws", "tiny, the data set draws a random number for each sample", draws=True,
         systems=("hand", "again", "lumen")),
    Case("tiny-log1", "tiny, the loss logged in every step", logs=1, goal=1.06),
    Case("tiny-log10", "tiny, the loss logged under ten names", logs=10, goal=1.20),
    Case("tiny-full", "tiny-log1 with progress bar and TensorBoard", logs=1, full=True, goal=1.10),
    Case(
        "tiny-tensor", "tiny on a TensorDataset; all but the loop by hand with fused AdamW",
        "train", ("hand", "again", "hand-fused", "hand-sliced", "lumen", *PEERS), tensors=True,
        fused="not by hand", tolerance=0.02, goal=0.60,
    ),
    Case("nothing", "a step in which nothing is computed; Lumen's own Python: without the C calls that seed",
         kind="nothing", systems=("hand", "again", "lumen", "lumen-own"), epoch=20_000, epochs=5, turns=1,
         goal="15 µs of its own Python"),
    Case("calls", "function calls of a step of tiny, by cProfile", measure="calls", epochs=1, turns=1, rounds=1),
    Case("calls-log1", "function calls of a step of tiny-log1", logs=1, measure="calls", epochs=1, turns=1, rounds=1),
    Case("accumulate", "tiny, 8 batches a step", accumulate=8, epoch=256, systems=WITH_SEEDS, goal=1.03),
    Case("clip", "tiny, gradient norm at most 1", clip=1.0, goal=1.03),
    Case("manual", "tiny, by two optimizers that the task moves itself", optimizers=2, goal=1.10,
         systems=("hand", "again", "lumen", "lightning")),
    Case("stream", "tiny on an iterable data set", stream=True, goal=1.03),
    Case("ema", "300 linear layers, 600 tensors, an exponential moving average of all of them", model="deep", ema=True,
         systems=("hand", "again", "lumen"), fused="yes", epoch=40, goal=1.03),
    Case("tiny-fp16", "tiny in fp16 with a gradient scaler", precision="fp16", goal=1.03),
    Case("workers2", "tiny, 2 worker processes (their CPU time counts)", workers=2, goal=1.03),
    Case("evaluation", "the MLP evaluated", systems=WITH_SEEDS, goal=1.03, **_EVALUATION),
    Case("evaluation-loss", "and its mean loss", metric="loss", goal=1.03, **_EVALUATION),
    Case("evaluation-metric", "and a torchmetrics accuracy", metric="accuracy", goal=1.03, **_EVALUATION),
    Case("evaluation-two", "the MLP evaluated on two loaders", loaders=2, goal=1.03, **_EVALUATION,
         systems=("hand", "again", "lumen")),
    Case("gpt", "GPT, 4 layers of 128, 8 x 64 tokens a step", goal=1.01, **_GPT),
    Case("gpt-bf16", "gpt in bf16", precision="bf16", goal=1.01, **_GPT),
    Case("ddp2-tiny", "tiny in 2 processes, gloo", ranks=2, goal=1.10,
         systems=("hand", "again", "hand-summed", "lumen", *PEERS)),
    Case("fsdp2-tiny", "tiny in 2 processes, FSDP2, gloo", ranks=2, sharded=True, goal=1.10,
         systems=("hand", "again", "lumen")),
    Case("ddp2-gpt", "gpt in 2 processes, gloo", ranks=2, goal=1.02, **_GPT),
    Case("ddp2-exact", "gpt in 2 processes, gloo, bitwise identical on any number of processes", ranks=2,
         **_GPT | _EXACT),
    Case("ddp2-exact4", "ddp2-exact, 4 batches a step", ranks=2, accumulate=4, tolerance=0.02, **_GPT | _EXACT),
    Case("fsdp2-exact", "ddp2-exact by FSDP2", ranks=2, sharded=True, tolerance=0.02, **_GPT | _EXACT),
    Case("import", "CPU time of `import torch`, and of the library after it", kind="import", goal="60 ms added"),
    Case("help", "CPU time of `fit --help`; by hand: of `import torch`", kind="help",
         systems=("hand", "again", "lumen", "lightning")),
    Case("first-step", "CPU time from the start of the process to the end of the first step", measure="first_s",
         epoch=2, epochs=1, turns=1, goal=1.05),
    Case("memory", "peak resident memory, GPT of 14 M parameters", model="gpt-wide", measure="peak_mb", epoch=3,
         epochs=1, turns=1, batch_size=4, goal=1.02),
    Case("checkpoint", "a save of 100 M parameters with Adam (1.2 GB): seconds that the loop waits", kind="checkpoint",
         systems=("hand", "again", "lumen", "lumen-at-once", "lightning", "lightning-async"), model="linears",
         tensors=True, fused="yes", batch_size=1, epoch=22, epochs=1, turns=1, save_every=20,
         measure="blocked_s", also=("lost_s",), rounds=2),
    Case("tiny-cuda", "tiny on a CUDA device with fused AdamW, wall time", device="cuda", measure="wall_s", fused="yes",
         systems=("hand", "again", "lumen", "lightning")),
    Case("gpt2-cuda", "nanoGPT's 124 M GPT, bf16, compiled, 12 x 1024 tokens a step", model="gpt2", precision="bf16",
         systems=("hand", "again", "lumen", "lightning"), device="cuda", compiled=True, measure="wall_s",
         batch_size=12, epoch=20, epochs=4, turns=1, lr=1e-4, fused="yes", tolerance=1e-3, goal=1.01),
    Case("gpt2-gaps", "gpt2-cuda: how long the device runs no kernel, by a trace", model="gpt2", precision="bf16",
         systems=("hand", "again", "lumen", "lightning"), device="cuda", compiled=True, measure="gap_s",
         batch_size=12, epoch=20, epochs=1, turns=1, lr=1e-4, fused="yes", tolerance=1e-3),
]  # fmt: skip
CASES = {case.name: case for case in _CASES}
