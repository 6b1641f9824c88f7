"""Choosing the next tokens: parameters, processors, samplers, stopping, and one file per search strategy."""
