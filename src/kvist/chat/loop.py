"""The conversation's loop: messages and commands in, replies and accounts out; Ctrl-C stops a reply and keeps the session.

Owns the commands. Replies go to standard output, all else to standard error, so that pipes get nothing but replies.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvist.chat.conversation import MODES, Conversation, Wishes, open_conversation
from kvist.chat.reader import Reader, open_reader
from kvist.chat.sessions import SessionFiles
from kvist.chat.talk import Said, harmless, talk
from kvist.engine.sampling.params import SamplingParams
from kvist.server.errors import ApiError
from kvist.server.loaded import served_model
from kvist.server.served import Served
from kvist.text import resolve_effort

if TYPE_CHECKING:
    from kvist.engine.launch import Launched, LaunchOptions

FLUSH_S = 30.0
MAX_PICTURE_BYTES = 64 << 20
HELP = """\
A message is sent with Enter. Several lines: end a line with \\, or write them between two lines of \"\"\";
at a terminal with kvist[chat], Alt-Enter breaks the line and pasted lines stay together. Ctrl-C stops a reply, Ctrl-D leaves.
/image PATH   show the model a picture with the next message
/save NAME    keep the session; its cache pages go to the page store
/load NAME    go on with a saved session, without computing it again
/sessions     names of saved sessions
/reset        begin anew
/help         this
/quit         leave"""


@dataclass(kw_only=True)
class Chat:
    """A running conversation. `flush` waits until the cache's pages are on disk; None where none are kept."""

    served: Served
    conversation: Conversation
    wishes: Wishes
    files: SessionFiles
    reader: Reader
    out: Callable[[str], object]
    notes: Console
    flush: Callable[[float], bool] | None
    pictures: list[bytes] = field(default_factory=list)

    def run(self, runner: asyncio.Runner) -> None:
        """Until the input ends or /quit."""
        while True:
            try:
                text = self.reader.message()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self.say("(/quit or Ctrl-D leaves)")
                continue
            if text.strip() == "/quit":
                return
            try:
                self._handle(text, runner)
            except (ApiError, ValueError, OSError) as error:
                self.notes.print(f"error: {_words(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
            except KeyboardInterrupt:
                self.say("[stopped]")

    def say(self, text: str) -> None:
        """A line that is no reply."""
        self.notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _handle(self, text: str, runner: asyncio.Runner) -> None:
        command, _, rest = text.partition(" ")
        name = rest.strip()
        match command:
            case "/help":
                self.say(HELP)
            case "/reset":
                self.conversation = self.conversation.begun()
                self.pictures.clear()
                self.say("begun anew")
            case "/image":
                self._show_picture(Path(name).expanduser())
            case "/save":
                self._save(name)
            case "/load":
                self._load(name, runner)
            case "/sessions":
                self.say(", ".join(self.files.names) or "none are saved")
            case _ if command.startswith("/") and command[1:].isalpha():
                raise ValueError(f"{command} is no command; /help lists them")
            case _ if text.strip() or self.pictures:
                self._reply(text, runner)

    def _show_picture(self, file: Path) -> None:
        if self.served.read_image is None:
            raise ValueError(f"{self.served.name} has no vision; it cannot be shown pictures")
        if file.stat().st_size > MAX_PICTURE_BYTES:
            raise ValueError(f"{file} has more than {MAX_PICTURE_BYTES} bytes; take a smaller picture")
        data = file.read_bytes()
        picture = self.served.read_image(data)
        self.pictures.append(data)
        self.say(f"{file.name}: {picture.tokens} tokens, shown with the next message")

    def _reply(self, text: str, runner: asyncio.Runner) -> None:
        asked, work = self.conversation.asked(text, self.pictures, self.wishes)
        said = Said(prompt_tokens=len(work.request.prompt))
        try:
            runner.run(talk(self.served, work, said, self._show))
        finally:
            if said.tokens:
                # What came belongs to the session, also if it was stopped.
                self.conversation = asked.answered(said.reply, said.tokens)
                self.pictures.clear()
                self.out("\n")
                if said.reply.reasoning and not said.reply.content:
                    self.say("")
            self.say(f"[{said.account()}]")

    def _show(self, text: str, reasoning: bool) -> None:
        if reasoning:
            self.notes.print(harmless(text), style="dim italic", markup=False, highlight=False, soft_wrap=True, end="")
            return
        self.out(harmless(text) if sys.stdout.isatty() else text)

    def _save(self, name: str) -> None:
        file = self.files.save(name, self.conversation.plain())
        if self.flush is None:
            self.say(f"saved as {name} ({file}); this process writes no pages, so loading it may compute it again")
        elif self.flush(FLUSH_S):
            self.say(f"saved as {name} ({file})")
        else:
            self.say(f"saved as {name} ({file}); the disk is slow, some pages may be computed again when it is loaded")

    def _load(self, name: str, runner: asyncio.Runner) -> None:
        plain = self.files.load(name)
        if plain.get("kind") != self.conversation.kind:
            kind = str(plain.get("kind"))[:20]
            raise ValueError(f"session {name!r} is a {kind}; start with --mode {kind}")
        try:
            loaded = self.conversation.restored(plain)
            work = loaded.again(self.wishes)
        except ValueError as error:
            raise ValueError(f"session {name!r} cannot be used: {error}") from error
        said = Said(prompt_tokens=len(work.request.prompt))
        runner.run(talk(self.served, work, said, lambda text, reasoning: None))
        self.conversation = loaded
        self.say(f"loaded {name}; [{said.account()}]")


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What `kvist chat` was asked: kind of conversation, sampling (no seed: a new one each time), limits, reasoning."""

    mode: str = "auto"
    system: str = ""
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int | None = None
    max_tokens: int = 512
    effort: str = "high"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} is unknown; use {', '.join(MODES)}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


def run_chat(model: str, options: ChatOptions, launching: LaunchOptions) -> None:
    """Load the model and talk until the input ends. Raises ValueError and named errors for what cannot be."""
    from kvist.engine.launch import launch, user_cache

    sampling = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
    )
    thinking = options.effort != "none"
    effort = resolve_effort(options.effort) if thinking else None
    wishes = Wishes(sampling=sampling, max_tokens=options.max_tokens, thinking=thinking, effort=effort)
    notes = Console(stderr=True)
    with notes.status(f"loading {model}"):
        launched = launch(model, launching)
    with asyncio.Runner() as runner:
        try:
            served = served_model(launched, figures=False)
            reader, edits = open_reader()
            chat = Chat(
                served=served,
                conversation=open_conversation(served, options.mode, options.system),
                wishes=wishes,
                files=SessionFiles((launching.cache_dir or user_cache()) / "sessions", _identity(launched)),
                reader=reader,
                out=_write,
                notes=notes,
                flush=_flush(launched),
            )
            if sys.stdin.isatty():
                chat.say(_welcome(chat, edits))
            chat.run(runner)
        finally:
            runner.run(launched.close())


def _welcome(chat: Chat, edits: bool) -> str:
    what = "continues your text" if chat.conversation.kind == "text" else "chats"
    editing = "" if edits else "; pip install '.[chat]' in the checkout for editing lines"
    return f"{chat.served.name} {what}, {chat.served.context:,} tokens; /help lists the commands{editing}"


def _identity(launched: Launched) -> str:
    from kvist.engine.engine import store_model

    engine = launched.engine.engine
    return store_model(engine.model.numerics, launched.fingerprint, engine.plan.layout.page_tokens).hex()


def _flush(launched: Launched) -> Callable[[float], bool] | None:
    tiers = launched.tiers
    return None if tiers is None or tiers.store is None or tiers.store.read_only else tiers.flush


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
