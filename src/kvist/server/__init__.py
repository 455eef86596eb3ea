"""The HTTP server: OpenAI-compatible and Anthropic-style routes over an engine, and what running it needs.

Optional (extra `serve`). Knows the engine by its requests and events only, never tensors. Import what you need from the files
here; nothing runs on import. docs/server.md.
"""
