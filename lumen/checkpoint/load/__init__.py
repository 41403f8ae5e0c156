"""What is read: which checkpoint, which of its parts, and into what."""
