"""Checkpoints: what a run needs to go on, in a form that carries no strategy.

state.py    the live state under canonical names            store.py   folders, manifests, digests (no torch)
save.py     state to folder, while training goes on or not  load.py    folder to state, in any layout
weights.py  weights alone, Plait's or safetensors, in       export.py  weights out, as safetensors
resume.py   what a start of a run finds                     run.py     the checkpoints of a run on its ranks
data.py     where in the data a run goes on             reader.py  torch's reader, which runs nothing of a folder
pickled.py  data out of a pickle, with nothing called   wellformed.py  is a manifest one that a save writes?
sums.py     SHA256SUMS beside weights
"""
