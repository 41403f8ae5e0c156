"""The order of things: training and evaluation in `loop`, one optimizer step in `step`."""
