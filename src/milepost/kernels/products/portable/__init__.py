"""Products in Triton, for every chip."""
