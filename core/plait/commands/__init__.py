"""The command `plait`: one file per subcommand.

May import `report` and the rooms below it; no room imports it.
"""
