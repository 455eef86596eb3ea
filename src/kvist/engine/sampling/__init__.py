"""The parts of the sampler, one file a concern: parameters, noise, history and penalties, filters, logprobs, grammars, rejection.

Must not know requests, text streams or schedules; `engine/sampler.py` puts the parts together. Nothing runs on import.
"""
