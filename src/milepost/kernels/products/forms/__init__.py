"""The forms that a weight may have: `matrix` has raw ones and what tables ask of any, `quantised`
FP8 and four bits."""
