"""`lumen check`: what can be known of a training before it begins, by its own first batches; nothing is written."""
