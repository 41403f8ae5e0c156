"""What `self.log` leaves behind: values, their means over exactly the samples seen, and torchmetrics objects."""
