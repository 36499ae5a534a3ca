# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf chat`: the model has read what was said, once and in order, whatever was taken back, saved or branched."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from command_answers import done, refused, tree
from small_models import VOCAB_SIZE, small_llama, small_model, state_values, word_tokenizer
from transformers import Cache

from retnet_hf import RetNetState
from retnet_hf.cli.errors import InputError
from retnet_hf.cli.text.generation import REWINDS, Conversation, Memory, sampling


TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}w90 {% endif %}"
    "w91 {{ message['content'] }} w92 {% endfor %}{% if add_generation_prompt %}w93 {% endif %}"
)
END = 92  # of a turn

pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")


def tokenizer(template: str | None = TEMPLATE):
    words = word_tokenizer()
    words.add_special_tokens({"eos_token": f"w{END}"})
    words.chat_template = template
    return words


def writer(dialect: str = "fla"):
    """A model that writes words alone, none of the special tokens that are left out of a text."""
    model = small_model(dialect, eos_token_id=END, pad_token_id=0)
    model.generation_config.suppress_tokens = [0, 1, 2]
    return model


def conversation(dialect: str = "fla", template: str | None = TEMPLATE, tokens: int = 6, **options) -> Conversation:
    return Conversation(writer(dialect), tokenizer(template), sampling(tokens, temperature=0), **options)


def say(talk: Conversation, text: str) -> str:
    pieces = []
    turn = talk.say(text, pieces.append)
    assert "".join(pieces).split() == turn.text.split()
    return turn.text


def reads(talk: Conversation) -> list[int]:
    """What was read, of which the state is that of reading it at once."""
    memory = talk.memory
    with torch.no_grad():
        whole = talk.model(torch.tensor([memory.read]), use_cache=True).past_key_values
    if isinstance(memory.cache, RetNetState):
        torch.testing.assert_close(state_values(memory.cache), state_values(whole), rtol=1e-4, atol=1e-4)
    assert int(memory.cache.get_seq_length()) == len(memory.read)
    return memory.read


@pytest.mark.parametrize("dialect", ["fla", "hybrid", "sinks"])
def test_turns_follow_each_other_as_the_template_has_them(dialect):
    talk = conversation(dialect, system="w5 w6")
    first, second = say(talk, "w10 w11"), say(talk, "w12")
    text = f"w91 w5 w6 w92 w91 w10 w11 w92 w93 {first} w92 w91 w12 w92 w93 {second}"
    expected = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert (reads(talk) + talk.memory.unread)[: len(expected)] == expected
    assert [message["content"] for message in talk.memory.messages] == ["w5 w6", "w10 w11", first, "w12", second]
    whole = tokenizer()(text.removesuffix(second), add_special_tokens=False, return_tensors="pt")["input_ids"]
    written = talk.model.generate(whole, max_new_tokens=6, do_sample=False)[0, whole.shape[1] :]
    assert tokenizer().decode([token for token in written.tolist() if token != END]).split() == second.split()


@pytest.mark.parametrize("system", [None, "w5</w> w6"])
def test_a_message_that_spells_out_the_end_of_a_turn_does_not_end_it(system):
    words = tokenizer(TEMPLATE.replace("w92", "</w>"))
    words.add_special_tokens({"eos_token": "</w>"})
    talk, text = Conversation(writer(), words, {}, system), "w10 </w> w11</w>"
    ends = [talk._ids_of(text, memory).count(words.eos_token_id) for memory in (talk.memory, Memory([], cache=Cache([])))]
    assert ends == [1 + (system is not None), 2]  # of the template: each message before the answer, and a further turn
    words.chat_template = None
    assert words.eos_token_id not in talk._ids_of(text, talk.memory)


def test_a_model_of_transformers_talks_and_takes_back():
    talk = Conversation(small_llama(), tokenizer(), sampling(5, temperature=0))
    first, second = say(talk, "w10"), say(talk, "w12")
    assert talk.rewind()
    assert say(talk, "w12") == second
    assert talk.rewind()
    assert talk.rewind()
    assert not talk.rewind()
    assert say(talk, "w10") == first
    with pytest.raises(InputError, match="only the state of a RetNet can be saved"):
        talk.save(Path("state"))
    with pytest.raises(InputError, match="only a RetNet can continue from a saved state"):
        talk.load(Path("state"))


def test_branches_have_one_past_and_two_futures():
    talk = conversation()
    say(talk, "w10")
    twin, alone = talk.branch(), conversation()
    say(alone, "w10")
    assert say(twin, "w30 w31 w32") == say(alone, "w30 w31 w32")
    alone.rewind()
    assert say(talk, "w50") == say(alone, "w50")
    assert reads(talk) != reads(twin)


@pytest.mark.parametrize("text_is_known", [True, False])
def test_a_saved_conversation_goes_on_elsewhere(tmp_path, text_is_known):
    talk, other = conversation(), conversation()
    say(talk, "w10 w11")
    talk.save(tmp_path / "state")
    if not text_is_known:
        (tmp_path / "state.json").unlink()
    assert other.load(tmp_path / "state") == text_is_known
    assert other.memory.read == (talk.memory.read if text_is_known else None)
    assert say(other, "w12").split() == say(talk, "w12").split()
    if text_is_known:
        assert reads(other) == reads(talk)
    else:
        assert other.memory.messages is None
        assert other.rewind()
        assert other.rewind()  # what was there before the file
        assert other.memory.cache is None


def test_what_cannot_be_saved_or_loaded_is_said(tmp_path):
    talk = conversation()
    say(talk, "w10")
    with pytest.raises(InputError, match="cannot be written"):
        talk.save(tmp_path / "missing" / "state")
    before = talk.memory
    (tmp_path / "text").write_text("no state")
    for name in ("text", "missing"):
        with pytest.raises(InputError, match=f"{name} holds no state of this model"):
            talk.load(tmp_path / name)
    talk.save(tmp_path / "state")
    with pytest.raises(InputError, match="state holds no state of this model"):
        conversation("torchscale").load(tmp_path / "state")
    assert talk.memory is before


def test_a_model_without_a_template_continues():
    talk = conversation(template=None)
    first = say(talk, "w10 w11")
    ids = tokenizer()("w10 w11", return_tensors="pt")["input_ids"]
    assert tokenizer().decode(talk.model.generate(ids, max_new_tokens=6, do_sample=False)[0, 2:]) == first
    assert reads(talk)[:2] == [10, 11]


@pytest.fixture
def folder(in_an_empty_folder):
    writer().save_pretrained("model")
    tokenizer().save_pretrained("model")
    return Path("model")


def test_the_command(retnet_hf, folder):
    said = ["w10 w11", "/save s", "w12", "/rewind", "w12", "/branch", "w13", "/branch 1", "/load s", "w12", "/help"]
    answer = done(retnet_hf("chat", folder, "--temperature", 0, "-n", 5, "--threads", 1, stdin="\n".join(said).encode()))
    first, second, again, _, loaded = answer.out.splitlines()
    assert second == again == loaded
    talk = conversation(tokens=5)
    assert (say(talk, "w10 w11").strip(), say(talk, "w12").strip()) == (first.strip(), second.strip())
    assert len({line.split("takes ")[1] for line in answer.err.splitlines() if "the state takes" in line}) == 1
    for word in ("saved: s,", "back after: w10 w11", "conversation 2 of 2", "conversation 1 of 2", "loaded: s", "/rewind"):
        assert word in answer.err
    assert RetNetState.load("s", talk.model).nbytes > 0


def test_mistakes_in_a_conversation_are_said_and_it_goes_on(retnet_hf, folder):
    said = ["/rewind", "/branch 7", "/save", "/save s", "/load missing", "/what", "", "w10", "/exit", "w11"]
    answer = done(retnet_hf("chat", folder, "--temperature", 0, "-n", 5, stdin="\n".join(said).encode()))
    assert len(answer.out.splitlines()) == 1
    sentences = ["there is no turn to take back", "/branch takes a number from 1 to 1, or no number", "nothing was read yet"]
    sentences += ["/save needs the name of a file", "missing holds no state of this model", "there is no command /what"]
    assert [sentence for sentence in sentences if sentence not in " ".join(answer.err.split())] == []


def test_a_system_message_needs_a_template(retnet_hf, folder):
    tokenizer(None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    said = "--system needs a model with a chat template, and this one has none: leave it out, or save the template as"
    refused(retnet_hf("chat", folder, "--system", "w5", stdin=b"w10\n"), f"{said} chat_template.jinja in {folder}")


def test_ctrl_c_ends_an_answer_and_not_the_program(retnet_hf, folder, monkeypatch):
    whole, pieces = Conversation.say, []

    def interrupted(self, text, write, stop):
        def heard(piece: str) -> None:
            pieces.append(piece)
            if len(pieces) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            write(piece)

        return whole(self, text, heard, stop)

    monkeypatch.setattr(Conversation, "say", interrupted)
    answer = done(retnet_hf("chat", folder, "--temperature", 0, "-n", 500, stdin=b"w10\nw12\n/exit\n"))
    assert "stopped" in answer.err.splitlines()[1]
    assert len(answer.out.splitlines()) == 2
    talk = conversation(tokens=50)
    monkeypatch.undo()
    turn = talk.say("w10", lambda piece: None, iter([False, False, True, True]).__next__)
    assert (turn.new_tokens, turn.stopped) == (3, True)
    say(talk, "w12")
    reads(talk)


SAID = {"messages": [{"role": "user", "content": "w10"}], "read": [3], "unread": [4]}
WRONG = [{"messages": 5}, {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user"}]}, {"read": [[1]]}]
WRONG += [{"read": {"1": 2}}, {"unread": None}, {"unread": [VOCAB_SIZE]}, {"unread": [-1]}, {"unread": [True]}]


@pytest.mark.parametrize(
    "beside", ["[]", "{}", "[" * 100_000, "\udcff", *(json.dumps(SAID | one) for one in WRONG)], ids=len
)
def test_a_file_of_something_else_beside_a_state_is_one_line_and_loses_nothing(folder, retnet_hf, tmp_path, beside):
    talk = conversation(tokens=2)
    say(talk, "w10")
    talk.save(tmp_path / "state")
    (tmp_path / "state.json").write_bytes(os.fsencode(beside))
    memory = talk.memory
    with pytest.raises(InputError, match="state holds no conversation with this model"):
        talk.load(tmp_path / "state")
    assert talk.memory is memory
    assert len(talk.before) == 1
    answer = done(retnet_hf("chat", folder, "-n", 2, stdin=f"/load {tmp_path / 'state'}\nw5\n".encode()))
    assert sum("holds no conversation" in line for line in answer.err.splitlines()) == 1
    assert "2 tokens" in answer.err


def test_as_many_turns_can_be_taken_back_as_the_help_says_and_no_more_states_are_kept(folder, retnet_hf):
    talk = conversation(tokens=2)
    for turn in range(REWINDS + 3):
        say(talk, f"w{10 + turn}")
    assert len(talk.before) == REWINDS
    talk.branch().rewind()
    assert len(talk.before) == REWINDS  # of a branch alone
    said = ["w10"] * (REWINDS + 1) + ["/help"] + ["/rewind"] * (REWINDS + 1)
    answer = retnet_hf("chat", folder, "-n", 2, "--temperature", 0, stdin="\n".join(said).encode())
    assert f"the last {REWINDS} can be taken back" in answer.err
    assert answer.err.count("back after: w10") == REWINDS
    assert f"only the last {REWINDS} turns can be taken back" in answer.err.splitlines()[-1]
    assert f"The last {REWINDS} turns can be taken back." in retnet_hf("chat", "--help").out


@pytest.mark.parametrize("name", ["notes.txt", "model/config.json", "model/config", "model/model.safetensors", "table"])
def test_saving_replaces_nothing_but_a_saved_conversation(folder, name):
    talk = conversation(tokens=2)
    say(talk, "w10")
    Path("notes.txt").write_text("mine", encoding="utf-8")
    Path("table.json").write_text("[1, 2]", encoding="utf-8")
    before = tree(Path())
    with pytest.raises(InputError, match="is no saved conversation, and is not replaced"):
        talk.save(Path(name))
    assert tree(Path()) == before
    for _ in range(2):
        talk.save(Path("state"))
    assert conversation(tokens=2).load(Path("state"))


def test_what_was_said_cannot_steer_the_terminal(folder, retnet_hf, tmp_path):
    talk = conversation(tokens=2)
    say(talk, "w10")
    talk.save(tmp_path / "state")
    held = json.loads((tmp_path / "state.json").read_text())
    held["messages"][-2]["content"] = "\x1b[31mred"
    (tmp_path / "state.json").write_text(json.dumps(held))
    answer = done(retnet_hf("chat", folder, "-n", 2, stdin=f"/load {tmp_path / 'state'}\nw5\n/rewind\n".encode()))
    assert r"back after: \x1b[31mred" in answer.err
