# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The Python files that are saved with a model: one for its configuration, one for the model, one for GPUs.

Each file joins modules of this package in the order of their imports, because transformers copies only single modules and
modules of the same folder.
"""

import ast
import functools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..version import __version__


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
                needed = "code to be saved must import names of this package without `as`."
                raise ValueError(f"{self.heading}, line {node.lineno}: {needed}")
            if level:
                module = ".".join([*name.split(".")[:-level], module])
            if level and at_top:
                self.needs.setdefault(module, set()).update(names)
            elif level:
                self.later.add(module)
            elif at_top:
                self.imports |= {(module, imported) for imported in names}
            if at_top and (names or node is tree.body[0]):
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


def import_lines(imports: set[tuple[str | None, str]]) -> list[str]:
    """Returns import statements, one for each module."""
    lines = sorted(f"import {name}" for module, name in imports if module is None)
    for module in sorted({module for module, _ in imports if module is not None}, key=lambda name: (name[0] == ".", name)):
        names = sorted(name for other, name in imports if other == module)
        line = f"from {module} import {', '.join(names)}"
        lines += [line] if len(line) <= WIDTH else [f"from {module} import (", *(f"    {name}," for name in names), ")"]
    return lines


def merged(modules: dict[str, Module], others: dict[str, str], main: str) -> str:
    """Returns the source of a file of these modules, with the docstring of `main`. `others`: modules -> other files."""
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


@contextmanager
def code_beside(saved: Any, folder: str | os.PathLike) -> Iterator[None]:
    """Writes the files of a model, configuration or image processor, and sets `auto_map` around `save_pretrained`."""
    cls = type(saved)
    if not Path(folder).is_file():
        files = files_of(cls)
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
