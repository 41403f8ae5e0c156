"""Tools around runs, each with its own command. The core imports none of the tools."""
