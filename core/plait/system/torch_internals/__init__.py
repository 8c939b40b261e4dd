"""The only files of the core that use names which torch keeps private, a file for each part of torch.

Each says what it needs, since which torch, and which tests fail if a later torch lacks it. Elastic's agent and
rendezvous (`launch/agent.py`, `launch/handler.py`), a module's table of parameters (`parallel/transform.py`, read in
every forward) and Hydra (`compose/hydra_internals.py`) have such files elsewhere; tests/install/test_house.py has the
list, and refuses a private name in any other file.
"""
