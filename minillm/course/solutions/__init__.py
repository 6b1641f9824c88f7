"""An answer to each exercise, in the module of its lesson."""
