"""Starts the process that tries out forms."""

from milepost.engine.constraints.process import main

main()
