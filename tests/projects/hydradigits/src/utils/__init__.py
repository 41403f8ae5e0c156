from src.utils.instantiators import instantiate_all
from src.utils.logging_utils import log_hyperparameters
from src.utils.pylogger import RankedLogger
from src.utils.utils import get_metric_value, task_wrapper

__all__ = ["RankedLogger", "get_metric_value", "instantiate_all", "log_hyperparameters", "task_wrapper"]
