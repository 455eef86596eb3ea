"""What clients send, one file an API: schemas (pydantic), and their translation into what the engine is asked.

Must not know HTTP, streaming or the engine's thread.
"""
