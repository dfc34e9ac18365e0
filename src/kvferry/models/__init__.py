"""What a model is, and what its cache looks like."""
