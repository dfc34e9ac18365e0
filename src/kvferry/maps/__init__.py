"""What a map is, and how it is applied."""
