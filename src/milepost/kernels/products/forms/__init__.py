"""Forms of weights: `matrix` has raw weights and the description that tables choose by, `quantised`
has FP8, int8 and four bits."""
