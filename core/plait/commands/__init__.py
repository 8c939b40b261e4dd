"""The command `plait`: one file for each subcommand. May import every room; no room imports it."""
