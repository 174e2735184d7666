"""The files DeepSpeed writes: read as if they were our own, and written for its tools. One model-parallel rank."""
