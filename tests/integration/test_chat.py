"""`kvist chat` as a person and as a pipe use it: a real process on a pseudo-terminal with nano, and the parts it is made of."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
from rich.console import Console

from kvist.chat.conversation import Wishes, open_conversation
from kvist.chat.loop import Chat, ChatOptions
from kvist.chat.reader import Reader
from kvist.chat.sessions import SessionError, SessionFiles
from kvist.chat.talk import harmless
from kvist.engine.errors import QueueFull
from kvist.engine.sampling.params import SamplingParams
from kvist.engine.terminal import book_text
from kvist.text import ContentDelta, ContentImage, Message, Reply, collect
from tests.integration.test_server_files import IMAGE_ID, seeing
from tests.integration.test_server_images import png
from tests.server_fakes import TOKENIZER, says, scripted

ENVIRONMENT = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
FLAGS = ["--memory", "200MB", "--temperature", "0", "--max-tokens", "12"]
PROMPT = r">(?: |\x08\x1b\[2C)"
REPLYING = r"(?:[\w'’-]+[^\w\x1b'’-]{1,4}){6}"
ACCOUNT = r"\[[\d,]+ prompt tokens: [^\]]*\]"


def command(cache: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kvist", "chat", "nano", "--cache-dir", str(cache), *FLAGS, *flags]


def piped(text: str, cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Text through a pipe."""
    return subprocess.run(
        command(cache, *flags), input=text, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False
    )


def hear_interrupts() -> None:
    """Ctrl-C reaches the program also where the tests run in the background of a shell, which has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A person at a terminal."""

    def __init__(self, cache: Path, *flags: str) -> None:
        whole = command(cache, *flags)
        self.child = pexpect.spawn(
            whole[0], whole[1:], env=ENVIRONMENT, encoding="utf-8", timeout=240, dimensions=(50, 200), preexec_fn=hear_interrupts
        )
        self.child.expect("/help lists the commands")

    def send(self, text: str, expect: str) -> str:
        """Type a line; what came up to `expect`, which is matched, without the terminal's own codes."""
        self.child.expect(PROMPT)
        self.child.send(text + "\r")
        self.child.expect(expect)
        whole = f"{self.child.before}{self.child.after}"
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", whole)

    def leave(self) -> int:
        self.child.expect(PROMPT)
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.child.close()
        status: int = self.child.exitstatus
        return status


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens terminals over one cache folder; none outlives the test."""
    opened: list[Terminal] = []

    def start(*flags: str) -> Terminal:
        opened.append(Terminal(tmp_path, *flags))
        return opened[-1]

    yield start
    for one in opened:
        one.child.close(force=True)


def test_at_a_terminal(terminal: Callable[..., Terminal]) -> None:
    """Talk, several lines, save, stop a reply, load in another process: the pages come from the disk, in milliseconds."""
    first = terminal()
    opening = " ".join(book_text().split()[:400])
    first.send(opening, ACCOUNT)
    account = first.send('"""\rtwo\rlines\r"""', ACCOUNT)
    assert "device" in account, "the next turn finds the turns before in the cache"
    assert "saved as walk" in first.send("/save walk", r"saved as [^\n]*")
    assert "no command" in first.send("/nonsense", "error: [^\n]*")
    assert "no vision" in first.send("/image cat.png", "error: [^\n]*")
    assert "/load NAME" in first.send("/help", "/quit +leave")
    assert first.leave() == 0
    second = terminal("--max-tokens", "5000")
    loaded = second.send("/load walk", "loaded walk[^\n]*\\]")
    found = re.search(r"([\d,]+) prompt tokens: ([\d,]+) cached \(([\d,]+) disk\).* after ([\d,]+) ms", loaded)
    assert found, loaded
    tokens, cached, disk, milliseconds = (int(group.replace(",", "")) for group in found.groups())
    assert cached == disk >= tokens - 128
    assert milliseconds < 20_000
    second.child.expect(PROMPT)
    second.child.send("and so on\r")
    second.child.expect(REPLYING)
    second.child.sendintr()
    second.child.expect(ACCOUNT)
    second.child.expect(r"\[stopped\]")
    second.send("go on", REPLYING)
    second.child.sendintr()
    second.child.expect(ACCOUNT)
    account = second.child.after
    now = re.search(r"([\d,]+) prompt tokens: ([\d,]+) cached", account)
    assert now, account
    assert int(now[1].replace(",", "")) > tokens + 4, "the stopped reply and both messages are in the session"
    assert int(now[2].replace(",", "")) >= tokens
    second.child.expect(r"\[stopped\]")
    assert "begun anew" in second.send("/reset", "begun anew")
    second.child.expect(PROMPT)
    second.child.sendintr()
    second.child.expect("Ctrl-D leaves")
    assert second.leave() == 0


def test_through_pipes(tmp_path: Path) -> None:
    """Replies and nothing else on standard output; commands work, continued lines are one message."""
    lines = "Once upon a time\n/save s\n/load s\n there \\\nwas\n/sessions\n/load none\n"
    ran = piped(lines, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(ACCOUNT, ran.stderr)) == 3
    assert "no session 'none'; saved are: s" in ran.stderr
    assert "prompt tokens" not in ran.stdout
    assert "\x1b" not in ran.stdout
    session = json.loads((tmp_path / "sessions" / "s.json").read_text())["conversation"]
    said = TOKENIZER.decode(session["ids"], skip_control=True)
    assert said.startswith("Once upon a time")
    assert ran.stdout.startswith(said.removeprefix("Once upon a time"))
    again = piped(lines, tmp_path)
    assert again.stdout == ran.stdout, "greedy text is the same with pages from the disk"
    flags = ["--mode", "chat", "--effort", "none", "--cache-budget", "0"]
    chat = subprocess.run(
        command(tmp_path, *flags),
        input="/load s\nhello\n/save t\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )
    assert chat.returncode == 0, chat.stderr
    assert "start with --mode text" in chat.stderr
    assert "this process writes no pages" in chat.stderr
    kept = json.loads((tmp_path / "sessions" / "t.json").read_text())["conversation"]["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant"]


def test_options_that_cannot_be(tmp_path: Path) -> None:
    ran = piped("", tmp_path, "--effort", "huge")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "reasoning effort 'huge'" in ran.stderr
    assert "Traceback" not in ran.stderr
    for options, words in (({"mode": "x"}, "mode 'x'"), ({"max_tokens": 0}, "at least 1")):
        with pytest.raises(ValueError, match=words):
            ChatOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--mode chat"):
        open_conversation(replace(scripted(says("x")), base=True), "auto", "a system message")


WISHES = Wishes(sampling=SamplingParams(seed=1), max_tokens=50, thinking=False)


def lines_of(text: str) -> Reader:
    lines: Iterator[str] = iter(io.StringIO(text).read().splitlines())

    def line(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    return Reader(line)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("a\nb", ["a", "b"]),
        ("a\\\nb\nc", ["a\nb", "c"]),
        ('"""\na\n\n b\n"""\nc', ["a\n\n b", "c"]),
        ('"""\na\nb', ["a\nb"]),
        ("a\\", ["a"]),
        ('"""\n"""\nx', ["", "x"]),
        ('"""', []),
    ],
)
def test_messages_of_many_lines(text: str, messages: list[str]) -> None:
    reader, got = lines_of(text), []
    while True:
        try:
            got.append(reader.message())
        except EOFError:
            break
    assert got == messages


def answer(text: str) -> Reply:
    return collect([ContentDelta(text)])


def test_chats_keep_pictures_and_reasoning() -> None:
    """A chat with a picture goes through its plain form unchanged; the prompt that is warmed begins the next one."""
    served = seeing()
    chat = open_conversation(served, "auto", "be kind")
    asked, work = chat.asked("what is it?", [png(1)], WISHES)
    assert len(work.request.images) == 1
    told = asked.answered(answer("a cat"), [5, 6])
    plain = json.loads(json.dumps(told.plain()))
    back = chat.begun().restored(plain)
    assert back == told
    assert base64.b64decode(plain["messages"][1]["pictures"][0]) == png(1)
    warmed = list(back.again(WISHES).request.prompt)
    following = list(back.asked("really?", [], WISHES)[1].request.prompt)
    assert following[: len(warmed)] == warmed
    assert warmed.count(IMAGE_ID) == 4
    assert chat == open_conversation(served, "chat", "be kind"), "a step changes nothing before it"


def test_a_text_goes_on() -> None:
    served = replace(scripted(says("x")), base=True)
    text = open_conversation(served, "auto", "")
    asked, work = text.asked("Once", [], WISHES)
    assert list(work.request.prompt) == [0, *TOKENIZER.encode("Once")]
    told = asked.answered(answer(" more"), [*TOKENIZER.encode(" more"), served.eos_id])
    assert told.plain()["ids"] == (0, *TOKENIZER.encode("Once"), *TOKENIZER.encode(" more"))
    assert text.restored(json.loads(json.dumps(told.plain()))) == told
    long = text.restored({"ids": [5] * (served.context - 3)})
    assert long.asked("", [], replace(WISHES, max_tokens=100))[1].request.max_tokens == 3, "shorter near the end of the context"
    with pytest.raises(Exception, match="exceed the context"):
        long.asked("a few more words than fit", [], WISHES)
    with pytest.raises(ValueError, match="cannot hold pictures"):
        text.asked("x", [b"y"], WISHES)


@pytest.mark.parametrize("plain", [{}, {"ids": []}, {"ids": [1, "2"]}, {"ids": [-1]}, {"ids": [True]}, {"ids": [10**9]}])
def test_damaged_texts(plain: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="it holds"):
        open_conversation(scripted(says("x")), "text", "").restored(plain)


@pytest.mark.parametrize(
    "message",
    [
        5,
        {},
        {"role": "tool", "text": "", "reasoning": "", "pictures": []},
        {"role": "user", "text": 5, "reasoning": "", "pictures": []},
        {"role": "user", "text": "", "reasoning": "", "pictures": ["@"]},
        {"role": "user", "text": "", "reasoning": "r", "pictures": []},
    ],
)
def test_damaged_chats(message: object) -> None:
    with pytest.raises(ValueError, match=r"damaged|cannot have"):
        open_conversation(scripted(says("x")), "chat", "").restored({"messages": [message]})


def test_session_files(tmp_path: Path) -> None:
    """Names are no paths, files are private and never believed, another model's are refused."""
    files = SessionFiles(tmp_path / "sessions", "aa")
    assert files.names == []
    file = files.save("walk.1", {"kind": "text"})
    assert file.stat().st_mode & 0o777 == 0o600
    assert files.load("walk.1") == {"kind": "text"}
    assert files.names == ["walk.1"]
    for name in ("", "../x", "a/b", ".x", "a\0", "x" * 65, "~"):
        with pytest.raises(SessionError, match="name"):
            files.save(name, {})
        with pytest.raises(SessionError, match="name"):
            files.load(name)
    with pytest.raises(SessionError, match="another model"):
        SessionFiles(tmp_path / "sessions", "bb").load("walk.1")
    for text in ("", "[]", "{}", '{"format": 9, "model": "aa", "conversation": {}}', "[" * 50_000, "\x00"):
        file.write_text(text)
        with pytest.raises(SessionError, match=r"damaged|format"):
            files.load("walk.1")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SessionError, match="damaged"):
        files.load("walk.1")


def test_a_reply_cannot_steer_the_terminal() -> None:
    assert harmless("a\x1b]0;title\x07b\r\n\tc\x9b") == "a�]0;title�b�\n\tc�"
    assert ContentImage(b"x").image == Message(role="user", content=(ContentImage(b"x"),)).content[0].image  # type: ignore[union-attr]


def test_pictures_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/image decodes a file at once and sends it with the next message only; what is no picture is said and not sent."""
    served = seeing()
    (tmp_path / "cat.png").write_bytes(png(1))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    shown = "".join(f"/image {tmp_path}/{name}.png\n" for name in ("bad", "none", "cat"))
    lines = f"{shown}what?\nand?\n/save x\n/reset\n/quit\nnever\n"
    out: list[str] = []
    chat = Chat(
        served=served,
        conversation=open_conversation(served, "auto", ""),
        wishes=WISHES,
        files=SessionFiles(tmp_path / "sessions", "aa"),
        reader=lines_of(lines),
        out=out.append,
        notes=Console(stderr=True, width=300),
        flush=lambda seconds: True,
    )
    with asyncio.Runner() as runner:
        chat.run(runner)
    assert "".join(out) == "hi\nhi\n"
    told = capsys.readouterr().err
    assert "cat.png: 4 tokens, shown with the next message" in told
    assert told.count("error: ") == 2
    assert "cannot decode an image" in told
    assert "No such file" in told
    requests = served.engine.requests  # type: ignore[attr-defined]
    assert [len(request.images) for request in requests] == [1, 1], "the second turn repeats the first"
    assert len(requests) == 2
    assert len(SessionFiles(tmp_path / "sessions", "aa").load("x")["messages"]) == 4
    assert chat.conversation == open_conversation(served, "auto", "")


def test_a_refused_message_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message that is too long, or that the engine refuses, is said; the conversation goes on without it."""
    answers = iter([["fine"], [QueueFull("the queue is full")], ["fine again"]])
    served = scripted(lambda request: next(answers))
    chat = Chat(
        served=served,
        conversation=open_conversation(served, "text", ""),
        wishes=WISHES,
        files=SessionFiles(tmp_path, "aa"),
        reader=lines_of("one\ntwo\n" + "word " * 40_000 + "\nthree\n"),
        out=lambda text: None,
        notes=Console(stderr=True, width=300),
        flush=None,
    )
    with asyncio.Runner() as runner:
        chat.run(runner)
    told = capsys.readouterr().err
    assert "the queue is full" in told
    assert "exceed the context" in told
    assert TOKENIZER.decode(chat.conversation.plain()["ids"], skip_control=True) == "onefinethreefine again"
