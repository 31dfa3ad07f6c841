"""What the plug-ins of serving engines share: a checkpoint under the engine's names, cuts over its ranks, packed layers.

Nothing here imports an engine.
"""
