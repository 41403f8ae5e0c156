"""A LoRA adapter for a language model."""
