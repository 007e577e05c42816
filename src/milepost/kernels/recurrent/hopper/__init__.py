"""Recurrent steps in Gluon, for Hopper."""
