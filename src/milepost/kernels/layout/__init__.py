"""Layouts of a step's tokens and chunks, and the forms in which rows are handed on.

batch       a step's batch on the host
chunks      prefills in chunks of the absolute grid
emit        rows in the model's dtype, in FP8, or both
"""
