# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Changes the sources in one place at a time and runs the tests of the file. A change that passes shows a missing test.

    python -m benchmarks.mutations [--number 400] [--seed 0] [--only ops/] [--processes 2]

A change replaces a comparison, a sign or a constant, negates a condition, or drops a statement. Which places are changed
depends on the seed alone. Each change is tested in a copy of the checkout, in 10 to 60 seconds. Changes that make no
difference, such as another size of blocks, also pass.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue


ROOT = Path(__file__).parents[1]

# The tests of files, by the beginning of their paths. The first beginning that fits counts.
TESTS = {
    "retnet_hf/vision/manhattan": "manhattan_retention",
    "retnet_hf/ops/retention_split": "context_parallel",
    "retnet_hf/ops/retention_packed": "packed_states retention",
    "retnet_hf/ops/gradients": "gradients",
    "retnet_hf/ops/retention_forms": "retention precision gradients encoder",
    "retnet_hf/ops/kernels": "kernels retention_triton",
    "retnet_hf/ops/": "retention padding packing positions encoder state devices",
    "retnet_hf/state/packed_documents": "packed_states",
    "retnet_hf/state/": "state state_algebra multi_scale_retention outputs packed_states",
    "retnet_hf/retnet/configuration": "configuration conversion_golden",
    "retnet_hf/streams/": "multi_scale_retention",
    "retnet_hf/retnet/": "modeling outputs training state padding generation long_sequences positions gradients",
    "retnet_hf/modules/": "modeling positions precision multi_scale_retention cuda_graphs",
    "retnet_hf/arguments/": "configuration modeling outputs training",
    "retnet_hf/hybrid/configuration": "configuration hybrid",
    "retnet_hf/hybrid/": "hybrid experts state state_algebra conversion_families conversion_ling",
    "retnet_hf/vision/modeling_vir": "vir vision_promises conversion_vision",
    "retnet_hf/vision/modeling_metaformer": "metaformer vision_promises",
    "retnet_hf/vision/modeling_rmt": "metaformer vision_promises",
    "retnet_hf/vision/image_processing": "image_processing",
    "retnet_hf/conversion/vir": "conversion_vision",
    "retnet_hf/conversion/rmt": "conversion_vision",
    "retnet_hf/conversion/poolformer": "conversion_vision",
    "retnet_hf/linearization/": "linearization linearization_report",
    "retnet_hf/vision/configuration": "vision_configurations",
    "retnet_hf/vision/": "vir metaformer vision_configurations vision_promises",
    "retnet_hf/cpu/": "decoding_programs prompt_programs",
    "retnet_hf/cli/commands/convert": "cli_conversion",
    "retnet_hf/cli/linearizing/": "cli_linearize",
    "retnet_hf/cli/": "cli_chat cli_tools cli",
    "retnet_hf/conversion/": "conversion_golden conversion_writers conversion_families cli_conversion",
}
COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)  # sentences and names, not computations


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yields the nodes that can be changed, each with the kind of its change, without annotations and sentences."""
    for field, value in ast.iter_fields(tree):
        if field in (
            "annotation",
            "returns",
            "decorator_list",
            "bases",
            "keywords" if isinstance(tree, ast.ClassDef) else "",
        ):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, SKIPPED):
                continue
            if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
                yield node, "comparison"
            elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
                texts = (each for each in ast.walk(node) if isinstance(each, (ast.Constant, ast.JoinedStr)))
                if not any(isinstance(each, ast.JoinedStr) or isinstance(each.value, str) for each in texts):
                    yield node, "sign"
            elif isinstance(node, ast.BoolOp):
                yield node, "condition"
            elif isinstance(node, (ast.If, ast.IfExp)):
                yield node, "branch"
            elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
                yield node, "constant"
            elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                yield node, "statement"
            yield from places(node)


def changed(source: str, number: int) -> tuple[str, str]:
    """Returns the source with its place `number` changed, and a description of the change."""
    tree = ast.parse(source)
    node, kind = list(places(tree))[number]
    before = ast.unparse(node).partition("\n")[0]
    if kind == "comparison":
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif kind == "sign":
        node.op = SIGNS[type(node.op)]()
    elif kind == "condition":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif kind == "branch":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "constant":
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        bodies = (getattr(each, name, None) for each in ast.walk(tree) for name in ("body", "orelse", "finalbody"))
        body = next(body for body in bodies if isinstance(body, list) and node in body)
        body[body.index(node)] = ast.Pass()
    after = "pass" if kind == "statement" else ast.unparse(node).partition("\n")[0]
    return ast.unparse(ast.fix_missing_locations(tree)), f"line {node.lineno}: {before} -> {after}"


def mutants(number: int = 400, seed: int = 0, only: str = "") -> list[tuple[str, int]]:
    """Returns `number` places of the sources that contain `only` in their path, as file and number of the place."""
    found = []
    for file in sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "retnet_hf").rglob("*.py")):
        if only in file and files_of_tests(file):
            source = (ROOT / file).read_text(encoding="utf-8")
            found += [(file, place) for place, _ in enumerate(places(ast.parse(source)))]
    return random.Random(seed).sample(found, min(number, len(found)))


def files_of_tests(file: str, checkout: Path = ROOT) -> list[str]:
    """Returns the paths of the tests of a file."""
    names = next((tests for beginning, tests in TESTS.items() if file.startswith(beginning)), "").split()
    return [str(next(checkout.glob(f"tests*/*/test_{name}.py"))) for name in names]


def is_killed(checkout: Path, file: str, place: int | None) -> tuple[bool, str]:
    """Returns whether a test fails in the checkout with a changed place, and the change. Restores the file."""
    source, change = (checkout / file).read_text(encoding="utf-8"), ""
    if place is not None:
        text, change = changed(source, place)
        (checkout / file).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command, environment = command + files_of_tests(file, checkout), os.environ | {"PYTHONPATH": str(checkout)}
    try:
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=900)
        return ended.returncode != 0, change
    except subprocess.TimeoutExpired:  # e.g. a loop that does not end
        return True, change
    finally:
        (checkout / file).write_text(source, encoding="utf-8")


def copied(folder: Path) -> Path:
    """Copies the files that git tracks into a folder, and returns the folder."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=400, help="number of changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    chosen = mutants(arguments.number, arguments.seed, arguments.only)
    with tempfile.TemporaryDirectory() as folder:
        free: Queue[Path] = Queue()
        for number in range(arguments.processes):
            free.put(copied(Path(folder) / str(number)))

        def run(mutant: tuple[str, int | None]) -> bool:
            checkout = free.get()
            try:
                killed, change = is_killed(checkout, *mutant)
            finally:
                free.put(checkout)
            print("killed" if killed else "passed", mutant[0], change, flush=True)
            return killed

        with ThreadPoolExecutor(arguments.processes) as pool:
            if any(pool.map(run, sorted({(file, None) for file, _ in chosen}))):
                sys.exit("tests fail without a change: nothing can be said")
            killed = sum(pool.map(run, chosen))
    print(f"{killed} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
