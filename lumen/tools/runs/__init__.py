"""`lumen runs`: which runs there are, how they stand, what they were set to, which of their checkpoints are good."""
