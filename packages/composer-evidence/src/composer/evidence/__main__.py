"""Run the command as `python -m composer.evidence`."""

from composer.evidence.cli import main

if __name__ == "__main__":
    main()
