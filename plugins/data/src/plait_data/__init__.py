"""Sources of data for Plait: text files, conversations, streams, Python's standard library; tokenised once per
machine."""
