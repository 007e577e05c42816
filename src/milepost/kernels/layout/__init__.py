"""Layouts of a step's tokens, chunks and states, and the forms in which rows are handed on.

batch       a step's batch on the host
chunks      prefills in chunks of the absolute grid
verify      decodes, with and without drafts
emit        rows in the model's dtype, in FP8, or both
"""
