// A network with one hidden layer, and its training in CDKT-FL: docs/reference/methods/cdkt.md.
"use strict";

const HIDDEN = 32;

class Network {
  constructor(inputs, classes, seed) {
    this.random = mulberry32(seed);
    const layer = (from, to) => Array.from({ length: to }, () => this.normal(from).map((x) => x * Math.sqrt(2 / from)));
    this.layers = [layer(inputs, HIDDEN), layer(HIDDEN, classes)];
    this.biases = [new Array(HIDDEN).fill(0), new Array(classes).fill(0)];
  }

  normal(count) {
    const one = () => Math.sqrt(-2 * Math.log(1 - this.random())) * Math.cos(2 * Math.PI * this.random());
    return Array.from({ length: count }, one);
  }

  // Returns hidden activations and logits of one sample.
  forward(x) {
    const apply = (at, from) => this.layers[at].map((row, to) => dot(row, from) + this.biases[at][to]);
    const hidden = apply(0, x).map((value) => Math.max(value, 0));
    return { hidden, logits: apply(1, hidden) };
  }

  logits(inputs) {
    return inputs.map((x) => this.forward(x).logits);
  }

  // Takes a step of gradient descent; each sample has an input and the gradient of the loss for its logits.
  step(samples, rate) {
    const changes = samples.map(({ x, gradient }) => {
      const { hidden } = this.forward(x);
      const back = hidden.map((value, at) => (value > 0 ? dot(gradient, this.layers[1].map((row) => row[at])) : 0));
      return [[x, back], [hidden, gradient]];
    });
    for (const layers of changes) {
      layers.forEach(([from, gradient], at) => gradient.forEach((slope, to) => {
        if (!slope) return;
        from.forEach((value, index) => { this.layers[at][to][index] -= rate * slope * value; });
        this.biases[at][to] -= rate * slope;
      }));
    }
  }

  // Trains on own labels, and towards the server's outcomes for the proxy set (eqs. 4 and 8).
  train(own, proxy, teacher, settings, seed) {
    this.random = mulberry32(seed);
    const size = settings.batch_size;
    let next = 0;
    for (let epoch = 0; epoch < settings.local_epochs; epoch++) {
      const order = shuffled(own.inputs.length, this.random);
      for (let at = 0; at < order.length; at += size) {
        const rows = order.slice(at, at + size);
        const samples = rows.map((row) => this.labelled(own.inputs[row], own.labels[row], 1 / rows.length));
        for (let count = Math.min(size, proxy.inputs.length); teacher && count > 0; count--) {
          const row = next++ % proxy.inputs.length;
          samples.push(this.taught(proxy.inputs[row], teacher[row], settings, 1 / Math.min(size, proxy.inputs.length)));
        }
        this.step(samples, settings.learning_rate);
      }
    }
  }

  labelled(x, label, weight) {
    const gradient = softmax(this.forward(x).logits, 1).map((p, at) => weight * (p - (at === label)));
    return { x, gradient };
  }

  // The gradient of alpha * tau^2 * KL(target || softmax(logits / tau)).
  taught(x, target, settings, weight) {
    const tau = settings.temperature;
    const outcomes = softmax(this.forward(x).logits, tau);
    return { x, gradient: outcomes.map((p, at) => weight * settings.alpha * tau * (p - target[at])) };
  }
}

// Returns the targets for the proxy set: the server's outcomes, averaged with the labels if the run says so.
function targets(logits, labels, settings) {
  return logits.map((row, at) => softmax(row, settings.temperature).map((p, one) =>
    settings.label_average ? (p + (one === labels[at])) / 2 : p));
}

function accuracy(logits, labels) {
  const right = logits.filter((row, at) => row.indexOf(Math.max(...row)) === labels[at]);
  return right.length / labels.length;
}

function softmax(logits, temperature) {
  const most = Math.max(...logits);
  const powers = logits.map((value) => Math.exp((value - most) / temperature));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);

function shuffled(count, random) {
  const order = Array.from({ length: count }, (_, at) => at);
  for (let at = count - 1; at > 0; at--) {
    const other = Math.floor(random() * (at + 1));
    [order[at], order[other]] = [order[other], order[at]];
  }
  return order;
}

function mulberry32(seed) {
  let state = Number(BigInt.asUintN(32, BigInt(seed)));
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

module.exports = { Network, accuracy, targets };
