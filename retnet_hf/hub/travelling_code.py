# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The Python files that are saved with a model: one for its configuration, one for the model, one for GPUs.

Each file joins modules of this package in the order of their imports, because transformers copies only single modules and
modules of the same folder.
"""

import ast
import functools
import importlib
import os
import re
import sys
import threading
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from transformers.utils import logging

from ..version import __version__


logger = logging.get_logger(__name__)

PACKAGE = __name__.split(".")[0]
ROOT = Path(__file__).parents[2]
WIDTH = 120
ROOMS = ("ops", "state", "modules", "arguments", "hub")  # their order in a file, before the model itself
_KERNELS = ("launching", "retention_triton", "rotation_triton", "gates_triton", "cross_entropy_triton", "kernel_check")
GPU = [f"{PACKAGE}.gpu.{name}" for name in (*_KERNELS, "cuda_graphs")]
GPU_FILE = "retnet_gpu"


class Module:
    """The parsed source of a module of this package.

    Attributes:
        needs: the modules of this package that it imports at its top, with the imported names. later: those that it imports
            in functions, from the GPU file if it has the module, else from the package.
        imports: its other imports at the top, as pairs (module, or None for `import name`; name).
        licence, heading, body: its first lines, its file with the first line of its docstring, and the rest of the source.
    """

    def __init__(self, name: str) -> None:
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        try:
            source = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"The code of {PACKAGE} cannot be saved: its sources cannot be read, {error}.") from error
        lines, tree = source.splitlines(), ast.parse(source)
        self.docstring = ast.get_docstring(tree)
        self.heading = f"# ======== {path.relative_to(ROOT).as_posix()}\n# {self.docstring.splitlines()[0]}"
        self.needs: dict[str, set[str]] = {}
        self.later: set[str] = set()
        self.imports: set[tuple[str | None, str]] = set()
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        for node in sorted(statements, key=lambda node: node.lineno, reverse=True):  # so that line numbers stay right
            place, at_top, indent = slice(node.lineno - 1, node.end_lineno), node in tree.body, " " * node.col_offset
            names = list(map(ast.unparse, node.names)) if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module, level = getattr(node, "module", None), getattr(node, "level", 0)
            if level and at_top and (module is None or any(alias.asname for alias in node.names)):
                raise ValueError(
                    f"{self.heading}, line {node.lineno}: code to be saved must import names of this package without `as`."
                )
            if level:
                module = ".".join([*name.split(".")[:-level], module])
            if level and at_top:
                self.needs.setdefault(module, set()).update(names)
            elif level:
                self.later.add(module)
            elif at_top:
                self.imports |= {(module, imported) for imported in names}
            if at_top and (names or node is tree.body[0] or ast.unparse(node).startswith("__all__")):
                del lines[place]
            elif level and module in GPU:
                lines[place] = [f"{indent}from .{GPU_FILE} import {', '.join(names)}"]
            elif level:
                lines[place] = [
                    f"{indent}try:",
                    f"{indent}    from {module} import {', '.join(names)}",
                    f"{indent}except ImportError as error:",
                    f'{indent}    raise ImportError("This needs the package {PACKAGE}, which is not installed.") from error',
                ]
        self.licence, self.body = lines[:2], "\n".join(lines[2:]).strip("\n")


module_of = functools.cache(Module)  # files of several classes share modules


def in_order(*names: str) -> dict[str, Module]:
    """Returns the named modules and all modules that they import, each after the modules that it imports."""
    found: dict[str, Module] = {}

    def visit(name: str) -> None:
        if name not in found:
            module = module_of(name)
            for needed in sorted(module.needs, key=lambda name: (*ROOMS, name.split(".")[1]).index(name.split(".")[1])):
                visit(needed)
            found[name] = module

    for name in names:
        visit(name)
    return found


def import_lines(imports: set[tuple[str | None, str]], width: int = WIDTH) -> list[str]:
    """Returns import statements, one for each module."""
    lines = sorted(f"import {name}" for module, name in imports if module is None)
    for module in sorted({module for module, _ in imports if module is not None}, key=lambda name: (name[0] == ".", name)):
        names = sorted(name for other, name in imports if other == module)
        line = f"from {module} import {', '.join(names)}"
        lines += [line] if len(line) <= width else [f"from {module} import (", *(f"    {name}," for name in names), ")"]
    return lines


def merged(modules: dict[str, Module], others: dict[str, str], main: str) -> str:
    """Returns the source of a file.

    Args:
        modules: the modules of the file, in order. others: maps modules in other files to the names of the files.
        main: the module that gives the file its docstring.
    """
    imports = {each for module in modules.values() for each in module.imports}
    needs = [each for module in modules.values() for each in module.needs.items() if each[0] in others]
    imports |= {(f".{others[needed]}", name) for needed, names in needs for name in names}
    of_triton = {(name, each) for name, each in imports if (name or each).split(".")[0] == "triton"}
    own = import_lines(imports - of_triton)
    if of_triton:  # transformers refuses files that import a package that is not installed, except within `try`
        own += ["", "try:", *(f"    {line}" for line in import_lines(of_triton)), "except ImportError:", "    raise"]
    sections = [f"{each.heading}\n\n{each.body}" for each in modules.values()]
    head = f"{PACKAGE} {__version__} wrote this file from its modules, each after the modules that it imports."
    described = [*modules[main].licence, f'"""{modules[main].docstring}\n\n{head}\n"""']
    text = "\n".join([*described, "", *own, "", "", "\n\n\n".join(sections), ""])
    return re.sub(r"\n{4,}", "\n\n\n", text)


@functools.cache
def files_of(cls: type) -> dict[str, str]:
    """Returns the files of a class of this package, as a dict of sources by file name without ".py"."""
    main, config_class = cls.__module__, getattr(cls, "config_class", None)
    file, of_config, files = main.split(".")[-1], {}, {}
    if config_class is not None:
        of_config = in_order(config_class.__module__)
        files = {config_class.__module__.split(".")[-1]: merged(of_config, {}, config_class.__module__)}
    modules = {name: module for name, module in in_order(main).items() if name not in of_config}
    others = dict.fromkeys(of_config, next(iter(files), ""))
    files[file] = merged(modules, others, main)
    asked = [name for name in GPU if any(name in module.later for module in modules.values())]
    if asked:
        others |= dict.fromkeys(modules, file)
        kernels = {name: module for name, module in in_order(*asked).items() if name not in others}
        files[GPU_FILE] = merged(kernels, others, next(iter(kernels)))
    return files


def derived_files(cls: type) -> dict[str, str]:
    """Returns the files of a class of another package that is derived from a class of this package.

    They are its module, the modules of its folder that this imports, since transformers copies only files of one folder, and
    the files of all models, configurations and image processors that these import from here.

    Raises:
        ValueError: if the code cannot be saved.
    """
    file, refused = getattr(sys.modules[cls.__module__], "__file__", None), f"The code of {cls.__name__} cannot be saved:"
    if file is None:
        raise ValueError(f"{refused} its module {cls.__module__} is not a file.")
    path, sources = Path(file), {}
    names = [path.stem]
    for name in names:
        if name not in sources:
            with tokenize.open(path.with_name(f"{name}.py")) as file:  # decodes by the declared encoding
                sources[name] = file.read()
            for node, modules in relative_imports(sources[name]):
                if node.level > 1 or not all(path.with_name(f"{each}.py").is_file() for each in modules):
                    raise ValueError(
                        f"The code of {path.name} cannot be saved: line {node.lineno} of {name}.py, {ast.unparse(node)!r}, "
                        "must import from a file of the same folder."
                    )
                names += modules
    uses = [use for source in sources.values() for _, uses in imports_from_here(source) for use in uses]
    used = (getattr(module, name, None) for _, module, names in uses for name in names)
    bases = {each for each in used if isinstance(each, type) and hasattr(each, "_auto_class")}
    files: dict[str, str] = {}
    for text in sorted(map(files_of, bases), key=lambda files: sum(map(len, files.values())), reverse=True):
        if not all(top_level(source) <= set().union(*map(top_level, files.values())) for source in text.values()):
            if clash := [name for name in text if files.get(name, text[name]) != text[name]]:
                advice = "Derive them in separate modules."
                raise ValueError(f"{refused} {clash[0]}.py would belong to two families of models. {advice}")
            files |= text
    if both := files.keys() & sources.keys():
        raise ValueError(f"{refused} {min(both)}.py is also a file of {PACKAGE}. Rename yours.")
    return files | {name: with_files(name, source, files) for name, source in sources.items()}


def relative_imports(source: str) -> list[tuple[ast.ImportFrom, list[str]]]:
    """Returns the relative imports in a source, with the modules that they need."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level]
    return [(node, [node.module] if node.module else [alias.name for alias in node.names]) for node in found]


def top_level(source: str) -> frozenset[str]:
    """Returns the names of the top-level classes and functions in a source."""
    return frozenset(node.name for node in ast.parse(source).body if hasattr(node, "name"))


def imports_from_here(source: str) -> list[tuple[ast.stmt, list[tuple[ast.alias, ModuleType | None, set[str]]]]]:
    """Returns the statements that import from this package, last one first, with (alias, module, used names) for each name.

    If the name is that of a module, as in `import retnet_hf as r`, what is used are attributes of this module.
    """
    tree, found = ast.parse(source), []
    attributes = [ast.unparse(node).split(".") for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        uses = []
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0) else ():
            place, module, used = getattr(node, "module", alias.name), None, set()
            if place.split(".")[0] == PACKAGE:
                module, used = importlib.import_module(place), {alias.name}
                thing = getattr(module, alias.name, None) if isinstance(node, ast.ImportFrom) else module
                if isinstance(thing, ModuleType):
                    bound = alias.asname or alias.name
                    module, used = thing, {parts[1] for parts in attributes if parts[0] == bound}
            uses.append((alias, module, used))
        if any(module for _, module, _ in uses):
            found.append((node, uses))
    return sorted(found, key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True)


def with_files(name: str, source: str, files: dict[str, str]) -> str:
    """Returns a source that imports from the files instead of this package. What they lack stays, with a warning."""
    lines, known = source.split("\n"), {}
    for file, text in files.items():
        imported = (node.names for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
        known[file] = top_level(text).union(alias.name for names in imported for alias in names)
    for node, uses in imports_from_here(source):
        imports: set[tuple[str | None, str]] = set()
        for alias, module, used in uses:
            place, line = getattr(node, "module", None), ast.unparse(alias)
            file = next((file for file in files if used and used <= known[file]), None)
            if file is not None and module.__name__ != place:  # the name of a module
                place, line = ".", f"{file} as {alias.asname or alias.name}"
            elif file is not None:
                place = f".{file}"
            imports.add((place, line))
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        before, after = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
        alone = not before.strip() and not after.lstrip().startswith(";") and not lines[node.lineno - 2].endswith("\\")
        *others, line = import_lines(imports) if alone else ["; ".join(import_lines(imports, width=10**6))]
        lines[node.lineno - 1 : node.end_lineno] = [*(before + other for other in others), before + line + after]
    for node, _ in imports_from_here("\n".join(lines)):
        logger.warning(f"{name}.py is saved with {ast.unparse(node)!r}. Loading the model will need {PACKAGE} installed.")
    unseen: set[str] = set()
    for node, modules in relative_imports("\n".join(lines)):
        if not lines[node.lineno - 1].strip().startswith(f"from .{node.module} import"):
            unseen.update(modules)
    if unseen:  # transformers copies a file only if a line begins with its import
        lines += ["if False:", *(f"    from .{module} import *" for module in sorted(unseen)), ""]
    return "\n".join(lines)


@contextmanager
def code_beside(saved: Any, folder: str | os.PathLike) -> Iterator[None]:
    """Writes the files of a model, configuration or image processor, and sets `auto_map` around `save_pretrained`."""
    cls = type(saved)
    if not Path(folder).is_file():
        files = files_of(cls) if cls.__module__.split(".")[0] == PACKAGE else derived_files(cls)
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            partial = Path(folder) / f"{name}.py.{os.getpid()}.{threading.get_ident()}"
            partial.write_text(text, encoding="utf-8")
            partial.replace(Path(folder) / f"{name}.py")
    config = getattr(saved, "config", saved)
    reference = f"{cls.__module__.split('.')[-1]}.{cls.__name__}"
    config.auto_map = (getattr(config, "auto_map", None) or {}) | {cls._auto_class: reference}
    # transformers reads this attribute to decide whether it copies modules itself.
    name, answer = ("is_remote_code", lambda: False) if isinstance(saved, nn.Module) else ("_auto_class", None)
    vars(saved)[name] = answer
    try:
        yield
    finally:
        vars(saved).pop(name, None)
