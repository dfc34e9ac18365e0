"""Records in, a page out."""
