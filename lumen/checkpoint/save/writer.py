"""Writing a checkpoint: each process its share, all of it checked as a reader will, and committed at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from typing import Any, final

import torch

from lumen.checkpoint.format.codec import JSON, encode
from lumen.checkpoint.format.folder import refuse_foreign, set_aside
from lumen.checkpoint.format.manifest import FORMAT_VERSION, STATE, new_file, text_of
from lumen.checkpoint.format.places import exists, storage_of
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.safetensors_file import write_safetensors
from lumen.checkpoint.format.storage import MANIFEST, Draft, explained, readable
from lumen.checkpoint.save.write_plan import Block, Sections, TensorSpec, WritePlan, plan_writes
from lumen.distributed.dtensor import local_tensor
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointDamaged, CheckpointError
from lumen.version import __version__

MAX_FILE_BYTES = 2 << 30
Written = tuple[dict[str, JSON], dict[str, dict[str, JSON]]]  # files and descriptions of tensors, as in the manifest


def write_checkpoint(
    directory: PurePath,
    sections: Sections,
    state: Mapping[str, JSON],
    *,
    aliases: Mapping[str, str] | None = None,
    info: Mapping[str, Any],
    max_file_bytes: int = MAX_FILE_BYTES,
    processes: Processes | None = None,
) -> None:
    """Write a checkpoint that is either complete under its name or not there at all, even after a kill or power loss.

    Every process writes its blocks, see `plan_writes`. Beyond the tensors themselves it needs the memory of one of them
    at most. Collective: every rank must call this.

    Args:
        directory: Final path, for example `runs/gpt/checkpoints/step-00000200`. A damaged checkpoint there is renamed
            to `<name>.damaged-<k>`.
        sections: Tensors of any dtype, shape, strides and device, by section ("model", "optimizer", "extra") and name.
        state: JSON that `lumen.checkpoint.format.codec.encode` returned, by name; rank 0's counts.
        aliases: Names of tied tensors of the section "model" that are stored under another name: alias to stored name.
        info: Plain data kept in the manifest, so that listing checkpoints need not open `state`; rank 0's counts.
        max_file_bytes: Most bytes of tensors in one file; a larger block gets a file of its own.
        processes: The processes of the run; default: this one alone.

    Raises:
        CheckpointError: `directory` holds a committed checkpoint; a tensor, `state` or `info` cannot be saved; the
            processes hold different tensors; or a disk refuses. It is the same on every rank. Nothing that existed
            before is changed, and nothing half-written is left under `directory`.
    """
    processes = Processes() if processes is None else processes
    plan = plan_writes(sections, processes)
    write_planned(
        directory, plan, state, aliases=aliases or {}, info=info, max_file_bytes=max_file_bytes, processes=processes
    )


def write_planned(
    directory: PurePath,
    plan: WritePlan,
    state: Mapping[str, JSON],
    *,
    aliases: Mapping[str, str],
    info: Mapping[str, Any],
    processes: Processes,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write this process's blocks, and commit when all have; else as `write_checkpoint`. Collective."""
    save = _Save(directory, plan.specs, state, aliases, info)
    draft = processes.on_rank_zero(save.begin)
    processes.conclude(partial(_write_files, draft, plan, max_file_bytes, processes.rank), partial(save.commit, draft))


@final
class _Save:
    """What rank 0 does to write a checkpoint: its beginning and its commit; the arguments are `write_checkpoint`'s."""

    def __init__(
        self,
        directory: PurePath,
        specs: Mapping[str, Mapping[str, TensorSpec]],
        state: Mapping[str, JSON],
        aliases: Mapping[str, str],
        info: Mapping[str, Any],
    ) -> None:
        self._directory = directory
        self._storage = storage_of(directory)
        self._specs = specs
        self._state = state
        self._aliases = aliases
        self._info = info
        self._state_bytes = b""
        self._manifest: dict[str, JSON] = {}

    def begin(self) -> Draft:
        """Refuse, before any work, what cannot be saved or committed, and make room for the rest."""
        self._manifest = {
            "format": FORMAT_VERSION,
            "lumen": __version__,
            "info": _encode_info(self._info),
            "aliases": _checked_aliases(self._aliases, self._specs),
        }
        self._state_bytes = _json_bytes("state", self._state)
        if holds_damaged := _holds_damaged(self._directory):
            refuse_foreign(self._directory)
        with explained("write", self._directory):
            try:
                return self._storage.begin(self._directory)
            except FileExistsError:  # what is damaged has to make room at once
                if not holds_damaged:
                    raise
                set_aside(self._directory)
                return self._storage.begin(self._directory)

    def commit(self, draft: Draft, written: Callable[[], list[Written]]) -> None:
        """Commit what all processes have written, or remove it."""
        with explained("write", self._directory):
            try:
                self._complete(draft.root, written())
                Checkpoint.open(draft.root, verify="sizes")  # what was written is what a reader will find
                if not draft.is_in_place and _holds_damaged(self._directory):
                    set_aside(self._directory)
                self._storage.commit(draft)
            except BaseException:
                with suppress(OSError):
                    self._storage.remove(draft.root)
                raise

    def _complete(self, root: PurePath, written: Iterable[Written]) -> None:
        """Add the files that only rank 0 writes: the state, and last the manifest."""
        files: dict[str, JSON] = {}
        sections = {
            section: {name: _describe(spec, []) for name, spec in specs.items()}
            for section, specs in self._specs.items()
        }
        for records, described in written:
            files |= records
            for section, tensors in described.items():
                for name, entry in tensors.items():
                    if known := sections[section].get(name):
                        known["chunks"] += entry["chunks"]
                    else:  # another process's own
                        sections[section][name] = entry
        files[STATE] = _write_bytes(root / STATE, self._state_bytes)
        _write_bytes(root / MANIFEST, text_of(self._manifest | {"files": files, "sections": sections}))


def _checked_aliases(aliases: Mapping[str, str], specs: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, str]:
    model = specs.get("model", {})
    for alias, name in aliases.items():
        if alias in model or name not in model:
            raise CheckpointError(f"the alias {alias!r} of {name!r} must name a tensor of `model` and be none itself.")
    return dict(aliases)


def _encode_info(info: Mapping[str, Any]) -> JSON:
    found: dict[str, torch.Tensor] = {}
    encoded = encode(dict(info), found, "info")
    if found:
        raise CheckpointError(f"{next(iter(found))}: `info` holds no tensors. Convert it with `item()` or `tolist()`.")
    return encoded


def _json_bytes(what: str, value: Mapping[str, JSON]) -> bytes:
    try:
        data = json.dumps(value, allow_nan=False).encode()
        exact = json.loads(data) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} is not JSON: {error}. Encode it with `lumen.checkpoint.format.codec.encode`."
        ) from error
    if not exact:  # json.dumps turns tuples into lists and keys into strings without a word
        raise CheckpointError(f"{what} is not exactly JSON. Encode it with `lumen.checkpoint.format.codec.encode`.")
    return data


def _holds_damaged(directory: PurePath) -> bool:
    """Whether a path holds something that is no intact checkpoint; an intact one is an error."""
    with readable(directory):
        if not exists(directory):
            return False
    try:
        Checkpoint.open(directory)
    except CheckpointDamaged:
        return True
    raise CheckpointError(
        f"{directory} holds a committed checkpoint, which is never overwritten. Remove it or choose another run name."
    )


def _write_files(draft: Draft, plan: WritePlan, max_file_bytes: int, rank: int) -> Written:
    """Write this process's files. Returns their sizes and checksums, and which block lies in which file."""
    files: dict[str, JSON] = {}
    described: dict[str, dict[str, JSON]] = {section: {} for section in plan.blocks}
    storage = storage_of(draft.root)
    with explained("write", draft.root):
        for section, blocks in plan.blocks.items():
            if not blocks:
                continue
            with storage.directory(draft.root / section):
                for index, names in enumerate(_bounded(blocks, max_file_bytes)):
                    file = f"{section}/{rank:05d}-{index:05d}{draft.mark}.safetensors"
                    tensors = {name: local_tensor(plan.sections[section][name]) for name in names}
                    files[file] = write_safetensors(draft.root / file, tensors)
                    for name in names:
                        chunk = [file, list(blocks[name].offsets), list(blocks[name].shape)]
                        described[section][name] = _describe(plan.specs[section][name], [chunk])
    return files, described


def _bounded(blocks: Mapping[str, Block], max_file_bytes: int) -> Iterator[list[str]]:
    """Names of the blocks in each file, so that none exceeds `max_file_bytes`, except for a single larger block."""
    group: list[str] = []
    size = 0
    for name, block in blocks.items():
        if group and size + block.nbytes > max_file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += block.nbytes
    if group:
        yield group


def _describe(spec: TensorSpec, chunks: list[JSON]) -> JSON:
    dtype, shape = spec
    return {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "chunks": chunks}


def _write_bytes(path: PurePath, data: bytes) -> dict[str, int | str]:
    with new_file(path) as file:
        file.write(data)
    return file.record()
