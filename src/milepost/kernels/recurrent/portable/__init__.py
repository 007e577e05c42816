"""Recurrent steps in Triton, for every chip."""
