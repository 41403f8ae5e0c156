"""A small GPT that learns to write, character by character."""
