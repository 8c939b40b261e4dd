"""Checkpoints: everything that a run needs to continue, in a form that is independent of strategies.

May import `records` and the rooms below it.

store.py    folders, manifests, digests (no torch)          choose.py      which checkpoint a run continues from
save.py     state to folder, synchronous or not             load.py        folder to state, in any layout
weights.py  weights alone, Plait's or safetensors, in       export.py      weights out, as safetensors
manager.py  the checkpoints of a run on its ranks           finite.py      refuses NaN and infinity
reader.py   torch's reader, which runs no code of a folder  pickled.py     data out of a pickle, calling nothing
files.py    digests, and atomic changes of folders          wellformed.py  checks the form of a manifest
pieces.py   checksums of a file's pieces, as text           hashed.py      takes them while files are written
checked.py  reads files, comparing each piece               sums.py        SHA256SUMS beside weights
staging.py  copies of the state in main memory
"""
