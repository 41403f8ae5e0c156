"""Base classes of user code, and its preparation before training: hooks, initialization and compilation."""
