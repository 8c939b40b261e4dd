"""Mutation testing of Plait: bugs that nobody chose, and whether the quick tests notice them."""
