"""`python -m composer.recipes`."""

from composer.recipes.cli import main

main()
