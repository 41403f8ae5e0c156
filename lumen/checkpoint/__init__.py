"""Checkpoints: format on disk, saving and loading.

    runs/gpt/checkpoints/
        step-00000200/
            model/00000-00000.safetensors    a folder for each section; numbers of the writing process and of the file
            optimizer/
            extra/                           tensors of metrics, callbacks and averages
            state.json                       everything except tensors
            manifest.json                    list of all files and tensors, and a digest of the manifest itself
        step-00000300.tmp-1f09c2ae/          a save in progress, or the leftover of a killed save

A checkpoint is complete (committed) after one rename. All processes write and sync their files in a temporary directory
next to the final path. Rank 0 writes the manifest last, checks the files as a reader does, and renames the directory. A
checkpoint is therefore either complete or absent, even if a process or the machine dies. Readers ignore a directory
without a valid manifest. An object store cannot rename: files are uploaded to their final place under unique names, and
the upload of the manifest, the last file, completes the checkpoint. Lumen never overwrites and never unpickles a file.

Each process writes blocks: its shards of sharded tensors, and some of the tensors that are replicated on all processes.

`format` contains the file format and storage. `save` collects and writes. `load` finds, reads and restores. The modules
in this folder serve both directions: names of tensors, settings, and the states of optimizers, ranks and user objects.
"""

from lumen.checkpoint.format.folder import find_checkpoints as find_checkpoints, open_newest_valid as open_newest_valid
from lumen.checkpoint.format.reader import Checkpoint as Checkpoint
from lumen.checkpoint.format.storage import as_path_or_url as as_path_or_url, get_storage as get_storage
from lumen.checkpoint.load.restore import treat_malformed_as_damaged as treat_malformed_as_damaged
from lumen.checkpoint.load.weights_source import (
    PARTS as PARTS,
    Part as Part,
    Weights as Weights,
    find_checkpoint as find_checkpoint,
    is_weights as is_weights,
)
from lumen.checkpoint.save.async_save import CheckpointSaver as CheckpointSaver
from lumen.checkpoint.save.collect import check_savable as check_savable
