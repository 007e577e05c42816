"""Products in Gluon, for Hopper."""
