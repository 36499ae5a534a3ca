// The page. Each pane has a text that a model reads and continues. Its state can be saved, loaded, rewound and branched.

import { Tokenizer } from "./vendor/tokenizers.min.mjs";
import { Model, draw, download, pause } from "./model.js";
import { readState, writeState } from "./state_file.js";

const SHOWN = 20_000; // largest number of characters of a text in the page
const KEPT = 8; // number of states to which Rewind can go back
const KEPT_BYTES = 128e6; // largest total size of these states
const $ = (selector, root = document) => root.querySelector(selector);
const size = (bytes) => {
  const unit = bytes < 1e3 ? 0 : Math.min(3, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** unit).toFixed(unit ? 1 : 0).replace(/\.0$/, "")} ${["B", "kB", "MB", "GB"][unit]}`;
};
const words = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;

let model, tokenizer, info;
let busy = null; // the pane for which the model is running

/** Returns a number that the user has set. Throws an Error if it is out of range. */
function setting(name) {
  const input = $(`#${name}`), { min, max, valueAsNumber: value } = input;
  const isWhole = name === "length";
  const fits = value >= Number(min) && value <= Number(max) && (!isWhole || Number.isInteger(value)); // false for NaN
  input.setAttribute("aria-invalid", !fits);
  if (fits) return value;
  input.focus();
  throw new Error(`${input.labels[0].textContent.trim()} must be a ${isWhole ? "whole " : ""}number from ${min} to ${max}.`);
}

/** A text and its state. The last token is not in the state yet: reading it gives the logits of the next token. */
class Pane {
  constructor() {
    this.element = $("#pane").content.firstElementChild.cloneNode(true);
    this.parts = []; // [{text, written}], shown in order
    this.state = model.start();
    this.unread = []; // token ids
    this.written = 0; // tokens
    this.past = []; // earlier texts and states, for Rewind
    for (const button of this.element.querySelectorAll("[data-action]"))
      button.addEventListener("click", () => this.act(button.dataset.action));
    $("input[type=file]", this.element).addEventListener("change", (event) => this.open(event.target));
    this.input = $("textarea", this.element);
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.act("write");
    });
    $("#texts").append(this.element);
    panes.add(this);
    this.show();
  }

  async act(action) {
    if (action === "stop") return void (this.stopped = true);
    if (action === "load") return void $("input[type=file]", this.element).click();
    if (busy) return this.say("The model is running. Stop it first.", true);
    try {
      await this[action]();
    } catch (error) {
      this.say(error.message, true);
    }
  }

  say(message, isError = false) {
    const place = $(".message", this.element);
    place.textContent = message;
    place.classList.toggle("error", isError);
  }

  /** Updates the shown text, state and figures. */
  show(speed = null) {
    const text = $(".text", this.element);
    text.replaceChildren(
      ...this.parts.map(({ text, written, note }) => {
        const span = document.createElement("span");
        span.className = note ? "left-out" : written ? "written" : "";
        span.textContent = text;
        return span;
      }),
    );
    text.scrollTop = text.scrollHeight;
    const tokens = this.state.position + (this.unread.length === 1);
    const cache = info.cache_bytes_per_token * tokens;
    const largest = Math.max(this.state.bytes, cache, 1);
    const figures = {
      read: (tokens - this.written).toLocaleString("en"),
      written: this.written.toLocaleString("en"),
      speed: speed === null ? $("[data-figure=speed]", this.element).textContent : speed.toFixed(1),
      state: size(this.state.bytes),
      cache: size(cache),
    };
    for (const [name, value] of Object.entries(figures)) $(`[data-figure=${name}]`, this.element).textContent = value;
    $("[data-bar=state]", this.element).style.width = `${(100 * this.state.bytes) / largest}%`;
    $("[data-bar=cache]", this.element).style.width = `${(100 * cache) / largest}%`;
    for (const pane of panes) pane.allow();
  }

  /** Enables the buttons that can be used now. */
  allow() {
    for (const button of this.element.querySelectorAll("[data-action]")) {
      const { action } = button.dataset;
      if (action === "stop") button.disabled = busy !== this;
      else button.disabled = busy !== null || (action === "rewind" && !this.past.length) || (action === "copy" && !this.parts.length);
      if (action === "close") button.hidden = panes.size < 2;
    }
  }

  /** Adds to the shown text. Only its end stays in the page. */
  add(text, written) {
    const last = this.parts.at(-1);
    if (last && last.written === written && !last.note) last.text += text;
    else this.parts.push({ text, written });
    let length = this.parts.reduce((sum, part) => sum + part.text.length, 0);
    while (length > SHOWN) {
      const first = this.parts.find((part) => !part.note);
      const cut = Math.min(first.text.length, length - SHOWN / 2);
      first.text = first.text.slice(cut);
      length -= cut;
      this.parts = [{ text: "[…] ", note: true }, ...this.parts.filter((part) => !part.note && part.text)];
    }
  }

  /** Returns a copy of the text with its state. */
  now() {
    const { state, unread, written } = this;
    return { state, unread, written, parts: this.parts.map((part) => ({ ...part })) };
  }

  remember() {
    this.past = [...this.past, this.now()].slice(-KEPT);
    while (this.past.reduce((sum, { state }) => sum + state.bytes, 0) > KEPT_BYTES) this.past.shift();
  }

  /** Takes the typed text, and reads all unread tokens except the last one. */
  async take() {
    const text = this.input.value;
    const begins = this.state.position === 0 && this.unread.length === 0;
    const ids = [...this.unread, ...(begins ? info.begin : []), ...tokenizer.encode(text, { add_special_tokens: false }).ids];
    if (ids.length === 0) throw new Error("Add some words first: the state alone does not tell which word comes next.");
    const foreign = ids.find((id) => id >= info.vocabulary);
    if (foreign !== undefined) throw new Error(`The model does not know “${tokenizer.decode([foreign])}”: its tokenizer has more tokens than the model.`);
    this.remember();
    if (text) this.add(text, false);
    this.input.value = "";
    const start = performance.now();
    let read = 0;
    const { state } = await model.readAll(this.state, ids.slice(0, -1), (done) => {
      if (done) this.say(`Read ${words(done, "token")} of ${(ids.length - 1).toLocaleString("en")}.`);
      read = done;
      return !this.stopped;
    });
    const finished = !this.stopped;
    const position = this.state.position;
    this.state = state;
    this.unread = ids.slice(state.position - position);
    const seconds = (performance.now() - start) / 1000;
    this.say(finished ? `Read ${words(ids.length, "token")} in ${seconds.toFixed(1)} s.` : `Stopped after ${words(read, "token")}.`);
  }

  /** Runs a task that needs the model. */
  async work(task) {
    const focused = document.activeElement, stop = $("[data-action=stop]", this.element);
    busy = this;
    this.stopped = false;
    this.show();
    if (focused.disabled) stop.focus(); // a disabled button loses the keyboard focus
    try {
      await task();
    } finally {
      const isHere = document.activeElement === stop;
      busy = null;
      this.show();
      if (isHere) focused.focus();
    }
  }

  read() {
    return this.work(() => this.take());
  }

  write() {
    const most = setting("length"), temperature = setting("temperature");
    return this.work(async () => {
      await this.take();
      const start = performance.now();
      let written = this.unread.slice(-1), shown = tokenizer.decode(written); // a token's leading space depends on the token before
      let count = 0, ends = false;
      while (count < most && !this.stopped) {
        const { state, logits } = await model.readAll(this.state, this.unread);
        const token = draw(logits, temperature);
        this.state = state;
        this.unread = [token];
        this.written++;
        count++;
        if ((ends = info.end.includes(token))) break;
        written.push(token);
        const text = tokenizer.decode(written);
        if (!text.endsWith("\ufffd")) {
          this.add(text.slice(shown.length), true);
          shown = text;
          if (text.endsWith("\n")) [written, shown] = [[token], tokenizer.decode([token])];
        }
        this.show((1000 * count) / (performance.now() - start));
        await pause();
      }
      this.add(tokenizer.decode(written).slice(shown.length), true); // the text may end in half a character
      if (count) this.say(`Wrote ${words(count, "token")}${ends ? " and ended" : ""}. The state takes ${size(this.state.bytes)}.`);
    });
  }

  rewind() {
    const before = this.past.pop();
    if (before) Object.assign(this, before);
    this.say("Went back to the earlier text and state.");
    this.show();
  }

  restart() {
    this.remember();
    Object.assign(this, { state: model.start(), unread: [], written: 0, parts: [] });
    this.say("Started again with no text. Rewind brings the old text back.");
    this.show();
    this.input.focus();
  }

  async copy() {
    const text = this.parts.map((part) => (part.note ? "" : part.text)).join("");
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren($(".text", this.element)); // needed without https
      document.execCommand("copy");
    }
    this.say(this.parts[0].note ? "Copied the end of the text, which is all that the page keeps." : "Copied the text.");
  }

  branch() {
    const twin = new Pane();
    Object.assign(twin, this.now());
    twin.say("This is a branch. Both texts continue independently from here.");
    twin.show();
    this.show();
    twin.input.focus();
  }

  close() {
    this.element.remove();
    panes.delete(this);
    const [first] = panes;
    first.show();
    first.input.focus();
  }

  save() {
    return this.work(async () => {
      const { state } = await model.readAll(this.state, this.unread);
      if (state.position === 0) throw new Error("There is nothing to save, since no text was read.");
      const text = [...this.parts.map((part) => part.text).join("")].slice(-2000).join(""); // without half characters
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await writeState(state, info, text));
      link.download = `${info.name.replaceAll("/", "-")}-${state.position}.safetensors`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
      this.say(`Saved the state of ${words(state.position, "token")}. RetNetState.load reads it in Python, too.`);
    });
  }

  async open(input) {
    const [file] = input.files;
    input.value = "";
    if (!file || busy) return;
    try {
      const { state, text } = await readState(new Uint8Array(await file.arrayBuffer()), model);
      this.remember();
      this.parts = [{ text: text ? `[…] ${text}` : `[${file.name}]`, written: false }];
      Object.assign(this, { state, unread: [], written: 0 });
      this.say(`Loaded the state of ${words(state.position, "token")}. Add some words to continue.`);
    } catch (error) {
      this.say(error.message, true);
    }
    this.show();
  }
}

/** All panes, in order. */
const panes = new Set();

function theme() {
  const root = document.documentElement;
  const isDark = getComputedStyle(root).colorScheme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = isDark ? "light" : "dark";
}

async function start() {
  $("#unserved").hidden = true;
  $("#loading").hidden = $("#theme").hidden = false;
  $("#theme").addEventListener("click", theme);
  document.addEventListener("keydown", (event) => event.key === "Escape" && busy?.act("stop"));
  $("#settings").addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));
  $("#kept").textContent = `Each text keeps up to ${KEPT} states to rewind, with at most ${size(KEPT_BYTES)} in total.`;
  const version = Date.now(); // small files are always fetched again; the weights are cached by the digest in info.json
  const json = async (name) => JSON.parse(new TextDecoder().decode(await download(`model/${name}?${version}`)));
  let config;
  [info, tokenizer, config] = await Promise.all(["info.json", "tokenizer.json", "tokenizer_config.json"].map(json));
  tokenizer = new Tokenizer(tokenizer, config);
  document.title = $("#name").textContent = info.name;
  const label = $("#loading-label");
  model = await Model.load(info, (bytes) => {
    $("#progress").value = bytes / info.bytes;
    label.textContent = `Loading the model: ${size(bytes)} of ${size(info.bytes)}`;
  });
  if (info.initial) model.initial = (await readState(await download(`model/${info.initial}?${version}`), model, true)).state;
  $("#loading").hidden = true;
  $("#texts").hidden = $("#settings").hidden = false;
  new Pane();
  Object.assign(globalThis, { retnet: { model, tokenizer, info, panes } }); // for the console
}

start().catch((error) => {
  $("#unserved").hidden = location.protocol !== "file:";
  $("#progress").hidden = true;
  $("#loading-label").textContent = `The model could not be loaded. ${error.message}`;
});
