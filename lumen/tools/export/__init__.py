"""What a checkpoint holds, for other programs: the command `lumen export`, weights, and other formats."""
