"""Run that is killed and started again many times, and the checks after each kill."""

import json
import signal
from collections import Counter
from contextlib import suppress

from lumen.checkpoint import Checkpoint, as_path_or_url, find_checkpoints, get_storage, open_newest_valid

BUCKET = "s3://lives"
MODULE = "tests.promises.resumable_run"
KILLED = "Signal 9 (SIGKILL)"  # torchrun's message about a rank


class Lives:
    """Run that is killed and started again, with all checks after each kill.

    Attributes:
        longest_s: The longest time from a kill until no process was left.
    """

    def __init__(self, directory, start, options):
        directory.mkdir(exist_ok=True)
        self.directory, self.start, self.options = directory, start, options
        self.checkpoints = self.checkpoints_in(directory)
        self.longest_s = 0.0

    def checkpoints_in(self, directory):
        """Return the folder of the checkpoints of a run, which may be in an object store."""
        return as_path_or_url(f"{BUCKET}{directory}") if self.options.get("s3") else directory / "run" / "checkpoints"

    def live(self, strike=None, *, start=None, kill=None, fails=False):
        """Resume up to the strike, to the kill by `kill(job)`, or to the end.

        Args:
            strike: Rank, event, and number of the event at which the rank kills itself.
            start: Function that starts the job; the usual one by default.
            kill: Function of the job that kills a process.
            fails: True if ranks are not killed, but may fail because of the kill.

        Returns:
            True if the run was killed.
        """
        for file in self.directory.glob("begun-*"):
            file.unlink()
        job = (start or self.start)(self.directory, MODULE, self.options | {"strike": strike})
        try:
            if kill is not None:
                kill(job)
        finally:
            code, took_s, output = job.wait()
        if code:
            assert fails or code in (-signal.SIGKILL, 128 + signal.SIGKILL) or KILLED in output, output
            self.longest_s = max(self.longest_s, took_s)
        else:
            assert "finished: " in output or "nothing to do: " in output, output
        self.check_checkpoints()
        return code != 0

    def check_checkpoints(self):
        """Check that the last committed checkpoint exists and that no checkpoint is damaged."""
        complaints = []
        newest = open_newest_valid(self.checkpoints, complaints.append)
        assert not complaints
        if commits := self.noted("commits"):
            assert newest is not None
            undone = "rolls_back" in self.options  # the resumed run removes newer checkpoints
            assert undone or commits[-1] in [path.name for path in find_checkpoints(self.checkpoints)]

    def noted(self, file):
        with suppress(FileNotFoundError):
            return (self.directory / file).read_text().splitlines()
        return []

    def end(self, expected, *, start=None):
        """Resume and train to the end, which must equal the end of an uninterrupted run."""
        assert not self.live(start=start)
        ends = [final_state(each, folder=self.checkpoints_in(each)) for each in (self.directory, expected)]
        for kept, wanted in zip(*ends, strict=True):
            assert kept == wanted
        ended = [(each / "ended.json").read_text() for each in (self.directory, expected)]
        assert ended[0] == ended[1]  # state of the task and the trainer
        found = sorted(path.name for path in find_checkpoints(self.checkpoints))
        assert sorted(get_storage(self.checkpoints).list_names(self.checkpoints)) == found
        seen = surviving_samples(self.directory)
        assert seen == surviving_samples(expected)
        return seen


def final_state(directory, name="run", folder=None):
    """Return all tensors of a run's last checkpoint, its other contents, and its metrics, in comparable form."""
    checkpoint = Checkpoint.open(find_checkpoints(folder or directory / name / "checkpoints")[-1])
    tensors = {
        (section, name): checkpoint.read_tensor(section, name).contiguous().view(-1).tolist()
        for section in ("model", "optimizer", "extra")
        for name in checkpoint.list_tensor_names(section)
    }
    state = {key: value for key, value in checkpoint.state.items() if key not in ("progress", "loggers")}
    progress = {key: value for key, value in checkpoint.state["progress"].items() if key != "elapsed_s"}
    return tensors, state, checkpoint.info, progress, (directory / name / "metrics.csv").read_text()


def surviving_samples(directory, moved=False):
    """Return per epoch how often each sample was trained on; a resumed process must repeat a step exactly.

    Args:
        directory: The directory of the run.
        moved: True if the run had several layouts, in which the number of steps before a batch's end differs.
    """
    history = {}
    for line in (directory / "samples.jsonl").read_text().splitlines():
        epoch, step, batch, indices = json.loads(line)
        step = None if moved else step
        assert history.setdefault((epoch, batch), (step, indices)) == (step, indices)
    seen = {}
    for (epoch, _), (_, indices) in history.items():
        seen.setdefault(epoch, Counter()).update(indices)
    return seen
