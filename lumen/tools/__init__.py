"""Tools around runs, each with its command; nothing of the core imports one."""
