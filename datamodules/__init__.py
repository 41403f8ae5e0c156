"""Example data modules for the models in ``models/``."""
