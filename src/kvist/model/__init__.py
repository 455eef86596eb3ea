"""The model, reading like the report: one file a mechanism. Single device, no files, no requests beyond `Rows`.

Shape letters used in this package: N rows (tokens of a ragged batch), S residual streams, D model width, H heads, C head
width (the latent), Q query rank, J index heads, I index width, M compressed rows, G groups completed in a call, R ratio,
K selected rows, B candidate blocks, T window entries, V vocabulary, L layers, E experts.
"""
