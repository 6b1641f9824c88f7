"""How the next tokens are chosen: parameters, processors, samplers, stopping, and one file per search strategy."""
