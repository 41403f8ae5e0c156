"""The processes of a run: how they start, find and hear each other, and how one's failure becomes that of all."""
