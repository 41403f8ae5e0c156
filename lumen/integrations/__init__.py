"""Loggers and callbacks for other packages; nothing of the core imports one."""
