# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf chat`: a conversation with a saved model."""

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from retnet_hf.conversion.errors import first_line, printable

from ..errors import InputError
from ..interrupts import handling, leaving_order
from ..named_inputs import model_source
from ..options import Model, RepetitionPenalty, Temperature, TopK, TopP, WriterThreads, loading, run_option, sampling_option


if TYPE_CHECKING:
    from ..text.generation import Conversation

COMMANDS = {
    "/save FILE": "save the state, and the text in FILE.json",
    "/load FILE": "continue from a saved state",
    "/rewind": "take the last turn back; the last 8 can be taken back",
    "/branch [N]": "start a second conversation from here; with a number, go to that one",
    "/help": "show this",
    "/exit": "end, like Ctrl-D; Ctrl-C ends an answer",
}


def chat(
    model: Model,
    system: Annotated[str | None, run_option(help="System message before the conversation.")] = None,
    max_new_tokens: Annotated[int, sampling_option("--max-new-tokens", "-n", min=1, help="Most tokens in an answer.")] = 500,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Annotated[int | None, sampling_option(min=0, help="The same seed gives the same answers.")] = None,
    threads: WriterThreads = None,
) -> None:
    """Talk to a model. Its state remembers the conversation, and can be saved, taken back and branched.

    A model without a chat template continues what you write.

    [bold]Examples[/bold]

    retnet-hf chat my-model

    retnet-hf chat my-model --system "You answer in verse." --temperature 0

    The last 8 turns can be taken back.

    In the conversation: /save FILE, /load FILE, /rewind, /branch, /help, /exit.
    """
    name = model_source(model)
    console = Console(stderr=True, highlight=False)
    with loading(console, threads):
        from ..text.generation import Conversation, load_writer, sampling

    network, tokenizer = load_writer(name, console, threads, seed)
    arguments = sampling(max_new_tokens, temperature, top_k, top_p, repetition_penalty)
    conversation = Conversation(network, tokenizer, arguments, system)
    if system is not None and not conversation.uses_template:
        advice = f"leave it out, or save the template as chat_template.jinja in {name}"
        raise InputError(f"--system needs a model with a chat template, and this one has none: {advice}")
    branches, current = [conversation], 0
    tell = functools.partial(console.print, style="dim", markup=False)
    hint = "" if conversation.uses_template else "; without a chat template, it continues your text"
    tell(f"/help shows the commands{hint}")
    for line in lines(tell):
        command, _, argument = map(str.strip, line.strip().partition(" "))
        try:
            if command in ("/exit", "/quit"):
                return
            if command == "/branch":
                if not argument:
                    branches.append(branches[current].branch())
                elif not argument.isdigit() or not 1 <= int(argument) <= len(branches):
                    raise InputError(f"/branch takes a number from 1 to {len(branches)}, or no number")
                current = int(argument or len(branches)) - 1
                tell(f"conversation {current + 1} of {len(branches)}")
            elif command.startswith("/"):
                obey(branches[current], command, argument, tell)
            elif line.strip():
                answer(branches[current], line.strip(), tell)
        except (InputError, RuntimeError, ValueError) as error:  # after errors of generation, the conversation continues
            console.print(printable(first_line(error)), style="red", markup=False, soft_wrap=True)


def lines(tell: Callable[[str], object]) -> Iterator[str]:
    """Yields the lines of the user. Ctrl-C discards an unfinished line."""
    asks = sys.stdin.isatty()
    while True:
        try:
            with leaving_order():
                yield input("> " if asks else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            tell("\n/exit or Ctrl-D ends the conversation")


def answer(conversation: "Conversation", text: str, tell: Callable[[str], object]) -> None:
    """Sends a line to the model and prints the answer on stdout while it is generated. Ctrl-C ends the answer."""
    heard, shown = [], []

    def write(piece: str) -> None:  # the space between a template's "Assistant:" and an answer is not shown
        shown.append(piece if any(shown) or not conversation.uses_template else piece.lstrip())
        print(shown[-1], end="", flush=True)

    with handling(lambda *_: heard.append(True), signal.SIGINT):
        turn = conversation.say(text, write, stop=lambda: bool(heard))
    print(flush=True)
    size = "" if turn.state_bytes is None else f"; the state takes {turn.state_bytes:,} bytes"
    end = ", stopped" if turn.stopped else ""
    tell(f"{turn.new_tokens} tokens{end}, {turn.tokens_per_second:,.1f} tokens/s{size}")


def obey(conversation: "Conversation", command: str, argument: str, tell: Callable[[str], object]) -> None:
    """Runs a command on one conversation. Raises InputError if that is not possible."""
    if command == "/rewind":
        if not conversation.rewind():
            forgotten, none = "only the last 8 turns can be taken back", "there is no turn to take back"
            raise InputError(forgotten if conversation.forgets else none)
        messages = conversation.memory.messages or []
        last = next((message["content"] for message in reversed(messages) if message["role"] == "user"), None)
        tell("back at the beginning" if last is None else printable(f"back after: {last}"))
    elif command in ("/save", "/load"):
        if not argument:
            raise InputError(f"{command} needs the name of a file")
        file = Path(argument).expanduser()
        if command == "/save":
            conversation.save(file)
            tell(f"saved: {file}, {file.stat().st_size:,} bytes")
        else:
            tell(f"loaded: {file}{'' if conversation.load(file) else ', a state without its text'}")
    elif command == "/help":
        for name, meaning in COMMANDS.items():
            tell(f"{name:12} {meaning}")
    else:
        raise InputError(f"there is no command {command}: /help shows all commands")
