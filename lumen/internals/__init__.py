"""All uses of private names of torch and Python, in one place."""
