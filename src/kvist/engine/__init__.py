"""Generation on top of the model: requests' state, prefill with the encoder half only, decode, sampling, text streams.

Must not know HTTP. Import what you need from the files here; nothing runs on import.
"""
