"""What the nox sessions do. Run a tool from the root of the repository: `python -m tools.<name> --help`."""
