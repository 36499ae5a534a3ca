# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""For the API reference: what the sources say in fewer words than the parser of docstrings understands.

One line may describe several arguments, `query, key: (B, H, T, K). value: (B, H, T, V).`; the parser wants a line each. The
arguments of a configuration are its fields; the parser looks for an `__init__`. Some arguments travel in `**kwargs`; the
parser looks for them in the signature.
"""

import re

import griffe


_ARGUMENT = r"\w+(?: \([^)]*\))?"
_HEAD = re.compile(rf"(?:^|(?<=[.;] )){_ARGUMENT}(?:, {_ARGUMENT})*: ")
_IN_KWARGS = re.compile(r"^ {4}(output_\w+|state_rows|max_position_embeddings)[ :]", flags=re.MULTILINE)
_SECTION = re.compile(r"^((?:Args|Attributes):\n)((?: {4}.*(?:\n|\Z)|\n(?= {4}))+)", flags=re.MULTILINE)


class SpelledOut(griffe.Extension):
    """Rewrites the sections of arguments before they are parsed, and gives configurations their signature."""

    def on_function(self, *, func: griffe.Function, **kwargs) -> None:
        if "kwargs" in func.parameters and func.docstring is not None:
            for name in set(_IN_KWARGS.findall(func.docstring.value)) - {parameter.name for parameter in func.parameters}:
                func.parameters.add(griffe.Parameter(name, kind=griffe.ParameterKind.keyword_only))
        _spell_out(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **kwargs) -> None:
        if any(str(decorator.value) == "strict" for decorator in cls.decorators):
            cls.set_member("__init__", _constructor(cls))
        constructor = cls.members.get("__init__")
        parameters = constructor.parameters if isinstance(constructor, griffe.Function) else ()
        _spell_out(cls, {*cls.members, *(parameter.name for parameter in parameters)})


def _constructor(config: griffe.Class) -> griffe.Function:
    """What `@strict` makes of the fields of a configuration, which are those with a type."""
    keyword_only = griffe.ParameterKind.keyword_only
    fields = [member for member in config.members.values() if member.is_attribute and member.annotation is not None]
    parameters = [
        griffe.Parameter(field.name.lstrip("_"), annotation=field.annotation, kind=keyword_only, default=field.value)
        for field in fields
        if "property" not in field.labels
    ]
    documented = "" if config.docstring is None else config.docstring.value
    parameters += [griffe.Parameter(name, kind=keyword_only) for name in _IN_KWARGS.findall(documented)]
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=config)


def _spell_out(documented: griffe.Object, names: set[str]) -> None:
    if documented.docstring is not None:
        text = documented.docstring.value
        documented.docstring.value = _SECTION.sub(lambda found: found[1] + _items(found[2], names), text)


def _items(section: str, names: set[str]) -> str:
    """The items of a section, one for each argument."""
    lines = []
    for item in re.split(r"^ {4}(?=\S)", section, flags=re.MULTILINE)[1:]:
        item = " ".join(item.split())
        heads = [head for head in _HEAD.finditer(item) if names.issuperset(_names(head[0]))]
        ends = [head.start() for head in heads[1:]] + [len(item)]
        if not heads or heads[0].start():
            lines.append(item)
            continue
        for head, end in zip(heads, ends):
            text = item[head.end() : end].strip()
            for argument in re.findall(_ARGUMENT, head[0]):
                lines.append(f"{argument.replace('`', '').replace('*', '')}: {text}")
    return "".join(f"    {line}\n" for line in lines)


def _names(head: str) -> list[str]:
    return [argument.partition(" ")[0] for argument in re.findall(_ARGUMENT, head)]
