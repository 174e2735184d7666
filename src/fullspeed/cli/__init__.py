"""The `fullspeed` command. The only package that prints."""
