"""Loaders: micro-batches of a dataset, each rank its share."""
