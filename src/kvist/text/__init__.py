"""Text around the model: tokenizer files, Engram's token map, prompts, replies, stop strings. No tensors, no torch.

A conversation (`Message`) becomes token ids through `encode_chat`; a reply's ids become text through `StreamDecoder` and
events through `ReplyParser`.
"""

from kvist.text.events import (
    ContentDelta,
    Event,
    ParsedCall,
    ReasoningDelta,
    Reply,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    coalesce,
    collect,
)
from kvist.text.messages import (
    ContentImage,
    ContentText,
    Message,
    PromptError,
    ToolCall,
    ToolDefinition,
    ToolNamespace,
    resolve_effort,
)
from kvist.text.parser import ReplyParser, parse
from kvist.text.prompt import EncodedPrompt, ImageSlot, encode_chat
from kvist.text.stops import StopMatcher
from kvist.text.token_map import class_count, token_map
from kvist.text.tokenizer import MissingSpecialToken, StreamDecoder, Tokenizer, TokenizerError

__all__ = [
    "ContentDelta",
    "ContentImage",
    "ContentText",
    "EncodedPrompt",
    "Event",
    "ImageSlot",
    "Message",
    "MissingSpecialToken",
    "ParsedCall",
    "PromptError",
    "ReasoningDelta",
    "Reply",
    "ReplyParser",
    "StopMatcher",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerError",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolDefinition",
    "ToolNamespace",
    "class_count",
    "coalesce",
    "collect",
    "encode_chat",
    "parse",
    "resolve_effort",
    "token_map",
]
