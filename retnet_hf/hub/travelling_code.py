# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
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
from typing import Any

from torch import nn
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

from ..version import __version__


logger = logging.get_logger(__name__)

PACKAGE = __name__.split(".")[0]
ROOT = Path(__file__).parents[2]
WIDTH = 120
ROOMS = ("ops", "state", "modules", "arguments", "hub")  # their order in a file, before the model itself
GPU = [
    f"{PACKAGE}.gpu.{name}"
    for name in (
        *("launching", "retention_triton", "rotation_triton", "gates_triton", "cross_entropy_triton"),
        *("residual_triton", "kernel_check", "cuda_graphs"),
    )
]
GPU_FILE = "retnet_gpu"


class Module:
    """The parsed source of a module of this package.

    Attributes:
        needs: the modules of this package that it imports at its top, with the imported names.
        later: the modules of this package that it imports in functions.
        imports: its other imports, as pairs (module, or None for `import name`; name).
        heading, summary: its file, and the first line of its docstring.
        licence, body: its first lines, and the source without these lines, docstring, imports and __all__.
    """

    def __init__(self, name: str) -> None:
        self.name, self.path = name, ROOT.joinpath(*name.split(".")).with_suffix(".py")
        try:
            source = self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"The code of {PACKAGE} cannot be saved: its sources cannot be read, {error}.") from error
        self.lines, tree = source.splitlines(), ast.parse(source)
        self.docstring = ast.get_docstring(tree)
        self.heading, self.summary = self.path.relative_to(ROOT).as_posix(), self.docstring.splitlines()[0]
        self.needs: dict[str, set[str]] = {}
        self.later: set[str] = set()
        self.imports: set[tuple[str | None, str]] = set()
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        for node in sorted(statements, key=lambda node: node.lineno, reverse=True):  # so that line numbers stay right
            place = slice(node.lineno - 1, node.end_lineno)
            at_top = node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom)) and at_top:
                self._import(node)
                del self.lines[place]
            elif isinstance(node, ast.ImportFrom) and node.level:
                self.lines[place] = self._import_later(node)
            elif node is tree.body[0] or (at_top and ast.unparse(node).startswith("__all__")):
                del self.lines[place]
        self.licence, self.body = self.lines[:2], "\n".join(self.lines[2:]).strip("\n")

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = set(map(ast.unparse, node.names))
        if getattr(node, "level", 0):
            if node.module is None or any(alias.asname for alias in node.names):
                raise ValueError(
                    f"{self.heading}, line {node.lineno}: code to be saved must import names of this package without `as`."
                )
            self.needs.setdefault(self.absolute(node), set()).update(names)
        else:
            self.imports |= {(getattr(node, "module", None), name) for name in names}

    def _import_later(self, node: ast.ImportFrom) -> list[str]:
        """Returns the lines of an import in a function: from the GPU file if it has the module, else from the package."""
        names, indent = ", ".join(map(ast.unparse, node.names)), " " * node.col_offset
        module = self.absolute(node)
        self.later.add(module)
        if module in GPU:
            return [f"{indent}from .{GPU_FILE} import {names}"]
        return [
            f"{indent}try:",
            f"{indent}    from {module} import {names}",
            f"{indent}except ImportError as error:",
            f'{indent}    raise ImportError("This needs the package {PACKAGE}, which is not installed.") from error',
        ]

    def absolute(self, node: ast.ImportFrom) -> str:
        """Returns the absolute name of the module of a relative import."""
        return ".".join([*self.name.split(".")[: -node.level], node.module])


module_of = functools.cache(Module)  # files of several classes share modules


def in_order(*names: str) -> dict[str, Module]:
    """Returns the named modules and all modules that they import, each after the modules that it imports."""
    found: dict[str, Module] = {}

    def visit(name: str) -> None:
        if name not in found:
            module = module_of(name)
            for needed in sorted(module.needs, key=place_of):
                visit(needed)
            found[name] = module

    for name in names:
        visit(name)
    return found


def place_of(name: str) -> int:
    """Returns the sort key of a module among modules that do not import each other."""
    room = name.split(".")[1]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


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
    for module in modules.values():
        for needed, names in module.needs.items():
            if needed in others:
                imports |= {(f".{others[needed]}", name) for name in names}
    of_triton = {(name, each) for name, each in imports if (name or each).split(".")[0] == "triton"}
    own = import_lines(imports - of_triton)
    if of_triton:  # transformers refuses files that import a package that is not installed, except within `try`
        own += ["", "try:", *(f"    {line}" for line in import_lines(of_triton)), "except ImportError:", "    raise"]
    sections = [f"# ======== {each.heading}\n# {each.summary}\n\n{each.body}" for each in modules.values()]
    head = f"{PACKAGE} {__version__} wrote this file from its modules, each after the modules that it imports."
    described = [*modules[main].licence, f'"""{modules[main].docstring}\n\n{head}\n"""']
    text = "\n".join([*described, "", *own, "", "", "\n\n\n".join(sections), ""])
    return re.sub(r"\n{4,}", "\n\n\n", text)


@functools.cache
def files_of(cls: type) -> dict[str, str]:
    """Returns the files of a class of this package, as a dict of sources by file name without ".py"."""
    main, config_class = cls.__module__, getattr(cls, "config_class", None)
    of_config, files = {}, {}
    if config_class is not None:
        of_config = in_order(config_class.__module__)
        files = {last_part(config_class.__module__): merged(of_config, {}, config_class.__module__)}
    modules = {name: module for name, module in in_order(main).items() if name not in of_config}
    others = dict.fromkeys(of_config, next(iter(files), ""))
    files[last_part(main)] = merged(modules, others, main)
    asked = [name for name in GPU if any(name in module.later for module in modules.values())]
    if asked:
        others |= dict.fromkeys(modules, last_part(main))
        kernels = {name: module for name, module in in_order(*asked).items() if name not in others}
        files[GPU_FILE] = merged(kernels, others, next(iter(kernels)))
    return files


def last_part(module: str) -> str:
    """Returns the name of a module without its package."""
    return module.rpartition(".")[2]


def derived_files(cls: type) -> dict[str, str]:
    """Returns the files of a class of another package that is derived from a class of this package.

    They are its modules, and the files of all models, configurations and image processors that these import from here.

    Raises:
        ValueError: if the code cannot be saved.
    """
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    if file is None:
        raise ValueError(f"The code of {cls.__name__} cannot be saved: its module {cls.__module__} is not a file.")
    sources = {path.stem: source_of(path) for path in map(Path, [file, *get_relative_import_files(file)])}
    bases: set[type] = set()
    for source in sources.values():
        for node in imports_from_here(source):
            module = importlib.import_module(node.module)
            found = [getattr(module, alias.name, None) for alias in node.names]
            bases |= {each for each in found if isinstance(each, type) and hasattr(each, "_auto_class")}
    files: dict[str, str] = {}
    for text in sorted(map(files_of, bases), key=lambda files: sum(map(len, files.values())), reverse=True):
        if not all(top_level(source) <= set().union(*map(top_level, files.values())) for source in text.values()):
            clash = [name for name in text if files.get(name, text[name]) != text[name]]
            if clash:
                raise ValueError(
                    f"The code of {cls.__name__} cannot be saved: {clash[0]}.py would belong to two families of models. "
                    "Derive them in separate modules."
                )
            files |= text
    if both := files.keys() & sources.keys():
        raise ValueError(
            f"The code of {cls.__name__} cannot be saved: {min(both)}.py is also a file of {PACKAGE}. Rename yours."
        )
    return files | {name: with_files(name, source, files) for name, source in sources.items()}


def source_of(path: Path) -> str:
    """Returns the text of a Python file, decoded by its declared encoding."""
    with tokenize.open(path) as file:
        return file.read()


def top_level(source: str) -> frozenset[str]:
    """Returns the names of the top-level classes and functions in a source."""
    return frozenset(node.name for node in ast.parse(source).body if hasattr(node, "name"))


def imports_from_here(source: str) -> list[ast.ImportFrom]:
    """Returns the statements that import names from this package, last one first."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and not node.level]
    found = [node for node in found if node.module.split(".")[0] == PACKAGE]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset), reverse=True)


def with_files(name: str, source: str, files: dict[str, str]) -> str:
    """Returns a source that imports from the files instead of this package. Names that they lack stay, with a warning."""
    lines, defined = source.split("\n"), {file: top_level(text) for file, text in files.items()}
    for node in imports_from_here(source):
        imports = set()
        for alias in node.names:
            home = next((f".{file}" for file, names in defined.items() if alias.name in names), node.module)
            imports.add((home, ast.unparse(alias)))
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        before, after = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
        alone = not (before.strip() or after.strip())  # otherwise the line has other statements or a comment
        new = import_lines(imports) if alone else ["; ".join(import_lines(imports, width=10**6))]
        lines[node.lineno - 1 : node.end_lineno] = [before + line + after for line in new]
    text = "\n".join(lines)
    tree = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in tree:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        if not getattr(node, "level", 0) and any(module.split(".")[0] == PACKAGE for module in modules):
            logger.warning(
                f"{name}.py is saved with {ast.unparse(node)!r}. Loading the model will need {PACKAGE} installed."
            )
    return text


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
    reference = f"{last_part(cls.__module__)}.{cls.__name__}"
    config.auto_map = (getattr(config, "auto_map", None) or {}) | {cls._auto_class: reference}
    # transformers reads this attribute to decide whether it copies modules itself.
    name, answer = ("is_remote_code", lambda: False) if isinstance(saved, nn.Module) else ("_auto_class", None)
    vars(saved)[name] = answer
    try:
        yield
    finally:
        vars(saved).pop(name, None)
