"""A model of transformers that predicts from the name of a character what kind it is."""
