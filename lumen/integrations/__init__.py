"""Loggers and callbacks for other packages; no module of the core imports them."""
