"""`lumen migrate`: the edits that make a project of Lightning's one of Lumen's, as a diff, and what to think about."""
