"""One file per family of models; the registry reads their `ARCHITECTURES`."""
