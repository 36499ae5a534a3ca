# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Training runs: start, progress, interruption, resuming, and the finished folder; and the run of `retnet-hf train`."""

import functools
import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from retnet_hf.conversion.checkpoint_location import repository_of
from retnet_hf.conversion.converted_folder import licence_of
from retnet_hf.conversion.formats import advice_for, reason_of
from retnet_hf.conversion.replaced_folder import replace as publish
from retnet_hf.conversion.replaced_folder import write_whole
from retnet_hf.hub.cards import model_card
from retnet_hf.linearization.measures import perplexity
from retnet_hf.retnet.configuration_retnet import RetNetConfig
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM
from retnet_hf.training.muon import MuonAdamW

from .. import ranks
from ..errors import SAVED, InputError, Interrupted
from ..interrupts import handling, leaving_order
from ..named_inputs import load
from ..text.corpus import CHAT_TEMPLATE, digest_of, document_end, hold_out, load_tokenizer, streams, train_tokenizer
from ..text.generation import CUT, continue_text, encode_prompt, load_model, require_known, sampling, template_ids, templated
from .run_folder import RECORD, TrainingFolder, checkpoints_of, step_of


@dataclass(kw_only=True)
class Course:
    """The length of a run and its evaluations. They may change when the run is resumed."""

    steps: int | None = None  # None: by `epochs`, or else the length of the resumed run, or else the default
    epochs: float | None = None
    minutes: float | None = None  # time limit from `started` on
    started: float = field(default_factory=time.monotonic)
    eval_every: int | None = None  # steps between evaluations and between checkpoints. None: about a tenth of the run
    threads: int | None = None  # of the CPU, if the user has chosen
    resume: bool = False

    def seconds(self) -> float:
        return time.monotonic() - self.started


@dataclass
class Start:
    """The data that a run starts or resumes with. Raises InputError if it cannot resume with this recipe and data."""

    folder: TrainingFolder
    recipe: Any  # a frozen dataclass
    course: Course
    digest: str  # of the data
    data: str  # its name in errors, with a verb: "the text is"
    checkpoint: Path | None = None  # to resume from
    record: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.course.resume:
            self.checkpoint, self.record = self.folder.to_resume()
        if not self.record:
            return
        for name, now in asdict(self.recipe).items():
            before = ({"optimizer": "adamw"} | self.record["recipe"]).get(name)  # of runs of earlier versions, too
            if before != now:
                option = {"source": "SOURCE", "base": "--from"}.get(name, "--" + name.replace("_", "-"))
                began = f"without {option}" if before is None else f"with {option} {before}"
                given = "" if now is None else f", not {now}"
                raise InputError(f"this run began {began}{given}; give it the same options, or --overwrite")
        if self.record.get("data") != self.digest:
            raise InputError(f"{self.data} not what this run began with; --overwrite begins anew")
        threads = self.record.get("threads")  # they affect the last bits
        if threads and self.course.threads is None and self.record.get("processes", 1) == ranks.RANKS:
            torch.set_num_threads(threads)

    def begin(self, steps: int | None = None) -> None:
        """Creates the partial folder, empty unless a run is resumed, with a record of the run."""
        record = {"command": self.folder.command, "recipe": asdict(self.recipe), "data": self.digest, "steps": steps}
        record |= {"threads": torch.get_num_threads(), "processes": ranks.RANKS}
        if not self.record:
            shutil.rmtree(self.folder.partial, ignore_errors=True)
        self.folder.partial.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder.partial / RECORD, json.dumps(record, indent=2))


class Supervisor(TrainerCallback):
    """Ends a run when its time is up, when it diverges, or after a signal that any of its processes has received."""

    def __init__(self, course: Course, rate_option: str = "--lr") -> None:
        self.course, self.rate_option = course, rate_option
        self.signal = 0  # received by this process, if it is not 0

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, optimizer=None, lr_scheduler=None, **kwargs
    ) -> None:
        seconds, heard = ranks.highest(self.course.seconds(), self.signal)
        step, steps, minutes = state.global_step, self.course.steps, self.course.minutes
        over = 0.0 if minutes is None else seconds / (60 * minutes)  # share of the time
        if heard:
            self.signal = int(heard)
            control.should_evaluate, control.should_save, control.should_training_stop = False, True, True
        elif max(over, step / steps) >= 1:
            control.should_evaluate = control.should_save = control.should_training_stop = True
        elif over > step / steps:
            # The rate of a later step, so that it has decayed when the time is up. The warm-up depends only on steps.
            factors = zip(optimizer.param_groups, lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)
            for group, highest, factor in factors:
                group["lr"] = highest * min(factor(step), factor(over * steps))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
        if not all(math.isfinite(logs.get(loss, 0.0)) for loss in ("loss", "eval_loss")):
            step, option = state.global_step, self.rate_option
            raise InputError(f"the loss is no longer a finite number at step {step}; try a lower {option}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Makes SIGINT and SIGTERM stop the run after the current step. In one process, the second acts as usual."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def remember(number: int, frame: object) -> None:
            self.signal = number
            # Launchers forward each Ctrl-C to processes that have already received it, so that the first one arrives twice.
            for other, handler in before.items() if ranks.RANKS == 1 else ():
                signal.signal(other, handler)

        with handling(remember, *before):
            yield


class Bar(ProgressCallback):
    """The progress bar of transformers, with the last loss."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
        if "loss" in logs and self.training_bar is not None:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.3f} (training)")


@dataclass(kw_only=True)
class TrainingRun(TrainerCallback):
    """A training run that is ready to start. It is a callback that prints its evaluations.

    Subclasses define `trainer(**kwargs)`, which takes the arguments that all runs share; `finish(trainer)`, which writes the
    model's files into the partial folder; and texts for the terminal: `overview()` of the data, `figure(metrics)` of an
    evaluation, and `outcome()` of the training, in rich's markup.
    """

    least_between: ClassVar[int] = 1  # minimum of the steps between evaluations, unless the user sets them
    warmup: ClassVar[float] = 0.05  # share of the steps in which the learning rate rises; at most 100 steps

    start: Start
    model: PreTrainedModel
    training: Dataset
    evaluation: Dataset
    rate_option: str = "--lr"
    name: str | None = None  # of a stage of linearizing: align, distill or long

    def __post_init__(self) -> None:
        self.folder, self.recipe, self.checkpoint = self.start.folder, self.start.recipe, self.start.checkpoint
        course, steps = self.start.course, self.start.course.steps
        if steps is None and course.epochs is None and self.start.record:
            steps = self.start.record["steps"]
        elif steps is None:
            steps = math.ceil((course.epochs or 3.0) * math.ceil(len(self.training) / self.recipe.batch_size))
        self.course = replace(course, steps=steps, eval_every=course.eval_every or max(self.least_between, steps // 10))
        self.log: list[dict[str, float]] = []
        self.steps_done = 0 if self.checkpoint is None else step_of(self.checkpoint)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict, **kwargs) -> None:
        """Prints a line, and a sample under it."""
        sample = self.specimen()
        with tqdm.external_write_mode():  # above the bar
            self.console.print(f"step {state.global_step:>6,} of {state.max_steps:,}   {self.figure(metrics)}")
            if sample is not None:
                text = Text.assemble((sample[0], "bold"), sample[1].replace("\n", " "), style="dim")
                self.console.print(Padding(text, (0, 0, 1, 4)))

    def trained(self, trainer: Trainer) -> None:
        """Runs in all processes after the last step."""

    def specimen(self) -> tuple[str, str] | None:
        """Returns a sample of one line: an input and the model's current output. None: no sample."""
        return None

    def reloaded(self, checkpoint: Path) -> PreTrainedModel:
        """Returns the model of a checkpoint."""
        return type(self.model).from_pretrained(checkpoint).to(self.model.device)

    @property
    def losses(self) -> list[float]:
        """Returns the held-out losses of all evaluations: the first before training, the last after."""
        return [entry["eval_loss"] for entry in self.log if "eval_loss" in entry]

    def train(self, console: Console) -> None:
        """Trains to the end, and moves the finished folder to its place. Raises InputError or Interrupted."""
        import matplotlib  # noqa: F401  # draws the loss at the end: fails now, not after hours, if it is missing

        threads = f"{torch.get_num_threads()} CPU thread{'s' * (torch.get_num_threads() > 1)}"
        limit = "" if self.course.minutes is None else f", at most {self.course.minutes:.3g} minutes"
        plan = f"{self.course.steps:,} steps{limit}; {threads}"
        console.print(f"{self.model.num_parameters():,} parameters, {self.overview()}; {plan}", soft_wrap=True)
        if self.checkpoint is not None:
            console.print(f"continuing after step {self.steps_done:,}")
        self.console = console
        start, bar, supervisor = time.monotonic(), Bar(), Supervisor(self.course, self.rate_option)
        shown = [*([bar] if console.is_terminal else []), self] if ranks.FIRST else []
        with leaving_order():
            try:
                self._train(supervisor, shown)
            finally:
                if bar.training_bar is not None:
                    bar.training_bar.close()
                if ranks.FIRST:
                    self.folder.discard()
        time_up = ", when its time was up" if self.log and self.log[-1]["step"] < self.course.steps else ""
        console.print(f"{self.outcome()}, in {time.monotonic() - start:.0f} s{time_up}", soft_wrap=True)

    def _train(self, supervisor: Supervisor, shown: list[TrainerCallback]) -> None:
        ranks.require_examples(len(self.training), len(self.evaluation), self.recipe.batch_size)
        ranks.wait()  # until all processes have read the folder
        ranks.of_first(lambda: self.start.begin(self.course.steps))
        if not self.folder.partial.exists():
            raise InputError(f"there is no {self.folder.partial} here; all processes need the same folder")
        given = {"model": self.model, "train_dataset": self.training, "eval_dataset": self.evaluation}
        trainer = self.trainer(callbacks=[supervisor, *shown], **given)
        trainer.remove_callback(PrinterCallback)
        with within_memory(), supervisor.listening():
            if self.steps_done < self.course.steps:
                trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
            else:  # the run ended after its last checkpoint: Trainer would take another step
                trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                self.model = trainer.model = self.reloaded(self.checkpoint)
            self.log = trainer.state.log_history
            [heard] = ranks.highest(supervisor.signal)
            if heard:
                raise Interrupted(f"interrupted at step {trainer.state.global_step}, {SAVED}", int(heard))
            self.trained(trainer)

            def end() -> None:
                self.finish(trainer)
                publish(self.folder.output, self.folder.partial)
                for checkpoint in checkpoints_of(self.folder.output):  # a finished run needs none
                    shutil.rmtree(checkpoint)
                (self.folder.output / RECORD).unlink()  # names the paths of sources

            ranks.of_first(end)
            [heard] = ranks.highest(supervisor.signal)
            if heard and self.name is not None:  # stops before the next stage
                raise Interrupted(f"interrupted at the end of the stage {self.name}, {SAVED}", int(heard))

    def arguments(self, **further: Any) -> TrainingArguments:
        recipe, steps = self.recipe, self.course.steps
        batch_size = ranks.share_of(recipe.batch_size)
        arguments = TrainingArguments(
            output_dir=str(self.folder.partial),
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=ranks.even_share(len(self.evaluation), batch_size),
            dataloader_drop_last=ranks.RANKS > 1,  # otherwise accelerate fills it with earlier examples of the epoch
            ddp_find_unused_parameters=False,
            max_steps=steps,
            learning_rate=recipe.lr,
            lr_scheduler_type="cosine_warmup_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=min(100, int(self.warmup * steps)),
            adam_beta2=0.95,
            weight_decay=recipe.weight_decay,
            seed=recipe.seed,
            logging_steps=max(1, min(steps // 100, self.course.eval_every)),
            logging_nan_inf_filter=False,
            prediction_loss_only=True,
            eval_strategy="steps",
            eval_steps=self.course.eval_every,
            eval_on_start=self.checkpoint is None,
            save_steps=self.course.eval_every,
            save_total_limit=1,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.accelerator.is_available(),
            use_cpu=not torch.accelerator.is_available(),  # otherwise accelerate connects no processes
            disable_tqdm=True,
            **further,
        )
        # Each process uses one GPU. A process with all GPUs would multiply the batch size.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        return arguments


@contextmanager
def within_memory() -> Iterator[None]:
    """Raises InputError, with advice, if the memory is not enough for the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise InputError("out of memory; try a smaller --batch-size or --block-size") from error
        raise


def draw_loss_curve(log: list[dict[str, float]], file: Path, title: str, unit: str = "nats per token") -> None:
    """Draws the training and held-out losses of `TrainerState.log_history` as a PNG."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # hides messages about its cache
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel="step", ylabel=f"loss ({unit})")
    axes.grid(alpha=0.3)
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        if points:
            axes.plot(*zip(*points), style, label=label, linewidth=1.5, markersize=4)
    axes.legend()
    if unit == "nats per token":
        scale = np.exp, lambda values: np.log(np.maximum(values, 1e-9))
        right = axes.secondary_yaxis("right", functions=scale)
        right.set_ylabel("perplexity")
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter("{x:g}")
    figure.savefig(file, dpi=120)


OF_NEW_MODELS = "muon" if hasattr(torch.optim, "Muon") else "adamw"  # PyTorch has Muon from version 2.9 on


@dataclass(frozen=True)
class Recipe:
    """All options that affect the trained weights, except text and course. A run is resumed only with the same recipe."""

    base: str | None = None  # the model to train further, instead of a new one
    preset: str | None = None
    config: dict[str, Any] | None = None  # fields of RetNetConfig, instead of a preset
    tokenizer: str | None = None  # folder or Hub name; one is trained if absent
    vocab_size: int = 8192  # of a tokenizer that the run trains
    eval_fraction: float = 0.05
    block_size: int = 256
    batch_size: int = 8
    lr: float = 1e-3
    optimizer: str = OF_NEW_MODELS
    weight_decay: float = 0.1
    form: str = "auto"
    seed: int = 0

    def model_config(self, tokenizer: PreTrainedTokenizerBase) -> RetNetConfig:
        """Returns the configuration of a model for this tokenizer. Raises InputError if preset or fields are not valid."""
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        fields = {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in special}
        try:
            if self.config is None:
                return RetNetConfig.from_preset(self.preset, **fields)
            return RetNetConfig(**(self.config | fields))
        except Exception as error:  # strict dataclasses wrap the errors of validators
            raise InputError(f"the configuration of the model is not valid: {reason_of(error)}") from error


def blocks_of(tokens: np.ndarray, block_size: int) -> Tensor:
    """Returns a stream of token ids cut into blocks of equal length, (N, block_size)."""
    return torch.from_numpy(tokens[: len(tokens) // block_size * block_size]).view(-1, block_size)


def collate(blocks: list[Tensor] | list[tuple[Tensor, Tensor]], form: str = "auto") -> dict[str, Any]:
    """Returns the model's inputs for one batch: of blocks of equal length, or of pairs of ids and labels of any lengths."""
    if isinstance(blocks[0], Tensor):
        ids = labels = torch.stack(blocks).long()
    else:
        rows, answers = zip(*blocks)
        ids, labels = pad_sequence(rows, batch_first=True), pad_sequence(answers, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "retention_form": form, "skip_logits": True}


def chat_example(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, block_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns ids (T,) of a conversation as in `retnet-hf chat`, and labels (T,): -100 except for the answers."""
    ids, labels, written = [], [], ""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = templated(tokenizer, messages[:number], True)
            answered = templated(tokenizer, messages[: number + 1], False)
            if not (asked.startswith(written) and answered.startswith(asked)):
                raise InputError("the chat template changes earlier turns: give conversations of one turn")
            for text, is_answer in ((asked[len(written) :], False), (answered[len(asked) :], True)):
                tokens = template_ids(tokenizer, text)
                ids, labels = ids + tokens, labels + (tokens if is_answer else [-100] * len(tokens))
            written = answered
    return torch.tensor(ids[:block_size]), torch.tensor(labels[:block_size])


@dataclass(kw_only=True)
class TextRun(TrainingRun):
    """A training run on text, made by `prepare`."""

    sources: list[str]
    tokenizer: PreTrainedTokenizerBase
    prompt: str  # beginning of the held-out text, which samples continue
    prompt_ids: list[int]
    dtype: torch.dtype  # of the finished weights

    @property
    def tokens(self) -> str:
        """Returns the numbers of tokens to train on and held out."""
        training, evaluation = (
            data.numel() if isinstance(data, Tensor) else sum(len(ids) for ids, _ in data)
            for data in (self.training, self.evaluation)
        )
        return f"{training:,} to train on, {evaluation:,} held out"

    def figure(self, metrics: dict[str, float]) -> str:
        return f"perplexity {perplexity(metrics['eval_loss']):,.2f}"

    def overview(self) -> str:
        return f"vocabulary {len(self.tokenizer):,}; tokens: {self.tokens}"

    def outcome(self) -> str:
        before, after = perplexity(self.losses[0]), perplexity(self.losses[-1])
        figures = f"{before:,.1f} before training, [bold green]{after:,.2f}[/bold green] after"
        gain = f"{before / after:,.1f} times lower" if after < before else "no lower: try more steps or another --lr"
        return f"perplexity on held-out text: {figures}, {gain}"

    def specimen(self) -> tuple[str, str]:
        """Returns the beginning of the held-out text, and the model's continuation."""
        written: list[str] = []
        with torch.random.fork_rng():  # training continues with its own random numbers
            torch.manual_seed(self.recipe.seed)
            continue_text(self.model, self.tokenizer, self.prompt_ids, sampling(max_new_tokens=40), written.append)
        return self.prompt, "".join(written)

    def trainer(self, **kwargs: Any) -> Trainer:
        recipe, collator = self.recipe, functools.partial(collate, form=self.recipe.form)
        if recipe.optimizer == "muon":
            options = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
            kwargs["optimizer_cls_and_kwargs"] = (lambda: MuonAdamW), options
        return Trainer(args=self.arguments(), data_collator=collator, processing_class=self.tokenizer, **kwargs)

    def finish(self, trainer: Trainer) -> None:
        recipe, partial = self.recipe, self.folder.partial
        before, after = perplexity(self.losses[0]), perplexity(self.losses[-1])
        base = recipe.base or ""
        facts = {"trained from": f"`{Path(base).name if Path(base).exists() else base}`"} if base else {}
        facts |= {
            "text": ", ".join(f"`{Path(source).name}`" for source in self.sources),
            "tokens": self.tokens,
            "steps": f"{trainer.state.global_step:,} of {recipe.batch_size} × {recipe.block_size} tokens",
            "perplexity on the held-out text": f"**{after:.2f}** per token ({before:.2f} before training)",
            "learning rate": f"{recipe.lr:g}, {recipe.optimizer}, weight decay {recipe.weight_decay:g}, seed {recipe.seed}",
        }
        curve, name = "loss_curve.png", self.folder.output.name
        training = f"\n## Training\n\nTrained with `retnet-hf {self.folder.command}`.\n\n![loss]({curve})\n"
        self.model.config.use_cache = True  # Trainer turns it off
        self.model.to(self.dtype).save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        draw_loss_curve(self.log, partial / curve, f"{name}, trained on {facts['text']}".replace("`", ""))
        card = model_card(self.model, name, facts, self.prompt, training)
        vars(card.data).update(source_metadata(base) if base else {})
        card.save(partial / "README.md")


def source_metadata(name: str) -> dict[str, Any]:
    """Returns metadata for the card of a model made from another: its repository, and its licence if known."""
    if Path(name).is_dir():
        return licence_of(Path(name))
    try:
        name, revision = repository_of(name)
        return {"base_model": name} | licence_of(Path(hf_hub_download(name, "README.md", revision=revision)).parent)
    except (OSError, HfHubHTTPError):  # no card or no network
        return {"base_model": name}


def prepare(sources: list[str], documents: list[Any], folder: TrainingFolder, recipe: Recipe, course: Course) -> TextRun:
    """Returns a run that is ready for its first step. `sources`: names for the model card. Raises InputError."""
    start = Start(folder, recipe, course, digest_of(documents), data="the text is")
    is_chat = not isinstance(documents[0], str)
    parts = hold_out(documents, recipe.eval_fraction, recipe.seed)
    if recipe.base is not None and not isinstance(config := load(AutoConfig, recipe.base), RetNetConfig):
        found = f"{recipe.base} is a model of type {config.model_type}{advice_for(config.model_type)}"
        raise InputError(f"--from takes a RetNet, and {found}")
    if start.checkpoint is not None or recipe.base is not None or recipe.tokenizer is not None:
        tokenizer = load_tokenizer(str(start.checkpoint or recipe.base or recipe.tokenizer))
    else:
        texts = [message["content"] for chat in parts[0] for message in chat] if is_chat else parts[0]
        tokenizer = ranks.of_first(lambda: train_tokenizer(texts, recipe.vocab_size))
    torch.manual_seed(recipe.seed)
    if recipe.base is None:
        model, end = RetNetForCausalLM(recipe.model_config(tokenizer)), None
    else:
        model, end = load_model(recipe.base)[0], document_end(tokenizer)
    if is_chat:
        tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
        training, evaluation = ([chat_example(chat, tokenizer, recipe.block_size) for chat in part] for part in parts)
        training, evaluation = ([each for each in part if each[1].ge(0).any()] for part in (training, evaluation))
        if not training or not evaluation:
            raise InputError("no conversation has an answer within --block-size: give more of them, or a larger number")
        first = [message["role"] for message in parts[1][0]].index("assistant")
        prompt = templated(tokenizer, parts[1][0][:first], True)
        prompt, prompt_ids = prompt.replace(CUT, ""), template_ids(tokenizer, prompt)
    else:
        encoded = streams(parts, tokenizer, recipe.block_size, "--block-size", end)
        training, evaluation = (blocks_of(stream, recipe.block_size) for stream in encoded)
        opening = " ".join(next((text.strip() for text in parts[1] if text.strip()), "")[:48].split())
        prompt = opening.rpartition(" ")[0] or opening
        prompt_ids = encode_prompt(tokenizer, prompt)
    ids_of_all = training if isinstance(training, Tensor) else [ids for ids, _ in training]
    require_known(max(int(ids.max()) for ids in ids_of_all), model)
    dtype, data = model.config.dtype or torch.float32, {"training": training, "evaluation": evaluation}
    texts = {"sources": sources, "tokenizer": tokenizer, "prompt": prompt, "prompt_ids": prompt_ids}
    return TextRun(start=start, model=model.float(), dtype=dtype, **data, **texts)
