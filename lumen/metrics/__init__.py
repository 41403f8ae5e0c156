"""Values logged by `self.log`: their means over exactly the samples seen, and torchmetrics objects."""
