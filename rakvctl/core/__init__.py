"""Everything that makes a token. Prints nothing, reads no arguments."""
