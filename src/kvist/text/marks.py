"""How the prompt format spells its marks: control tokens, task tokens, tool-call tags.

Owns spellings only; ids come from each tokenizer file. Must not know messages, prompts or parsing. Source: facts section 12.
Bars are fullwidth (U+FF5C), word gaps are U+2581. Only the whole marks here are control tokens; the `<`, the tag names
(with the blank before them) and the `>` around the DSML mark are ordinary text.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"
"""The release's spelling of the image token. Tokenizer files spell it differently, so it is always addressed by id."""

TASKS: dict[str, str] = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

BAR = "｜"
"""Stands in every mark but the two thinking marks; text without it can hold none of the others."""

OPEN_TAG = "<" + DSML
CLOSE_TAG = "</" + DSML
CALLS = " calls"
INVOKE = " invoke"
PARAMETER = " parameter"

TOOL_RESULT = "<tool_result>"
END_TOOL_RESULT = "</tool_result>"
"""Plain text that the model was trained to read; no control token."""
