// Checks wire.js against protos/vectors.json: node check_vectors.js
"use strict";

const assert = require("node:assert");
const fs = require("node:fs");
const path = require("node:path");
const wire = require("./wire.js");

const vectors = JSON.parse(fs.readFileSync(path.join(__dirname, "../../protos/vectors.json"), "utf8"));
const bytes = (hex) => Buffer.from(hex, "hex");

for (const one of vectors.crc32c) assert.strictEqual(wire.crc32c(bytes(one.data)), one.crc32c);
for (const one of vectors.payloads) {
  const parts = wire.type("Parts").decode(bytes(one.parts));
  assert.strictEqual(Buffer.from(wire.type("Parts").encode(parts).finish()).toString("hex"), one.parts, one.name);
  assert.strictEqual(wire.digest(parts, bytes(one.data)).toString("hex"), one.sha256, one.name);
}
for (const one of vectors.errors) {
  const error = { metadata: { get: () => [bytes(one.details)] } };
  assert.deepStrictEqual({ ...wire.errorInfo(error) }, { code: one.code, metadata: one.metadata });
}
for (const one of vectors.messages) {
  const kind = wire.type(one.type.split(".").pop());
  assert.strictEqual(Buffer.from(kind.encode(kind.decode(bytes(one.bytes))).finish()).toString("hex"), one.bytes);
}
for (let bits = 0; bits < 0x10000; bits++) {
  const number = wire.fromHalf(bits);
  if (Number.isFinite(number)) assert.strictEqual(wire.toHalf(number), bits);
}
console.log(`${vectors.payloads.length} payloads and ${vectors.messages.length} messages`);
