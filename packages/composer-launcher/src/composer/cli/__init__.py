"""The command `composer`: start a program in several processes."""

from composer.cli.launcher import main as main

__all__ = ["main"]
