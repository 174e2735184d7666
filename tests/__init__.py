"""FullSpeed's tests; a package, so that ranks can import a test file by its full name."""
