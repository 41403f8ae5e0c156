"""Processes of a run: start, rendezvous, collectives, and the propagation of an error from one process to all."""
