"""`python -m composer.report`."""

from composer.report.cli import main

main()
