"""Commands of the command line that are too long for `rlplace.cli`, one file each."""
