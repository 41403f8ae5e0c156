"""Text sent to a terminal."""

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # cursor codes
