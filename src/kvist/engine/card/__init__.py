"""The runner of one Hopper card: weights packed for the GPU operators, state on the device, decode steps in CUDA graphs.

Modules here are imported only where Triton is (`weights`, `state`, `layers`, `device_model`); `cost` is arithmetic alone.
"""
