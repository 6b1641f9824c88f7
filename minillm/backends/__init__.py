"""Who runs the operations: the seam between mathematics and machine."""
