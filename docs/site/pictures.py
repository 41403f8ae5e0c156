"""Draw the pictures of the documentation: `python docs/site/pictures.py` writes docs/pictures/*.svg.

Each picture is at most 480 units wide, so that its text is legible on a phone. Colours follow the reader's system; in
the built site they follow the site's switch, because `pages.py` puts the pictures into the pages.
"""

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "pictures"
BLUE, GREEN, ORANGE, GREY = "#2f7de1", "#1f9d6b", "#d98324", "#8b929c"
STYLE = (
    "<style>svg.picture{color:#1f2328}"
    "@media(prefers-color-scheme:dark){svg.picture{color:#e6edf3}}</style>"
)  # fmt: skip
HEAD = 8  # the length of an arrow's head


class Picture:
    """Boxes, arrows and lines of text, in user units from the upper left corner.

    Args:
        title: The description for readers who do not see the picture.
        height: Height in user units.
    """

    width = 480

    def __init__(self, title: str, height: float) -> None:
        self._title, self._height, self._parts = title, height, list[str]()

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: float = 13, bold: bool = False,
        colour: str = "currentColor", code: bool = False, faint: bool = False,
    ) -> None:  # fmt: skip
        """Write a line of text with its baseline at y."""
        extra = ' font-weight="600"' * bold + ' opacity="0.65"' * faint
        extra += ' font-family="ui-monospace, monospace"' * code
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" fill="{colour}"{extra}>'
            f"{escape(words)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, colour: str = GREY, size: float = 12,
        dashed: bool = False, code: bool = False, filled: float = 0.16,
    ) -> None:  # fmt: skip
        """Draw a box with a line of text in its middle."""
        dash = ' stroke-dasharray="4 3"' * dashed
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colour}" '
            f'fill-opacity="{filled:g}" stroke="{colour}" stroke-width="1.2"{dash}/>'
        )
        if words:
            middle = y + height / 2 + size * 0.36
            self.text(x + width / 2, middle, words, anchor="middle", size=size, code=code)

    def line(self, x: float, y: float, x2: float, y2: float, *, colour: str = GREY, dashed: bool = False) -> None:
        """Draw a line."""
        dash = ' stroke-dasharray="4 3"' * dashed
        ends = f'x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}"'
        self._parts.append(f'<line {ends} stroke="{colour}" stroke-width="1.4"{dash}/>')

    def arrow(self, x: float, y: float, x2: float, y2: float, *, colour: str = GREY) -> None:
        """Draw a horizontal or vertical arrow."""
        across = y == y2
        sign = 1 if (x2 > x if across else y2 > y) else -1
        back = HEAD * sign
        self.line(x, y, x2 - back / 2 * across, y2 - back / 2 * (not across), colour=colour)
        sides = ((x2 - back, y2 - 4), (x2 - back, y2 + 4)) if across else ((x2 - 4, y2 - back), (x2 + 4, y2 - back))
        points = " ".join(f"{a:g},{b:g}" for a, b in ((x2, y2), *sides))
        self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def svg(self) -> str:
        """Return the picture as SVG."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" viewBox="0 0 {self.width} '
            f'{self._height:g}" width="{self.width}" font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, f"<title>{escape(self._title)}</title>", STYLE, *self._parts, "</svg>", ""])


def step() -> Picture:
    """One optimizer step on two ranks, of three micro-batches."""
    picture = Picture("One optimizer step of 12 samples, in micro-batches of 4, on two ranks", 262)
    picture.text(0, 16, "One step: 12 samples in three micro-batches of 4", bold=True)
    for rank, (y, second) in enumerate(((36, "micro-batch 2"), (106, "dummy, weight 0"))):
        picture.text(0, y + 15, f"rank {rank}", bold=True, size=12)
        picture.box(52, y, 128, 42, f"micro-batch {rank}", colour=BLUE)
        picture.box(186, y, 128, 42, second, colour=ORANGE if rank else BLUE, dashed=bool(rank))
        picture.box(376, y, 103, 42, "clip, update", colour=GREEN)
    picture.box(322, 30, 48, 124, colour=GREY)
    picture.text(346, 84, "all-", anchor="middle", size=11)
    picture.text(346, 98, "reduce", anchor="middle", size=11)
    picture.arrow(52, 172, 480, 172)
    picture.text(480, 188, "time", anchor="end", size=11, faint=True)
    lines = (
        (BLUE, "forward and backward; gradients add up on each rank"),
        (ORANGE, "a rank without a micro-batch keeps the collectives matched"),
        (GREY, "gradients are averaged once, in the last backward of the step"),
        (GREEN, "the same update on every rank, then on_step_end"),
    )
    for number, (colour, words) in enumerate(lines):
        y = 203 + 16 * number
        picture.box(0, y - 9, 10, 10, colour=colour, filled=0.5)
        picture.text(16, y, words, size=11.5)
    return picture


def hooks() -> Picture:
    """The order of the hooks of a training."""
    rows = (
        (0, "configure_model", "once"), (0, "configure_optimizers", "once"), (0, "on_fit_start", "once"),
        (0, "on_sanity_check_start / _end", "once, around a short validation"), (0, "on_train_start", "once"),
        (1, "on_train_epoch_start", "each epoch"),
        (2, "on_train_batch_start", "each micro-batch"), (2, "on_before_zero_grad", "first micro-batch of a step"),
        (2, "training_step", "each micro-batch"), (2, "on_before_backward / on_after_backward", ""),
        (3, "on_before_optimizer_step", "last micro-batch"), (3, "configure_gradient_clipping", ""),
        (3, "optimizer_step", ""), (3, "lr_scheduler_step", "interval: step"), (2, "on_train_batch_end", ""),
        (2, "on_validation_start ... _end", "if one is due"), (2, "on_step_end", "end of step"),
        (2, "on_step_checkpoint", "checkpoints are saved"),
        (1, "on_train_epoch_end", "each epoch"), (0, "on_train_end", "once"), (0, "on_fit_end", "once"),
        (0, "teardown", "also after a failure"),
    )  # fmt: skip
    top, pitch = 34, 19
    picture = Picture("The hooks of fit, in their order", top + pitch * len(rows) + 6)
    picture.text(0, 16, "fit", bold=True)
    picture.text(472, 16, "when", anchor="end", size=11, faint=True)
    colours, names = (GREY, BLUE, GREEN, ORANGE), ("", "epoch", "step", "update")
    for level in (1, 2, 3):
        inside = [number for number, row in enumerate(rows) if row[0] >= level]
        first, last = inside[0], inside[-1]
        x = 18 * level - 8
        picture.box(x, top + pitch * first - 2, 466 - 2 * x + 4, pitch * (last - first + 1), colour=colours[level],
                    filled=0.07)  # fmt: skip
        picture.text(464 - x, top + pitch * first + 11, names[level], anchor="end", size=11, bold=True,
                     colour=colours[level])  # fmt: skip
    for number, (level, name, when) in enumerate(rows):
        y = top + pitch * number + 11
        picture.text(18 * level, y, name, code=True, size=11.5)
        named = number in {next(n for n, row in enumerate(rows) if row[0] >= level) for level in (1, 2, 3)}
        edge = 472 - 18 * level - (52 if named else 0)
        if when:
            picture.text(edge, y, when, anchor="end", size=10.5, faint=True)
    return picture


def checkpoint() -> Picture:
    """When a checkpoint becomes visible."""
    picture = Picture("When a checkpoint becomes visible", 250)
    picture.text(0, 16, "On a disk: one rename", bold=True)
    picture.box(1, 28, 330, 74, colour=ORANGE, dashed=True)
    picture.text(10, 46, "step-00000200.tmp-1f09c2ae/", code=True, size=11.5)
    picture.text(10, 66, "1  each rank writes its tensors; SHA-256 on the way", size=11.5)
    picture.text(10, 81, "2  rank 0 writes state.json", size=11.5)
    picture.text(10, 96, "3  rank 0 writes manifest.json last", size=11.5)
    picture.text(340, 60, "a kill here leaves", size=11, faint=True)
    picture.text(340, 74, "a directory that", size=11, faint=True)
    picture.text(340, 88, "resume ignores", size=11, faint=True)
    picture.arrow(60, 104, 60, 130, colour=GREEN)
    picture.text(72, 122, "rename", size=11.5, bold=True, colour=GREEN)
    picture.box(1, 132, 330, 26, colour=GREEN)
    picture.text(10, 149, "step-00000200/", code=True, size=11.5)
    picture.text(340, 149, "complete", size=11.5, bold=True, colour=GREEN)
    picture.text(0, 188, "In an object store: the manifest comes last", bold=True)
    for number, (name, colour) in enumerate(
        (("tensors", ORANGE), ("state.json", ORANGE), ("manifest.json", GREEN))
    ):  # fmt: skip
        x = 128 * number + 1
        picture.box(x, 200, 104, 26, name, colour=colour, dashed=colour == ORANGE, code=number > 0, size=11.5)
        if number < 2:
            picture.arrow(x + 106, 213, x + 126, 213)
    picture.text(372, 217, "complete", size=11.5, bold=True, colour=GREEN)
    picture.text(0, 246, "Without its manifest a directory is no checkpoint: no reader finds it.", size=11, faint=True)
    return picture


def run_directory() -> Picture:
    """The files of a run directory, and who reads them."""
    rows = (
        (0, "runs/gpt/", "", GREY), (1, "config.yaml", "repeats the run: lumen fit --config", BLUE),
        (1, "metrics.csv", "every logged value", BLUE), (1, "system.csv", "speed, waiting, memory", BLUE),
        (1, "run.log", "messages, warnings, tracebacks", BLUE), (1, "environment.json", "versions, host", BLUE),
        (1, "checkpoints/", "", GREY), (2, "step-00000500/", "a complete checkpoint", GREEN),
        (3, "manifest.json", "every file with its SHA-256", GREEN),
        (3, "state.json", "progress, seeds, schedules", GREEN),
        (3, "model/*.safetensors", "parameters and buffers", GREEN),
        (3, "optimizer/*.safetensors", "optimizer state", GREEN),
    )  # fmt: skip
    picture = Picture("The files of a run directory", 24 * len(rows) + 6)
    for number, (level, name, use, colour) in enumerate(rows):
        y = 24 * number + 4
        if level:
            parent = max(n for n, row in enumerate(rows[:number]) if row[0] == level - 1)
            x = 22 * (level - 1) + 8
            picture.line(x, 24 * parent + 24, x, y + 10)
            picture.line(x, y + 10, x + 12, y + 10)
        width = 7.1 * len(name) + 14
        picture.box(22 * level + 1, y, width, 20, colour=colour)
        picture.text(22 * level + 7, y + 14, name, code=True, size=11.5)
        picture.text(22 * level + width + 10, y + 14, use, size=11.5, faint=True)
    return picture


def resume() -> Picture:
    """The samples of three steps on two processes, then on three."""
    picture = Picture("A run resumes on three processes with the samples that two would have taken", 232)
    picture.text(0, 16, "global_batch_size: 12, micro-batches of 2", bold=True)
    colours, side = (BLUE, GREEN, ORANGE), 30
    for row, (y, world) in enumerate(((40, 2), (76, 2), (142, 3))):
        picture.text(0, y + 19, f"step {row + 1}", size=12, bold=True)
        for micro in range(6):
            rank, first = micro % world, 12 * row + 2 * micro
            picture.box(56 + 66 * micro, y, 62, side, f"{first}, {first + 1}", colour=colours[rank], size=11.5)
    picture.line(0, 123, 110, 123, dashed=True)
    picture.text(251, 127, "checkpoint; resume on 3 processes", anchor="middle", size=11)
    picture.line(364, 123, 448, 123, dashed=True)
    for rank, colour in enumerate(colours):
        picture.box(56 + 80 * rank, 184, 10, 10, colour=colour, filled=0.5)
        picture.text(71 + 80 * rank, 193, f"rank {rank}", size=11.5)
    picture.text(0, 213, "A number is a position in the epoch's shuffled order. Every step takes the same", size=11,
                 faint=True)  # fmt: skip
    picture.text(0, 228, "samples on any number of processes: none is repeated, none is skipped.", size=11, faint=True)
    return picture


def strategy() -> Picture:
    """The layers below a trainer, and what a strategy decides."""
    picture = Picture("The layers below a trainer, and what a strategy decides", 236)
    layers = (
        ("Trainer", "opens and closes the run", GREY),
        ("loop", "epochs, steps, evaluations", GREY),
        ("Strategy", "SingleDevice, DDP or FSDP", BLUE),
        ("Precision", "autocast, fp16 scaler", GREY),
        ("TaskModule", "your code", GREEN),
        ("torch", "modules, autograd", GREY),
    )
    for number, (name, what, colour) in enumerate(layers):
        y = 39 * number
        picture.box(1, y + 2, 252, 30, colour=colour)
        picture.text(10, y + 21, name, size=12, bold=True)
        picture.text(245, y + 21, what, anchor="end", size=10.5, faint=True)
        if number + 1 < len(layers):
            picture.arrow(127, y + 32, 127, y + 41)
    picture.line(253, 95, 275, 95, colour=BLUE)
    picture.box(275, 24, 204, 142, colour=BLUE, filled=0.06)
    for number, words in enumerate((
        "A strategy decides", "· where parameters are placed", "· how gradients are averaged",
        "· which data a rank reads", "· what a rank saves", "",
        "One flag switches it:", "--trainer.strategy fsdp",
    )):  # fmt: skip
        picture.text(285, 43 + 16.5 * number, words, size=11.5, bold=number in (0, 6), code=number == 7)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "step": step, "hooks": hooks, "checkpoint": checkpoint, "run-directory": run_directory, "resume": resume,
    "strategy": strategy,
}  # fmt: skip


def main(names: Iterable[str] = PICTURES) -> None:
    """Write the pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name]().svg())


if __name__ == "__main__":
    main()
