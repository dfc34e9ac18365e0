"""Text in, map out. Never sees tasks or sealed items."""
