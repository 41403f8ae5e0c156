"""What callbacks and the task add to a checkpoint by `on_save_checkpoint` comes back by `on_load_checkpoint`."""

import lumen


class Average(lumen.Callback):
    """An average of the parameters as users of Lightning write it: it exists from `on_train_start` on."""

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
