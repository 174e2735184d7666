"""Training: `initialize`, and the engine it returns."""
