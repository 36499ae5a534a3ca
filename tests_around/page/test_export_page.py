# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The page that a model runs in, in a real browser: what it writes, the states that it saves and loads, what it refuses."""

import base64
import copy
import functools
import http.server
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from selenium.webdriver.common.keys import Keys
from small_models import small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retnet_hf import RetNetState
from retnet_hf.cli.text.corpus import SAMPLE_TEXT, train_tokenizer
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.export import ExportedFile, ExportError, export_web, web_folder
from retnet_hf.export.web_folder import page_info
from retnet_hf.state.state_file import write_state_file


BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.skipif(None in (BROWSER, DRIVER), reason="there is no chromium with its chromedriver"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm, which fetches what a page needs"),
]
TEXT = SAMPLE_TEXT.read_text(encoding="utf-8")
# Of the models: layers of retention alone, and one with a window that has sinks. Neither ends a text early.
FIELDS = {"fla": {}, "sinks": {"decay_schedule": [0.5, 0.9]}}
BEGINNING = "In the beginning God created the heaven and the earth."


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Page:
    def __init__(self, folder: Path, downloads: Path) -> None:
        from selenium import webdriver

        self.server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=str(folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.downloads, options = downloads, webdriver.ChromeOptions()
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"):
            options.add_argument(argument)
        options.binary_location = BROWSER
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.reload()

    def reload(self) -> None:
        self.driver.get(f"http://localhost:{self.server.server_port}/")
        self.wait_for(lambda: self.all(".pane"))

    def end(self) -> None:
        self.driver.quit()
        self.server.shutdown()
        self.server.server_close()

    def wait_for(self, condition, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.message()
            time.sleep(0.02)

    def all(self, selector: str) -> list:
        return self.driver.find_elements("css selector", selector)

    def in_pane(self, selector: str, pane: int = 0):
        return self.all(".pane")[pane].find_element("css selector", selector)

    def message(self, pane: int = 0) -> str:
        return self.in_pane(".message", pane).text if self.all(".pane") else self.all("#loading-label")[0].text

    def text(self, pane: int = 0) -> str:
        return self.in_pane(".text", pane).get_property("textContent")

    def figure(self, name: str, pane: int = 0) -> str:
        return self.in_pane(f"[data-figure={name}]", pane).text

    def press(self, action: str, pane: int = 0) -> None:
        """Presses a button, and waits until the model has done what it does."""
        self.in_pane(f"[data-action={action}]", pane).click()
        self.wait_for(lambda: self.in_pane("[data-action=write]", pane).is_enabled())

    def type(self, text: str, pane: int = 0) -> None:
        self.driver.execute_script("arguments[0].value = arguments[1]", self.in_pane("textarea", pane), text)

    def setting(self, name: str, value: float | str) -> None:
        self.driver.execute_script("document.querySelector(arguments[0]).value = arguments[1]", f"#{name}", str(value))

    def open(self, file: Path, pane: int = 0) -> None:
        before = self.message(pane)
        self.in_pane("input[type=file]", pane).send_keys(str(file))
        self.wait_for(lambda: self.message(pane) != before)

    def saved(self) -> Path:
        """The file that was downloaded last."""
        self.wait_for(lambda: list(self.downloads.glob("*.safetensors")))
        [file] = self.downloads.glob("*.safetensors")
        return file.rename(self.downloads / "saved")

    def write(self, text: str, action: str = "write", pane: int = 0) -> None:
        self.type(text, pane)
        self.press(action, pane)

    def counts(self) -> tuple[int, int]:
        return tuple(int(self.figure(name).replace(",", "")) for name in ("read", "written"))


def of_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer whose words begin with a mark in the place of the space, as those of Llama do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence(list(parts))
    tokenizer.train_from_iterator(TEXT.splitlines(), trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<unk>"]))
    special = {"eos_token": "<s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module", params=["fla", "sinks"])
def exported(request, tmp_path_factory):
    dialect, folder = request.param, tmp_path_factory.mktemp("page") / "page"
    tokenizer = train_tokenizer([TEXT], 300) if dialect == "fla" else of_pieces()
    model = small_model(dialect, vocab_size=300, eos_token_id=0, **FIELDS[dialect])
    model.generation_config.eos_token_id = 0 if dialect == "fla" else None  # the tokenizer says it, too
    export_web(model, folder, tokenizer, kind="float32", name=f"a small {dialect}")
    return model, tokenizer, folder


@pytest.fixture
def state_file(exported, tmp_path) -> Callable[..., Path]:
    """Saves the state that a model, or else the exported one, has after the beginning."""
    ids = exported[1](BEGINNING, return_tensors="pt")["input_ids"]

    def save(model=None) -> Path:
        with torch.no_grad():
            (model or exported[0])(ids, use_cache=True).past_key_values.save(tmp_path / "state")
        return tmp_path / "state"

    return save


@pytest.fixture(scope="module")
def browser(exported, tmp_path_factory):
    page = Page(exported[2], tmp_path_factory.mktemp("downloads"))
    yield page
    page.end()


@pytest.fixture
def page(browser):
    browser.reload()
    browser.setting("temperature", 0)
    browser.setting("length", 24)
    return browser


def expected(model, tokenizer, text: str) -> str:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    whole = model.generate(ids, max_new_tokens=24, do_sample=False)[0]
    prompt, text = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[0], whole))
    return text.removeprefix(prompt)  # tokens alone would lose a space before the first


def test_the_page_writes_what_the_model_writes_and_asks_nothing_of_another_server(page, exported):
    model, tokenizer, folder = exported
    page.write(BEGINNING)
    assert page.text() == BEGINNING + expected(model, tokenizer, BEGINNING)
    assert page.driver.title == page.all("h1")[0].text
    assert page.message().startswith("Wrote 24 tokens. The state takes")
    urls = page.driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(urls) >= 9
    assert all(url.startswith((f"http://localhost:{page.server.server_port}/", "data:", "blob:")) for url in urls)
    assert not [entry for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"]
    licences = {file.name for file in (folder / "vendor").iterdir() if not file.suffix.endswith(("mjs", "wasm"))}
    assert licences == {"huggingface-tokenizers-0.2.0.LICENSE", "onnxruntime-web-1.30.0.package.json"}


def test_a_state_of_the_page_goes_on_in_python(page, exported):
    model, tokenizer, _ = exported
    page.write(BEGINNING, "read")
    page.press("save")
    state = RetNetState.load(page.saved(), model)
    ids = tokenizer(BEGINNING, return_tensors="pt")["input_ids"]
    assert int(state.get_seq_length()) == ids.shape[1]
    more = tokenizer(" And the earth", return_tensors="pt")["input_ids"]
    found = model(more, past_key_values=state).logits
    whole = model(torch.cat([ids, more], dim=1)).logits[:, ids.shape[1] :]
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-3)


def test_a_state_of_python_goes_on_in_the_page(page, exported, state_file):
    model, tokenizer, _ = exported
    ids = tokenizer(BEGINNING, return_tensors="pt")["input_ids"]
    page.open(state_file())
    assert page.message() == f"Loaded the state of {ids.shape[1]} tokens. Add some words to continue."
    page.press("write")
    assert page.message() == "Add some words first: the state alone does not tell which word comes next."
    page.write(" And the earth")
    both = torch.cat([ids, tokenizer(" And the earth", return_tensors="pt")["input_ids"]], dim=1)
    written = model.generate(both, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(written, skip_special_tokens=True).removeprefix(" ")  # some tokenizers drop it
    assert page.text().endswith(f" {expected}")
    page.reload()
    page.open(state_file(copy.deepcopy(model).bfloat16()))  # which is widened
    assert page.message().startswith(f"Loaded the state of {ids.shape[1]} tokens")
    page.write(" And")
    assert page.message().startswith("Wrote")


def last(name: str, value: float):
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(value)


def each(change, name: str = ""):
    return lambda tensors: tensors.update({key: change(each) for key, each in tensors.items() if name in key and each.dim()})


STATES = "layers.0.recurrent_states"
REFUSED_STATES = {  # tensors that are not those of a state, though the checksum is that of what the file holds
    "not a number": (last(STATES, float("nan")), "with values that are not finite"),
    "below 0": (last("layers.0.next_position", -1), "does not say how many tokens"),
    "beyond what is exact": (last("layers.0.next_position", 2**40), "does not say how many tokens"),
    "another length": (last("layers.0.cumulative_length", 3), "the state of several texts, or of a text with gaps"),
    "a tensor less": (lambda tensors: tensors.pop(STATES), "missing, or has another shape or type"),
    "a tensor more": (lambda tensors: tensors.update(extra=torch.zeros(3)), "holds extra, which is not part of a state"),
    "double": (each(torch.Tensor.double, STATES), "has another shape or type"),
    "no rows": (each(lambda tensor: tensor[:0]), "does not say how many tokens"),
    "two rows": (each(lambda tensor: torch.cat([tensor] * 2)), "does not say how many tokens"),
}


@pytest.mark.parametrize("kind", REFUSED_STATES)
def test_a_state_that_cannot_be_is_told_in_a_sentence(page, state_file, kind):
    change, words = REFUSED_STATES[kind]
    with safe_open(file := state_file(), "pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    change(tensors)
    write_state_file(file, tensors, metadata["fingerprint"], metadata["weights"])
    page.open(file)
    assert words in page.message()
    assert page.figure("read") == "0"


def test_the_state_of_another_model_is_refused(page, exported, state_file):
    dialect, fields = ("sinks" if exported[0].config.is_hybrid else "fla"), {"vocab_size": 300, "eos_token_id": 0}
    page.open(state_file(small_model("torchscale", **fields)))
    assert "of another configuration" in page.message()
    page.open(state_file(small_model(dialect, seed=1, **fields, **FIELDS[dialect])))
    assert "computed with other weights" in page.message()


def test_every_changed_bit_is_noticed(page, state_file):
    """Of values, of the metadata (the mark of the weights among it), and of the header's structure."""
    whole, generator = state_file().read_bytes(), torch.Generator().manual_seed(0)
    header = len(whole[: 8 + int.from_bytes(whole[:8], "little")].rstrip())
    values = torch.randint(8 * (header + 8), 8 * len(whole), (300,), generator=generator).tolist()
    cuts = torch.randint(0, len(whole), (100,), generator=generator).tolist()
    script = """
        const [text, places, cuts, done] = arguments;
        const whole = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
        import("./state_file.js").then(async ({ readState }) => {
            const said = [];
            const told = async (bytes, what) => {
                try { await readState(bytes, retnet.model); said.push(`${what} was accepted`); }
                catch (error) { if (error.constructor !== Error || !/[.]$/.test(error)) said.push(`${what}: ${error}`); }
            };
            for (const place of places) {
                const bytes = whole.slice();
                bytes[place >> 3] ^= 1 << (place & 7);
                await told(bytes, `bit ${place}`);
            }
            for (const cut of cuts) await told(whole.slice(0, cut), `cut ${cut}`);
            await readState(whole, retnet.model);
            done(said);
        }).catch((error) => done([String(error)]));
    """
    page.driver.set_script_timeout(100)
    places, encoded = [*range(8 * header), *values], base64.b64encode(whole).decode()
    assert page.driver.execute_async_script(script, encoded, places, cuts) == []


def test_texts_of_characters_outside_the_basic_plane_are_saved_with_a_state(page, exported):
    """The text that is kept beside a state is cut between characters."""
    page.write("😀" * 3000 + "x", "read")
    page.press("save")
    file = page.saved()
    assert int(RetNetState.load(file, exported[0]).get_seq_length()) == page.counts()[0]
    page.reload()
    page.open(file)
    assert page.text() == "[…] " + "😀" * 1999 + "x"


def test_tokens_are_counted_and_rewinding_goes_back_one_action(page, exported):
    read = len(exported[1](BEGINNING)["input_ids"])
    page.write(BEGINNING, "read")
    assert page.counts() == (read, 0)
    texts = []
    for written in (24, 48):
        page.press("write")
        assert page.counts() == (read, written)
        texts.append(page.text())
    page.press("rewind")
    assert (page.text(), *page.counts()) == (texts[0], read, 24)
    page.press("write")
    assert page.text() == texts[1]
    page.press("rewind")
    page.press("save")
    page.press("restart")
    assert (page.text(), *page.counts()) == ("", 0, 0)
    page.open(page.saved())
    assert page.counts() == (read + 24, 0)


def test_branches_go_on_by_themselves(page):
    page.write(BEGINNING, "read")
    page.press("branch")
    assert len(page.all(".pane")) == 2
    page.write(" And the earth", pane=1)
    assert page.text(0) == BEGINNING
    assert page.text(1).startswith(f"{BEGINNING} And the earth")
    page.press("write", pane=0)
    alone = page.text(0)
    page.in_pane("[data-action=close]", 1).click()
    assert len(page.all(".pane")) == 1
    page.press("rewind")
    page.press("write")
    assert page.text(0) == alone


def test_a_text_of_twenty_thousand_tokens_takes_no_more_memory(page, exported):
    text = TEXT[:60_000]
    assert len(exported[1](text)["input_ids"]) > 20_000
    page.write(TEXT[:400], "read")
    heap, size = "return performance.memory.usedJSHeapSize", page.figure("state")
    before = page.driver.execute_script(heap)
    page.type(text)
    page.in_pane("[data-action=read]").click()
    page.wait_for(lambda: page.message().startswith("Read") and " in " in page.message(), seconds=200)
    assert page.counts()[0] > 20_000
    assert page.figure("state") == size
    assert page.driver.execute_script(heap) - before < 64e6
    assert len(page.text()) <= 20_100


def test_a_page_from_a_file_says_that_it_needs_a_server(page, exported):
    page.driver.get((exported[2] / "index.html").as_uri())
    page.wait_for(lambda: "python3 -m http.server" in page.all("body")[0].text, seconds=10)
    page.driver.get("about:blank")
    page.reload()
    assert "http.server" not in page.all("body")[0].text


SAID = {"length": "Tokens to write must be a whole number from 1 to 100000."}
SAID["temperature"] = "Temperature must be a number from 0 to 2."
WRONG = [("length", "0"), ("length", "2.5"), ("length", "1e9"), ("temperature", "abc"), ("temperature", "2.1")]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_setting_out_of_its_bounds_is_refused_before_anything_is_read(page, name, value):
    page.type(BEGINNING)
    page.setting(name, value)
    page.in_pane("[data-action=write]").click()
    page.wait_for(lambda: page.message() == SAID[name], seconds=5)
    assert (page.text(), page.figure("read")) == ("", "0")
    assert page.in_pane("textarea").get_property("value") == BEGINNING
    field = page.driver.switch_to.active_element
    assert (field.get_attribute("id"), field.get_attribute("aria-invalid")) == (name, "true")
    field.clear()
    field.send_keys("1")
    assert field.get_attribute("aria-invalid") is None
    page.press("write")
    assert page.message().startswith("Wrote")


def test_the_text_is_copied(page):
    page.type(BEGINNING)
    assert not page.in_pane("[data-action=copy]").is_enabled()
    page.press("write")
    for script in ("arguments[0].value = ''", "navigator.clipboard.writeText = () => Promise.reject()"):
        page.driver.execute_script(script, field := page.in_pane("textarea"))
        page.in_pane("[data-action=copy]").click()
        page.wait_for(lambda: page.message() == "Copied the text.", seconds=5)
        field.clear()
        field.send_keys(Keys.CONTROL, "v")
        assert field.get_property("value") == page.text()
        page.driver.execute_script("arguments[0].closest('.pane').querySelector('.message').textContent = ''", field)


def test_what_is_kept_to_rewind_is_bounded_and_the_page_says_so(page):
    for number in range(10):
        page.write(f" {number}", "read")
    taken_back = 0
    while page.in_pane("[data-action=rewind]").is_enabled():
        page.press("rewind")
        taken_back += 1
    assert (taken_back, page.text()) == (8, " 0 1")
    assert page.all("#kept")[0].text == "Each text keeps up to 8 states to rewind, with at most 128 MB in total."
    kept = """
        const [pane] = retnet.panes;
        for (let turn = 0; turn < 5; turn++) {
            pane.state = Object.assign(Object.create(Object.getPrototypeOf(pane.state)), pane.state);
            Object.defineProperty(pane.state, "bytes", { value: arguments[0] });
            pane.remember();
        }
        return pane.past.length;
    """
    assert [page.driver.execute_script(kept, size) for size in (50e6, 200e6)] == [2, 0]


def test_the_keyboard_is_enough(page):
    page.setting("length", 100_000)
    page.in_pane("textarea").send_keys(BEGINNING)
    page.in_pane("textarea").send_keys(Keys.TAB)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)  # Write
    page.wait_for(lambda: page.figure("written") != "0")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait_for(lambda: page.message().startswith("Wrote"))
    assert page.driver.switch_to.active_element.text == "Write"
    first = page.message()
    page.in_pane("textarea").send_keys(" And", Keys.CONTROL, Keys.ENTER)
    # A text may end by itself before anybody looks.
    page.wait_for(lambda: page.in_pane("[data-action=stop]").is_enabled() or page.message() != first)
    page.in_pane("textarea").send_keys(Keys.ESCAPE)
    page.wait_for(lambda: page.in_pane("[data-action=write]").is_enabled())
    unnamed = """
        return [...document.querySelectorAll("button, input:not([type=file]), textarea, [tabindex]")].filter((element) =>
            !(element.ariaLabel || element.labels?.length || element.textContent.trim())).map((element) => element.outerHTML)
    """
    assert page.driver.execute_script(unnamed) == []


def test_texts_begin_with_a_learned_state_and_weights_may_have_8_bits(tmp_path):
    tokenizer, model = train_tokenizer([TEXT], 300), small_model("fla", vocab_size=300, eos_token_id=0, num_hidden_layers=1)
    begun, own, written = tokenizer(BEGINNING, return_tensors="pt")["input_ids"], [], {}
    state = model(torch.randint(300, (1, 20)), use_cache=True).past_key_values
    outputs = model(begun, past_key_values=copy.deepcopy(state), use_cache=True)
    for _ in range(24):
        own.append(outputs.logits[0, -1].argmax().item())
        outputs = model(torch.tensor([own[-1:]]), past_key_values=outputs.past_key_values, use_cache=True)
    for kind in ("float32", "int8"):
        export_web(model, tmp_path / kind, tokenizer, kind=kind, state=state)
        page = Page(tmp_path / kind, tmp_path)
        try:
            page.setting("temperature", 0)
            page.setting("length", 24)
            page.write(BEGINNING)
            written[kind] = page.text()
        finally:
            page.end()
    assert written["float32"] == BEGINNING + tokenizer.decode(own, skip_special_tokens=True)
    assert written["int8"].startswith(BEGINNING)
    assert len(written["int8"]) > len(BEGINNING)


def test_texts_end_by_the_token_of_the_model_or_of_the_tokenizer_or_not(exported, tokenizer):
    assert json.loads((exported[2] / "model" / "info.json").read_text())["end"] == [0]
    tokenizer.eos_token, model = None, small_model("fla", eos_token_id=None, num_hidden_layers=1)
    assert page_info(model, tokenizer, ExportedFile("model/model.onnx", "float32", 1, 0.0, 64), "x")["end"] == []


def test_what_a_browser_cannot_load_is_refused_and_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    model = small_model()
    (tmp_path / "cache").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("mine")
    two_rows = model(torch.zeros(2, 4, dtype=torch.int64), use_cache=True).past_key_values
    with pytest.raises(CheckpointError, match="is not empty"):
        export_web(model, tmp_path / "taken", tokenizer)

    def refuse(words: str, tokenizer=tokenizer, **options) -> None:
        with pytest.raises(ExportError, match=words):
            export_web(model, tmp_path / "out", tokenizer, **options)

    refuse("a page needs weights in float32 or int8", kind="int4")
    refuse("this tokenizer does not have", tokenizer=None)
    refuse("a state of one row in float32, got 2 rows", state=two_rows)
    monkeypatch.setattr(web_folder, "CACHE", tmp_path / "cache")
    digest = web_folder.PACKAGES["onnxruntime-web@1.30.0"].digest
    (tmp_path / "cache" / f"{digest[:16]}.tgz").write_bytes(b"another one")
    refuse("npm fetched a wrong package for .*: its SHA-512 does not match")
    monkeypatch.setattr(web_folder.shutil, "which", lambda name: None)
    refuse("npm is needed to fetch .*: install Node.js")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "taken"]
