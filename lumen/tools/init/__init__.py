"""`lumen init`: a project of one's own to begin with."""
