"""BYOL on small images: a student learns to predict what a slowly moving teacher sees of another view."""
