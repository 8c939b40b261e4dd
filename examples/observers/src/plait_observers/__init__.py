"""Observers of a run, as a package of a third party brings them."""
