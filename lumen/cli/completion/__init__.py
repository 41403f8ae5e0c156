"""Words for a shell to complete: `words.json` keeps what the parsers say, so that a TAB waits for no torch."""
