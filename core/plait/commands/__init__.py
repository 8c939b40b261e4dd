"""The command `plait`: one file per subcommand.

May import `sweep` and the rooms below it; no room imports it.
"""
