"""A GAN of handwritten digits, small enough for a CPU."""
