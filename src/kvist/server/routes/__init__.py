"""One file an API: what a request becomes, and how its answer and its stream are spelled.

Must not know the engine's thread, sockets or other APIs.
"""
