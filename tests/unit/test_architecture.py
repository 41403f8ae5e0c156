"""Architecture: layers, stack frames, public names, and strategies without checks of their names."""

import ast
import enum
import importlib
import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lumen
from lumen.checkpoint.format.storage import Storage
from lumen.errors.lightning_names import ATTRIBUTES_OF_CALLBACKS
from lumen.task.hooks import HOOKS, MODE_HOOKS
from tests.helpers.architecture import AROUND_THE_CORE, LAYERS, ROOT, SOURCES
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer

DOORS = {"lumen", "lumen.__main__"}
MIXINS = {
    "LightningAttributeErrors", "HyperparametersMixin", "ModelHooks", "OptimizerHooks", "DataHooks", "Attached",
    "RenamedMembers",
}  # fmt: skip
OPEN_CLASSES = {
    "TaskModule",
    "DataModule",
    "Callback",
    "BasePredictionWriter",
    "FSDP",
    "ForwardingOptimizer",
    "ProgressBar",
    "CLI",
    "RunView",
    "SaveConfigCallback",
} | MIXINS
PUBLIC = [
    "AdvancedProfiler",
    "AimLogger",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "CLI",
    "CSVLogger",
    "Callback",
    "CombinedLoader",
    "DDP",
    "DataModule",
    "DeviceStatsMonitor",
    "EMA",
    "EarlyStopping",
    "FSDP",
    "GradientAccumulationScheduler",
    "HyperparametersMixin",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "Logger",
    "LumenError",
    "MLFlowLogger",
    "Mesh",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PassThroughProfiler",
    "Precision",
    "PredictionWriter",
    "Profiler",
    "ProgressBar",
    "RayTrainReportCallback",
    "Report",
    "SWA",
    "SaveConfigCallback",
    "SimpleProfiler",
    "SingleDevice",
    "SpikeDetection",
    "Strategy",
    "TaskModule",
    "Teacher",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "TorchProfiler",
    "Trainer",
    "Tuner",
    "WandbLogger",
    "Weights",
    "attention",
    "chunked_cross_entropy",
    "goodput",
    "grad_norm",
    "isolate_rng",
    "move_data_to_device",
    "position_ids",
    "rank_zero_debug",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "runs",
    "seed_everything",
    "summarize",
]


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in {
        part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in ast.walk(node.test)
    }


def list_imports(module, *, lazily):
    """Return the names of the modules that a module imports: at module level, or inside functions."""

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child):
                yield from (found for alternative in child.orelse for found in visit(alternative, inside))
            elif isinstance(child, ast.Import) and inside == lazily:
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and inside == lazily:
                assert child.level == 0, f"{module}: a relative import"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from (name if name in SOURCES else child.module for name in names)
            else:
                yield from visit(
                    child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                )

    return set(visit(SOURCES[module], False))


def get_unit(module):
    """Return the part of Lumen that a module belongs to: "loop" for `lumen.loop.loop`."""
    return module.split(".")[1] if "." in module else ""


def layer(name):
    for number, units in enumerate(LAYERS):
        if name in units:
            return number
    pytest.fail(f"lumen.{name} has no layer; write it into LAYERS")


def list_imports_between_units(*, lazily):
    """Return (importer, imported) of every import inside Lumen from one unit to another."""
    for module in SOURCES:
        for found in list_imports(module, lazily=lazily):
            if found.startswith("lumen.") and module not in DOORS and get_unit(module) != get_unit(found):
                yield get_unit(module), get_unit(found)


# ---------------------------------------------------------------------- layers


def test_modules_import_only_from_lower_layers():
    upward = {
        (importer, found)
        for importer, found in list_imports_between_units(lazily=False)
        if layer(found) >= layer(importer)
    }
    assert upward == set()
    for name in LAYERS:
        for each in name:
            assert any(get_unit(module) == each for module in SOURCES), f"LAYERS names {each}, which does not exist"


def test_the_core_knows_nothing_around_it():
    """The core neither imports a module around it nor names one in a text; plugins are entry points."""
    named = re.compile(r"lumen\.(cli|tools|integrations)(\.\w+)*")
    for module, tree in SOURCES.items():
        if module in DOORS or get_unit(module) in AROUND_THE_CORE:
            continue
        found = {name for lazily in (False, True) for name in list_imports(module, lazily=lazily)}
        found |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not {name for name in found if named.fullmatch(name)}, module


def test_no_module_imports_itself_in_a_circle():
    graph = {module: list_imports(module, lazily=False) & SOURCES.keys() for module in SOURCES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(SOURCES)


def test_package_imports_nothing_until_used():
    assert {name.split(".")[0] for name in list_imports("lumen", lazily=False)} <= {
        "__future__",
        "ast",
        "gc",
        "importlib",
        "lumen",
        "os",
        "pathlib",
        "typing",
    }


def test_lumen_does_not_import_models_or_tests():
    for module in SOURCES:
        for lazily in (False, True):
            found = {name.split(".")[0] for name in list_imports(module, lazily=lazily)}
            assert not found & {"models", "datamodules", "tests", "benchmarks"}, module


# ---------------------------------------------------------------------- types

#: Imports of a higher layer, in functions or for types alone.
WAYS_UP = {
    ("lumen.task.hyperparameters", "lumen.checkpoint.load.load_weights"),  # `load_from_checkpoint` of tasks
    ("lumen.run.run", "lumen.checkpoint"),  # the types of two parts of a run
}


def list_all_imports(module):
    """Return modules of Lumen that a module imports anywhere: at module level, in functions, for types alone."""
    for node in ast.walk(SOURCES[module]):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{name}" for name in names]
            names = [name if name in SOURCES else node.module for name in inside]
        yield from (name for name in names if name in SOURCES and name not in {module, *DOORS})


def list_reachable_modules(module, graph):
    """Return modules that a module reaches through imports of any kind."""
    found, waiting = set(), [module]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def test_two_imports_for_types_go_up():
    upward = {
        (module, found)
        for module in SOURCES.keys() - DOORS
        for found in list_all_imports(module)
        if get_unit(module) != get_unit(found) and layer(get_unit(found)) >= layer(get_unit(module))
    }
    assert upward == WAYS_UP


def test_circles_of_types_are_small():
    """A cycle of more than nine files is too large to understand."""
    graph = {module: set(list_all_imports(module)) for module in SOURCES.keys() - DOORS}
    reach = {module: list_reachable_modules(module, graph) for module in graph}
    circles = {frozenset(each for each in reach[module] if module in reach[each]) for module in graph}
    assert max(map(len, circles)) <= 9, max(circles, key=len)


# ---------------------------------------------------------------------- frames


def list_lumen_frames():
    """Return names of Lumen's functions on the stack, the innermost first."""
    frame, stack = sys._getframe(2), []
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(ROOT):
            stack.append(frame.f_code.co_name)
        frame = frame.f_back
    return stack


class Looking(torch.optim.SGD):
    def step(self, closure=None):
        self.stacks.append(("optimizer.step", list_lumen_frames()))
        return super().step(closure)


class Looked(Regression):
    """Task that records its depth on the stack."""

    def training_step(self, batch):
        self.stacks.append(("training_step", list_lumen_frames()))
        return super().training_step(batch)

    def validation_step(self, batch):
        self.stacks.append(("validation_step", list_lumen_frames()))
        return super().validation_step(batch)

    def configure_optimizers(self):
        optimizer = Looking(self.parameters(), lr=0.1)
        optimizer.stacks = self.stacks
        return optimizer


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, 0),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}, 0),
        ({"precision": "bf16"}, 0),
        ({"strategy": "ddp"}, 1),
    ],
)
def test_few_frames_lie_between_fit_and_user_code(tmp_path, options, more):
    task = Looked()
    task.stacks = []
    quiet_trainer(tmp_path, max_steps=2, val_check_interval=2, num_sanity_val_steps=0, **options).fit(
        task, loader(), val_dataloaders=loader()
    )
    deepest = {"optimizer.step": 6, "training_step": 6 + more, "validation_step": 7 + more}
    assert {name for name, _ in task.stacks} == deepest.keys()
    for name, stack in task.stacks:
        assert stack[-1] == "fit"
        assert len(stack) <= deepest[name], (name, stack)


# ---------------------------------------------------------------------- public names


def test_the_public_names_are_these_and_each_resolves():
    assert sorted(lumen.__all__) == PUBLIC == dir(lumen)
    for name in PUBLIC:
        assert getattr(lumen, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Traner'"):
        _ = lumen.Traner


def test_type_checkers_see_the_same_names():
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    names = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(names - {None, "__version__"}) == PUBLIC


def list_parameters(function, skip):
    """Return (name, kind, default) of a method's parameters after the first ones."""
    found = list(inspect.signature(function).parameters.values())
    return [(each.name, each.kind, each.default) for each in found[skip:]]


def test_hooks_have_same_arguments_on_callback_and_task():
    not_hooks = {
        "state_key",
        "state_dict",
        "load_state_dict",
        "may_stop_at_steps",
        "needs_step_loss",
        "validation_context",
    }
    not_hooks |= {"evaluated_state_key", "log", "log_dict"}
    hooks = [name for name in vars(lumen.Callback) if not name.startswith("_") and name not in not_hooks]
    assert sorted(hooks) == sorted(HOOKS)
    assert len(set(HOOKS)) == len(HOOKS)
    for name in HOOKS:
        of_callback = list_parameters(getattr(lumen.Callback, name), skip=3)
        assert of_callback == list_parameters(getattr(lumen.TaskModule, name), skip=1), name
        assert [each[0] for each in list_parameters(getattr(lumen.Callback, name), skip=0)][:3] == [
            "self",
            "trainer",
            "task",
        ]


def test_task_hooks_are_callback_transfer_or_mode_hooks():
    of_the_task_alone = {"on_before_batch_transfer", "on_after_batch_transfer", *MODE_HOOKS}
    hooks = {name for name, each in inspect.getmembers(lumen.TaskModule, callable) if name.startswith("on_")}
    assert hooks == {name for name in HOOKS if name.startswith("on_")} | of_the_task_alone


# ---------------------------------------------------------------------- strategies


class Counting(lumen.Strategy):
    """Strategy unknown to Lumen: it counts its calls, and changes nothing."""

    device = torch.device("cpu")

    def __init__(self):
        self.calls = {}

    def count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1

    def setup(self, task):
        self.count("setup")
        self.task = task

    def call(self, step, *args):
        self.count(step)
        return getattr(self.task, step)(*args)

    @contextmanager
    def gradient_sync(self, *, last):
        self.count("last micro-batch" if last else "micro-batch")
        yield

    def teardown(self):
        self.count("teardown")


class Weighted(Regression):
    def training_step(self, batch):
        return super().training_step(batch), batch[0].abs().sum()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_custom_strategy_trains_exactly(tmp_path, algorithm):
    counting, tasks = Counting(), (Weighted(dropout=0.2), Weighted(dropout=0.2))
    for task, strategy in zip(tasks, ("auto", counting), strict=True):
        trainer = quiet_trainer(
            tmp_path, max_epochs=2, strategy=strategy, accumulate_grad_batches=2, gradient_clip_val=0.1,
            gradient_clip_algorithm=algorithm, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(task, loader(50, 8), val_dataloaders=loader(20, 8))
    for ours, theirs in zip(*(task.parameters() for task in tasks), strict=True):
        assert torch.equal(ours, theirs)
    assert counting.calls == {
        "setup": 1,
        "training_step": 14,
        "validation_step": 6,
        "micro-batch": 6,
        "last micro-batch": 8,
        "teardown": 1,
    }


def test_the_contract_of_a_strategy_is_a_page():
    members = {name for name in {*vars(lumen.Strategy), *lumen.Strategy.__annotations__} if not name.startswith("_")}
    assert len(members - {"ATTRIBUTES"}) <= 28, sorted(members)  # ATTRIBUTES has advice, and nothing to override
    assert lumen.Strategy.__abstractmethods__ == {"setup", "call", "gradient_sync"}


def test_nobody_asks_a_strategy_for_its_name():
    concrete = {cls.__name__ for cls in list_classes() if issubclass(cls, lumen.Strategy)} - {"Strategy"}
    assert "SingleDevice" in concrete
    for module, tree in SOURCES.items():
        if module == "lumen" or get_unit(module) in ("strategies", "cli", "tools"):
            continue
        for node in ast.walk(tree):
            names = {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None)}
            names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            assert not {name for name in names if isinstance(name, str)} & concrete, f"{module}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass", "type"):
                asked = {getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(node)}
                assert not asked & {"Strategy", "strategy"}, f"{module}:{node.lineno}"


def test_numbers_of_layers_and_packages_are_limited():
    assert len(LAYERS) <= 11
    assert len({each.stem for each in ROOT.iterdir()} - {"__pycache__"}) <= 25


def test_a_run_and_its_parts_have_few_members(tmp_path):
    trainer = bare_trainer(tmp_path, max_steps=1)
    trainer.fit(Regression(), loader())
    parts = [part for part in vars(trainer.run).values() if type(part).__module__.startswith("lumen.run.")]
    parts.remove(trainer.plan)  # the user's settings, which may be more
    assert {type(part).__name__ for part in parts} >= {"Progress", "Loaders", "StepContext", "LoggedValues", "RunEnd"}
    for each in (trainer.run, *parts):
        members = {name for name in {*vars(each), *dir(type(each))} if not name.startswith("_")}
        assert len(members) <= 30, (type(each).__name__, sorted(members))
        assert len(members & vars(each).keys()) <= 20, (type(each).__name__, sorted(vars(each)))


# ---------------------------------------------------------------------- callbacks


def test_callbacks_use_what_a_users_callback_may_use():
    """Callbacks use public names of the trainer, among them `trainer.run` and its parts; no private names."""
    for module, tree in SOURCES.items():
        if get_unit(module) != "callbacks":
            continue
        for node in ast.walk(tree):
            owner = ast.unparse(node.value).rpartition(".")[2] if isinstance(node, ast.Attribute) else ""
            if owner in ("trainer", "_trainer"):
                assert not node.attr.startswith("_"), f"{module}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and module != "lumen.callbacks.callback_trainer":
                assert (node.module, "Run") not in [(node.module, alias.name) for alias in node.names], module


# ---------------------------------------------------------------------- storage

#: Modules that store locations, and names that only these modules know.
SIDES = {"LocalStorage", "ObjectStore", "Url"}
HOMES = {f"lumen.checkpoint.format.{name}" for name in ("object_store", "storage")}


def test_nobody_asks_what_a_place_is_kept_by():
    assert {cls.__name__ for cls in list_classes() if issubclass(cls, Storage)} == SIDES - {"Url"} | {"Storage"}
    asking = []
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            names = {getattr(node, "id", None), getattr(node, "attr", None)}
            names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            assert module in HOMES or not names & SIDES, f"{module}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass", "type"):
                parts = {getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(node)}
                asking += [module] * bool(parts & (SIDES | {"Storage", "storage", "get_storage"}))
    assert asking == ["lumen.checkpoint.format.storage"]


def test_as_local_is_imported_only_where_needed():
    """Only modules with locks, logs or links may depend on a path of this machine."""
    assert {
        module for module in SOURCES if "lumen.checkpoint.format.storage.as_local_path" in list_imported_names(module)
    } == {"lumen.callbacks.checkpoint_names", "lumen.checkpoint.load.weights_source", "lumen.tools.runs.find"}


def test_one_module_reads_pickles_with_weights_only():
    reading = []
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            imported = {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            imported |= {getattr(node, "module", None)} if isinstance(node, ast.ImportFrom) else set()
            assert not imported & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}, module
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.jit.load"):
                settings = {each.arg: ast.unparse(each.value) for each in node.keywords}
                reading.append((module, ast.unparse(node.func), settings.get("weights_only")))
    assert reading == [("lumen.tools.convert.unpickle", "torch.load", "True")]
    users = {
        module
        for module in SOURCES
        for lazily in (False, True)
        if "lumen.tools.convert.unpickle" in list_imports(module, lazily=lazily)
    }
    assert users == {"lumen.tools.convert.command"}


#: Calls that start a program, by the end of their name.
STARTS = {
    "subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
    "os.system", "os.popen", "os.fork", "os.forkpty", "pty.spawn", "Process", "context.Pool", "ProcessPoolExecutor",
    "ensure_running", "LocalElasticAgent", "create_subprocess_exec", "create_subprocess_shell", "start_processes",
}  # fmt: skip


def starts_program(function):
    return function.startswith(("os.exec", "os.spawn", "os.posix_spawn")) or any(
        function == name or function.endswith(f".{name}") for name in STARTS
    )


def test_interpreters_are_started_in_known_places():
    """All except the two explained ones go through `lumen.internals.interpreters`."""
    started, interpreters = set(), set()
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and starts_program(ast.unparse(node.func)):
                started.add((module, ast.unparse(node.func)))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                interpreters.add(module)
    assert started == {
        ("lumen.tools.convert.unpickle", "subprocess.run"),  # python_command
        ("lumen.tools.migrate.check", "subprocess.Popen"),  # the user's program, as the user starts it
        ("lumen.tools.migrate.project", "subprocess.run"),  # git
        ("lumen.tools.submit.command", "subprocess.run"),  # the program of an engine; Ray's is Python with -P
        ("lumen.distributed.agent", "LocalElasticAgent"),  # the user's program, as the user started it
        ("lumen.distributed.launch", "os.execv"),  # python_command
        ("lumen.tools.proof.worker", "context.Process"),  # under safe_path
        ("lumen.tools.proof.worker", "ensure_running"),  # under safe_path
    }
    assert interpreters == {
        "lumen.internals.interpreters",
        "lumen.distributed.agent",
        "lumen.tools.migrate.check",
        "lumen.tools.submit.command",
        "lumen.cli.command_words",  # prints its name
        "lumen.trainer.status_messages",  # prints its name
    }
    for module, start in (("lumen.tools.convert.unpickle", "subprocess.run"), ("lumen.distributed.launch", "os.execv")):
        assert "lumen.internals.interpreters.make_python_command" in list_imported_names(module), start
    pool = ast.walk(SOURCES["lumen.tools.proof.worker"])
    safe = [
        node
        for node in pool
        if isinstance(node, ast.With) and "protect_search_path()" in map(ast.unparse, contexts(node))
    ]
    inside = {ast.unparse(call.func) for each in safe for call in ast.walk(each) if isinstance(call, ast.Call)}
    assert {"context.Process", "ensure_running"} <= inside


def contexts(node):
    return [item.context_expr for item in node.items]


def list_imported_names(module):
    imports = (node for node in ast.walk(SOURCES[module]) if isinstance(node, ast.ImportFrom))
    return {f"{node.module}.{alias.name}" for node in imports for alias in node.names}


# ---------------------------------------------------------------------- booleans

#: Functions whose booleans may be positional, by the reason.
POSITIONAL_BOOLEANS = {
    "Lightning's signature": {
        "AdvancedProfiler.__init__", "BackboneFinetuning.__init__", "BaseFinetuning.filter_params",
        "BaseFinetuning.freeze", "BaseFinetuning.unfreeze_and_add_param_group", "DataModule.load_from_checkpoint",
        "DeviceStatsMonitor.__init__", "EarlyStopping.__init__", "LearningRateCurve.plot",
        "LearningRateFinder.__init__", "LearningRateMonitor.__init__", "MLFlowLogger.__init__",
        "ManualOptimizer.toggle_model", "OptimizerHooks.optimizers", "OptionParser.add_lightning_class_args",
        "OptionParser.dump", "SaveConfigCallback.__init__", "TaskModule.all_gather",
        "TaskModule.load_from_checkpoint", "TaskModule.log", "TaskModule.log_dict", "Trainer.fit", "Trainer.predict",
        "Trainer.test", "Trainer.validate", "WandbLogger.__init__", "WandbLogger.watch", "isolate_rng",
        "Tuner.lr_find", "seed_everything",
    },
    "torch's signature": {
        "ManualOptimizer.zero_grad", "SavedModes.keep_choices.recorded_train", "Teacher.train", "attention",
    },
    "pickle gives arguments by position": {"_unpickle_request"},
    "Python gives a property its value by position": {"RunView.should_stop"},
}  # fmt: skip
#: Functions of Python and torch with positional booleans.
OF_OTHERS_WITH_BOOLEANS = {
    "RawValue", "_load_from_state_dict", "c_bool", "fromkeys", "get", "getattr", "inference_mode", "requires_grad_",
    "set_blocking", "set_reduce_scatter_unused_params", "set_reshard_after_forward", "use_deterministic_algorithms",
}  # fmt: skip


def is_boolean(annotation):
    """Return True for `bool` and `bool | None`."""
    names = {part.strip() for part in ast.unparse(annotation).split("|")} if annotation else set()
    return "bool" in names and names <= {"bool", "None"}


def iterate_functions(node, above=""):
    """Return (qualified name, function) of every function below a node."""
    for child in ast.iter_child_nodes(node):
        inside = above
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = f"{above}{child.name}."
            if not isinstance(child, ast.ClassDef):
                yield inside[:-1], child
        yield from iterate_functions(child, inside)


def test_booleans_are_given_by_keyword():
    positional = {
        name
        for tree in SOURCES.values()
        for name, function in iterate_functions(tree)
        if any(is_boolean(each.annotation) for each in (*function.args.posonlyargs, *function.args.args))
    }
    assert positional == set().union(*POSITIONAL_BOOLEANS.values())
    for module, tree in SOURCES.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            given = {ast.unparse(each) for each in call.args}
            called = ast.unparse(call.func).rpartition(".")[2]
            assert not given & {"True", "False"} or called in OF_OTHERS_WITH_BOOLEANS, f"{module}:{call.lineno}"


# ---------------------------------------------------------------------- capabilities

#: Declarations of a class, by its base class; read as a plain attribute.
DECLARED = {
    lumen.Callback: {"evaluated_state_key", "needs_step_loss", "state_key", "may_stop_at_steps"},
    lumen.Logger: {"state_key"},
}
#: Declarations of loaders and data sets, which inherit nothing from Lumen.
OF_DATA = {"follows_training", "shards_itself"}
#: Names of attributes that an object may lack, by the reason. Outside `internals`, where the names are torch's.
MAY_BE_MISSING = {
    "Python's, of functions, modules and errors": {
        "__all__", "__code__", "__dict__", "__file__", "__func__", "__getitems__", "__module__", "__name__",
        "__notes__", "__path__", "__qualname__", "__self__", "SIGRTMAX", "file", "isatty", "items", "problem",
        "strerror", "stream",
    },
    "ast's and argparse's, of nodes and actions": {"_typehint", "attr", "func", "id", "name", "names", "value"},
    "torch's, of loaders, samplers, optimizers, schedules and tensors": {
        "Muon", "batch_sampler", "batch_size", "dataset", "device_mesh", "dtype", "indices", "is_python_function",
        "num_workers", "optimizer", "placements", "replacement", "sampler", "scheduler", "shape",
        "step_size", "to", "track_running_stats",
    },
    "other libraries'": {
        "PeftModel", "_distributed", "_ex_iterable", "bit_generator", "console", "entropy", "eval", "ex_iterable",
        "optimizers", "rich_proxied_file", "seed_seq", "tp_plan", "train", "world_size",
    },
    "of a task, which is any nn.Module here": {"automatic_optimization", "backbone", "example_input_array"},
    "tables of a class whose arguments are checked, which inherits nothing": {"INSTEAD", "NEUTRAL", "NONE_IS_DEFAULT"},
    "of a checkpoint, which may be a path": {"path"},
}  # fmt: skip


def test_capabilities_are_declared():
    for base, names in DECLARED.items():
        assert names <= vars(base).keys()
    allowed = set().union(*MAY_BE_MISSING.values())
    assert not allowed & OF_DATA.union(*DECLARED.values())
    for module, tree in SOURCES.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "getattr" and len(call.args) == 3 and get_unit(module) != "internals":
                name = call.args[1]
                assert not isinstance(name, ast.Constant) or name.value in allowed, (
                    f"{module}:{call.lineno} {name.value}"
                )
    reading = {
        (module, name)
        for module, tree in SOURCES.items()
        for name, function in iterate_functions(tree)
        if "getattr(part, capability, False)" in ast.unparse(function)
    }
    assert reading == {("lumen.data.iterable_style", "has_capability")}


# ---------------------------------------------------------------------- owners

#: "package: attribute" that a package writes although another package also has it, by the reason.
WRITTEN_BY_OTHERS = {
    "the object is torch's": {
        "checkpoint: param_groups", "checkpoint: training", "internals: _iterator", "internals: forward",
        "run: param_groups", "strategies: data", "strategies: logger", "task: data", "task: state", "task: training",
    },
    "the object is Python's or another library's": {
        "checkpoint: closed", "data: value", "integrations: config", "internals: path", "profilers: title",
        "random: state", "task: __class__",
        "tools: complete", "tools: formatter", "tools: help",
    },
    "the config is saved before other callbacks run": {"cli: callbacks"},
    "users set the hyperparameters in this way": {"trainer: hparams"},
    "subclasses of users have this attribute": {"trainer: run_directory", "trainer: progress"},
}  # fmt: skip
#: Methods that change the list, set or dictionary in an attribute.
CHANGING = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "sort", "update",
}  # fmt: skip


#: Protocols, which have no attributes, by the package whose objects they describe.
DESCRIBED = {"AnyTrainer": "trainer", "CallbackTrainer": "trainer", "AttachedRun": "run"}


def find_attribute_owners():
    """Return the packages whose classes have an attribute, by its name; and those with a property that can be set."""
    owners, settable = defaultdict(set), defaultdict(set)
    for module, tree in SOURCES.items():
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            if "Protocol" in map(ast.unparse, cls.bases):
                continue
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    owners[node.attr] |= {get_unit(module)} if ast.unparse(node.value) == "self" else set()
            for node in cls.body:
                if isinstance(node, ast.FunctionDef):
                    owners[node.name].add(get_unit(module))
                    if any(ast.unparse(each) == f"{node.name}.setter" for each in node.decorator_list):
                        settable[node.name].add(get_unit(module))
                for target in [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", []):
                    owners[ast.unparse(target)].add(get_unit(module))
    return owners, settable


def find_name_packages(trees):
    """Return the packages of the objects in variables and attributes, by name, from annotations and calls."""
    classes, found = defaultdict(set), defaultdict(set)
    for module, tree in SOURCES.items():
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            classes[cls.name].add(get_unit(module))
    classes.update({name: {package} for name, package in DESCRIBED.items()})

    def note(name, described):
        found[name.rpartition(".")[2].lstrip("_")].update(*(classes[word] for word in described))

    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            note(node.arg, re.findall(r"\w+", ast.unparse(node.annotation)))
        elif isinstance(node, ast.AnnAssign):
            note(ast.unparse(node.target), re.findall(r"\w+", ast.unparse(node.annotation)))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for target in node.targets:
                note(ast.unparse(target), [ast.unparse(node.value.func)])
    return found


def iterate_written_attributes(tree):
    """Return (line, object, attribute) of each change to an attribute of an object other than `self`."""
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found = node.value, node.attr
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found = (node.value.value, node.value.attr) if isinstance(node.value, ast.Attribute) else None
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            found = node.args[0], getattr(node.args[1], "value", None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            changed = node.func.value
            found = (changed.value, changed.attr) if isinstance(changed, ast.Attribute) else None
        if found is not None and ast.unparse(found[0]) not in ("self", "cls"):
            yield node.lineno, ast.unparse(found[0]), found[1]


def find_foreign_writes():
    """Return ("package: attribute", place) of each write to an attribute of another package."""
    (owners, settable), named = find_attribute_owners(), find_name_packages(SOURCES.values())
    for module, tree in SOURCES.items():
        here = find_name_packages([tree])
        for line, owner, attribute in iterate_written_attributes(tree):
            name = owner.rpartition(".")[2].lstrip("_")
            known = here[name] or (named[name] if "." in owner.removeprefix("self.") else set())
            packages = known & owners[attribute] or owners[attribute]
            if packages and get_unit(module) not in packages and not packages <= settable[attribute]:
                yield f"{get_unit(module)}: {attribute}", f"{module}:{line} {owner}.{attribute}"


def test_every_attribute_is_written_by_its_own_package():
    allowed = [each for names in WRITTEN_BY_OTHERS.values() for each in names]
    found = dict(find_foreign_writes())
    assert not {place for each, place in found.items() if each not in allowed}
    assert sorted(found) == sorted(allowed)


# ---------------------------------------------------------------------- classes


def list_classes():
    """Return every class that is defined at the level of a module of Lumen."""
    names = [found.name for found in pkgutil.walk_packages(lumen.__path__, "lumen.") if "__main__" not in found.name]
    for name in ["lumen", *names]:
        module = importlib.import_module(name)
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == name and cls.__name__ != "_ArgumentGroupAutoSubclass":
                yield cls  # jsonargparse adds the class above to the module of a parser


def is_final(cls):
    return vars(cls).get("__final__", False)


def is_record(cls):
    return issubclass(cls, enum.Enum) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def is_method(member):
    return inspect.isroutine(member) or isinstance(member, property)


def test_every_class_is_abstract_final_or_open():
    for cls in list_classes():
        assert (
            inspect.isabstract(cls)
            or is_final(cls)
            or is_record(cls)
            or issubclass(cls, BaseException)
            or cls.__name__ in OPEN_CLASSES
            or Protocol in cls.__bases__
        ), f"{cls.__module__}.{cls.__name__} is neither abstract nor final"
        assert not any(is_final(base) for base in cls.__mro__[1:]), f"{cls.__name__} inherits from a final class"


def test_no_method_is_overridden_twice():
    for cls in list_classes():
        lineage = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "lumen"]
        for name in {name for base in lineage for name in vars(base) if not name.startswith("__")}:
            owners = [base.__name__ for base in lineage if is_method(vars(base).get(name))]
            assert len(owners) <= 2, f"{name} is defined by {', '.join(owners)}"


def test_no_classes_are_nested():
    """A class inside a function or another class would escape the tests above."""
    for module, tree in SOURCES.items():
        on_top = {node for node in ast.walk(tree) if isinstance(node, ast.Module) for node in node.body}
        on_top |= {child for node in on_top if isinstance(node, ast.If) for child in node.body}
        hidden = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node not in on_top]
        assert hidden == [], module


# ---------------------------------------------------------------------- private names of torch

#: Underscore names that are neither Lumen's nor torch's.
OTHERS = {
    "_asdict", "_fields", "_make", "_replace",  # named tuples
    "_distributed", "_ex_iterable",  # Hugging Face's data sets
    "_strip_protocol",  # fsspec
    "_wandb_watch_called",  # Weights & Biases
    "_target_",  # Hydra
    "_current_frames", "_exit",  # sys and os, which document them
    "_actions", "_typehint",  # argparse and jsonargparse
    "_computed", "_defaults", "_forward_cache", "_reductions", "_sync_dist", "_to_sync",  # torchmetrics
    "_update_count",
    *(name for names in ATTRIBUTES_OF_CALLBACKS.values() for name in names),  # Lightning's
}  # fmt: skip
#: Lumen's names that no assignment shows.
LUMENS = {"_", "_hparams"}
#: Private names of objects of torch that Lumen gets or subclasses.
OF_TORCH = {
    name
    for owner in (nn.Module(), torch.Tensor, torch.optim.Optimizer, DataLoader, torch)
    for name in dir(owner)
    if name.startswith("_") and not name.startswith("__")
}


def is_private(name):
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and not name.endswith("__")


def find_defined_underscores(tree):
    """Return underscore names that a module defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def iterate_used_underscores(tree):
    """Return (line, name) of underscore names in attributes, imports, and strings for `getattr` and the like."""
    own = set(find_defined_underscores(tree))
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (ast.unparse(node.value) == "self" and node.attr in own):
                yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = (getattr(node, "module", None) or "").split(".")
            for name in (*origin, *(part for alias in node.names for part in alias.name.split("."))):
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            for name in node.value.split("."):
                yield node.lineno, name


def test_private_names_of_torch_are_in_one_package():
    others = {module: tree for module, tree in SOURCES.items() if get_unit(module) != "internals"}
    own = {name for tree in others.values() for name in find_defined_underscores(tree)} - OF_TORCH
    for module, tree in others.items():
        for line, name in iterate_used_underscores(tree):
            assert not is_private(name) or name in OTHERS | LUMENS | own, f"{module}:{line} {name}"
