# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Saving and pushing of models, configurations and image processors with their code, and of models with a card."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


# True in code that was saved with a model. transformers then copies the code unchanged.
TRAVELS = not __name__.startswith("retnet_hf.")


class SavedWithCode:
    """Saves its code with it if its class is registered for an Auto class."""

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Saves as transformers does."""
        if not self._carries_code(*args, **kwargs):
            return super().save_pretrained(save_directory, *args, **kwargs)
        from .travelling_code import code_beside

        with code_beside(self, save_directory):
            return super().save_pretrained(save_directory, *args, **kwargs)

    def _carries_code(self, *args: Any, **kwargs: Any) -> bool:
        """Returns whether `save_pretrained` writes the code of this package. transformers copies that of derived classes."""
        return not TRAVELS and self._auto_class is not None and type(self).__module__.startswith("retnet_hf.")

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        """Returns the files' times, except for code, so that transformers uploads the code, which is written earlier."""
        stamps = super()._get_files_timestamps(working_dir)
        return stamps if TRAVELS else {name: stamp for name, stamp in stamps.items() if not str(name).endswith(".py")}


class SavedWithCard(SavedWithCode):
    """A model that is pushed with a card about loading it, unless the repository has its own card."""

    def _carries_code(self, is_main_process: bool = True, *args: Any, **kwargs: Any) -> bool:
        return super()._carries_code() and self.should_save_on_this_rank(is_main_process)

    def _upload_modified_files(self, working_dir: str, repo_id: str, *args, **kwargs):
        """Replaces the card that `push_to_hub` has just written, since `push_to_hub` accepts no other card."""
        path = Path(working_dir) / "README.md"
        written = ModelCard.load(path) if path.is_file() and not TRAVELS else None
        if written is not None and "This model card has been automatically generated." in written.text:
            from .cards import model_card

            card = model_card(self, repo_id)
            card.data.tags = sorted({*card.data.tags, *(written.data.tags or [])})
            card.save(path)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)
