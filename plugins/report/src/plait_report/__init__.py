"""`plait report`: one page about runs and sweeps, which opens without a server or a network; and `plait compare`."""
