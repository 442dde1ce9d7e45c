"""__CLASS__: __SUMMARY__."""

from composer.algorithms.__SNAKE__.__SNAKE__ import __CLASS__ as __CLASS__
from composer.algorithms.__SNAKE__.__SNAKE__ import __FUNCTION__ as __FUNCTION__

__all__ = ["__CLASS__", "__FUNCTION__"]
