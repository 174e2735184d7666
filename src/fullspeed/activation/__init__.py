"""What backward needs of the forward: recomputed, sharded over ranks, or kept in host memory meanwhile."""
