"""What a change would do to a measured run: the run taken apart, changes, their effect, and their rank."""
