"""Which dtypes training uses, and the loss scale that keeps fp16 gradients in range."""
