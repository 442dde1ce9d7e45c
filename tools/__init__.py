"""The work of the nox sessions. Run a tool from the root of the repository: `python -m tools.<name> --help`."""
