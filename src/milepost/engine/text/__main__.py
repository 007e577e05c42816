"""Starts the process that renders conversations and tokenizes texts."""

from milepost.engine.text.process import main

main()
