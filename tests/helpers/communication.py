"""How much the processes of a run tell each other at once."""

#: Numbers: a sum of weights, who returned some, who none, who ends the epoch, who wishes to stop, whose memory is full.
BESIDE = 6
VOTE = 3  # numbers: a clock, how many ranks are asked to stop, how many announce something
AGREEMENT = 1  # collective, of a logged step: do ranks still agree, and which is slow
GATHER = 2  # collectives: each rank tells first how long its value is
#: Gathers and sums of an epoch of one step, by the task that is trained.
EPOCHS = {"Quiet": (0, 1), "Saying": (1, 1), "Ending": (2, 2), "QuietEnding": (1, 2), "MeasuringEnding": (3, 2)}
