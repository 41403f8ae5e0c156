"""Reading a checkpoint without trusting a byte of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, final

import torch

from lumen.checkpoint.codec import JSON
from lumen.checkpoint.disk import check_file, read_json, readable
from lumen.checkpoint.manifest import STATE, Chunk, Manifest, Spec, read_manifest
from lumen.checkpoint.safetensors_files import check_header
from lumen.checkpoint.sharded import fill
from lumen.errors import CheckpointDamaged, CheckpointMismatch


@final
class Checkpoint:
    """A committed checkpoint, verified when it was opened; its tensors are read one by one when they are asked for.

    Attributes:
        path: Its directory.
        info: What was given as `info` when it was written.
        state: What was given as `state`, still encoded.
        aliases: Tied tensors of the section "model": alias to stored name.
    """

    def __init__(
        self, path: Path, manifest: Manifest, state: dict[str, JSON], begins: Mapping[str, Mapping[str, int]]
    ) -> None:
        self.path = path
        self.info = manifest.info
        self.state = state
        self.aliases = manifest.aliases
        self._sections = manifest.sections
        self._begins = begins

    @staticmethod
    def open(path: Path, verify: Literal["checksums", "sizes"] = "checksums") -> Checkpoint:
        """Verify a checkpoint and open it.

        Args:
            path: Its directory.
            verify: "checksums" reads every byte; "sizes" checks that every file is there with its size, and its header.

        Raises:
            CheckpointDamaged: Something is missing, changed, malformed, or outside the directory; the message names it.
            CheckpointError: The checkpoint has another format version, or this user may not read it.
        """
        manifest = read_manifest(path)
        for name, (size, sha256) in manifest.files.items():
            check_file(path, name, size, sha256 if verify == "checksums" else None)
        begins = {file: check_header(path / file, tensors) for file, tensors in manifest.contents.items()}
        return Checkpoint(path, manifest, read_json(path / STATE), begins)

    def names(self, section: str) -> list[str]:
        """Return the names of a section's tensors, in the order they were written."""
        return list(self._section(section))

    def spec(self, section: str, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape of a tensor without reading it."""
        spec = self._spec(section, name)
        return spec.dtype, torch.Size(spec.shape)

    def tensor(self, section: str, name: str) -> torch.Tensor:
        """Read a tensor into new memory of the host.

        Raises:
            CheckpointMismatch: There is no such tensor.
            CheckpointDamaged: Its file changed since the checkpoint was opened.
        """
        spec = self._spec(section, name)
        return self._read(name, spec).view(spec.dtype).reshape(spec.shape)

    def tensors(self, section: str) -> Mapping[str, torch.Tensor]:
        """Return a section as a mapping that reads a tensor each time it is looked up."""
        return _Tensors(self, section)

    def copy_into(self, section: str, name: str, destination: torch.Tensor) -> None:
        """Read a tensor into an existing one, on any device, in place; of a sharded one into the part that is here.

        Raises:
            CheckpointMismatch: There is no such tensor, or `destination` has another dtype or shape: nothing is cast.
            CheckpointDamaged: Its file changed since the checkpoint was opened.
        """
        dtype, shape = self.spec(section, name)
        if destination.dtype != dtype or destination.shape != shape or destination.is_meta:
            raise CheckpointMismatch(
                f"{self.path}: {section}/{name} is {dtype} {list(shape)}, but it would be read into "
                f"{destination.dtype} {list(destination.shape)} on {destination.device}, and nothing is cast. "
                "Build it as it was when this was saved."
            )
        fill(destination, self.tensor(section, name))

    def _section(self, section: str) -> Mapping[str, Spec]:
        if section not in self._sections:
            raise CheckpointMismatch(f"{self.path} has no section {section!r}, only {sorted(self._sections)}.")
        return self._sections[section]

    def _spec(self, section: str, name: str) -> Spec:
        specs = self._section(section)
        if name not in specs:
            raise CheckpointMismatch(f"{self.path} has no tensor {name!r} in {section!r} (it has {len(specs)} others).")
        return specs[name]

    def _read(self, name: str, spec: Spec) -> torch.Tensor:
        """A tensor's bytes; chunks are put together as bytes, since not every dtype can be copied into a slice."""
        if len(spec.chunks) == 1:
            return self._read_chunk(name, spec.chunks[0], spec.dtype)
        whole = torch.empty((*spec.shape, spec.dtype.itemsize), dtype=torch.uint8, device="cpu")
        for chunk in spec.chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
            whole[box] = self._read_chunk(name, chunk, spec.dtype).reshape(*chunk.shape, spec.dtype.itemsize)
        return whole.reshape(-1)

    def _read_chunk(self, name: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        data = torch.empty(math.prod(chunk.shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        path = self.path / chunk.file
        with readable(path), open(path, "rb") as file:
            file.seek(self._begins[chunk.file][name])
            if file.readinto(data.numpy().data) != len(data):
                raise CheckpointDamaged(f"{path} became shorter while it was read.")
        return data


@final
class _Tensors(Mapping[str, torch.Tensor]):
    def __init__(self, checkpoint: Checkpoint, section: str) -> None:
        self._checkpoint = checkpoint
        self._section = section
        self._names = dict.fromkeys(checkpoint.names(section))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._checkpoint.tensor(self._section, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
