"""Example models: tasks, each with YAML configs that train it."""

import logging

# transformers imports torchao if installed, which warns about its GPU kernels and about its own use of torch.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
