// A device in Node.js, written from docs/reference/wire-format.md. It takes part in cdkt runs with knowledge = "full".
//
//     npm install
//     node client.js 127.0.0.1:50051 state own.json
//
// own.json has `inputs`, a list of flat lists of numbers, and `labels`, a list of class numbers.
"use strict";

const crypto = require("node:crypto");
const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const wire = require("./wire.js");
const { Network, accuracy, targets } = require("./network.js");

const RETRIED = ["", "internal", "not-ready", "too-many", "no-space", "incomplete", "out-of-step", "checksum"];
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
const between = (low, high) => low + Math.random() * (high - low);

class Refused extends Error {
  constructor(code, text) {
    super(`${code}: ${text}`);
    this.code = code;
  }
}

class Device {
  constructor(server, folder, own) {
    this.client = new grpc.Client(server, grpc.credentials.createInsecure());
    this.own = own;
    this.answerFile = path.join(folder, "answer.bin");
    fs.mkdirSync(folder, { recursive: true });
    this.identity = this.loadIdentity(path.join(folder, "identity.bin"), path.basename(folder));
  }

  // Returns the stored identity; a new one is stored before the first call.
  loadIdentity(file, device) {
    if (!fs.existsSync(file)) {
      const made = wire.type("Identity").encode({ device, secret: crypto.randomBytes(32) }).finish();
      fs.writeFileSync(file, made, { mode: 0o600 });
    }
    return wire.type("Identity").toObject(wire.type("Identity").decode(fs.readFileSync(file)));
  }

  // --- calls

  options(seconds) {
    return { deadline: Date.now() + 1000 * seconds };
  }

  unary(name, request, seconds = 30) {
    const { path: at, serialize, deserialize } = wire.method(name);
    return new Promise((resolve, reject) => {
      const done = (error, response) => (error ? reject(error) : resolve(response));
      this.client.makeUnaryRequest(at, serialize, deserialize, { identity: this.identity, ...request }, this.options(seconds), done);
    });
  }

  // Repeats an action until it succeeds; throws Refused if it never will (section "Errors and retries").
  async retried(action) {
    for (let failures = 0; ; failures++) {
      try {
        return await action();
      } catch (error) {
        if (!(error.code in grpc.status)) throw error;
        const { code, metadata } = wire.errorInfo(error);
        const unknown = code === "bad-identity" && "check_in" in metadata;
        if (!unknown && !RETRIED.includes(code)) throw new Refused(code, error.details);
        await sleep(Number(metadata.after_seconds ?? between(0.5, 1) * Math.min(2 ** failures, 15)));
        if (unknown) await this.checkIn();
      }
    }
  }

  call(name, request, seconds) {
    return this.retried(() => this.unary(name, request, seconds));
  }

  async checkIn() {
    const { contract } = await this.call("CheckIn", {});
    if (contract.method !== "cdkt" || contract.features.length) {
      throw new Error(`run ${contract.run} is not a cdkt run with knowledge = "full"`);
    }
    this.contract = contract;
    this.settings = wire.settingsOf(contract.config);
    const { heartbeat_seconds } = await this.call("CheckIn", { profile: this.profile() });
    this.heartbeatSeconds = heartbeat_seconds;
    this.identity.run = contract.run;
  }

  profile() {
    const { classes, input_shape, proxy_digest } = this.contract;
    return {
      model_name: "node client",
      samples: this.own.labels.length,
      classes: classes.length,
      input_shape,
      knowledge_types: [wire.FLOAT32, wire.FLOAT16],
      allowed_columns: ["logits"],
      proxy_digest,
    };
  }

  // --- payloads

  async download(sha256) {
    const { path: at, serialize, deserialize } = wire.method("Download");
    const found = { header: null, data: Buffer.alloc(0) };
    while (!found.header || found.data.length < Number(found.header.data_bytes)) {
      await this.retried(async () => {
        const request = { identity: this.identity, sha256 };
        if (found.data.length) request.first_byte = found.data.length;
        const stream = this.client.makeServerStreamRequest(at, serialize, deserialize, request, this.options(3600));
        for await (const { header, chunk } of stream) {
          if (header) found.header = header;
          else if (wire.crc32c(chunk.data) !== chunk.crc32c) break; // the rest is downloaded again
          else found.data = Buffer.concat([found.data, chunk.data]);
        }
      });
    }
    return wire.unpacked(found.header, found.data, sha256);
  }

  // Sends the stored answer until it has a receipt, or its ask is closed.
  async upload() {
    const bytes = fs.readFileSync(this.answerFile);
    const length = bytes.readUInt32BE(0);
    const header = wire.type("UploadHeader").decode(bytes.subarray(4, 4 + length));
    const outcome = await this.retried(async () => {
      const status = await this.unary("UploadStatus", { name: header.name });
      if (status.receipt) return `receipt ${status.receipt.id}`;
      if (!status.ask_open) return status.closed_text;
      const { receipt } = await this.stream(header, bytes.subarray(4 + length), Number(status.next_byte));
      return `receipt ${receipt.id}`;
    }).catch((error) => {
      if (!(error instanceof Refused)) throw error;
      return error.message; // the answer is dropped
    });
    console.log(`round ${header.name.round}: ${outcome}`);
    fs.unlinkSync(this.answerFile);
  }

  stream(header, data, firstByte) {
    const { path: at, serialize, deserialize } = wire.method("Upload");
    return new Promise((resolve, reject) => {
      const done = (error, response) => (error ? reject(error) : resolve(response));
      const call = this.client.makeClientStreamRequest(at, serialize, deserialize, this.options(3600), done);
      call.write({ header: { ...header, identity: this.identity, first_byte: firstByte } });
      for (const chunk of wire.chunks(data, firstByte)) call.write({ chunk });
      call.end();
    });
  }

  // --- asks

  async handle(ask) {
    const name = { round: ask.round, step_number: ask.step_number, attempt: ask.first_attempt, payload: ask.payload };
    if (ask.step !== "train") {
      await this.call("Decline", { round: ask.round, step_number: ask.step_number, reason: `no step ${ask.step}` });
      return;
    }
    const beat = setInterval(() => this.unary("Heartbeat", {}).catch(() => {}), 1000 * this.heartbeatSeconds);
    const logits = this.train(await this.download(ask.payload), ask);
    clearInterval(beat);
    this.store(name, logits);
  }

  train({ knowledge }, ask) {
    const { labels, inputs } = this.proxy;
    const teacher = knowledge.valid ? targets(wire.rowsOf(knowledge.logits), labels, this.settings) : null;
    this.network.train(this.own, this.proxy, teacher, this.settings, ask.seed.toString());
    const logits = this.network.logits(inputs);
    console.log(`round ${ask.round}: accuracy ${accuracy(logits, labels).toFixed(3)} on the proxy set`);
    return logits;
  }

  // Stores an answer, so that a restarted device sends the same bytes.
  store(name, logits) {
    const knowledge = { valid: true, proxy_digest: this.contract.proxy_digest };
    knowledge.logits = wire.tensorOf(logits, this.contract.knowledge_type);
    const { header: payload, data } = wire.packed({ parts: [{ name: "knowledge", proxy_knowledge: knowledge }] });
    const samples = this.own.labels.length;
    const header = wire.type("UploadHeader").encode({ identity: this.identity, name, payload, samples }).finish();
    const length = Buffer.alloc(4);
    length.writeUInt32BE(header.length);
    fs.writeFileSync(`${this.answerFile}.new`, Buffer.concat([length, header, data]));
    fs.renameSync(`${this.answerFile}.new`, this.answerFile);
  }

  async run() {
    await this.checkIn();
    const { proxy } = await this.download(this.contract.proxy_digest);
    this.proxy = { inputs: wire.rowsOf(proxy.inputs), labels: wire.rowsOf(proxy.labels).flat() };
    this.network = new Network(this.own.inputs[0].length, this.contract.classes.length, this.contract.seed.toString());
    for (;;) {
      if (fs.existsSync(this.answerFile)) await this.upload();
      const next = await this.call("NextAsk", { wait_seconds: 20 }, 50);
      if (next.ask) await this.handle(next.ask);
      else if (next.come_back) await sleep(between(next.come_back.after_seconds, next.come_back.before_seconds));
      else return;
    }
  }
}

const [server, folder, data] = process.argv.slice(2);
const device = new Device(server, folder, JSON.parse(fs.readFileSync(data, "utf8")));
device.run().then(
  () => device.client.close(),
  (error) => {
    console.error(String(error));
    process.exit(1);
  },
);
