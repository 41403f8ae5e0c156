"""Weights of a pickle as safetensors: the command `lumen convert`, and the one module that reads pickles."""
