"""What a run needs of data: the interface of sources and their batches, one batch read ahead, the tokenizer's files.

May import `strategies` and the rooms below it.
"""
