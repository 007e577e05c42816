"""Attention kernels in Triton for any chip."""
