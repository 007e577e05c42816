"""The page at `/`, and what it shows of a running engine. Its modules:

the server's process        routes, and the page's files in static
the engine's process        watch, survey
"""
