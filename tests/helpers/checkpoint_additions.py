"""Helper for additions of callbacks and the task to a checkpoint."""

import lumen


class Average(lumen.Callback):
    """Callback with an average of the parameters, as users of Lightning write it: created in `on_train_start`."""

    average = None

    def on_train_start(self, trainer, task):
        if self.average is None:
            self.average = {name: tensor.detach().clone() for name, tensor in task.named_parameters()}

    def on_step_end(self, trainer, task):
        for name, parameter in task.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.25)

    def on_save_checkpoint(self, trainer, task, checkpoint):
        checkpoint["average"] = self.average
        checkpoint["about"] = {"decay": 0.75, "steps": (trainer.global_step,)}

    def on_load_checkpoint(self, trainer, task, checkpoint):
        assert checkpoint["about"]["decay"] == 0.75
        self.loaded_steps = checkpoint["about"]["steps"]
        self.average = checkpoint["average"]
