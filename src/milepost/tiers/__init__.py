"""What leaves the device lives on in host memory and on disk. `policy`, with `loads`, `stores`,
`writes` and `reach`, and what they share, `holdings`, `tier` and `rates`, are pure: they decide,
and know neither tensors nor files. `copier`, `arena`, `disk` and `files` move the bytes.
"""
