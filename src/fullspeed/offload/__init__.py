"""Where tensors wait that do not fit in memory: files, the engine that moves bytes, and buffers for both."""
