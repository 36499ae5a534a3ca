# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The command `transformers` with support for RetNets: `python -m retnet_hf.cli.serve_transformers BYTES serve my-model`.

BYTES is the memory for states of prompts; 0 keeps none.
"""

import functools
import logging
import sys


def run() -> None:
    """Runs `transformers` with the arguments of this process. A fatal error is one line."""
    memory = int(sys.argv.pop(1))
    logging.disable(logging.WARNING)  # hides messages of libraries during their import
    import transformers
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from transformers.cli.serving import server
    from transformers.cli.transformers import main

    from retnet_hf import library
    from retnet_hf.conversion.errors import first_line

    from .named_inputs import load as load_named
    from .text.corpus import ending_no_text

    # `transformers serve` looks for the class that config.json names in this module, not among the Auto classes.
    for name in load_named(transformers.AutoConfig, sys.argv[2]).architectures or []:
        if not hasattr(transformers, name):
            setattr(transformers, name, getattr(library, name, library.RetNetHybridForCausalLM))
    plain, kept = library.RetNetForCausalLM.generate, {}

    def generate(model, input_ids, **kwargs):
        states = kept.setdefault(id(model), library.PrefixStates(model, memory, generate=functools.partial(plain, model)))
        reused, read = states.reused, states.read
        output = states.generate(input_ids, **kwargs)
        said = f"read {states.read - read:,} tokens of a prompt, and knew {states.reused - reused:,}"
        said += f"; {len(states.states)} states, {states.nbytes / 1e6:,.1f} MB"
        print(f"retnet-hf: {said}", file=sys.stderr, flush=True)
        return output

    async def refuse(request, error):
        return JSONResponse({"detail": first_line(error)}, status_code=400)

    refused = dict.fromkeys((ValueError, TypeError, LookupError, TemplateError), refuse)  # transformers answers 500
    server.FastAPI = functools.partial(server.FastAPI, exception_handlers=refused)
    if memory:
        library.RetNetForCausalLM.generate = generate
    load = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: ending_no_text(load(*args, **kwargs))
    transformers.logging.disable_progress_bar()
    logging.disable(logging.NOTSET)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # loading a model may raise anything
        sys.exit(f"retnet-hf: {sys.argv[2]} cannot be served: {first_line(error)}")


if __name__ == "__main__":
    run()
