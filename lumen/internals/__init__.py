"""What Lumen uses of the private parts of torch and Python, all of it in this room."""
