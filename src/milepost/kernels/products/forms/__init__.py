"""Forms that a weight may have: `matrix` has raw ones and the description that tables use,
`quantised` FP8 and four bits."""
