"""The example models: each a task, and a YAML file of the same name that trains it."""

import logging

# transformers imports torchao where it is installed, which warns of its kernels for GPUs and of its own use of torch.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
