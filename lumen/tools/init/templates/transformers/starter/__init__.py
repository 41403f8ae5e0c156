"""A model of transformers that tells from the name of a character what kind it is."""
