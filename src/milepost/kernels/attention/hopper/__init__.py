"""Attention kernels in Gluon that use Hopper's own instructions."""
