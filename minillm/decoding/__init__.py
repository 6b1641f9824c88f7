"""How the next tokens are chosen: parameters, logits processors, samplers, stopping and one file per search strategy."""
