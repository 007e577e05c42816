"""The process that prepares images (`process`)."""

from milepost.engine.media.process import main

main()
