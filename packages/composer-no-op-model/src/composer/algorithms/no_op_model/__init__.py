"""NoOpModel: train nothing, to measure the dataloader."""

from composer.algorithms.no_op_model.no_op_model import NoOpModel as NoOpModel
from composer.algorithms.no_op_model.no_op_model import NoOpModelClass as NoOpModelClass

__all__ = ["NoOpModel", "NoOpModelClass"]
