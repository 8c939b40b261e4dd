"""`plait report`: what runs and sweeps did, as one page that opens without a server or a network."""
