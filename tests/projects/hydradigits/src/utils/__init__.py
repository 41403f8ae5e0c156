from src.utils.instantiators import instantiate_project
from src.utils.pylogger import RankedLogger
from src.utils.utils import get_metric_value, task_wrapper

__all__ = ["RankedLogger", "get_metric_value", "instantiate_project", "task_wrapper"]
