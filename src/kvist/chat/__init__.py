"""`kvist chat`: a conversation in the terminal with a model in this process, over the same engine as the server's.

Owns reading lines, commands, saved sessions and what is shown. Must not know HTTP. No torch.
"""
