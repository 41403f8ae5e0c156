"""The example data modules: what the models in ``models/`` are trained on."""
