"""The example models: each a task, and a YAML file of the same name that trains it."""
