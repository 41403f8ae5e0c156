"""Size of the collectives of a run."""

#: Numbers of a step: a sum of weights, ranks with and without weights, epoch end, stop requests, full memory.
OTHER_SUMS_OF_STEP = 6
VOTE = 3  # numbers: a clock, ranks with a stop request, ranks with an announcement
GUARD = 1  # collective of a logged step: the consistency guard and the slow rank
GATHER = 2  # collectives: each rank sends the length of its value first
#: Gathers and sums of an epoch of one step, by task.
COLLECTIVES_OF_EPOCH = {
    "Quiet": (0, 1),
    "Saying": (1, 1),
    "Ending": (2, 2),
    "QuietEnding": (1, 2),
    "MeasuringEnding": (3, 2),
}
