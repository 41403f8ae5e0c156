"""What a terminal is sent."""

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor
