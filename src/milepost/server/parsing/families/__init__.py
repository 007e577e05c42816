"""One file for each family of models; see `milepost.server.parsing`."""
