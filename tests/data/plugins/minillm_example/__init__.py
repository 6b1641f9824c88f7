"""A package that adds a strategy, a logits processor and a model family to minillm."""
