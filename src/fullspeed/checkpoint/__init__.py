"""State on disk: files, the manifest that describes them, and commits that a crash cannot tear."""
