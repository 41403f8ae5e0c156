"""The bytes of a checkpoint: storage, manifest, safetensors files, and a reader that opens one."""
