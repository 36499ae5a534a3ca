# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Blocks of `bash`, `text` and `py` in the guides are run as they stand, on small stand-ins, or a table says why not."""

import ast
import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from documentation import blocks
from foreign_folders import write_folder
from golden import SMALL, golden
from places import ROOT
from small_models import small_model

import retnet_hf
from retnet_hf.cli.main import app
from retnet_hf.cli.text.corpus import SAMPLE_TEXT, train_tokenizer
from retnet_hf.conversion import ring
from retnet_hf.conversion.fla import to_fla
from retnet_hf.conversion.hypenet import to_hypenet
from retnet_hf.conversion.torchscale import to_torchscale


DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("a source distribution has no docs", allow_module_level=True)
typer_main = pytest.importorskip("typer.main")
pytestmark = pytest.mark.usefixtures("heard_again", "interruptible", "in_an_empty_folder", "newest_names")

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

NOT_RUN = {  # the beginning of a line, as a pattern: why it is not run
    r"python3 -m venv |\.venv\S*/bin/(uv )?pip |pip install |\.venv-vllm/bin/uv ": "installs packages from a network",
    r"\.venv/bin/(python -m pytest|ruff) ?": "is what CI runs",
    r"\.venv/bin/(jupyter|mkdocs) ": "is a server that runs until Ctrl-C; tests build the site and run the notebooks",
    r"\S*python -m benchmarks": "measures a machine for minutes; test_benchmarks.py runs these",
    r"python3 -m http\.server ": "is a server that runs until Ctrl-C",
    r"hf ": "writes to the Hub",
    r"transformers (serve|chat) ": "is a server, and a client of it; test_cli_serve.py runs them",
    r"torchrun \S+ \d train_\w+\.py": "test_context_parallel.py runs these lines",
    r"torchrun .* -m retnet_hf.cli ": "is several processes; test_cli_ranks.py runs them",
    r"\S*retnet-hf serve ": "is a server that runs until Ctrl-C; test_cli_serve.py runs it",
    r"\S*retnet-hf demo": "trains for two minutes; test_cli.py runs it with fewer",
    r"\S*retnet-hf train book": "trains a tokenizer and 10 M parameters for a minute; test_cli.py trains fewer",
    r"\S*retnet-hf linearize HuggingFaceTB/": "reads a source and a text from the Hub",
    r"\S*retnet-hf linearize ": "trains for minutes; test_cli_linearize.py runs these options",
    r"python examples/train_image_classifier.py ": "trains for minutes; test_vision_promises.py trains less",
}

PY_NOT_RUN = {  # a pattern in a block: why it is not run here
    r"my-name/my-model": "writes to the Hub: test_hub.py and test_remote_code.py do so to a stand-in",
    r"^from vllm ": "needs vLLM: tests_around/vllm runs it",
    r"init_process_group": "is of several processes: test_context_parallel.py runs it",
    r"^import openvino$|^from executorch": "test_export_recipes.py runs it",
    r"IntxWeightOnlyConfig": "compiles for half a minute: test_works_with_torchao.py does so",
}


def lines_of(page: Path) -> list[list[str]]:
    """The lines of each block of commands; what follows three spaces, or a mark of a comment, is an explanation."""
    markdown, found = page.read_text(encoding="utf-8"), []
    for block in (*blocks(markdown, "bash"), *blocks(markdown, "text")):
        lines = [re.split(r"\s{3,}|\s+# ", line)[0].strip() for line in block.source.splitlines()]
        found.append([line for line in lines if line and not line.startswith("# ")])
    return found


BLOCKS = [(page, block) for page in PAGES for block in lines_of(page)]
LINES = [line for _, block in BLOCKS for line in block]
OURS = [line for line in LINES if re.match(r"\S*retnet-hf ", line)]
PY = {f"{page.stem}, line {block.line}": block.source for page in PAGES for block in blocks(page.read_text("utf-8"), "py")}


def reason(line: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, line)), None)


def arguments_of(line: str) -> list[str]:
    return shlex.split(line.split(" && ")[-1])[1:]


def language_model():
    tokenizer = train_tokenizer([SAMPLE_TEXT.read_text(encoding="utf-8")[:5000]], 300)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = retnet_hf.RetNetConfig.from_preset("tiny", vocab_size=len(tokenizer), **sizes, **ids)
    return retnet_hf.RetNetForCausalLM(config).eval(), tokenizer


def make_vir(path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = retnet_hf.ViRConfig(image_size=32, patch_size=8, id2label={0: "dark", 1: "bright"}, **sizes)
    retnet_hf.ViRForImageClassification(config).save_pretrained(path)
    retnet_hf.ViRImageProcessor(size=32).save_pretrained(path)


def make_language_model(path: Path) -> None:
    for each in language_model():
        each.save_pretrained(path)


def make_state(path: Path) -> None:
    retnet_hf.StateTuning(retnet_hf.RetNetForCausalLM.from_pretrained(path.parent / "retnet-demo")).save(path)


def make_texts(path: Path) -> None:
    file = path if path.suffix else path / "one.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text(SAMPLE_TEXT.read_text(encoding="utf-8")[:40_000], encoding="utf-8")


def make_torchscale(path: Path) -> None:
    model = small_model("torchscale", decay_schedule="power_of_two", residual_multiplier=4**0.25)
    torch.save(dict(zip(("model", "args"), to_torchscale(model))), path)


def make_ring(path: Path) -> None:
    fields = ring.FAMILY.fields(golden("ring/published_like", SMALL).config | {"vocab_size": 300})
    write_folder(path, *ring.to_ring(retnet_hf.RetNetHybridForCausalLM(retnet_hf.RetNetHybridConfig(**fields))))


MAKERS = {
    "my-model": make_language_model,
    "retnet-demo": make_language_model,
    "my-vir": make_vir,
    "task.safetensors": make_state,
    "book.txt": make_texts,
    "chapter.txt": make_texts,
    "notes/": make_texts,
    "letters.csv": lambda path: path.write_text("body\n" + '"And God said, Let there be light."\n' * 30),
    "chats.jsonl": lambda path: path.write_text('{"prompt": "Who?", "completion": "God."}\n' * 20),
    "checkpoint_last.pt": make_torchscale,
    "OpenNLPLab/TransNormerLLM-385M": lambda path: write_folder(path, *golden("transnormer/published_like", SMALL)[:2]),
    "fla-hub/retnet-1.3B-100B": lambda path: write_folder(path, *to_fla(small_model("fla"))),
    "chen-yingfa/HypeNet-2B": lambda path: write_folder(path, *to_hypenet(small_model("hypenet"))),
    "inclusionAI/Ring-mini-linear-2.0": make_ring,
}


def output_of(arguments: list[str]) -> str | None:
    for option in {"-o", "--output"} & set(arguments):
        return arguments[arguments.index(option) + 1]
    return arguments[2] if arguments[0] in ("convert", "export") else None


def make_stand_ins(folder: Path, arguments: list[str]) -> None:
    for name in arguments:
        if name in MAKERS and name != output_of(arguments) and not (folder / name).exists():
            MAKERS[name](folder / name)


# The page of the command line lists commands that do not follow each other.
APART = [(page, [line]) for page, block in BLOCKS for line in block if page.stem == "command-line"]
APART += [(page, block) for page, block in BLOCKS if page.stem != "command-line"]


@pytest.mark.parametrize("block", [pytest.param(part, id=f"{page.stem}: {part[0]}") for page, part in APART])
def test_each_block_of_commands_runs_as_it_stands(block, retnet_hf, tmp_path):
    to_run = [line for line in block if reason(line) is None]
    if not to_run:
        pytest.skip("; ".join(dict.fromkeys(reason(line) for line in block)))
    if any("--to web" in line for line in to_run) and shutil.which("npm") is None:
        pytest.skip("there is no npm, which fetches what a page needs")
    for line in to_run:
        arguments = arguments_of(line)
        make_stand_ins(tmp_path, arguments)
        answer = retnet_hf(*arguments, stdin=b"Hello\n")
        assert answer.code == 0, answer.err
        output = output_of(arguments)
        assert output is None or any((tmp_path / output).iterdir())


@pytest.mark.parametrize("line", dict.fromkeys(line for line in OURS if reason(line)))
def test_the_arguments_of_each_command_are_understood(line, tmp_path):
    make_stand_ins(tmp_path, arguments_of(line))
    command, *arguments = arguments_of(line.partition(" -- ")[0])
    assert typer_main.get_command(app).commands[command].make_context(command, arguments).params


def test_every_line_is_a_command_of_ours_or_has_a_reason():
    assert len(OURS) >= 28
    assert [line for line in LINES if line not in OURS and reason(line) is None] == []
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in LINES)] == []
    assert [pattern for pattern in PY_NOT_RUN if not re.search(pattern, "\n".join(PY.values()), flags=re.M)] == []


@pytest.mark.parametrize("source", PY.values(), ids=PY)
def test_each_block_that_needs_more_than_a_page_runs_on_stand_ins(source, retnet_hf, tmp_path):
    for pattern, why in PY_NOT_RUN.items():
        if re.search(pattern, source, flags=re.M):
            pytest.skip(why)
    for package in re.findall(r"^(?:import|from) (\w+)", source, flags=re.M):
        pytest.importorskip(package, reason=f"{package} is not installed")
    names = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    make_stand_ins(tmp_path, ["", *names])
    for name, target in (("my-onnx", "onnx"), ("my-mlx", "mlx")):
        if name in names:
            make_language_model(tmp_path / "retnet-demo")
            assert retnet_hf("export", "retnet-demo", name, "--to", target).code == 0
    for name in names & {"chen-yingfa/HypeNet-2B", "inclusionAI/Ring-mini-linear-2.0"}:
        language_model()[1].save_pretrained(tmp_path / name)
    exec(compile(source, "docs", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("source", PY.values(), ids=PY)
def test_names_of_this_package_in_blocks_that_are_not_run_exist(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("retnet_hf"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
    assert all(hasattr(retnet_hf, name) for name in re.findall(r"\bretnet_hf\.(\w+)", source))
