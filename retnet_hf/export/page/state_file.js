// State files in the format of Python's RetNetState.save and RetNetState.load: safetensors files with a checksum.

import { State } from "./model.js";

const FORMAT = "retnet_hf.RetNetState/3";
const TYPES = {
  F64: { name: "torch.float64", size: 8 },
  F32: { name: "torch.float32", size: 4 },
  BF16: { name: "torch.bfloat16", size: 2 },
  F16: { name: "torch.float16", size: 2 },
  I64: { name: "torch.int64", size: 8 },
};
const MOST_TOKENS = 2 ** 32; // the model's rotation is exact below this position
const MOST_TEXT = 4000; // largest number of characters of the text in a file

/** Returns the values of a tensor in a file as a typed array. Half precision is widened to float32. */
function numbers(type, bytes) {
  if (type === "I64") return new BigInt64Array(bytes.buffer);
  if (type === "F64") return new Float64Array(bytes.buffer);
  if (type === "F32") return new Float32Array(bytes.buffer);
  const halves = new Uint16Array(bytes.buffer);
  if (type === "BF16") return new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
  return Float32Array.from(halves, (half) => {
    const [sign, exponent, fraction] = [half >> 15 ? -1 : 1, (half >> 10) & 31, half & 1023];
    return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
  });
}

/** Returns the index of the token in each column of softmax attention, from 1: the sinks, then the last tokens. */
function counts(columns, position, sinks) {
  return BigInt64Array.from({ length: columns }, (_, column) =>
    BigInt(column < sinks ? column + 1 : position - columns + column + 1),
  );
}

/** Returns the tensors of a file by name, made from the page's tensors. */
function toFile(state, info) {
  const tensors = {};
  const number = (value, shape) => ({ type: "I64", shape, data: BigInt64Array.of(BigInt(value)) });
  for (const { index, retains, sinks } of info.layers) {
    const layer = `layers.${index}.`;
    const prefix = layer + (retains ? "window_" : "");
    const { data, dims } = state.tensors[`${index}.recurrent_state`] ?? {};
    if (data) tensors[`${layer}recurrent_states`] = { type: "F32", shape: dims, data };
    tensors[`${layer}next_position`] = number(state.position, [1]);
    tensors[`${layer}cumulative_length`] = number(state.position, []);
    const key = state.tensors[`${index}.key`];
    if (!key) continue;
    const columns = key.dims[2];
    const shape = [1, columns];
    tensors[`${prefix}keys`] = { type: "F32", shape: key.dims, data: key.data };
    const { data: values, dims: sizes } = state.tensors[`${index}.value`];
    tensors[`${prefix}values`] = { type: "F32", shape: [...sizes.slice(0, 2), columns, sizes[3]], data: values };
    tensors[`${prefix}document`] = { type: "I64", shape, data: new BigInt64Array(columns) };
    for (const name of ["count", "position"])
      tensors[prefix + name] = { type: "I64", shape, data: counts(columns, state.position, sinks) };
  }
  return tensors;
}

/** Returns the SHA-256 of metadata and tensors, computed as in Python. */
async function checksum(metadata, tensors) {
  const parts = [];
  for (const name of Object.keys(metadata).sort()) {
    const value = new TextEncoder().encode(metadata[name]);
    if (name !== "sha256") parts.push(`${name} ${value.length} `, value);
  }
  for (const name of Object.keys(tensors).sort()) {
    const { type, shape, data, raw } = tensors[name];
    const tuple = `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
    parts.push(`${name} ${TYPES[type].name} ${tuple} `, raw ?? new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  }
  if (!globalThis.crypto?.subtle) throw new Error("States are saved and loaded over https or from localhost only.");
  const digest = await crypto.subtle.digest("SHA-256", await new Blob(parts).arrayBuffer());
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns a file with the state of a text. It also holds `text`, the last text that was read, for users to see. */
export async function writeState(state, info, text) {
  const tensors = toFile(state, info);
  const metadata = { format: FORMAT, fingerprint: info.fingerprint, text };
  if (info.weights) metadata.weights = info.weights;
  metadata.sha256 = await checksum(metadata, tensors);
  const header = { __metadata__: metadata };
  let offset = 0;
  for (const [name, { type, shape, data }] of Object.entries(tensors)) {
    header[name] = { dtype: type, shape, data_offsets: [offset, (offset += data.byteLength)] };
  }
  const json = new TextEncoder().encode(JSON.stringify(header));
  const padding = " ".repeat((8 - (json.length % 8)) % 8);
  const length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(json.length + padding.length), true);
  return new Blob([length.buffer, json, padding, ...Object.values(tensors).map(({ data }) => data)]);
}

/** Returns the state and the text in a file. Throws an Error with a sentence for any other file.
 * `isOwn` skips the checksum for a file of the page itself, since browsers compute it only over https. */
export async function readState(bytes, model, isOwn = false) {
  const { info } = model;
  const { metadata, tensors } = parse(bytes);
  if (metadata.format !== FORMAT) throw new Error("This file does not hold the state of a RetNet.");
  if (metadata.fingerprint !== info.fingerprint) throw new Error("This is the state of a model of another configuration.");
  const first = tensors["layers.0.next_position"];
  const position = first?.type === "I64" && first.data.length === 1 ? Number(first.data[0]) : -1;
  if (!(position >= 0 && position < MOST_TOKENS)) throw new Error("The file does not say how many tokens of one text the state has read.");
  const state = new State(fromFile(tensors, info), position);
  const expected = toFile(state, info), types = {};
  for (const name of Object.keys(tensors)) if (!expected[name]) throw new Error(`The file holds ${name}, which is not part of a state.`);
  for (const [name, { shape, data, type }] of Object.entries(expected)) {
    const found = tensors[name], part = name.split(".").at(-1);
    const isOfType = type === "I64" || part === "recurrent_states" ? type : (types[part] ??= found?.type); // one type for all layers
    if (found?.type !== isOfType || found.type === "F64" || found.shape.join() !== shape.join())
      throw new Error(`The file does not fit this model: ${name} is missing, or has another shape or type.`);
    if (type === "I64" && data.some((value, index) => value < 0n || value !== found.data[index]))
      throw new Error("This page cannot continue the state of several texts, or of a text with gaps.");
    if (type !== "I64" && !found.data.every(Number.isFinite)) throw new Error(`The file holds ${name} with values that are not finite.`);
  }
  if (!isOwn && metadata.sha256 !== (await checksum(metadata, tensors)))
    throw new Error("The file is damaged: its contents differ from what was saved.");
  if (metadata.weights && info.weights && !sameWeights(metadata.weights, info.weights))
    throw new Error("This state was computed with other weights.");
  return { state, text: (metadata.text ?? "").slice(-MOST_TEXT) };
}

/** Returns the page's tensors by name, made from the tensors of a file. */
function fromFile(tensors, info) {
  const state = {};
  for (const { name, shape } of info.state) {
    const [index, part] = name.split(".");
    const layer = info.layers[index];
    const file = { recurrent_state: "recurrent_states", key: "keys", value: "values" }[part];
    const prefix = part !== "recurrent_state" && layer.retains ? "window_" : "";
    const found = tensors[`layers.${index}.${prefix}${file}`];
    const dims = [1, ...shape.map((size, axis) => size ?? found?.shape[axis + 1] ?? 0)];
    const size = dims.reduce((product, each) => product * each, 1);
    state[name] = { dims, data: found?.data instanceof Float32Array && found.data.length === size ? found.data : new Float32Array(0) };
    if (found && found.shape.join() !== dims.join()) throw new Error(`The file does not fit this model: ${name} has another shape.`);
  }
  return state;
}

/** Returns the metadata and tensors of a safetensors file. The tensors must fill the file without gaps. */
function parse(bytes) {
  try {
    const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    const { __metadata__: metadata, ...entries } = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)));
    const tensors = Object.create(null);
    const inOrder = Object.entries(entries).sort(([, one], [, other]) => one.data_offsets[0] - other.data_offsets[0]);
    let filled = 8 + length;
    for (const [name, { dtype, shape, data_offsets: [begin, end] }] of inOrder) {
      const size = shape.reduce((product, each) => product * each, TYPES[dtype].size);
      const raw = bytes.slice(filled, filled + size);
      if (8 + length + begin !== filled || end - begin !== size || raw.length !== size) throw new RangeError(name);
      tensors[name] = { type: dtype, shape, raw, data: numbers(dtype, raw) };
      filled += size;
    }
    if (filled !== bytes.length || Object.values(metadata).some((value) => typeof value !== "string")) throw new RangeError();
    return { metadata, tensors };
  } catch {
    throw new Error("The file is not a complete safetensors file of a state.");
  }
}

/** Returns whether two marks belong to equal weights, or to weights that were rounded to different types. */
function sameWeights(one, other) {
  try {
    const [first, second] = [one, other].map(JSON.parse);
    const tolerance = first.dtypes.join() === second.dtypes.join() ? 1e-5 : 2 ** -7;
    const close = ([sum, norm], [otherSum, otherNorm]) =>
      [[sum, otherSum], [norm, otherNorm]].every(([a, b]) => Math.abs(a - b) <= tolerance * norm);
    return first.sums.length === second.sums.length && first.sums.every((pair, index) => close(pair, second.sums[index]));
  } catch {
    return false; // the mark of a file may be malformed
  }
}
