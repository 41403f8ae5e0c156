"""Uses of private names of torch and Python, all in one place."""
