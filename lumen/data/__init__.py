"""Which sample when: orders, loaders, and the micro-batches of one optimizer step."""
