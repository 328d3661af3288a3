// Messages, payloads and checksums of docs/reference/wire-format.md.
"use strict";

const crypto = require("node:crypto");
const path = require("node:path");
const protobuf = require("protobufjs");

const PROTOS = path.join(__dirname, "../../protos");
const CHUNK_BYTES = 1 << 20;
const FLOAT32 = 1, FLOAT16 = 2, INT32 = 4, RAW = 1;
const BYTES = [0, 4, 2, 8, 4, 8, 1, 1, 1]; // of an element, by ElementType

const root = new protobuf.Root();
root.resolvePath = (_, target) => path.join(PROTOS, target);
root.loadSync("fleetdistill/wire/v1/service.proto", { keepCase: true });
const type = (name) => root.lookupType(`fleetdistill.wire.v1.${name}`);

const rpc = protobuf.parse(`
  syntax = "proto3"; package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`).root;

// Returns the definition of a method of DeviceService for grpc.Client.
function method(name) {
  const found = root.lookupService("fleetdistill.wire.v1.DeviceService").methods[name];
  const [request, response] = [type(found.requestType), type(found.responseType)];
  return {
    path: `/fleetdistill.wire.v1.DeviceService/${name}`,
    serialize: (value) => Buffer.from(request.encode(value).finish()),
    deserialize: (bytes) => response.decode(bytes),
  };
}

// Returns code and metadata of an error, or an empty code after a failure of the transport.
function errorInfo(error) {
  const [details] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!details) return { code: "", metadata: {} };
  const status = rpc.lookupType("google.rpc.Status").decode(details);
  const info = rpc.lookupType("google.rpc.ErrorInfo").decode(status.details[0].value);
  return { code: info.reason, metadata: info.metadata };
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0x82f63b78 : byte >>> 1;
  return byte >>> 0;
});

function crc32c(data) {
  let crc = ~0;
  for (const byte of data) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 0xff];
  return ~crc >>> 0;
}

// Returns the tensors of a message of one type in field order, depth first.
function tensorsIn(message, kind) {
  if (kind.name === "Tensor") return [message];
  const fields = kind.fieldsArray.filter((field) => field.resolve().resolvedType instanceof protobuf.Type);
  return fields.sort((a, b) => a.id - b.id).flatMap((field) => {
    const value = Object.hasOwn(message, field.name) ? message[field.name] : null;
    return [value ?? []].flat().flatMap((one) => tensorsIn(one, field.resolvedType));
  });
}

const countOf = (tensor) => tensor.shape.reduce((product, size) => product * Number(size), 1);
const sizeOf = (tensor) => countOf(tensor) * BYTES[tensor.element_type];

function digest(parts, data) {
  return crypto.createHash("sha256").update(type("Parts").encode(parts).finish()).update(data).digest();
}

// Returns header and data of an answer whose tensors have their data.
function packed(parts) {
  const tensors = tensorsIn(parts, type("Parts"));
  const data = Buffer.concat(tensors.map((tensor) => tensor.data));
  for (const tensor of tensors) delete tensor.data;
  const header = { parts, sha256: digest(parts, data) };
  return { header: data.length ? { ...header, data_bytes: data.length } : header, data };
}

// Yields the chunks of a payload's data from a byte on.
function* chunks(data, firstByte) {
  for (let at = firstByte; at < data.length; at += CHUNK_BYTES) {
    const piece = data.subarray(at, at + CHUNK_BYTES);
    yield { offset: at, data: piece, crc32c: crc32c(piece) };
  }
}

// Returns the parts of a received payload by name, with the data in their tensors.
function unpacked(header, data, sha256) {
  if (!digest(header.parts, data).equals(sha256)) throw new Error("a payload has a wrong digest");
  let start = 0;
  for (const tensor of tensorsIn(header.parts, type("Parts"))) {
    tensor.data = data.subarray(start, (start += sizeOf(tensor)));
  }
  return Object.fromEntries(header.parts.parts.map((part) => [part.name, part[part.kind]]));
}

// Returns a matrix of floats as a tensor.
function tensorOf(rows, elementType) {
  const numbers = rows.flat();
  const data = Buffer.alloc(numbers.length * BYTES[elementType]);
  numbers.forEach((number, at) => {
    if (elementType === FLOAT16) data.writeUInt16LE(toHalf(number), 2 * at);
    else data.writeFloatLE(number, 4 * at);
  });
  return { element_type: elementType, shape: [rows.length, rows[0].length], encoding: RAW, data };
}

// Returns the rows of a tensor as arrays of numbers; one number per row for a vector.
function rowsOf(tensor) {
  const read = {
    [FLOAT32]: (at) => tensor.data.readFloatLE(4 * at),
    [FLOAT16]: (at) => fromHalf(tensor.data.readUInt16LE(2 * at)),
    [INT32]: (at) => tensor.data.readInt32LE(4 * at),
  }[tensor.element_type];
  const rows = Number(tensor.shape[0]), width = countOf(tensor) / rows;
  return Array.from({ length: rows }, (_, row) => Array.from({ length: width }, (_, at) => read(row * width + at)));
}

function toHalf(number) {
  const sign = number < 0 || Object.is(number, -0) ? 0x8000 : 0, size = Math.abs(number);
  if (!(size < 65520)) throw new RangeError(`${number} does not fit float16`);
  const exponent = Math.max(Math.floor(Math.log2(size || 2 ** -25)), -14);
  const steps = roundHalfToEven(size / 2 ** (exponent - 10)); // 1,024 steps from one power of two to the next
  return sign | (steps + (exponent + 14) * 1024);
}

function roundHalfToEven(number) {
  const low = Math.floor(number), rest = number - low;
  return rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
}

function fromHalf(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : bits & 0x8000 ? -Infinity : Infinity;
  const size = exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24;
  return bits & 0x8000 ? -size : size;
}

// Returns the value of each setting of a plan.
function settingsOf(plan) {
  return Object.fromEntries(plan.entries.map((entry) => {
    const value = entry[entry.value];
    return [entry.name, entry.value === "integer" ? Number(value) : value];
  }));
}

module.exports = {
  FLOAT16, FLOAT32, chunks, crc32c, digest, errorInfo, fromHalf, method, packed, rowsOf, settingsOf, tensorOf, toHalf, type, unpacked,
};
