"""Prediction of a wine's cultivar from thirteen measurements: a project around LightningCLI."""
