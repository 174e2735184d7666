"""Starts ranks: reads the command line, chooses slots, runs the ranks and finds what went wrong first."""
