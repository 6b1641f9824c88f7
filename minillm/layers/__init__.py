"""The textbook's parts of a transformer, written in the operations of a backend."""
