"""Recurrent kernels in Gluon, for Hopper."""
