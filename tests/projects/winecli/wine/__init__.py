"""Which cultivar a wine is of, by thirteen measurements: a project around LightningCLI."""
