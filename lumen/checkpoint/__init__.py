"""Checkpoints: what is saved and under which names, and its bytes on disk.

    runs/gpt/checkpoints/
        step-00000200/
            model/00000-00000.safetensors    a folder for each section; numbers of the writing process and of the file
            optimizer/
            extra/                           tensors of metrics, callbacks and averages
            state.json                       everything that is no tensor
            manifest.json                    every file and every tensor that must be there, and its own digest
        step-00000300.tmp-1f09c2ae/          a save under way, or what a killed one left

The commit is one rename. All files are written and synced in a directory beside the final one, the manifest last, and
checked as a reader would check them; then that directory gets its name. So a checkpoint is there completely or not at
all, whenever the process or the machine dies. For readers a directory without a valid manifest does not exist. An
object store cannot rename: there the files lie in their place at once, under names that never come again, and the
manifest, uploaded last, is the commit. Nothing is ever overwritten or unpickled.

Each process writes blocks: of sharded tensors what it holds, and some of the tensors that all processes hold alike.

`format` has the bytes and storage, `save` collects and writes, `load` finds, reads and resumes. The modules here serve
both directions: names of tensors, settings, and the states of optimizers, of ranks, and of what users keep.
"""

from lumen.checkpoint.format.folder import find_checkpoints as find_checkpoints, newest_valid as newest_valid
from lumen.checkpoint.format.reader import Checkpoint as Checkpoint
from lumen.checkpoint.format.storage import as_place as as_place, storage_of as storage_of
from lumen.checkpoint.load.restore import malformed_is_damaged as malformed_is_damaged
from lumen.checkpoint.load.weights_source import (
    PARTS as PARTS,
    Part as Part,
    Weights as Weights,
    find_checkpoint as find_checkpoint,
    is_weights as is_weights,
)
from lumen.checkpoint.save.async_save import Saves as Saves
from lumen.checkpoint.save.collect import check_savable as check_savable
