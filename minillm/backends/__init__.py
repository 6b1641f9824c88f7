"""Backends: each runs the operations of the model on one kind of hardware."""
