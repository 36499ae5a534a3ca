// A language model in ONNX Runtime, and the state of a text, which holds all that was read in constant memory.

import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

ort.env.wasm.wasmPaths = { wasm: new URL("./vendor/ort-wasm-simd-threaded.wasm", import.meta.url).href };
if (!globalThis.crossOriginIsolated) ort.env.wasm.numThreads = 1; // threads need two HTTP headers from the server

const PIECE = 32; // tokens read at a time

/** Downloads a file, and calls `told(bytes)` with the number of bytes so far. */
export async function download(url, told = () => {}) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} could not be downloaded (${response.status}).`);
  const parts = [];
  let bytes = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    told((bytes += value.length));
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

/** The state of one text: tensors by the names of the model's inputs, and the number of tokens read. */
export class State {
  constructor(tensors, position) {
    this.tensors = tensors; // {name: {data: Float32Array, dims: [1, …]}}, never changed in place
    this.position = position;
  }

  get bytes() {
    return Object.values(this.tensors).reduce((sum, tensor) => sum + tensor.data.byteLength, 0);
  }
}

export class Model {
  static async load(info, told) {
    const bytes = await download(new URL(`./model/${info.file}?${info.digest}`, import.meta.url), told);
    const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
    return new Model(session, info);
  }

  constructor(session, info) {
    this.session = session;
    this.info = info;
    this.initial = null; // a learned initial state of texts, or null
  }

  /** Returns the state before the first token. */
  start() {
    if (this.initial) return this.initial;
    const tensors = {};
    for (const { name, shape } of this.info.state) {
      const dims = [1, ...shape.map((size) => size ?? 0)];
      tensors[name] = { data: new Float32Array(dims.reduce((product, size) => product * size, 1)), dims };
    }
    return new State(tensors, 0);
  }

  /** Reads token ids, and returns the state after them and the logits of the next token. */
  async read(state, ids) {
    const long = (numbers) => new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), [1, numbers.length]);
    const feeds = { input_ids: long(ids), position_ids: long(ids.map((_, index) => state.position + index)) };
    for (const [name, { data, dims }] of Object.entries(state.tensors))
      feeds[`past_key_values.${name}`] = new ort.Tensor("float32", data, dims);
    for (const name of this.session.inputNames)
      feeds[name] ??= new ort.Tensor("float32", new Float32Array(1), [1, 1, 1]); // inputs that only other runtimes need
    const outputs = await this.session.run(feeds);
    const tensors = {};
    for (const name of Object.keys(state.tensors)) {
      const { data, dims } = outputs[`present.${name}`];
      tensors[name] = { data, dims };
    }
    const { data, dims } = outputs.logits;
    return { state: new State(tensors, state.position + ids.length), logits: data.subarray(data.length - dims[2]) };
  }

  /** Reads a text of any length, some tokens at a time. Stops if `goesOn(tokens read)` returns false. */
  async readAll(state, ids, goesOn = () => true) {
    let logits = null;
    for (let first = 0; first < ids.length && goesOn(first); first += PIECE) {
      ({ state, logits } = await this.read(state, ids.slice(first, first + PIECE)));
      await pause();
    }
    return { state, logits };
  }
}

/** Lets the browser draw the page and handle clicks. */
export const pause = () => new Promise((resolve) => setTimeout(resolve, 0));

/** Returns a token: the likeliest at temperature 0, otherwise a random one of the 64 likeliest. */
export function draw(logits, temperature, random = Math.random) {
  let best = 0;
  for (let token = 1; token < logits.length; token++) if (logits[token] > logits[best]) best = token;
  if (temperature <= 0) return best;
  const possible = [];
  for (let token = 0; token < logits.length; token++) if (logits[token] > logits[best] - 10 * temperature) possible.push(token);
  const likeliest = possible.sort((one, other) => logits[other] - logits[one]).slice(0, 64);
  const weights = likeliest.map((token) => Math.exp((logits[token] - logits[best]) / temperature));
  let left = random() * weights.reduce((sum, weight) => sum + weight, 0);
  return likeliest.find((_, index) => (left -= weights[index]) <= 0) ?? best;
}
