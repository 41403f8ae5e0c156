"""Checkpoint format: storage, manifest, safetensors files, and a reader."""
