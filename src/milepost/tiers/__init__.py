"""What leaves the device lives on in host memory and on disk. `tier`, `policy` and `rates` are
pure: they decide, and know neither tensors nor files. The others move the bytes.
"""
