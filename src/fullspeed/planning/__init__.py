"""What a job needs before it runs: sizes of elastic jobs."""
